"""The SwiGLU gate in Triton: one program per row and a block of its columns."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def silu_mul(
    gate_up,
    out,
    GATE_UP_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """FEATURES intermediate features: the gate's are followed by as many of up."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < FEATURES
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    at = gate_up + row * GATE_UP_STRIDE + i
    gate = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    up = tl.load(at + FEATURES, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out + row * OUT_STRIDE + i, value.to(out.dtype.element_ty), mask=inside)
