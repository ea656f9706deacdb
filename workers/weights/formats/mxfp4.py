"""MXFP4 (OCP Microscaling Formats, version 1.0, 2023), as DeepSeek V4 has its experts: `X.weight`, two numbers in E2M1
per byte, the low half the even input feature, and a scale for each 32 input features of a row, `X.weight_scale`, a byte
that is an exponent of 2 with 127 added (E8M0).

Shape legend: N output features, K input features, G = K / 32 groups.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, ClassVar, Final

from typing_extensions import override

from workers.weights.formats.format import Block, StoredPart
from workers.weights.formats.grouped import GROUP, MicroScaling
from workers.weights.wanted import MX_SCALES, Shape, Wanted

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kernels.matrix import Matrix

_BYTES: Final = ("I8", "U8")
_SCALES: Final = ("F8_E8M0",)
MOST_EXPONENT: Final = 128
"""Largest byte of a scale, 2 as a number, because kernels multiply 2^126 times it in bf16 (`kernels/moe/e2m1.py`)."""


class Mxfp4(MicroScaling):
    """Two numbers per byte, uint8 [.., N, K / 2]; 32 neighbouring input features of a row share a scale, uint8
    [.., N, K / 32]. No quantization_config says so: a checkpoint whose other matrices are in FP8 has its experts so."""

    name: ClassVar = "MXFP4"
    suffixes: ClassVar = {"": "I8", MX_SCALES: "F8_E8M0"}
    packed: ClassVar = 2
    w4a8: ClassVar = True

    @override
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        import torch

        return torch.uint8, torch.uint8

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
    def data(self, part: StoredPart) -> Tensor:
        return _packed(part, slice(part.columns.start // 2, -(-part.columns.stop // 2)))

    @override
    def scales(self, part: StoredPart, block: Block) -> Tensor:
        from workers.weights.checkpoint import WeightsError

        byte = super().scales(part, block)
        if byte.numel() and int(byte.max()) > MOST_EXPONENT:
            raise WeightsError(
                f"{part.name}{MX_SCALES} has scales above 2, times which numbers of MXFP4 are too large for the bf16 "
                "in which GPUs multiply them"
            )
        return byte

    @override
    def matrix(self, data: Tensor, scales: Tensor | None, block: Block) -> Matrix:
        from kernels.matrix import MicroScaled4

        assert scales is not None
        return MicroScaled4(data, scales)

    @override
    def beside(self, shape: Shape) -> int:
        """A byte for each row, see `kernels.matrix.MicroScaled4.least`."""
        return prod(shape[:-1])

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
