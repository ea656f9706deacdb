"""Activations to FP8 in Triton: a program per token and a few neighbouring groups of features."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["scale_row", "scale_column"])
def quantize(
    x,
    out,
    scale_out,
    scale_row,
    scale_column,
    X_STRIDE: tl.constexpr,
    FEATURES: tl.constexpr,
    GATED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    MOST: tl.constexpr,
    LEAST_SCALE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """GROUPS groups per program. Scales lie `scale_row` and `scale_column` elements apart. GATED: `x` holds FEATURES of
    a gate, then as many of up, and what is rounded is silu(gate) * up."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    k = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    at = x + row * X_STRIDE + k
    number = tl.load(at, mask=k < FEATURES, other=0.0, cache_modifier=".cg").to(tl.float32)
    if GATED:
        up = tl.load(at + FEATURES, mask=k < FEATURES, other=0.0, cache_modifier=".cg").to(tl.float32)
        number = number * tl.sigmoid(number) * up
    size = tl.where(number == number, tl.abs(number), 0.0)
    scale = tl.maximum(tl.div_rn(tl.max(size, 1), MOST), LEAST_SCALE)
    number = number * tl.div_rn(1.0, scale)[:, None]
    tl.store(out + row * FEATURES + k, number.to(out.dtype.element_ty), mask=k < FEATURES)
    to = row * scale_row + group.to(tl.int64) * scale_column
    tl.store(scale_out + to, scale, mask=group * GROUP < FEATURES)
