"""Reading of weights that are stored in fewer bits than they are multiplied in, for kernels of few tokens.

FP8 (e4m3) weights with a scale for every block of neighbouring rows and features, as DeepSeek-V3 publishes them
(arXiv:2412.19437, section 3.3): they stay 8 bits on their way, become bf16 in registers, which is exact, and the sums
of a block are multiplied by its scale in fp32. So nothing is rounded but what the checkpoint has rounded.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.matrix import BlockScaled, Matrix


class Stored(NamedTuple):
    """Storage of a matrix, with the numbers of rows and features that share a scale, where it has scales."""

    fp8: bool = False
    """Whether it is stored as bytes of e4m3; otherwise in bf16."""
    rows: int = 1
    features: int = 1
    scales: int = 1
    """Scales of a row of the matrix."""
    piece: int = 8
    """Features in 16 bytes. (A field: Triton's cache would not see the code of a property.)"""


PLAIN: Final = Stored()


def stored(weight: Matrix) -> tuple[Tensor, Tensor, Stored]:
    """The memory of a matrix as kernels take it, that of its scales, and how both are to be read."""
    if isinstance(weight, Tensor):
        return weight, weight, PLAIN
    if not isinstance(weight, BlockScaled):
        raise TypeError(f"no kernel of few tokens reads {type(weight).__name__}")
    how = Stored(True, weight.rows, weight.features, weight.scales.shape[-1], piece=16)
    return weight.data.view(torch.uint8), weight.scales, how


# A byte becomes the upper half of a 16-bit word; its exponent and mantissa move down by four bits to where bf16 has
# them, which leaves a number 2^120 times too small, zero and subnormal numbers included. Two words at a time.
_WIDEN = gl.constexpr(
    """
    {
    .reg .b32 low, high, sign, large;
    mov.b32 large, 0x7B807B80;
    prmt.b32 low, $2, 0, 0x1404;
    prmt.b32 high, $2, 0, 0x3424;
    and.b32 sign, low, 0x80008000;
    shr.u32 low, low, 4;
    and.b32 low, low, 0x07F007F0;
    or.b32 low, low, sign;
    and.b32 sign, high, 0x80008000;
    shr.u32 high, high, 4;
    and.b32 high, high, 0x07F007F0;
    or.b32 high, high, sign;
    mul.rn.bf16x2 $0, low, large;
    mul.rn.bf16x2 $1, high, large;
    }
    """
)


@gluon.jit
def widened(tile):
    """A tile of FP8 weights in bf16, without their scales. (NaN, which no checked checkpoint holds, becomes 480.)"""
    return gl.inline_asm_elementwise(_WIDEN, "=r,=r,r", [tile], dtype=gl.bfloat16, is_pure=True, pack=4)
