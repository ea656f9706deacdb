"""What a pass begins with, in Triton: what tokens and positions say, the streams before the first layer, and where the
tokens of decode rows belong. In torch's words that were fourteen launches.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def copy_row(to, source, FEATURES: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a row of so many numbers."""
    d = tl.arange(0, BLOCK)
    tl.store(to + d, tl.load(source + d, mask=d < FEATURES, other=0.0), mask=d < FEATURES)


@triton.jit
def begin_kernel(
    token,
    position,
    embedding,
    rotation,
    compressed_rotation,
    token_out,
    rotation_out,
    compressed_out,
    x,
    residual,
    open_gate,
    mix,
    EMBEDDING: tl.constexpr,
    X_STRIDE: tl.constexpr,
    FEATURES: tl.constexpr,
    STREAMS: tl.constexpr,
    STREAMS_BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Programs (token, block of features): the embedding, and zeros in every stream; of each token the first one does
    all else. EMBEDDING and X_STRIDE: numbers from row to row of `embedding` and of `x`."""
    t = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = e < FEATURES
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    # .cg: a dependent launch may find lines of an earlier step in L1.
    id = tl.load(token + t, cache_modifier=".cg")
    value = tl.load(embedding + id * EMBEDDING + e, mask=inside, other=0.0)
    tl.store(x + t * X_STRIDE + e, value.to(x.dtype.element_ty), mask=inside)
    nothing = tl.zeros([BLOCK], residual.dtype.element_ty)
    for stream in tl.static_range(STREAMS):
        tl.store(residual + (t * STREAMS + stream) * FEATURES + e, nothing, mask=inside)
    if tl.program_id(1) == 0:
        tl.store(token_out + t, id)
        p = tl.load(position + t, cache_modifier=".cg")
        copy_row(rotation_out + t * ROPE, rotation + p * ROPE, ROPE, ROPE_BLOCK)
        copy_row(compressed_out + t * ROPE, compressed_rotation + p * ROPE, ROPE, ROPE_BLOCK)
        s = tl.arange(0, STREAMS_BLOCK)
        tl.store(open_gate + t * STREAMS + s, tl.full([STREAMS_BLOCK], 1.0, tl.float32), mask=s < STREAMS)
        both = s[:, None] * STREAMS + s[None, :]
        there = (s < STREAMS)[:, None] & (s < STREAMS)[None, :]
        tl.store(mix + t * STREAMS * STREAMS + both, tl.zeros([STREAMS_BLOCK, STREAMS_BLOCK], tl.float32), mask=there)


@triton.jit(do_not_specialize=["tokens"])
def lay_out_rows_kernel(
    position,
    length,
    wanted,
    row_out,
    bound_out,
    tokens,
    WIDTH: tl.constexpr,
    RATIO: tl.constexpr,
    WANTED: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Programs of BLOCK tokens each. WANTED: of a row's tokens the first so many alone are somebody's."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = t < tokens
    row = t // WIDTH
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    # .cg: as above.
    own = inside
    if WANTED:
        own = own & (t % WIDTH < tl.load(wanted + row, mask=inside, other=0, cache_modifier=".cg"))
    live = own & (tl.load(length + row, mask=inside, other=0, cache_modifier=".cg") > 0)
    seen = tl.load(position + t, mask=inside, other=0, cache_modifier=".cg") + 1
    tl.store(row_out + t, tl.where(own, row, -1), mask=inside)
    tl.store(bound_out + t, tl.where(live, seen // RATIO, 0).to(tl.int32), mask=inside)
