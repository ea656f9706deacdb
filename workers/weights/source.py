"""The source of the weights, for a model's constructors.

A model builds itself from a `WeightSource`, twice: a `DryRun` first collects, on the meta device, which tensors it
wants, in which shapes and how many bytes they take; after that was held against the files, a `CheckpointReader` fills
real memory, each rank's with its slices alone. Where that memory is there already, filled by a rank that has died, a
`KeptSource` (`workers.weights.kept`) hands it out once more. So the model's constructors are the only place that names
a tensor, the checkpoint is the only one that says how matrices are stored, and `WeightSource.empty` is the only one
that takes memory for weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from kernels.matrix import MicroScaled4
from workers.parallel.mesh import Mesh
from workers.weights.arena import Arena, Item
from workers.weights.formats.format import Format
from workers.weights.formats.registry import stored_format
from workers.weights.layout import Layout, invariant_layout, layout_of
from workers.weights.part import Part, RopeRows
from workers.weights.stored import PLAIN_DTYPES
from workers.weights.wanted import INTEGER_NAMES, Shape, Wanted
from workers.weights.weight import Formats, Weight

T = TypeVar("T")


class WeightSource(ABC):
    """Source of the tensors for a model's constructors."""

    def __init__(
        self,
        mesh: Mesh,
        dtype: torch.dtype,
        device: torch.device,
        stored: Callable[[str], str] = str,
        dtype_of: Callable[[str], str | None] | None = None,
        invariant: bool = False,
        own: Container[str] = (),
        arena: Arena | None = None,
    ) -> None:
        """`stored`: what the checkpoint calls a tensor, of the name that the model asks for. `dtype_of`: the dtype of
        a tensor of the checkpoint, by its name there and in safetensors' words; without it all are plain. `invariant`:
        a matrix is kept in the same format on however many ranks, because products round otherwise in another one.
        `own`: of the matrices that may repeat others of the model, those that do not, by the names there. `arena`:
        memory for all of them; None: each tensor has its own."""
        self.mesh = mesh
        self.dtype = dtype
        self.device = device
        self.stored = stored
        self._dtype_of = dtype_of or (lambda name: None)
        self._invariant = invariant
        self._own = own
        self._arena = arena
        self.formats = Formats()
        """Formats in which the matrices so far are kept."""
        self._told: set[str] = set()
        self._experts: list[Weight] = []
        self._stored_formats: dict[str, Format] = {}

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Uninitialised memory for a tensor. The caller writes to it by the methods here alone: a source that has the
        weights already returns them, in memory that cannot be written to."""
        if self._arena is not None:
            return self._arena.take(shape, dtype or self.dtype)
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory of zeros for a tensor of which not all is filled."""
        return self.empty(*shape, dtype=dtype).zero_()

    def copy(self, into: Tensor, tensor: Tensor) -> None:
        """Copy a tensor that is in place, see `settle`, into memory from `empty`."""
        into.copy_(tensor)

    def load(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The whole tensor `name`, which must have `shape`, as plain numbers. Only matrices may be stored quantized."""
        if len(shape) == 2:
            return self.plain(Part(name, *shape), dtype=dtype)
        into = self.empty(*shape, dtype=dtype)
        self.fill_part(into, name, shape, tuple(slice(0, size) for size in shape))
        return into

    def plain(self, part: Part, dtype: torch.dtype | None = None) -> Tensor:
        """Read this rank's part of a matrix as plain numbers, however it is stored: for tensors that are no matrix of a
        product, or cannot be one as they are stored."""
        rows, columns = part.index(self.mesh)
        into = self.empty(rows.stop - rows.start, columns.stop - columns.start, dtype=dtype)
        self.fill(Weight(into), part)
        return into

    def matrix(self, *parts: Part) -> Weight:
        """The matrix [N, K] that has the rows of `parts`, one behind the other; see `layout` for its format."""
        layout = self.layout([parts])
        weight = self._room((), parts, layout)
        self._stack(weight, parts)
        return weight

    def experts(self, stacks: Sequence[Sequence[Part]]) -> Weight:
        """The matrices [X, N, K] that have the rows of each of `stacks`, all in one format."""
        weight = self._room((len(stacks),), stacks[0], self.layout(stacks))
        for expert, parts in enumerate(stacks):
            self._stack(weight[expert], parts)
        self._experts.append(weight)
        return weight

    def once(self, name: str, build: Callable[[WeightSource], T]) -> T:
        """Return what `build` makes of this source: a part of a model that is the same, by `name`, in models that
        differ in something else alone. See `DryRun`, which may know it already."""
        return build(self)

    def layout(self, stacks: Sequence[Sequence[Part]]) -> Layout:
        """Choose the form in which `experts` keeps these: as they are stored, if all are stored alike and no rank's
        share begins inside of a block with one scale; else plain, which the user is told."""
        return (invariant_layout if self._invariant else layout_of)(stacks, self.stored_format, self.mesh)

    def repeats(self, name: str) -> bool:
        """Whether matrix `name`, which may repeat another one, does: it is not there, or the same."""
        return self.stored(name) not in self._own

    def stored_format(self, name: str) -> Format:
        """Return the checkpoint's format of matrix `name`. Every matrix of an expert is asked for twice."""
        if (found := self._stored_formats.get(name)) is None:
            found = self._stored_formats[name] = stored_format(self.stored(name), self._dtype_of)
        return found

    def has(self, name: str) -> bool:
        """Whether tensor `name` is known to be in the checkpoint; not known without its files."""
        return self._dtype_of(self.stored(name)) is not None

    def lossless(self, name: str) -> torch.dtype:
        """The model's dtype if tensor `name` is stored in it, else fp32."""
        return self.dtype if PLAIN_DTYPES.get(self._dtype_of(self.stored(name)) or "") == self.dtype else torch.float32

    def _room(self, outer: tuple[int, ...], parts: Sequence[Part], layout: Layout) -> Weight:
        """Room for a matrix, or for several."""
        if layout.note and layout.note not in self._told and self.mesh.world.first:  # all ranks choose alike
            self._told.add(layout.note)
            self.tell(layout.note)
        shares = [part.index(self.mesh) for part in parts]
        height = sum(rows.stop - rows.start for rows, _ in shares)
        width = shares[0][1].stop - shares[0][1].start
        (self.formats.experts if outer else self.formats.others).add(layout.format)
        data, scales = layout.format.room(outer, height, width, layout.block, self.empty)
        return Weight(data, layout.format, scales, layout.block)

    def _stack(self, weight: Weight, parts: Sequence[Part]) -> None:
        begin = 0
        for part in parts:
            own, _ = part.index(self.mesh)
            end = begin + own.stop - own.start
            self.fill(weight[begin:end], part)
            begin = end

    def fill(self, into: Weight, part: Part) -> None:
        """Copy what this rank reads of `part` into `into`, which is plain or in the format in which it is stored."""
        self.fill_matrix(into, part)
        if part.rope is not None:
            scaled = into.scales is not None and into.scaled_rows == 1  # scales of blocks of rows stay: `Format.kept`
            for tensor in [into.data, into.scales] if scaled else [into.data]:
                assert tensor is not None
                numbers = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
                numbers.copy_(self.in_order(numbers, part.rope))

    def in_order(self, x: Tensor, rope: RopeRows) -> Tensor:
        """The rows of a tensor, when it is in place, in the order in which they are kept."""
        self.settle()
        return x[rope.order(x.shape[0], x.device)]

    def fill_matrix(self, into: Weight, part: Part) -> None:
        """`fill`, in the checkpoint's order. Here of plain matrices alone."""
        self.fill_part(into.plain, part.name, part.shape, part.index(self.mesh))

    @abstractmethod
    def fill_part(self, into: Tensor, name: str, shape: Shape, index: tuple[slice, ...]) -> None:
        """Copy `index` of the plain tensor `name`, whose shape in the checkpoint is `shape`, into `into`: numbers, or
        integers where `into` has such."""

    @abstractmethod
    def progress(self, text: str) -> None:
        """Tell the user what is being loaded."""

    def tell(self, text: str) -> None:  # noqa: B027 - most sources have nobody to tell
        """Tell the user what is not as the checkpoint would have it."""

    def settle(self) -> None:  # noqa: B027 - most sources fill at once
        """Wait until everything that was asked for is in place: before it is read or changed."""

    def finish(self, minimum: Callable[[Tensor], Tensor]) -> None:
        """`settle` at the end, and make the matrices of all experts that kernels read. Of MXFP4 that looks whether they
        are FP8 times a power of two for each row, which waits for the device: many layers run for the first time in a
        step that is captured, where nothing may.

        Either all experts are multiplied so or none, on all ranks: a start compiles the kernels of a few layers for
        all. `minimum`: the least value over the ranks, see `Group`; so this is collective."""
        self.settle()
        matrices = [(weight, weight.matrix) for weight in self._experts]
        looked = [(weight, matrix.with_least()) for weight, matrix in matrices if isinstance(matrix, MicroScaled4)]
        if not looked:
            return
        exact = all(matrix.least is not None for _, matrix in looked)
        if bool(minimum(torch.tensor([exact], dtype=torch.int64, device=self.device)).item()):
            for weight, matrix in looked:
                weight.multiply_as(matrix)
        elif self.mesh.world.first:
            self.tell("experts in MXFP4 are multiplied in bf16: some rows are not FP8 times a power of two")


class DryRun(WeightSource):
    """Collects what a model wants, without memory."""

    Known = dict[str, tuple[Any, "DryRun"]]
    """Parts of models, by name, each with what it wants."""

    def __init__(
        self,
        mesh: Mesh,
        dtype: torch.dtype,
        stored: Callable[[str], str] = str,
        dtype_of: Callable[[str], str | None] | None = None,
        invariant: bool = False,
        own: Container[str] = (),
        known: Known | None = None,
    ) -> None:
        """`known`: parts that were counted before, of the same checkpoint on as many ranks, to which others are added;
        None: each part is counted."""
        super().__init__(mesh, dtype, torch.device("meta"), stored, dtype_of, invariant, own)
        self._known = known
        self.wanted: dict[str, Wanted] = {}
        """Wanted tensors by the checkpoint's names."""
        self.bytes = 0
        """Bytes of this rank's share, scales included."""
        self.beside = 0
        """Bytes that are made of it on a GPU, and kept."""
        self.census: list[Item] = []
        """Its tensors, in the order in which the model asks for them."""

    @override
    def once(self, name: str, build: Callable[[WeightSource], T]) -> T:
        """Counts a part that is known as it was counted before."""
        if self._known is None:
            return build(self)
        if name not in self._known:
            counted = DryRun(self.mesh, self.dtype, self.stored, self._dtype_of, self._invariant, self._own)
            self._known[name] = build(counted), counted
        part: T
        part, counted = self._known[name]
        self.wanted |= counted.wanted
        self.bytes += counted.bytes
        self.beside += counted.beside
        self.census += counted.census
        self.formats.experts.update(counted.formats.experts)
        self.formats.others.update(counted.formats.others)
        return part

    @override
    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Counts the bytes."""
        tensor = super().empty(*shape, dtype=dtype)
        self.bytes += tensor.nbytes
        self.census.append(Item.of(tensor))
        return tensor

    @override
    def experts(self, stacks: Sequence[Sequence[Part]]) -> Weight:
        """Counts what kernels read beside the weights, too."""
        weight = super().experts(stacks)
        self.beside += weight.format.beside(weight.shape)
        return weight

    @override
    def fill_part(self, into: Tensor, name: str, shape: Shape, index: tuple[slice, ...]) -> None:
        """Notes the name and the shape."""
        floating = into.dtype.is_floating_point
        self.wanted[self.stored(name)] = Wanted(shape) if floating else Wanted(shape, INTEGER_NAMES)

    @override
    def fill_matrix(self, into: Weight, part: Part) -> None:
        """Notes the tensors that the matrix consists of."""
        self.wanted |= self.stored_format(part.name).tensors(self.stored(part.name), *part.shape)

    @override
    def in_order(self, x: Tensor, rope: RopeRows) -> Tensor:
        """As it is: to index tensors without memory torch imports its compiler, which takes a start a second."""
        return x

    @override
    def progress(self, text: str) -> None:
        """Report nothing."""
