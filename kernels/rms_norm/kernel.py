"""RMS norm in Triton: one program holds a whole row, so the order of the sum depends on the row's length alone."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.parts import sum_of_parts


@triton.jit
def norm(
    x,
    residual,
    weight,
    out,
    eps,
    X_STRIDE: tl.constexpr,
    X_PART: tl.constexpr,
    PARTS: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """With ADD: residual += x first, rounded to its dtype, and the norm is of the rounded sum. With PARTS x is as many
    parts, whose sum is rounded before. Then the residual is read before the wait."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    inside = e < FEATURES
    w = tl.load(weight + e, mask=inside, other=0.0).to(tl.float32)
    at = residual + row * RESIDUAL_STRIDE + e
    if PARTS:
        before = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    # .cg: a dependent launch may find lines of an earlier kernel in L1.
    if PARTS:
        value = sum_of_parts(x + row * X_STRIDE + e, inside, X_PART, PARTS).to(residual.dtype.element_ty).to(tl.float32)
    else:
        value = tl.load(x + row * X_STRIDE + e, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    if ADD:
        if not PARTS:
            before = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        value += before
        rounded = value.to(residual.dtype.element_ty)
        tl.store(at, rounded, mask=inside, eviction_policy="evict_last" if DEPENDENT else "")
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / FEATURES + eps)
    normed = (value * scale * w).to(out.dtype.element_ty)
    tl.store(out + row * OUT_STRIDE + e, normed, mask=inside, eviction_policy="evict_last" if DEPENDENT else "")
