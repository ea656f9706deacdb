"""Attention over selected FP8 entries on Hopper where a program has many heads: `kernels.mla_decode.wide_fp8`, whose
tiles are gathered entry by entry."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.mla_decode.narrow import let_kernel_after_start, wait_for_kernel_before
from kernels.mla_decode.wide import wide_memory
from kernels.mla_decode.wide_groups import WORKER, left_group, right_group
from kernels.mla_decode.wide_tile import BLOCK, HALF, TILE
from kernels.mla_decode.widen import PIECE, QUARTERS, ROWS, first_pieces, widen_tile
from kernels.sparse.fetch import copy_columns, places_of, rows_layout, share_of_part


@gluon.jit
def places_of_quarters(mine, first, count):
    """Where a tile's entries lie in the flattened cache, [ROWS] for each quarter."""
    places = ()
    for quarter in gl.static_range(QUARTERS):
        own = places_of(mine, first + quarter * ROWS, count, ROWS, PIECE)
        places = places + (own,)  # noqa: RUF005 - Gluon knows no stars
    return places


@gluon.jit
def fetch(cache, q_half, q_rope, place, share, fetched, ring, SELECTED: gl.constexpr, ENTRY: gl.constexpr):
    """The fetching warps: the queries, and the tiles of the program's part of a token's entries."""
    KEYS: gl.constexpr = rows_layout(8)
    record = share.plan + share.worker * WORKER
    token = gl.load(record, cache_modifier=".cg")
    start = gl.load(record + 1, cache_modifier=".cg")
    stop = start + gl.load(record + 2, cache_modifier=".cg")
    if stop > start:
        count = gl.load(share.length + token, cache_modifier=".cg")
        mine = place + token.to(gl.int64) * SELECTED
        numbers = places_of_quarters(mine, start * TILE, count)
        loaded = first_pieces(cache, numbers, ENTRY)
        vector = token * share.queries + share.block * BLOCK
        mbarrier.expect(ring.q_full, 2 * q_half.block_type.nbytes + q_rope.block_type.nbytes)
        tma.async_copy_global_to_shared(q_half, [vector, 0], ring.q_full, fetched.q.index(0))
        tma.async_copy_global_to_shared(q_half, [vector, HALF], ring.q_full, fetched.q.index(1))
        tma.async_copy_global_to_shared(q_rope, [vector, 2 * HALF], ring.q_full, fetched.q_rope.index(0))
        for tile in range(start, stop):
            tiles = tile - start
            buffer = tiles & 1
            entry = cache + places_of(mine, tile * TILE, count, TILE, KEYS).to(gl.int64) * ENTRY.size
            roped = entry.to(gl.pointer_type(gl.bfloat16), bitcast=True)
            following = places_of_quarters(mine, (tile + 1) * TILE, count)
            mbarrier.wait(ring.empty.index(2 + buffer), ((tiles >> 1) & 1) ^ 1)
            copy_columns(roped, ENTRY.rope // 2, fetched.rope.index(buffer), KEYS)
            async_copy.commit_group()
            loaded = widen_tile(cache, loaded, numbers, following, fetched, ring, tiles, ENTRY, True)
            numbers = following


@gluon.jit(do_not_specialize=["heads", "blocks"])
def attend_selected_wide_fp8(
    q_half, q_rope, cache, place, length, out, lse, partial, partial_lse, plan, scale, heads, blocks,
    SELECTED: gl.constexpr, ENTRY: gl.constexpr, SPLIT: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """As `selected_wide.attend_selected`, of FP8 entries."""
    if OVERLAP.dependent:
        wait_for_kernel_before()
        let_kernel_after_start()
    share = share_of_part(length, out, lse, partial, partial_lse, plan, scale, heads, blocks)
    fetched, exchanged, ring, messages = wide_memory(1)
    group = (
        share, fetched, exchanged, ring, messages,
        SPLIT.unit, SPLIT.row_cost, SPLIT.invariant, OVERLAP.dependent, OVERLAP.early, True,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (left_group, group),
            (right_group, group),
            (fetch, (cache, q_half, q_rope, place, share, fetched, ring, SELECTED, ENTRY)),
        ],
        [4, 4],
        [208, 72],
    )
