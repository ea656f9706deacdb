"""The interface of a format of weights.

Shape legend: X experts, N output features (rows), K input features (columns).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from typing_extensions import override

from workers.weights.wanted import Shape, Wanted

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.matrix import Matrix
    from workers.parallel.mesh import Mesh
    from workers.weights.part import Part

Block = tuple[int, int] | None
"""Rows and columns that share a scale; None where a format has no blocks, or always the same ones."""


@dataclass(frozen=True)
class Kept:
    """Whether a rank can keep matrices as they are stored."""

    block: Block = None
    """Blocks that no share of a rank and no seam between matrices begins inside of."""
    note: str = ""
    """Reason why they cannot, so that they are dequantized as they are loaded."""


class Files(Protocol):
    """The files of a checkpoint."""

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """A part of a tensor, on the CPU."""
        ...


@dataclass(frozen=True)
class StoredPart:
    """`rows` and `columns` of matrix `name`, which is of `shape` in all. Files are read when data are asked for."""

    files: Files
    name: str
    shape: Shape
    rows: slice
    columns: slice

    def of_rows(self, begin: int, end: int) -> StoredPart:
        """Return some of its rows, counted from its first."""
        return replace(self, rows=slice(self.rows.start + begin, self.rows.start + end))

    def scales(self, suffix: str, index: tuple[slice, slice]) -> Tensor:
        """Read some of the scales in the tensor with this end of its name. `WeightsError` for what is no finite
        number."""
        import torch

        from workers.weights.checkpoint import WeightsError

        scales = self.files.read(self.name + suffix, index)
        if scales.dtype == torch.float8_e8m0fnu:
            scales = scales.float()
        if not bool(scales.isfinite().all()):
            raise WeightsError(
                f"{self.name}{suffix} has scales that are NaN or infinite; scales are finite. Is the download complete?"
            )
        return scales


class Format(ABC):
    """Storage format of a matrix: who stores it so, in which tensors, and the numbers that these stand for.

    A format needs the abstract methods. Its matrices are then dequantized as they are loaded. One that has kernels says
    in `kept` and in those behind it how a rank keeps them as they are stored.
    """

    name: ClassVar[str]
    """Name for people."""

    # The config.json of a checkpoint.
    method: ClassVar[str] = ""
    """`quant_method` of its quantization_config."""
    algorithm: ClassVar[str | None] = None
    """`quant_algo` of its quantization_config, where its method has that."""
    layout: ClassVar[str | None] = None
    """`format` of its quantization_config, where its method has that."""
    published: ClassVar[str] = ""
    """Part of this method that is supported, for an error message."""

    def difference(self, given: Mapping[str, Any]) -> str:
        """Return what in a quantization_config of this method says that the checkpoint is stored otherwise; "" if
        nothing does."""
        return ""

    # The files of a checkpoint.
    suffixes: ClassVar[Mapping[str, str]]
    """Suffixes of a matrix's name, for all tensors that it consists of, with safetensors' names of their usual
    dtypes."""

    @abstractmethod
    def stores(self, name: str, dtype_of: Callable[[str], str | None]) -> bool:
        """Whether matrix `name` is stored so in files whose tensors have these dtypes; None: there is no such
        tensor."""

    @abstractmethod
    def tensors(self, name: str, rows: int, columns: int) -> dict[str, Wanted]:
        """The tensors that a matrix stored so consists of."""

    def publishes(self, name: str) -> bool:
        """Whether those who publish checkpoints so store this matrix so: for who does not have the files yet. As it is
        here, every projection."""
        return name.endswith("_proj.weight")

    @abstractmethod
    def covering(self, part: StoredPart) -> tuple[Tensor, Tensor]:
        """Numbers and scales of all that `numbers` needs, on the CPU."""

    @abstractmethod
    def numbers(self, part: StoredPart, data: Tensor, scales: Tensor) -> Tensor:
        """fp32 [N, K] of what `covering` gave, computed where that lies by now."""

    # The memory of a rank. Data and scales are what `Weight` has.

    def kept(self, stacks: Sequence[Sequence[Part]], mesh: Mesh) -> Kept:
        """Whether matrices can be kept as they are stored, each of which has rows of some parts, one behind the other.
        All ranks find the same. As it is here they are not."""
        return Kept(note=f"no kernel multiplies {self.name}")

    def room(
        self, outer: Shape, rows: int, columns: int, block: Block, empty: Callable[..., Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Uninitialised data and scales of a matrix [N, K], or of several. `empty(*shape, dtype=)` gives memory."""
        raise NotImplementedError(self.name)

    def data(self, part: StoredPart) -> Tensor:
        """The numbers as a rank keeps them, on the CPU."""
        raise NotImplementedError(self.name)

    def scales(self, part: StoredPart, block: Block) -> Tensor:
        """The scales as a rank keeps them for such blocks, on the CPU."""
        raise NotImplementedError(self.name)

    def check(self, data: Tensor, scales: Tensor | None, block: Block) -> None:
        """ValueError for what does not fit together."""
        raise NotImplementedError(self.name)

    def shape(self, data: Tensor) -> Shape:
        """Return the shape of the matrix as it is multiplied, however it is stored: (N, K) or (X, N, K)."""
        return tuple(data.shape)

    def scaled_rows(self, block: Block) -> int:
        """Neighbouring rows that share a scale."""
        return 1

    def matrix(self, data: Tensor, scales: Tensor | None, block: Block) -> Matrix:
        """Return the matrix in the form of kernels that read every format."""
        raise NotImplementedError(self.name)

    def beside(self, shape: Shape) -> int:
        """Return the bytes that `matrix` of experts of this shape takes on a GPU beside data and scales."""
        return 0

    def dequantized(self, data: Tensor, scales: Tensor | None, block: Block) -> Tensor:
        """fp32 [.., N, K], computed in plain torch. Without scales the numbers may have another dtype."""
        raise NotImplementedError(self.name)

    # Products.
    most_few: ClassVar[int] = 0
    """Most tokens of the small-batch path in a model with such weights; 0: its kernels do not read them."""
    experts_alone: ClassVar[bool] = False
    """Whether that path reads them in experts alone, all of which must then be stored so (`moe.PendingExperts`)."""
    w8a8: ClassVar[bool] = False
    """Whether there are products with activations that are rounded to FP8, in experts and outside of them."""
    w4a8: ClassVar[bool] = False
    """Whether there are such products of very many tokens in experts alone (`kernels.moe.w4a8`)."""

    @override
    def __repr__(self) -> str:
        return self.name


