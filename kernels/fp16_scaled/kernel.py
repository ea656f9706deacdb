"""Rows in fp16 with a power of two each, in Triton: one program holds a whole row."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def unit_of(peak):
    """The power of two by which a row is divided whose largest magnitude is `peak` (fp32), and its inverse: the
    quotients are below 2^15. Of tiny rows and of rows with infinities it is a power of two as well."""
    exponent = tl.maximum(peak.to(tl.int32, bitcast=True) >> 23, 15)
    unit = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    inverse = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    return unit, inverse


@triton.jit
def to_fp16_scaled(
    x,
    half,
    unit,
    X_STRIDE: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    f = tl.arange(0, BLOCK)
    inside = f < FEATURES
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    # .cg: a dependent launch may find lines of an earlier kernel in L1.
    value = tl.load(x + row * X_STRIDE + f, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    row_unit, inverse = unit_of(tl.max(tl.abs(value), 0))
    tl.store(half + row * FEATURES + f, (value * inverse).to(tl.float16), mask=inside)
    tl.store(unit + row, row_unit)
