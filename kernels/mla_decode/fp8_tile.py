"""What the groups of `fp8` do with one tile of FP8 entries: scores, weights, sums, results; and the layouts they share.

Shape legend of comments: N entries of a tile, M query vectors, P = 64 pairs of features of a group of 128.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.mla_decode.narrow_tile import unknown_zero

LATENT = gl.constexpr(512)
ROPE = gl.constexpr(64)
GROUPS = gl.constexpr(4)
GROUP = gl.constexpr(128)
"""Features that share a scale."""
PAIRS = gl.constexpr(64)
"""Pairs of features of a group."""
TILE = gl.constexpr(64)
"""Cache entries of a tile: a page."""
LOWEST = gl.constexpr(-1.0e30)
"""Start of the running maximum: below every real score."""
LIFT = gl.constexpr(15.0)
"""Weights are 2^15 times as large, so that those down to 2^-29 keep all bits in fp16."""
VALUE_LIFT = gl.constexpr(32.0)
"""Values are so many times as large, for the same reason: they stay below 448 x 2 x 32."""
LN2 = gl.constexpr(0.6931471805599453)
TILED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
"""Shared-memory layout of matrices whose rows are 64 numbers of 16 bits, or pairs of bytes."""
SCALES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2))

# Two pairs of e4m3 become two numbers of fp16 each: exact.
_KEYS = gl.constexpr(
    """
    {
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    }
    """
)
# A pair of one entry, then of the next: the even features of both, and the odd ones.
_VALUES = gl.constexpr(
    """
    {
    .reg .b16 low, high;
    .reg .b32 sorted;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {low, high}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    }
    """
)


class Fetched(NamedTuple):
    """Rings of tiles in shared memory, which the fetching warp fills."""

    latent: Any
    """Pairs of e4m3, int16 [stages x 4, N, P]: the groups of features one after the other."""
    rope: Any
    """bfloat16 [stages, N, 64]."""
    scales: Any
    """fp32 [stages, N, 4]."""


class Queries(NamedTuple):
    """A block of query vectors in shared memory, divided by a power of two each."""

    latent: Any
    """fp16 [8, M, 64]: of each group of features those with which first numbers of `_KEYS` are multiplied, then those
    of the second."""
    rope: Any
    """bfloat16 [M, 64]."""
    unit: Any
    """fp32 [M]: the powers of two, times the scale of scores."""
    back: Any
    """int32 [M]: how many of the row's tokens come after a vector's."""


class Exchanged(NamedTuple):
    """What the scoring group tells the others in shared memory, the first three in two places each."""

    weights: Any
    """fp16 [2, N, M]."""
    ratios: Any
    """fp16 [2 x 4, 1, N]: every entry's scales over its `unit_of_entry`, times `VALUE_LIFT`."""
    shrink: Any
    """fp32 [2, M]: the factor for what was summed before."""
    factor: Any
    """fp32 [M]: with which a row's sums become its result."""
    top: Any
    """fp32 [M]: the scoring group's own, the maximum so far."""
    total: Any
    """fp32 [4, 8, M]: the same, sums of weights so far, of every thread."""


class Messages(NamedTuple):
    """The mbarriers between the warps."""

    full: Any
    """[stages, 1]: a tile is there."""
    empty: Any
    """[stages, 1]: all groups are done with it."""
    weights_full: Any
    """[2, 1]."""
    weights_empty: Any
    """[2, 1]."""
    factor_full: Any
    factor_empty: Any


