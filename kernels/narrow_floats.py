"""Numbers of eight bits as bf16, in registers, for products in Triton: those of FP8 (e4m3), and exponents (E8M0)."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl

# Exponent and mantissa of a byte of e4m3 move to where bf16 has them, which leaves a number 2^120 times too small, zero
# and subnormal numbers included. Two at a time, as many as a thread finds side by side in a tile of the tensor cores.
_WIDEN = tl.constexpr(
    """
    {
    .reg .b32 both, sign;
    cvt.u32.u16 both, $1;
    prmt.b32 both, both, 0, 0x1404;
    and.b32 sign, both, 0x80008000;
    shr.u32 both, both, 4;
    and.b32 both, both, 0x07F007F0;
    or.b32 both, both, sign;
    mov.b32 sign, 0x7B807B80;
    mul.rn.bf16x2 $0, both, sign;
    }
    """
)


@triton.jit
def wide(byte):
    """Bytes of e4m3 in bf16, exactly. (NaN, which no checked checkpoint holds, becomes 480.)"""
    return tl.inline_asm_elementwise(_WIDEN, "=r,h", [byte], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def power(byte):
    """Exponents in bytes (E8M0) as powers of 2 in bf16. The least counts as 0, as in `kernels.matrix`."""
    return (byte.to(tl.int16) << 7).to(tl.bfloat16, bitcast=True)
