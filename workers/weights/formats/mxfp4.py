"""MXFP4 (OCP Microscaling Formats, version 1.0, 2023), as DeepSeek V4 has its experts: `X.weight`, two numbers in E2M1
per byte, the low half the even input feature, and a scale for each 32 input features of a row, `X.weight_scale`, a byte
that is an exponent of 2 with 127 added (E8M0).

Shape legend: N output features, K input features, G = K / 32 groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Final

from typing_extensions import override

from workers.weights.formats.format import Block, Format, Kept, StoredPart, check_scales
from workers.weights.wanted import MX_SCALES, Shape, Wanted

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.matrix import Matrix
    from workers.parallel.mesh import Mesh
    from workers.weights.part import Part

GROUP: Final = 32
"""Input features of a row that share a scale."""
_BYTES: Final = ("I8", "U8")
_SCALES: Final = ("F8_E8M0",)
_NAN: Final = 0xFF
"""The byte that is no scale."""


class Mxfp4(Format):
    """Two numbers per byte, uint8 [.., N, K / 2]; 32 neighbouring input features of a row share a scale, uint8
    [.., N, K / 32]. No quantization_config says so: a checkpoint whose other matrices are in FP8 has its experts so."""

    name: ClassVar = "MXFP4"
    suffixes: ClassVar = {"": "I8", MX_SCALES: "F8_E8M0"}
    clamps: ClassVar = False

    @override
    def stores(self, name: str, dtype_of: Callable[[str], str | None]) -> bool:
        return dtype_of(name) in _BYTES and dtype_of(name + MX_SCALES) in _SCALES

    @override
    def tensors(self, name: str, rows: int, columns: int) -> dict[str, Wanted]:
        return {
            name: Wanted((rows, -(-columns // 2)), _BYTES),
            name + MX_SCALES: Wanted((rows, -(-columns // GROUP)), _SCALES),
        }

    @override
    def publishes(self, name: str) -> bool:
        return False

    @override
    def covering(self, part: StoredPart) -> tuple[Tensor, Tensor]:
        """Whole groups, as far as there are bytes."""
        begin = part.columns.start // GROUP * (GROUP // 2)
        return _packed(part, slice(begin, -(-part.columns.stop // 2))), self.scales(part, None)

    @override
    def numbers(self, part: StoredPart, data: Tensor, scales: Tensor) -> Tensor:
        begin = part.columns.start % GROUP
        return _numbers(data, scales)[:, begin : begin + part.columns.stop - part.columns.start]

    @override
    def kept(self, stacks: Sequence[Sequence[Part]], mesh: Mesh) -> Kept:
        from workers.weights.part import sharing

        for part in (part for parts in stacks for part in parts):
            _, columns = part.index(mesh)
            if part.steps(mesh)[1] % GROUP or (columns.stop - columns.start) % GROUP:
                ranks = sharing(stacks, mesh)
                return Kept(note=f"on {ranks} ranks a share's columns begin or end inside of a group of {GROUP}")
        return Kept()

    @override
    def room(
        self, outer: Shape, rows: int, columns: int, block: Block, empty: Callable[..., Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        import torch

        data = empty(*outer, rows, columns // 2, dtype=torch.uint8)
        return data, empty(*outer, rows, columns // GROUP, dtype=torch.uint8)

    @override
    def data(self, part: StoredPart) -> Tensor:
        return _packed(part, slice(part.columns.start // 2, -(-part.columns.stop // 2)))

    @override
    def scales(self, part: StoredPart, block: Block) -> Tensor:
        """The groups that this part has a number of."""
        import torch

        from workers.weights.checkpoint import WeightsError

        groups = slice(part.columns.start // GROUP, -(-part.columns.stop // GROUP))
        byte = part.files.read(part.name + MX_SCALES, (part.rows, groups)).view(torch.uint8)
        if byte.numel() and int(byte.max()) == _NAN:
            raise WeightsError(
                f"{part.name}{MX_SCALES} has scales that are NaN; scales are numbers. Is the download complete?"
            )
        return byte

    @override
    def check(self, data: Tensor, scales: Tensor | None, block: Block) -> None:
        import torch

        if block is not None:
            raise ValueError("MXFP4 weights have groups of input features, no blocks")
        *rows, columns = self.shape(data)
        if columns % GROUP:
            raise ValueError(f"{self.name}: scales are of whole groups of {GROUP}, not of {columns} columns")
        check_scales(self, data, scales, (*rows, columns // GROUP), (torch.uint8, torch.uint8))

    @override
    def shape(self, data: Tensor) -> Shape:
        *outer, last = data.shape
        return (*outer, 2 * last)

    @override
    def matrix(self, data: Tensor, scales: Tensor | None, block: Block) -> Matrix:
        from kernels.matrix import MicroScaled4

        assert scales is not None
        return MicroScaled4(data, scales)

    @override
    def dequantized(self, data: Tensor, scales: Tensor | None, block: Block) -> Tensor:
        assert scales is not None
        return _numbers(data, scales)


def _packed(part: StoredPart, columns: slice) -> Tensor:
    import torch

    return part.files.read(part.name, (part.rows, columns)).view(torch.uint8)


def _numbers(data: Tensor, scales: Tensor) -> Tensor:
    """fp32 [.., N, K] of bytes [.., N, K / 2] and scales [.., N, G], of which the last group may be cut."""
    from kernels.matrix import e2m1, e8m0

    number = e2m1(data)
    return number * e8m0(scales).repeat_interleave(GROUP, dim=-1)[..., : number.shape[-1]]


MXFP4: Final = Mxfp4()