@gluon.constexpr_function
def sums_layout(BLOCK):
    """Of sums of wgmma: 64 entries, or 64 pairs of features, by the query vectors of a block."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 16])


@gluon.constexpr_function
def weights_layout(BLOCK):
    """Shared-memory layout of weights, [N, M] in fp16."""
    return gl.NVMMASharedLayout(swizzle_byte_width=2 * BLOCK, element_bitwidth=16, rank=2)


@gluon.jit
def keys_in_half(pair):
    """Pairs of e4m3 in fp16: of features 4 t and 4 t + 1 at t, then of features 4 t + 2 and 4 t + 3."""
    return gl.inline_asm_elementwise(_KEYS, "=r,=r,r", [pair], dtype=(gl.float16, gl.float16), is_pure=True, pack=2)


@gluon.jit
def values_in_half(pair):
    """Pairs of e4m3, of neighbouring entries, in fp16: the even features, and the odd ones."""
    return gl.inline_asm_elementwise(_VALUES, "=r,=r,r", [pair], dtype=(gl.float16, gl.float16), is_pure=True, pack=2)


@gluon.jit
def put_queries(q, row, share, queries, BLOCK: gl.constexpr):
    """Bring a row's block of query vectors to shared memory, in the form that `Queries` has. Those that the row does
    not have become zero."""
    VECTOR: gl.constexpr = LATENT + ROPE
    CHUNK: gl.constexpr = GROUP // 2
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    m = gl.arange(0, BLOCK, gl.SliceLayout(1, layout)) + (share.block * BLOCK + unknown_zero())
    queries.back.store(gl.maximum(share.drafts - m // share.heads, 0))
    c = gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
    at = q + row.to(gl.int64) * share.queries * VECTOR + ((m * VECTOR)[:, None] + c[None, :])
    inside = (m < share.queries)[:, None]
    rope = gl.load(at + LATENT, mask=inside, other=0.0, cache_modifier=".cg").to(gl.float32)
    # Roped features are scaled with the others, but for magnitudes 2^100 apart they must not grow beyond fp32.
    least = (gl.max(gl.abs(rope), 1).to(gl.int32, bitcast=True) >> 23) - 100
    peak = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, layout))
    for chunk in range(2 * GROUPS):
        part = gl.load(at + chunk * CHUNK, mask=inside, other=0.0, cache_modifier=".cg")
        peak = gl.maximum(peak, gl.max(gl.abs(part.to(gl.float32)), 1))
    exponent = gl.maximum(peak.to(gl.int32, bitcast=True) >> 23, gl.maximum(least, 15))
    unit = ((exponent - 14) << 23).to(gl.float32, bitcast=True)
    inverse = ((268 - exponent) << 23).to(gl.float32, bitcast=True)[:, None]
    queries.unit.store(unit * share.scale)
    rope = gl.load(at + LATENT, mask=inside, other=0.0, cache_modifier=".cg").to(gl.float32)
    queries.rope.store((rope * inverse).to(gl.bfloat16))
    for g in range(GROUPS):
        for i in gl.static_range(2):
            place = at + (2 * g + i) * CHUNK
            part = gl.load(place, mask=inside, other=0.0, cache_modifier=".cg").to(gl.float32)
            half = gl.reshape((part * inverse).to(gl.float16), [BLOCK, CHUNK // 4, 2, 2])
            first, second = gl.split(gl.permute(half, (0, 1, 3, 2)))
            first_s = queries.latent.index(2 * g).slice(i * CHUNK // 2, CHUNK // 2, dim=1)
            first_s.store(gl.reshape(first, [BLOCK, CHUNK // 2]))
            second_s = queries.latent.index(2 * g + 1).slice(i * CHUNK // 2, CHUNK // 2, dim=1)
            second_s.store(gl.reshape(second, [BLOCK, CHUNK // 2]))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def scores(queries, fetched, stage, BLOCK: gl.constexpr):
    """Products [N, M] of a tile with the query vectors, over their units.

    The products of a group of features are issued before those of the group before are waited for, and while they run
    the next group becomes fp16.
    """
    SUMS: gl.constexpr = sums_layout(BLOCK)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    nothing = gl.zeros([TILE, BLOCK], gl.float32, SUMS)
    scales = fetched.scales.index(stage)
    zero = unknown_zero()
    latest = warpgroup_mma(
        fetched.rope.index(stage), queries.rope.permute((1, 0)), nothing, use_acc=False, is_async=True
    )
    score = nothing
    before = ()
    for g in gl.static_range(GROUPS):
        first, second = keys_in_half(fetched.latent.index(stage * GROUPS + g).load(LEFT))
        finished = latest
        right, other = queries.latent.index(2 * g + zero), queries.latent.index(2 * g + 1 + zero)
        latest = warpgroup_mma(first, right.permute((1, 0)), nothing, use_acc=False, is_async=True)
        latest = warpgroup_mma(second, other.permute((1, 0)), latest, is_async=True)
        if g == 0:
            score = warpgroup_mma_wait(2, deps=(finished,))
        else:
            done, _, _ = warpgroup_mma_wait(2, deps=(finished, before[0], before[1]))
            score += done * scales.slice(g - 1, 1, dim=1).load(SUMS)
        before = (first, second)
    done, _, _ = warpgroup_mma_wait(0, deps=(latest, before[0], before[1]))
    return score + done * scales.slice(GROUPS - 1, 1, dim=1).load(SUMS)


@gluon.jit
def scores_in_place(queries, fetched, stage, BLOCK: gl.constexpr):
    """As `scores`, for so many query vectors that registers have place for one set of sums only. They are brought to
    each group's scale before its products are added, and roped features come last."""
    SUMS: gl.constexpr = sums_layout(BLOCK)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    WIDTH: gl.constexpr = PAIRS // 2
    scales = fetched.scales.index(stage)
    zero = unknown_zero()
    sums = gl.zeros([TILE, BLOCK], gl.float32, SUMS)
    scale = scales.slice(0, 1, dim=1).load(SUMS)
    largest = scale
    before = ()
    for g in gl.static_range(GROUPS):
        keys = fetched.latent.index(stage * GROUPS + g)
        for part in gl.static_range(2):
            first, second = keys_in_half(keys.slice(part * WIDTH, WIDTH, dim=1).load(LEFT))
            right = queries.latent.index(2 * g + zero).slice(part * WIDTH, WIDTH, dim=1).permute((1, 0))
            other = queries.latent.index(2 * g + 1 + zero).slice(part * WIDTH, WIDTH, dim=1).permute((1, 0))
            if g > 0 and part == 0:
                done, _, _ = warpgroup_mma_wait(0, deps=(sums, before[0], before[1]))
                # With a scale so far below another one the sums would leave fp32, and what is added does not show.
                next_scale = gl.maximum(scales.slice(g, 1, dim=1).load(SUMS), largest * 2.0**-60)
                largest = gl.maximum(largest, next_scale)
                sums = done * (scale / next_scale)
                scale = next_scale
            sums = warpgroup_mma(first, right, sums, use_acc=g + part > 0, is_async=True)
            sums = warpgroup_mma(second, other, sums, is_async=True)
            if part > 0:
                _, _ = warpgroup_mma_wait(2, deps=(before[0], before[1]))
            before = (first, second)
    done, _, _ = warpgroup_mma_wait(0, deps=(sums, before[0], before[1]))
    sums = warpgroup_mma(fetched.rope.index(stage), queries.rope.permute((1, 0)), done * scale, is_async=True)
    return warpgroup_mma_wait(0, deps=(sums,))


