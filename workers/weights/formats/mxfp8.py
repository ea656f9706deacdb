"""MXFP8 (OCP Microscaling Formats, version 1.0, 2023): `X.weight` in e4m3, and a scale for each 32 input features of a
row, `X.weight_scale`, a byte that is an exponent of 2 with 127 added (E8M0).

Shape legend: N output features, K input features, G = K / 32 groups.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from typing_extensions import override

from workers.weights.formats.format import Block, Format, Kept, StoredPart, check_scales, differences
from workers.weights.formats.fp8_blocks import e4m3_of
from workers.weights.wanted import FP8_DTYPE, MX_DTYPES, MX_SCALES, Shape, Wanted

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.matrix import Matrix
    from workers.parallel.mesh import Mesh
    from workers.weights.part import Part

GROUP: Final = 32
"""Input features of a row that share a scale."""
_NAN: Final = 0xFF
"""The byte that is no scale."""
_PUBLISHED: Final = re.compile(r"(?<!\.eh)(?<!\.weights)_proj(_with_mqa)?\.weight$")
"""Every projection but that of the draft layer's inputs and of an indexer's weights."""


class Mxfp8(Format):
    """e4m3 numbers [.., N, K]; 32 neighbouring input features of a row share a scale, uint8 [.., N, K / 32]."""

    name: ClassVar = "MXFP8"
    method: ClassVar = "modelopt"
    published: ClassVar = "MXFP8 (e4m3 in groups of 32 with scales in E8M0), as modelopt stores it"
    suffixes: ClassVar = {"": FP8_DTYPE, MX_SCALES: "U8"}

    @override
    def difference(self, given: Mapping[str, Any]) -> str:
        nothing: tuple[Any, ...] = (None, {}, [])
        return differences(
            given, "", {"quant_algo": ("MXFP8",), "group_size": (None, GROUP), "kv_cache_quant_algo": nothing}
        ) or differences(given, "", {"kv_cache_scheme": nothing})

    @override
    def stores(self, name: str, dtype_of: Callable[[str], str | None]) -> bool:
        return dtype_of(name) == FP8_DTYPE and dtype_of(name + MX_SCALES) in MX_DTYPES

    @override
    def tensors(self, name: str, rows: int, columns: int) -> dict[str, Wanted]:
        return {
            name: Wanted((rows, columns), (FP8_DTYPE,)),
            name + MX_SCALES: Wanted((rows, -(-columns // GROUP)), MX_DTYPES),
        }

    @override
    def publishes(self, name: str) -> bool:
        return _PUBLISHED.search(name) is not None

    @override
    def covering(self, part: StoredPart) -> tuple[Tensor, Tensor]:
        return self.data(part), self.scales(part, None)

    @override
    def numbers(self, part: StoredPart, data: Tensor, scales: Tensor) -> Tensor:
        import torch

        from kernels.matrix import e8m0

        columns = part.columns
        group_K = torch.arange(columns.start, columns.stop, device=data.device) // GROUP - columns.start // GROUP
        return data.float() * e8m0(scales).index_select(-1, group_K)

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

        data = empty(*outer, rows, columns, dtype=torch.float8_e4m3fn)
        return data, empty(*outer, rows, columns // GROUP, dtype=torch.uint8)

    @override
    def data(self, part: StoredPart) -> Tensor:
        return e4m3_of(part)

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
            raise ValueError("MXFP8 weights have groups of input features, no blocks")
        *rows, columns = data.shape
        if columns % GROUP:
            raise ValueError(f"{self.name}: scales are of whole groups of {GROUP}, not of {columns} columns")
        check_scales(self, data, scales, (*rows, columns // GROUP), (torch.float8_e4m3fn, torch.uint8))

    @override
    def matrix(self, data: Tensor, scales: Tensor | None, block: Block) -> Matrix:
        from kernels.matrix import MicroScaled

        assert scales is not None
        return MicroScaled(data, scales)

    @override
    def dequantized(self, data: Tensor, scales: Tensor | None, block: Block) -> Tensor:
        from kernels.matrix import e8m0

        assert scales is not None
        return data.float() * e8m0(scales).repeat_interleave(GROUP, dim=-1)


MXFP8: Final = Mxfp8()
