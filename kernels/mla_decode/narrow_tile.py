"""What `narrow` does to one tile of cache entries: copies it, multiplies it with queries, and with their weights.

FP8 entries stay 8 bits on their way to shared memory, and in it. Two neighbouring features are taken as one number of
16 bits, so that tiles are read as those of bf16 are, the transposed ones included. In registers such a number becomes
two of bf16, which is exact: of the even features, and of the odd ones. Each half has products of its own, the sums of
which are added for the scores and stay apart for the output.

The scales are not multiplied into the entries, which would have to be rounded again. An entry's score is summed group
by group, and a group's sum is multiplied by its scale in fp32; the weights, which are rounded to bf16 anyway, are
multiplied before by the scale of each group whose values they weigh.

Shape legend of comments: M query vectors, N entries, P pairs of features.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

_LATENT = gl.constexpr(512)
_ROPE = gl.constexpr(64)
_GROUPS = gl.constexpr(4)
_PAIRS = gl.constexpr(64)
"""Pairs of features of a group."""
_UP = gl.constexpr(2.0**60)
_DOWN = gl.constexpr(2.0**-60)

# Exponent and mantissa of a byte move to where bf16 has them, which leaves a number 2^120 times too small, zero and
# subnormal numbers included. The even bytes of a word, then the odd ones.
#
# What they are multiplied with is made 2^60 times larger before, and the sums as much afterwards, which are fewer. In
# between numbers are as far from the limits of bf16 and fp32 as they were.
_WIDEN_PAIRS = gl.constexpr(
    """
    {
    .reg .b32 even, odd, sign;
    shl.b32 sign, $2, 8;
    and.b32 sign, sign, 0x80008000;
    shl.b32 even, $2, 4;
    and.b32 even, even, 0x07F007F0;
    or.b32 $0, even, sign;
    and.b32 sign, $2, 0x80008000;
    shr.u32 odd, $2, 4;
    and.b32 odd, odd, 0x07F007F0;
    or.b32 $1, odd, sign;
    }
    """
)


@gluon.constexpr_function
def products_layout(warps):
    """Of sums of mma.sync: the warps side by side."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, warps], instr_shape=[16, 8])


@gluon.constexpr_function
def stored_layout(columns, warps):
    """Of results as they are written, 16 bytes a thread."""
    lanes = min(32, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])


class Tiles(NamedTuple):
    """Rings of tiles in shared memory."""

    latent: Any
    """[stages, N, 512] in bf16, or [stages, N, 256] pairs of e4m3."""
    rope: Any
    scales: Any
    """fp32 [stages, N, 4], of FP8 entries alone."""


class Queries(NamedTuple):
    """Two places in shared memory, each for a block of query vectors."""

    latent: Any
    """[2, M, 512] in bf16."""
    rope: Any


