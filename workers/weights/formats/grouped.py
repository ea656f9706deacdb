"""What formats share whose scales are of 32 neighbouring input features of a row.

Shape legend: N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Final

from typing_extensions import override

from workers.weights.formats.format import Block, Format, Kept, StoredPart, check_scales
from workers.weights.wanted import MX_SCALES, Shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from workers.parallel.mesh import Mesh
    from workers.weights.part import Part

GROUP: Final = 32
"""Input features of a row that share a scale."""
_NAN: Final = 0xFF
"""The exponent that is no scale."""


class Grouped(Format):
    """Numbers [.., N, K], or several in a byte, and scales [.., N, K / 32]."""

    packed: ClassVar[int] = 1
    """Numbers of an element."""

    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Dtypes of the elements and of the scales."""
        raise NotImplementedError(self.name)

    @override
    def kept(self, stacks: Sequence[Sequence[Part]], mesh: Mesh) -> Kept:
        """Whole groups of each rank."""
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
        elements, scales = self.dtypes()
        data = empty(*outer, rows, columns // self.packed, dtype=elements)
        return data, empty(*outer, rows, columns // GROUP, dtype=scales)

    @override
    def check(self, data: Tensor, scales: Tensor | None, block: Block) -> None:
        if block is not None:
            raise ValueError(f"{self.name}: weights have groups of input features, no blocks")
        *rows, columns = self.shape(data)
        if columns % GROUP:
            raise ValueError(f"{self.name}: scales are of whole groups of {GROUP}, not of {columns} columns")
        check_scales(self, data, scales, (*rows, columns // GROUP), self.dtypes())

    @override
    def shape(self, data: Tensor) -> Shape:
        *outer, last = data.shape
        return (*outer, self.packed * last)


class MicroScaling(Grouped):
    """Formats of OCP's Microscaling (version 1.0, 2023), whose scales are `X.weight_scale`, a byte that is an exponent
    of 2 with 127 added (E8M0)."""

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
