"""MXFP4 weights in registers, for Hopper's kernels with weights of four bits: E2M1 numbers with a power of two for a
group of 32, exactly as bf16.

A number's exponent and mantissa move to where bf16 has them, its sign to the top: that leaves it 2^126 times too small,
zero and the subnormal half included. One product brings it back and scales it, where 2^126 times the group's power of
two is a number of bf16: up to a scale of 2. The loader refuses larger ones.

Gluon, for compute capability 9.0.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Final

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TO_BF16: Final = gl.constexpr(
    """
    {
    .reg .b32 bits, sign;
    shl.b32 bits, $4, 12;
    and.b32 sign, bits, 0x80008000;
    shl.b32 bits, $4, 6;
    lop3.b32 bits, bits, 0x01C001C0, sign, 0xEA;
    mul.rn.bf16x2 $0, bits, $5;
    shl.b32 bits, $4, 8;
    and.b32 sign, bits, 0x80008000;
    shl.b32 bits, $4, 2;
    lop3.b32 bits, bits, 0x01C001C0, sign, 0xEA;
    mul.rn.bf16x2 $1, bits, $5;
    shl.b32 bits, $4, 4;
    and.b32 sign, bits, 0x80008000;
    shr.u32 bits, $4, 2;
    lop3.b32 bits, bits, 0x01C001C0, sign, 0xEA;
    mul.rn.bf16x2 $2, bits, $5;
    and.b32 sign, $4, 0x80008000;
    shr.u32 bits, $4, 6;
    lop3.b32 bits, bits, 0x01C001C0, sign, 0xEA;
    mul.rn.bf16x2 $3, bits, $5;
    }
    """
)
"""Conversion of eight numbers of a word to the four pairs that are 16 bits apart, times a factor."""


@gluon.jit
def factor(byte):
    """2^126 times the powers of two of `byte` (uint8, at most 128), in bf16."""
    return ((byte.to(gl.int16) + 126) << 7).to(gl.bfloat16, bitcast=True)