@gluon.jit
def units_of(scales_s, low, first, tokens, BLOCK: gl.constexpr):
    """Of every entry [N, 1]: whether it is one of the row's, and its unit, the power of two at or below the largest of
    its scales, or rather that number's exponent in fp32. Outside of the row's entries the unit is 1."""
    SUMS: gl.constexpr = sums_layout(BLOCK)
    largest = scales_s.slice(0, 1, dim=1).load(SUMS)
    for g in gl.static_range(1, GROUPS):
        largest = gl.maximum(largest, scales_s.slice(g, 1, dim=1).load(SUMS))
    entry = low + gl.arange(0, TILE, gl.SliceLayout(1, SUMS))
    there = ((entry >= first) & (entry < tokens))[:, None]
    return there, gl.where(there, (largest.to(gl.int32, bitcast=True) >> 23) & 255, 127)


@gluon.jit
def inverse_of(exponent):
    """1 over the power of two that has this exponent in fp32."""
    return ((254 - exponent) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def put_ratios(scales_s, there, exponent, ratios, slot, BLOCK: gl.constexpr):
    """Write the entries' scales over their units; zeros outside of the row's entries."""
    SUMS: gl.constexpr = sums_layout(BLOCK)
    inverse = inverse_of(exponent) * VALUE_LIFT
    for g in gl.static_range(GROUPS):
        ratio = gl.where(there, scales_s.slice(g, 1, dim=1).load(SUMS) * inverse, 0.0)
        ratios.index(slot * GROUPS + g).permute((1, 0)).store(ratio.to(gl.float16))


@gluon.jit
def weigh(score, exponent, top_s, unit, back_s, low, tokens, share, BLOCK: gl.constexpr):
    """Online softmax of one tile, of weights that are times the entries' units: (weights, new maximum, factor for what
    was summed before)."""
    SUMS: gl.constexpr = sums_layout(BLOCK)
    score = score * unit[None, :] + (exponent - 127).to(gl.float32)
    if (low + TILE > tokens - share.drafts) | (low < share.first):
        bound = tokens - back_s.load(gl.SliceLayout(0, SUMS))
        entry = low + gl.arange(0, TILE, gl.SliceLayout(1, SUMS))
        seen = (entry[:, None] < bound[None, :]) & (entry >= share.first)[:, None]
        score = gl.where(seen, score, float("-inf"))
    highest = gl.max(score, 0)
    top = top_s.load(gl.SliceLayout(0, SUMS))
    new_top = gl.maximum(top, highest)
    return gl.exp2(score - (new_top - LIFT)[None, :]), new_top, gl.exp2(top - new_top)


@gluon.jit
def sums_in_threads(x, BLOCK: gl.constexpr):
    """[N, M] summed over entries as far as a thread holds them: [4, 8, M]."""
    return gl.sum(gl.reshape(x, [4, 2, 8, BLOCK]), 1)


@gluon.jit
def without_outside(latent_s, low, first, tokens):
    """Zero the entries of a group of features that lie outside the row's: 0 x NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    entry = low + gl.arange(0, TILE, gl.SliceLayout(1, layout))
    keep = (entry >= first) & (entry < tokens)
    pairs = latent_s.load(layout)
    latent_s.store(gl.where(keep[:, None], pairs, gl.zeros_like(pairs)))


@gluon.jit
def add_values(sums, fetched, exchanged, stage, slot, HALF: gl.constexpr, BLOCK: gl.constexpr):
    """`sums`, [P, M] of the even features of two groups and of the odd ones, and the products of their values with
    weights. While products run, the next entries become fp16."""
    SUMS: gl.constexpr = sums_layout(BLOCK)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    PARTS: gl.constexpr = 2 if BLOCK < 64 else 4  # beside so many sums there are registers for few entries
    ENTRIES: gl.constexpr = TILE // PARTS
    weights_s = exchanged.weights.index(slot)
    even_sums, odd_sums = sums[0], sums[1]
    finished = ()
    before = ()
    for part in gl.static_range(2 * PARTS):
        g = 2 * HALF + part // PARTS
        latent_s = fetched.latent.index(stage * GROUPS + g).slice(part % PARTS * ENTRIES, ENTRIES, dim=0)
        ratio = exchanged.ratios.index(slot * GROUPS + g).slice(part % PARTS * ENTRIES, ENTRIES, dim=1).load(LEFT)
        even, odd = values_in_half(latent_s.permute((1, 0)).load(LEFT))
        even = even * ratio
        odd = odd * ratio
        right = weights_s.slice(part % PARTS * ENTRIES, ENTRIES, dim=0)
        if part == PARTS:
            finished = even_sums, odd_sums
            even_sums, odd_sums = sums[2], sums[3]
        even_sums = warpgroup_mma(even, right, even_sums, is_async=True)
        odd_sums = warpgroup_mma(odd, right, odd_sums, is_async=True)
        if part == PARTS:
            even0, odd0, _, _ = warpgroup_mma_wait(2, deps=(finished[0], finished[1], before[0], before[1]))
            finished = even0, odd0
        elif part > 0:
            _, _ = warpgroup_mma_wait(2, deps=before)
        before = even, odd
    even_sums, odd_sums, _, _ = warpgroup_mma_wait(0, deps=(even_sums, odd_sums, before[0], before[1]))
    return finished[0], finished[1], even_sums, odd_sums


@gluon.jit
def store_pairs(to, even, odd, factor_s, share, OFFSET: gl.constexpr, BLOCK: gl.constexpr):
    """Write sums [P, M] of the even features of a group and of the odd ones, times the factor of each query vector,
    behind `to`, in bfloat16. OFFSET: the group's first feature. Of 16 query vectors at a time:
    addresses of more would spill registers."""
    if BLOCK == 64:
        evens, odds = _halves(even), _halves(odd)
        for i in gl.static_range(2):
            _store_32(to, evens[i], odds[i], factor_s, share, 32 * i, OFFSET, BLOCK)
    elif BLOCK == 32:
        _store_32(to, even, odd, factor_s, share, 0, OFFSET, BLOCK)
    else:
        _store_16(to, even, odd, factor_s, share, 0, OFFSET, BLOCK)


@gluon.jit
def _halves(x):
    """The first half of columns, and the second, which a thread has both."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    return gl.split(gl.permute(gl.reshape(x, [ROWS, 2, COLUMNS // 2]), (0, 2, 1)))


@gluon.jit
def _store_32(to, even, odd, factor_s, share, FIRST: gl.constexpr, OFFSET: gl.constexpr, BLOCK: gl.constexpr):
    """Those of 32 query vectors, from number FIRST of the block on."""
    evens, odds = _halves(even), _halves(odd)
    for i in gl.static_range(2):
        _store_16(to, evens[i], odds[i], factor_s, share, FIRST + 16 * i, OFFSET, BLOCK)


@gluon.jit
def _store_16(to, even, odd, factor_s, share, FIRST: gl.constexpr, OFFSET: gl.constexpr, BLOCK: gl.constexpr):
    """Those of 16."""
    own: gl.constexpr = sums_layout(16)
    per_query: gl.constexpr = gl.SliceLayout(0, own)
    factor = factor_s.slice(FIRST, 16, dim=0).load(per_query)[None, :]
    even = gl.convert_layout(even, own, assert_trivial=True) * factor
    odd = gl.convert_layout(odd, own, assert_trivial=True) * factor
    m = gl.arange(0, 16, per_query) + (share.block * BLOCK + FIRST + unknown_zero())
    c = OFFSET + 2 * gl.arange(0, PAIRS, gl.SliceLayout(1, own))
    inside = (m < share.queries)[None, :]
    at = to + ((m * LATENT)[None, :] + c[:, None])
    both = gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )
    gl.store(at.to(gl.pointer_type(gl.int32)), both, mask=inside, eviction_policy="evict_last")