@gluon.jit
def unknown_zero():
    """A zero that the compiler does not know. Addresses that depend on it stay inside the loop, where they are cheap;
    hoisted out of it, as many as there are products, they would spill registers.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def widened_pairs(pair):
    """Pairs of e4m3 in bf16, exactly, times 2^-120: those of the even features, and of the odd ones. (NaN, with which a
    scale that is NaN, too, always goes, becomes 480.)"""
    return gl.inline_asm_elementwise(
        _WIDEN_PAIRS, "=r,=r,r", [pair], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
    )


@gluon.jit
def take_apart(queries, own, BLOCK: gl.constexpr):
    """Let the even features of query vectors come before the odd ones, and be 2^60 times larger, as `scores` of FP8
    entries reads them. They must be there for all warps, and are again behind another barrier."""
    HALF: gl.constexpr = _LATENT // 2
    by_vector: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    query_s = queries.latent.index(own)
    even, odd = gl.split(gl.reshape(query_s.load(by_vector), [BLOCK, HALF, 2]))
    gl.thread_barrier()
    query_s.slice(0, HALF, dim=1).store((even.to(gl.float32) * _UP).to(gl.bfloat16))
    query_s.slice(HALF, HALF, dim=1).store((odd.to(gl.float32) * _UP).to(gl.bfloat16))


@gluon.jit
def rings(STAGES: gl.constexpr, TOKENS: gl.constexpr, BLOCK: gl.constexpr, ENTRY: gl.constexpr):
    """Shared memory for tiles, queries, and for the weights of FP8 entries, [4, M, N]."""
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    if ENTRY.fp8:
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        latent_s = gl.allocate_shared_memory(gl.int16, [STAGES, TOKENS, _LATENT // 2], swizzled)
        scales_s = gl.allocate_shared_memory(gl.float32, [STAGES, TOKENS, _GROUPS], plain)
        weights_s = gl.allocate_shared_memory(gl.bfloat16, [_GROUPS, BLOCK, TOKENS], swizzled)
    else:
        latent_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, _LATENT], swizzled)
        scales_s = latent_s
        weights_s = latent_s
    q_latent_s = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK, _LATENT], swizzled)
    rope_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, _ROPE], swizzled)
    q_rope_s = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK, _ROPE], swizzled)
    tiles = Tiles(latent=latent_s, rope=rope_s, scales=scales_s)
    return tiles, Queries(latent=q_latent_s, rope=q_rope_s), weights_s


@gluon.jit
def _copy_entries(
    base, to, begin, first, tokens,
    TILE: gl.constexpr, APART: gl.constexpr, SKIPPED: gl.constexpr, FEATURES: gl.constexpr, PIECE: gl.constexpr,
):  # fmt: skip
    """Start copying FEATURES numbers, behind the SKIPPED first ones, of every entry of a tile that begins with entry
    `begin` and lies at `base`. Entries are APART numbers apart; PIECE numbers are 16 bytes."""
    LANES: gl.constexpr = min(32, FEATURES // PIECE)
    by_entry: gl.constexpr = gl.BlockedLayout([1, PIECE], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    n = gl.arange(0, TILE, gl.SliceLayout(1, by_entry))
    c = SKIPPED + gl.arange(0, FEATURES, gl.SliceLayout(0, by_entry))
    entry = begin + n
    written = ((entry < tokens) & (entry >= first))[:, None]
    async_copy.async_copy_global_to_shared(to, base + n[:, None] * APART + c[None, :], mask=written)


@gluon.jit
def copy_tile(cache, page, tile, tokens, first, tiles, to, TILE: gl.constexpr, PAGE: gl.constexpr, ENTRY: gl.constexpr):
    """Start copying one tile; entries outside [first, tokens) become zero."""
    latent_s = tiles.latent.index(to)
    rope_s = tiles.rope.index(to)
    at = page.to(gl.int64) * PAGE + tile * TILE % PAGE
    begin = tile * TILE
    if ENTRY.fp8:
        SIZE: gl.constexpr = ENTRY.size
        SCALES: gl.constexpr = ENTRY.scales // 4
        KEYS: gl.constexpr = ENTRY.rope // 2
        base = cache + at * SIZE
        pairs = base.to(gl.pointer_type(gl.int16))
        scales = base.to(gl.pointer_type(gl.float32))
        keys = base.to(gl.pointer_type(gl.bfloat16))
        _copy_entries(pairs, latent_s, begin, first, tokens, TILE, SIZE // 2, 0, _LATENT // 2, 8)
        _copy_entries(scales, tiles.scales.index(to), begin, first, tokens, TILE, SIZE // 4, SCALES, _GROUPS, 4)
        _copy_entries(keys, rope_s, begin, first, tokens, TILE, SIZE // 2, KEYS, _ROPE, 8)
    else:
        APART: gl.constexpr = _LATENT + _ROPE
        base = cache + at * APART
        _copy_entries(base, latent_s, begin, first, tokens, TILE, APART, 0, _LATENT, 8)
        _copy_entries(base, rope_s, begin, first, tokens, TILE, APART, _LATENT, _ROPE, 8)


@gluon.jit
def _copy_vectors(
    base, to, begin, queries,
    BLOCK: gl.constexpr, APART: gl.constexpr, SKIPPED: gl.constexpr, FEATURES: gl.constexpr, PIECE: gl.constexpr,
):  # fmt: skip
    """Start copying FEATURES numbers of some query vectors from number `begin` on, as `_copy_entries`."""
    LANES: gl.constexpr = min(32, FEATURES // PIECE)
    by_vector: gl.constexpr = gl.BlockedLayout([1, PIECE], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    m = begin + gl.arange(0, BLOCK, gl.SliceLayout(1, by_vector))
    c = SKIPPED + gl.arange(0, FEATURES, gl.SliceLayout(0, by_vector))
    inside = (m < queries)[:, None]
    async_copy.async_copy_global_to_shared(to, base + m[:, None] * APART + c[None, :], mask=inside)


@gluon.jit
def copy_query(q, row, block, count, queries, to, BLOCK: gl.constexpr):
    """Start copying a block of the `count` query vectors of a row; those the row does not have become zero."""
    APART: gl.constexpr = _LATENT + _ROPE
    latent_s = queries.latent.index(to)
    rope_s = queries.rope.index(to)
    base = q + row.to(gl.int64) * count * APART
    begin = block * BLOCK + unknown_zero()  # the addresses of one row's copies, kept for the next's, would spill
    _copy_vectors(base, latent_s, begin, count, BLOCK, APART, 0, _LATENT, 8)
    _copy_vectors(base, rope_s, begin, count, BLOCK, APART, _LATENT, _ROPE, 8)


@gluon.jit
def scores(queries, own, tiles, stage, BLOCK: gl.constexpr, TOKENS: gl.constexpr, ENTRY: gl.constexpr):
    """Products [M, N] of the query vectors with a tile's entries. Two chains of products hide half of their latency: a
    warp has only N / warps columns."""
    mma: gl.constexpr = products_layout(gl.num_warps())
    left_of: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right_of: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    keys = tiles.latent.index(stage)
    query = queries.latent.index(own)
    score = gl.zeros([BLOCK, TOKENS], gl.float32, mma)
    other = gl.zeros([BLOCK, TOKENS], gl.float32, mma)
    score = mma_v2(queries.rope.index(own).load(left_of), tiles.rope.index(stage).permute((1, 0)).load(right_of), score)
    if ENTRY.fp8:
        scale_s = tiles.scales.index(stage)
        for g in gl.static_range(_GROUPS):
            even, odd = widened_pairs(keys.slice(g * _PAIRS, _PAIRS, dim=1).permute((1, 0)).load(right_of))
            q_even = query.slice(g * _PAIRS, _PAIRS, dim=1).load(left_of)
            q_odd = query.slice(_LATENT // 2 + g * _PAIRS, _PAIRS, dim=1).load(left_of)
            first = mma_v2(q_even, even, gl.zeros([BLOCK, TOKENS], gl.float32, mma))
            second = mma_v2(q_odd, odd, gl.zeros([BLOCK, TOKENS], gl.float32, mma))
            scale = scale_s.slice(g, 1, dim=1).permute((1, 0)).load(mma)
            other += (first + second) * scale
        score = score + other * _UP
    else:
        CHUNK: gl.constexpr = 64
        for j in gl.static_range(_LATENT // CHUNK // 2):
            other = mma_v2(
                query.slice(2 * j * CHUNK, CHUNK, dim=1).load(left_of),
                keys.slice(2 * j * CHUNK, CHUNK, dim=1).permute((1, 0)).load(right_of),
                other,
            )
            score = mma_v2(
                query.slice((2 * j + 1) * CHUNK, CHUNK, dim=1).load(left_of),
                keys.slice((2 * j + 1) * CHUNK, CHUNK, dim=1).permute((1, 0)).load(right_of),
                score,
            )
        score = score + other
    return score


@gluon.jit
def no_sums(BLOCK: gl.constexpr, ENTRY: gl.constexpr):
    """Sums of `added_values` of nothing: [M, 512]; where entries are FP8, of every group its even and its odd features,
    [M, 64] each."""
    mma: gl.constexpr = products_layout(gl.num_warps())
    sums = ()
    if ENTRY.fp8:
        for _ in gl.static_range(2 * _GROUPS):
            sums += (gl.zeros([BLOCK, _PAIRS], gl.float32, mma),)
    else:
        sums += (gl.zeros([BLOCK, _LATENT], gl.float32, mma),)
    return sums


@gluon.jit
def added_values(sums, shrink, weight, weights_s, tiles, stage, ENTRY: gl.constexpr):
    """`sums` times `shrink` [M], and weights [M, N] times a tile's values. `weights_s`: of FP8 entries, shared memory
    [4, M, N] that no warp reads any more; their sums are 2^60 times too small."""
    mma: gl.constexpr = products_layout(gl.num_warps())
    left_of: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right_of: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    keys = tiles.latent.index(stage)
    added = ()
    if ENTRY.fp8:
        scale_s = tiles.scales.index(stage)
        for g in gl.static_range(_GROUPS):
            scale = scale_s.slice(g, 1, dim=1).permute((1, 0)).load(mma)
            weights_s.index(g).store((weight * _UP * scale).to(gl.bfloat16))
        gl.thread_barrier()
        for g in gl.static_range(_GROUPS):
            factor = weights_s.index(g).load(left_of)
            even, odd = widened_pairs(keys.slice(g * _PAIRS, _PAIRS, dim=1).load(right_of))
            added += (mma_v2(factor, even, sums[2 * g] * shrink[:, None]),)
            added += (mma_v2(factor, odd, sums[2 * g + 1] * shrink[:, None]),)
    else:
        sum_latent = sums[0] * shrink[:, None]
        factor = gl.convert_layout(weight.to(gl.bfloat16), left_of)
        added += (mma_v2(factor, keys.load(right_of), sum_latent),)
    return added


@gluon.jit
def whole_rows(sums, divisor, BLOCK: gl.constexpr, ENTRY: gl.constexpr):
    """Sums over `divisor` [M] in bf16: [M, 512], or [M, 128] of each group. Through shared memory into whole rows, so
    that each lane can write 16 bytes at a time."""
    rows = ()
    if ENTRY.fp8:
        by_group: gl.constexpr = stored_layout(2 * _PAIRS, gl.num_warps())
        for g in gl.static_range(_GROUPS):
            small = (divisor * _DOWN)[:, None]
            both = gl.join(sums[2 * g] / small, sums[2 * g + 1] / small)
            group = gl.reshape(both.to(gl.bfloat16), [BLOCK, 2 * _PAIRS])
            rows += (gl.convert_layout(group, by_group),)
    else:
        stored: gl.constexpr = stored_layout(_LATENT, gl.num_warps())
        rows += (gl.convert_layout((sums[0] / divisor[:, None]).to(gl.bfloat16), stored),)
    return rows


@gluon.jit
def places(begin, queries, BLOCK: gl.constexpr, ENTRY: gl.constexpr):
    """Of results of query vectors from number `begin` on: where their first features, as many as `whole_rows` has in
    one piece, lie behind those of vector 0, and which of the vectors there are."""
    COLUMNS: gl.constexpr = 2 * _PAIRS if ENTRY.fp8 else _LATENT
    stored: gl.constexpr = stored_layout(COLUMNS, gl.num_warps())
    m = begin + gl.arange(0, BLOCK, gl.SliceLayout(1, stored)) + unknown_zero()
    c = gl.arange(0, COLUMNS, gl.SliceLayout(0, stored))
    return (m[:, None] * _LATENT + c[None, :]).to(gl.int64), (m < queries)[:, None]


@gluon.jit
def store_rows(rows, to, at, inside, ENTRY: gl.constexpr):
    """Write `whole_rows` to their `places` in the row's vectors, which begin at `to`."""
    PIECES: gl.constexpr = _GROUPS if ENTRY.fp8 else 1
    for g in gl.static_range(PIECES):
        result = rows[g].to(to.dtype.element_ty)
        gl.store(to + g * 2 * _PAIRS + at, result, mask=inside, eviction_policy="evict_last")
