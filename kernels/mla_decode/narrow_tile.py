"""Work of `narrow` on one tile of cache entries: it is copied, and multiplied with queries and with their weights. The
differences for FP8 entries are in `narrow_fp8`.

Shape legend of comments: M query vectors, N entries.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from kernels.mla_decode.narrow_fp8 import (
    added_fp8_values,
    copy_fp8_query,
    copy_fp8_tile,
    fp8_queries,
    fp8_rows,
    fp8_scores,
    fp8_shared,
    fp8_tiles,
    hold,
    no_fp8_sums,
    take_apart,
)

_ROPE = gl.constexpr(64)


@gluon.constexpr_function
def products_layout(warps):
    """Layout of sums of mma.sync: the warps side by side."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, warps], instr_shape=[16, 8])


@gluon.constexpr_function
def stored_layout(warps):
    """Layout of results as they are written, 16 bytes per thread."""
    return gl.BlockedLayout([1, 8], [1, 32], [warps, 1], [1, 0])


class Tiles(NamedTuple):
    """Rings of tiles in shared memory; of FP8 entries see `narrow_fp8`."""

    latent: Any
    """[stages, N, latent] in bf16."""
    rope: Any
    """[stages, N, 64] in bf16."""
    scales: Any
    """Scales of FP8 entries; unused for others."""


class Queries(NamedTuple):
    """Query vectors in shared memory: two places, each for a block of them."""

    latent: Any
    """[2, M, latent] in bf16."""
    rope: Any
    """[2, M, 64] in bf16."""


