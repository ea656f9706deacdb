"""The residual stream's entry, in Triton: programs for some features of a token each."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.pending_norm.pieces import PIECE

_PIECE = tl.constexpr(PIECE)


@triton.jit
def enter(
    source,
    ids,
    residual,
    norm,
    out,
    square,
    SOURCE_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    GATHER: tl.constexpr,
    ADD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """residual = or += the token's row (GATHER: of a table); out = residual * norm, sums of squares by pieces. Grid:
    tokens, blocks of features."""
    token = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = e < FEATURES
    w = tl.load(norm + e, mask=inside, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()  # after the wait: kernels after this may read before theirs what precedes this one
    row = token
    if GATHER:
        row = tl.load(ids + token).to(tl.int64)
    value = tl.load(source + row * SOURCE_STRIDE + e, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    place = residual + token * RESIDUAL_STRIDE + e
    if ADD:
        value += tl.load(place, mask=inside, other=0.0, cache_modifier=".cg")
    tl.store(place, value, mask=inside)
    tl.store(out + token * OUT_STRIDE + e, (value * w).to(out.dtype.element_ty), mask=inside)
    piece = tl.sum(tl.reshape(value * value, [BLOCK // _PIECE, _PIECE]), 1)
    p = tl.program_id(1) * (BLOCK // _PIECE) + tl.arange(0, BLOCK // _PIECE)
    tl.store(square + token * PIECES + p, piece, mask=p < PIECES)
