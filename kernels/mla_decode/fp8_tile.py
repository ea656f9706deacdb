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


class Exchanged(NamedTuple):
    """What the scoring group tells the others in shared memory, in two places each."""

    weights: Any
    """fp16 [2, N, M]."""
    ratios: Any
    """fp16 [2 x 4, 1, N]: every entry's scales over its `unit_of_entry`, times `VALUE_LIFT`."""
    shrink: Any
    """fp32 [2, M]: the factor for what was summed before."""
    factor: Any
    """fp32 [2, M]: with which a row's sums become its result."""


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
    """[2, 1]."""
    factor_empty: Any
    """[2, 1]."""


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
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    short: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    per_vector: gl.constexpr = gl.SliceLayout(1, wide)
    m = share.block * BLOCK + gl.arange(0, BLOCK, per_vector)
    base = q + row.to(gl.int64) * share.queries * VECTOR
    c = gl.arange(0, GROUP, gl.SliceLayout(0, wide))
    at = base + (m * VECTOR)[:, None] + c[None, :]
    inside = (m < share.queries)[:, None]
    n = share.block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, short))
    at_rope = base + (n * VECTOR)[:, None] + (LATENT + gl.arange(0, ROPE, gl.SliceLayout(0, short)))[None, :]
    rope = gl.load(at_rope, mask=(n < share.queries)[:, None], other=0.0, cache_modifier=".cg").to(gl.float32)
    # Roped features are scaled with the others, but for magnitudes 2^100 apart they must not grow beyond fp32.
    least = (gl.max(gl.abs(rope), 1).to(gl.int32, bitcast=True) >> 23) - 100
    peak = gl.zeros([BLOCK], gl.float32, per_vector)
    for g in range(GROUPS):
        part = gl.load(at + g * GROUP, mask=inside, other=0.0, cache_modifier=".cg")
        peak = gl.maximum(peak, gl.max(gl.abs(part.to(gl.float32)), 1))
    exponent = gl.maximum(peak.to(gl.int32, bitcast=True) >> 23, gl.convert_layout(gl.maximum(least, 15), per_vector))
    unit = ((exponent - 14) << 23).to(gl.float32, bitcast=True)
    inverse = ((268 - exponent) << 23).to(gl.float32, bitcast=True)
    queries.unit.store(unit * share.scale)
    queries.rope.store((rope * gl.convert_layout(inverse, gl.SliceLayout(1, short))[:, None]).to(gl.bfloat16))
    for g in range(GROUPS):
        part = gl.load(at + g * GROUP, mask=inside, other=0.0, cache_modifier=".cg").to(gl.float32)
        half = (part * inverse[:, None]).to(gl.float16)
        grouped = gl.permute(gl.reshape(half, [BLOCK, GROUP // 4, 2, 2]), (0, 1, 3, 2))
        first, second = gl.split(grouped)
        queries.latent.index(2 * g).store(gl.reshape(first, [BLOCK, PAIRS]))
        queries.latent.index(2 * g + 1).store(gl.reshape(second, [BLOCK, PAIRS]))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def scores(queries, fetched, stage, BLOCK: gl.constexpr):
    """Products [N, M] of a tile with the query vectors, over their units, and the tile's scales: four of [N, 1].

    The products of a part are issued before those of the part before are waited for, and while they run the next part
    becomes fp16.
    """
    SUMS: gl.constexpr = sums_layout(BLOCK)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    PARTS: gl.constexpr = 1 if BLOCK < 64 else 4
    WIDTH: gl.constexpr = PAIRS // PARTS
    nothing = gl.zeros([TILE, BLOCK], gl.float32, SUMS)
    scales = fetched.scales.index(stage)
    zero = unknown_zero()
    latest = warpgroup_mma(
        fetched.rope.index(stage), queries.rope.permute((1, 0)), nothing, use_acc=False, is_async=True
    )
    score = nothing
    before = ()
    for g in gl.static_range(GROUPS):
        keys = fetched.latent.index(stage * GROUPS + g)
        for part in gl.static_range(PARTS):
            first, second = keys_in_half(keys.slice(part * WIDTH, WIDTH, dim=1).load(LEFT))
            right = queries.latent.index(2 * g + zero).slice(part * WIDTH, WIDTH, dim=1).permute((1, 0))
            other = queries.latent.index(2 * g + 1 + zero).slice(part * WIDTH, WIDTH, dim=1).permute((1, 0))
            if part == 0:
                finished = latest
                if BLOCK == 64:  # two of so many sums would not fit into registers
                    if g == 0:
                        score = warpgroup_mma_wait(0, deps=(finished,))
                    else:
                        done, _, _ = warpgroup_mma_wait(0, deps=(finished, before[0], before[1]))
                        score += done * scales.slice(g - 1, 1, dim=1).load(SUMS)
                latest = warpgroup_mma(first, right, nothing, use_acc=False, is_async=True)
                latest = warpgroup_mma(second, other, latest, is_async=True)
                if BLOCK < 64:
                    if g == 0:
                        score = warpgroup_mma_wait(2, deps=(finished,))
                    else:
                        done, _, _ = warpgroup_mma_wait(2, deps=(finished, before[0], before[1]))
                        score += done * scales.slice(g - 1, 1, dim=1).load(SUMS)
            else:
                latest = warpgroup_mma(first, right, latest, is_async=True)
                latest = warpgroup_mma(second, other, latest, is_async=True)
                _, _ = warpgroup_mma_wait(2, deps=(before[0], before[1]))
            before = (first, second)
    done, _, _ = warpgroup_mma_wait(0, deps=(latest, before[0], before[1]))
    return score + done * scales.slice(GROUPS - 1, 1, dim=1).load(SUMS)


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
def weigh(score, exponent, top, unit, low, tokens, share, BLOCK: gl.constexpr):
    """Online softmax of one tile, of weights that are times the entries' units: (weights, new maximum, factor for what
    was summed before)."""
    SUMS: gl.constexpr = sums_layout(BLOCK)
    score = score * unit[None, :] + (exponent - 127).to(gl.float32)
    if (low + TILE > tokens - share.drafts) | (low < share.first):
        m = share.block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, SUMS)) + unknown_zero()
        bound = gl.minimum(tokens - (share.drafts - m // share.heads), tokens)
        entry = low + gl.arange(0, TILE, gl.SliceLayout(1, SUMS))
        seen = (entry[:, None] < bound[None, :]) & (entry >= share.first)[:, None]
        score = gl.where(seen, score, float("-inf"))
    new_top = gl.maximum(top, gl.max(score, 0))
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
    weights."""
    SUMS: gl.constexpr = sums_layout(BLOCK)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ENTRIES: gl.constexpr = TILE // 2
    even_sums, odd_sums = sums[0], sums[1]
    others = sums[2], sums[3]
    before = ()
    for part in gl.static_range(4):
        g = 2 * HALF + part // 2
        latent_s = fetched.latent.index(stage * GROUPS + g).slice(part % 2 * ENTRIES, ENTRIES, dim=0).permute((1, 0))
        ratio = exchanged.ratios.index(slot * GROUPS + g).slice(part % 2 * ENTRIES, ENTRIES, dim=1).load(LEFT)
        even, odd = values_in_half(latent_s.load(LEFT))
        even = even * ratio
        odd = odd * ratio
        weights_s = exchanged.weights.index(slot).slice(part % 2 * ENTRIES, ENTRIES, dim=0)
        if part == 2:
            finished = even_sums, odd_sums
            even_sums, odd_sums = others
        even_sums = warpgroup_mma(even, weights_s, even_sums, is_async=True)
        odd_sums = warpgroup_mma(odd, weights_s, odd_sums, is_async=True)
        if BLOCK < 64:  # more leave no registers to go on in
            if part == 2:
                first, second, _, _ = warpgroup_mma_wait(2, deps=(finished[0], finished[1], before[0], before[1]))
                finished = first, second
            elif part > 0:
                _, _ = warpgroup_mma_wait(2, deps=before)
            before = even, odd
            if part == 3:
                even_sums, odd_sums, _, _ = warpgroup_mma_wait(0, deps=(even_sums, odd_sums, even, odd))
        else:
            even_sums, odd_sums, _, _ = warpgroup_mma_wait(0, deps=(even_sums, odd_sums, even, odd))
    return finished[0], finished[1], even_sums, odd_sums


@gluon.jit
def store_pairs(to, even, odd, factor_s, share, OFFSET: gl.constexpr, BLOCK: gl.constexpr):
    """Write sums [P, M] of the even features of a group and of the odd ones, times the factor of each query vector,
    behind `to`, in the type of what lies there. OFFSET: the group's first feature. Of 16 query vectors at a time:
    addresses of more would spill registers."""
    if BLOCK == 16:
        _store_some(to, even, odd, factor_s, share, 0, OFFSET, BLOCK)
    elif BLOCK == 32:
        evens, odds = _halves(even), _halves(odd)
        for i in gl.static_range(2):
            _store_some(to, evens[i], odds[i], factor_s, share, 16 * i, OFFSET, BLOCK)
    else:
        evens, odds = _halves(even), _halves(odd)
        for i in gl.static_range(2):
            quarters, others = _halves(evens[i]), _halves(odds[i])
            for j in gl.static_range(2):
                _store_some(to, quarters[j], others[j], factor_s, share, 32 * i + 16 * j, OFFSET, BLOCK)


@gluon.jit
def _halves(x):
    """The first half of columns, and the second, which a thread has both."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    return gl.split(gl.permute(gl.reshape(x, [ROWS, 2, COLUMNS // 2]), (0, 2, 1)))


@gluon.jit
def _store_some(to, even, odd, factor_s, share, FIRST: gl.constexpr, OFFSET: gl.constexpr, BLOCK: gl.constexpr):
    """Those of 16 query vectors, from number FIRST of the block on."""
    own: gl.constexpr = sums_layout(16)
    per_query: gl.constexpr = gl.SliceLayout(0, own)
    even = gl.convert_layout(even, own, assert_trivial=True)
    odd = gl.convert_layout(odd, own, assert_trivial=True)
    factor = factor_s.slice(FIRST, 16, dim=0).load(per_query)[None, :]
    m = share.block * BLOCK + FIRST + gl.arange(0, 16, per_query) + unknown_zero()
    c = OFFSET + 2 * gl.arange(0, PAIRS, gl.SliceLayout(1, own))
    inside = (m < share.queries)[None, :]
    at = to + ((m * LATENT)[None, :] + c[:, None])
    kind: gl.constexpr = to.dtype.element_ty
    even *= factor
    odd *= factor
    if kind == gl.bfloat16:
        both = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1
        )
        gl.store(at.to(gl.pointer_type(gl.int32)), both, mask=inside, eviction_policy="evict_last")
    else:
        gl.store(at, even.to(kind), mask=inside, eviction_policy="evict_last")
        gl.store(at + 1, odd.to(kind), mask=inside, eviction_policy="evict_last")
