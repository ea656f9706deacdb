"""Work of the scoring group of `fp8` before the softmax: query vectors to shared memory, products with them. The pairs
that the copy engine fetched are seen as single codes by a private part of Gluon, of Triton 3.6.

Shape legend of comments: N entries of a tile, M query vectors, P = 64 pairs of features of a group of 128.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from kernels.mla_decode.fp8_tile import (
    CODES,
    GROUP,
    GROUPS,
    LATENT,
    ROPE,
    code_sums_layout,
    column_halves,
    load_scales,
    sums_layout,
)
from kernels.mla_decode.narrow_tile import unknown_zero
from kernels.mla_decode.split_kv import TILE


@gluon.jit
def _rounded(x):
    """fp32 rounded to four bits of significand, half away from zero. What e4m3 would make of it is not read back from
    there: ptxas 12.8 has been seen to read such a register before it is written."""
    return ((x.to(gl.int32, bitcast=True) + 0x80000) & -0x100000).to(gl.float32, bitcast=True)


@gluon.jit
def put_queries(q, row, tokens, share, queries, BLOCK: gl.constexpr, OWN: gl.constexpr):
    """Bring a row's block of query vectors to shared memory, in the form that `Queries` has. Those that the row does
    not have become zero. OWN: `Split.own`."""
    VECTOR: gl.constexpr = LATENT + ROPE
    CHUNK: gl.constexpr = GROUP // 2
    LANES: gl.constexpr = CHUNK // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    m = gl.arange(0, BLOCK, gl.SliceLayout(1, layout)) + (share.block * BLOCK + unknown_zero())
    if OWN:
        at_bound = share.seen + row.to(gl.int64) * (share.drafts + 2) + m // share.heads
        back = tokens - gl.load(at_bound, mask=m < share.queries, other=0, cache_modifier=".cg")
    else:
        back = gl.maximum(share.drafts - m // share.heads, 0)
    queries.back.store(back)
    c = gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
    at = q + row.to(gl.int64) * share.queries * VECTOR + ((m * VECTOR)[:, None] + c[None, :])
    inside = (m < share.queries)[:, None]
    peak = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, layout))
    for chunk in range(LATENT // CHUNK):
        part = gl.load(at + chunk * CHUNK, mask=inside, other=0.0, cache_modifier=".cg")
        peak = gl.maximum(peak, gl.max(gl.abs(part.to(gl.float32)), 1))
    peak_rope = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, layout))
    for chunk in range(ROPE // CHUNK):
        part = gl.load(at + (LATENT + chunk * CHUNK), mask=inside, other=0.0, cache_modifier=".cg")
        peak_rope = gl.maximum(peak_rope, gl.max(gl.abs(part.to(gl.float32)), 1))
    # Roped features are scaled with the others, but for magnitudes 2^100 apart they must not grow beyond fp32.
    least = (peak_rope.to(gl.int32, bitcast=True) >> 23) - 100
    exponent = gl.maximum(peak.to(gl.int32, bitcast=True) >> 23, gl.maximum(least, 15))
    # The largest feature gets the exponent 7, so that it is between 128 and 256.
    unit = ((exponent - 7) << 23).to(gl.float32, bitcast=True)
    inverse = ((261 - exponent) << 23).to(gl.float32, bitcast=True)[:, None]
    queries.unit.store(unit * share.scale)
    for chunk in gl.static_range(ROPE // CHUNK):
        part = gl.load(at + (LATENT + chunk * CHUNK), mask=inside, other=0.0, cache_modifier=".cg").to(gl.float32)
        queries.rope.slice(chunk * CHUNK, CHUNK, dim=1).store((part * inverse).to(gl.bfloat16))
    for g in range(GROUPS):
        for i in gl.static_range(GROUP // CHUNK):
            place = at + (g * GROUP + i * CHUNK)
            part = gl.load(place, mask=inside, other=0.0, cache_modifier=".cg").to(gl.float32) * inverse
            high = _rounded(part)
            parts_s = queries.latent.index(g).slice(i * CHUNK, CHUNK, dim=1)
            parts_s.slice(0, BLOCK, dim=0).store(high.to(gl.float8e4nv))
            parts_s.slice(BLOCK, BLOCK, dim=0).store((part - high).to(gl.float8e4nv))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _begin_group(queries, fetched, stage, GROUP_INDEX: gl.constexpr, BLOCK: gl.constexpr):
    """Begin the products [N, 2 M] of one group of features, without its scale."""
    keys = fetched.latent.index(stage * GROUPS + GROUP_INDEX)._reinterpret(gl.float8e4nv, [TILE, GROUP], CODES)
    parts = queries.latent.index(GROUP_INDEX + unknown_zero()).permute((1, 0))
    nothing = gl.zeros([TILE, 2 * BLOCK], gl.float32, code_sums_layout(BLOCK))
    return warpgroup_mma(keys, parts, nothing, use_acc=False, is_async=True)


@gluon.jit
def begin_scores(queries, fetched, stage, BLOCK: gl.constexpr):
    """Begin the products of a tile with the query vectors: of all groups of features, then of the roped ones."""
    nothing = gl.zeros([TILE, BLOCK], gl.float32, sums_layout(BLOCK))
    begun = ()
    for g in gl.static_range(GROUPS):
        begun = begun + (_begin_group(queries, fetched, stage, g, BLOCK),)  # noqa: RUF005 - Gluon knows no stars
    rope = warpgroup_mma(fetched.rope.index(stage), queries.rope.permute((1, 0)), nothing, use_acc=False, is_async=True)
    return begun + (rope,)  # noqa: RUF005


@gluon.jit
def _scaled(sums, scale, BLOCK: gl.constexpr):
    """Add both parts of the products of one group of features, and multiply by the scale of each entry."""
    high, low = column_halves(sums)
    SUMS: gl.constexpr = sums_layout(BLOCK)
    high = gl.convert_layout(high, SUMS, assert_trivial=True)
    low = gl.convert_layout(low, SUMS, assert_trivial=True)
    return (high + low) * scale


@gluon.jit
def end_scores(begun, fetched, stage, BLOCK: gl.constexpr):
    """Products [N, M] of a tile with the query vectors, over their units, and the scales of its entries, [N, 1] of each
    group of features."""
    scales = load_scales(fetched.scales.index(stage), BLOCK)
    sums0, sums1, sums2, sums3, score = warpgroup_mma_wait(0, deps=begun)
    score += _scaled(sums0, scales[0], BLOCK)
    score += _scaled(sums1, scales[1], BLOCK)
    score += _scaled(sums2, scales[2], BLOCK)
    score += _scaled(sums3, scales[3], BLOCK)
    return score, scales