def differences(values: Mapping[str, Any], prefix: str, supported: Mapping[str, tuple[Any, ...]]) -> str:
    """The first of these fields of a config.json that has none of the supported values; "" if there is none."""
    for name, choices in supported.items():
        value = values.get(name)
        # True is no 1.
        if not any(value == choice and type(value) is type(choice) for choice in choices):
            return f"{prefix}{name} = {value!r}, supported: {choices[-1]!r}"
    return ""


def unchanged(given: Mapping[str, Any]) -> str:
    """Return what in a quantization_config of compressed-tensors says that matrices are not those of the model, but
    turned or with numbers left out; "" if nothing does."""
    sparsity = given.get("sparsity_config")
    form = sparsity.get("format") if isinstance(sparsity, dict) else sparsity
    why = "" if form in (None, "dense") else f"sparsity_config.format = {form!r}, supported: 'dense'"
    return differences(given, "", {"transform_config": ({}, [], None)}) or why


def check_scales(
    format: Format, data: Tensor, scales: Tensor | None, scale_shape: Shape, dtypes: tuple[object, object]
) -> None:
    """ValueError unless there are scales of this shape, and numbers and scales have these dtypes."""
    if scales is None or tuple(scales.shape) != scale_shape:
        raise ValueError(f"{format.name}, of shape {list(format.shape(data))}: scales must be {list(scale_shape)}")
    if (data.dtype, scales.dtype) != dtypes:
        raise ValueError(f"{format.name}: numbers and scales are {dtypes[0]} and {dtypes[1]}")
