"""MXFP8 (OCP Microscaling Formats, version 1.0, 2023): `X.weight` in e4m3, and a scale for each 32 input features of a
row, `X.weight_scale`, a byte that is an exponent of 2 with 127 added (E8M0).

Shape legend: N output features, K input features, G = K / 32 groups.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

from typing_extensions import override

from workers.weights.formats.format import Block, StoredPart, differences
from workers.weights.formats.fp8_blocks import e4m3_of
from workers.weights.formats.grouped import GROUP, MicroScaling
from workers.weights.wanted import FP8_DTYPE, MX_DTYPES, MX_SCALES, Wanted

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kernels.matrix import Matrix

_PUBLISHED: Final = re.compile(r"(?<!\.eh)(?<!\.weights)_proj(_with_mqa)?\.weight$")
"""Every projection but that of the draft layer's inputs and of an indexer's weights."""


class Mxfp8(MicroScaling):
    """e4m3 numbers [.., N, K]; 32 neighbouring input features of a row share a scale, uint8 [.., N, K / 32]."""

    name: ClassVar = "MXFP8"
    method: ClassVar = "modelopt"
    algorithm: ClassVar = "MXFP8"
    published: ClassVar = "MXFP8 (e4m3 in groups of 32 with scales in E8M0), as modelopt stores it"
    suffixes: ClassVar = {"": FP8_DTYPE, MX_SCALES: "U8"}

    @override
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        import torch

        return torch.float8_e4m3fn, torch.uint8

    @override
    def difference(self, given: Mapping[str, Any]) -> str:
        return differences(given, "", {"group_size": (None, GROUP)})

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
    def data(self, part: StoredPart) -> Tensor:
        return e4m3_of(part)

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