@gluon.jit
def unknown_zero():
    """A zero that the compiler does not know. Addresses that depend on it stay inside the loop, where they are cheap;
    hoisted out of it, as many as there are products, they would spill registers.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def rings(STAGES: gl.constexpr, TILE: gl.constexpr, ENTRY: gl.constexpr):
    """Shared memory for tiles and queries, and what FP8 entries need beside."""
    TOKENS: gl.constexpr = TILE.tokens
    BLOCK: gl.constexpr = TILE.queries
    LATENT: gl.constexpr = TILE.latent
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    shared = ()
    if ENTRY.fp8:
        latent_s, rope_s, scales_s = fp8_tiles(STAGES, TOKENS)
        q_latent_s, q_rope_s = fp8_queries(BLOCK)
        shared = fp8_shared(TOKENS, BLOCK)
    else:
        latent_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, LATENT], swizzled)
        rope_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, _ROPE], swizzled)
        q_latent_s = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK, LATENT], swizzled)
        q_rope_s = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK, _ROPE], swizzled)
        scales_s = latent_s
    tiles = Tiles(latent=latent_s, rope=rope_s, scales=scales_s)
    return tiles, Queries(latent=q_latent_s, rope=q_rope_s), shared


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
    LATENT: gl.constexpr = TILE.latent
    TOKENS: gl.constexpr = TILE.tokens
    latent_s = tiles.latent.index(to)
    rope_s = tiles.rope.index(to)
    at = page.to(gl.int64) * PAGE + tile * TOKENS % PAGE
    begin = tile * TOKENS
    if ENTRY.fp8:
        SIZE: gl.constexpr = ENTRY.size
        copy_fp8_tile(cache + at * SIZE, latent_s, rope_s, tiles.scales.index(to), begin, first, tokens, TOKENS, ENTRY)
    else:
        APART: gl.constexpr = LATENT + _ROPE
        base = cache + at * APART
        _copy_entries(base, latent_s, begin, first, tokens, TOKENS, APART, 0, LATENT, 8)
        _copy_entries(base, rope_s, begin, first, tokens, TOKENS, APART, LATENT, _ROPE, 8)


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
def copy_query(q, row, block, count, queries, to, TILE: gl.constexpr, ENTRY: gl.constexpr):
    """Start copying a block of the `count` query vectors of a row; those the row does not have become zero."""
    LATENT: gl.constexpr = TILE.latent
    BLOCK: gl.constexpr = TILE.queries
    APART: gl.constexpr = LATENT + _ROPE
    latent_s = queries.latent.index(to)
    rope_s = queries.rope.index(to)
    base = q + row.to(gl.int64) * count * APART
    begin = block * BLOCK + unknown_zero()  # the addresses of one row's copies, kept for the next's, would spill
    if ENTRY.fp8:
        copy_fp8_query(base, latent_s, rope_s, begin, count, BLOCK)
    else:
        _copy_vectors(base, latent_s, begin, count, BLOCK, APART, 0, LATENT, 8)
        _copy_vectors(base, rope_s, begin, count, BLOCK, APART, LATENT, _ROPE, 8)


@gluon.jit
def query_of_row(queries, own, arrived, AHEAD: gl.constexpr, BLOCK: gl.constexpr, ENTRY: gl.constexpr):
    """Load the registers that `scores` needs of a row's query vectors. For FP8 entries: when they have `arrived`, if
    they were asked for, in the group of copies that AHEAD - 1 others have followed."""
    held = ()
    if ENTRY.fp8:
        if arrived:
            async_copy.wait_group(AHEAD - 1)
            gl.thread_barrier()
            take_apart(queries.latent.index(own), BLOCK)
            gl.thread_barrier()
        held = hold(queries.latent.index(own), queries.rope.index(own))
    return held


@gluon.jit
def scores(held, queries, own, tiles, stage, shared, TILE: gl.constexpr, ENTRY: gl.constexpr):
    """Products [M, N] of the query vectors with a tile's entries. Two chains of products hide half of their latency: a
    warp has only N / warps columns."""
    BLOCK: gl.constexpr = TILE.queries
    TOKENS: gl.constexpr = TILE.tokens
    mma: gl.constexpr = products_layout(gl.num_warps())
    if ENTRY.fp8:
        where = tiles.latent.index(stage), tiles.rope.index(stage), tiles.scales.index(stage)
        score = gl.convert_layout(fp8_scores(held, where[0], where[1], where[2], shared, BLOCK, TOKENS), mma)
    else:
        CHUNK: gl.constexpr = 64
        left_of: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
        right_of: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
        keys = tiles.latent.index(stage)
        query = queries.latent.index(own)
        score = gl.zeros([BLOCK, TOKENS], gl.float32, mma)
        other = gl.zeros([BLOCK, TOKENS], gl.float32, mma)
        score = mma_v2(
            queries.rope.index(own).load(left_of), tiles.rope.index(stage).permute((1, 0)).load(right_of), score
        )
        for j in gl.static_range(TILE.latent // CHUNK // 2):
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
def no_sums(TILE: gl.constexpr, ENTRY: gl.constexpr):
    """Sums of `added_values` of nothing: [M, latent], or those of FP8 entries."""
    BLOCK: gl.constexpr = TILE.queries
    LATENT: gl.constexpr = TILE.latent
    if ENTRY.fp8:
        sums = no_fp8_sums(BLOCK)
    else:
        sums = (gl.zeros([BLOCK, LATENT], gl.float32, products_layout(gl.num_warps())),)
    return sums


@gluon.jit
def added_values(sums, shrink, weight, tiles, stage, shared, ENTRY: gl.constexpr):
    """`sums` times `shrink` [M], and weights [M, N] times a tile's values."""
    mma: gl.constexpr = products_layout(gl.num_warps())
    if ENTRY.fp8:
        added = added_fp8_values(sums, shrink, weight, tiles.latent.index(stage), tiles.scales.index(stage), shared)
    else:
        keys = tiles.latent.index(stage)
        sum_latent = sums[0] * shrink[:, None]
        factor = gl.convert_layout(weight.to(gl.bfloat16), gl.DotOperandLayout(0, mma, 2))
        added = (mma_v2(factor, keys.load(gl.DotOperandLayout(1, mma, 2)), sum_latent),)
    return added


@gluon.jit
def whole_rows(sums, divisor, BLOCK: gl.constexpr, ENTRY: gl.constexpr):
    """Sums over `divisor` [M] in bf16, [M, latent]. Through shared memory into whole rows, so that each lane can write
    16 bytes at a time."""
    stored: gl.constexpr = stored_layout(gl.num_warps())
    if ENTRY.fp8:
        rows = gl.convert_layout(fp8_rows(sums, divisor, BLOCK), stored)
    else:
        rows = gl.convert_layout((sums[0] / divisor[:, None]).to(gl.bfloat16), stored)
    return rows


@gluon.jit
def places(begin, queries, TILE: gl.constexpr):
    """Return the offsets of the results of query vectors from number `begin` on, behind those of vector 0, and which of
    the vectors there are."""
    BLOCK: gl.constexpr = TILE.queries
    LATENT: gl.constexpr = TILE.latent
    stored: gl.constexpr = stored_layout(gl.num_warps())
    m = begin + gl.arange(0, BLOCK, gl.SliceLayout(1, stored)) + unknown_zero()
    c = gl.arange(0, LATENT, gl.SliceLayout(0, stored))
    return (m[:, None] * LATENT + c[None, :]).to(gl.int64), (m < queries)[:, None]
