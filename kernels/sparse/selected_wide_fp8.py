"""Attention over selected FP8 entries on Hopper where a program has many heads: `kernels.mla_decode.wide_fp8`, whose
tiles are gathered entry by entry."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.gluon.dependent import let_kernel_after_start, wait_for_kernel_before
from kernels.gluon.prefetch import LINE, ask_for_lines
from kernels.mla_decode.narrow_tile import unknown_zero
from kernels.mla_decode.split_kv import CTA, TILE
from kernels.mla_decode.wide import fetch_queries, wide_memory
from kernels.mla_decode.wide_groups import left_group, right_group
from kernels.mla_decode.widen import PIECE, QUARTERS, ROWS, first_pieces, widen_half
from kernels.sparse.fetch import copy_columns, places_of, rows_layout, share_of_part

LINES = gl.constexpr(gl.BlockedLayout([1, 1], [16, 2], [4, 1], [1, 0]))
"""Layout of the lines of a tile's entries that are asked for: two threads have one entry, and so one place each."""


@gluon.jit
def last_to_ask_for(share, stop, count):
    """The end of the entries that a program tells the L2 cache of: those up to tile `stop`, where no other block of
    heads does so."""
    return gl.where(share.block == 0, gl.minimum(count, stop * TILE), 0)


@gluon.jit
def into_l2(cache, places, first, last, BYTES: gl.constexpr):
    """Ask for a tile's entries, of so many bytes each, to be brought into L2: the first is number `first`, and
    from number `last` on there are none. `places`: as of `places_of` with `LINES`."""
    COUNT: gl.constexpr = (BYTES + LINE - 1) // LINE
    COLUMNS: gl.constexpr = 8 if COUNT <= 8 else 16
    line = gl.arange(0, COLUMNS, gl.SliceLayout(0, LINES))
    at = cache.to(gl.int64) + gl.expand_dims(places.to(gl.int64) * BYTES, 1) + (line * LINE)[None, :]
    asked = first + gl.arange(0, TILE, gl.SliceLayout(1, LINES)) < last
    ask_for_lines(at, gl.expand_dims(asked, 1) & (line < COUNT)[None, :])


@gluon.jit
def places_of_quarters(mine, first, count):
    """Return the indices of a tile's entries in the flattened cache, [ROWS] for each quarter."""
    places = ()
    for quarter in gl.static_range(QUARTERS):
        own = places_of(mine, first + quarter * ROWS, count, ROWS, PIECE)
        places = places + (own,)  # noqa: RUF005 - Gluon knows no stars
    return places


@gluon.jit
def fetch(
    cache, q_half, q_rope, place, share, fetched, ring, SIDE: gl.constexpr, SELECTED: gl.constexpr, ENTRY: gl.constexpr
):
    """The four warps that fetch one side of the program's part of a token's entries: the left half of the tiles (SIDE
    0) or the right one with the roped features (1). Those of the left side fetch the queries, too, and tell the L2
    cache of the tile after the next."""
    KEYS: gl.constexpr = rows_layout(8)
    record = share.metadata + share.cta * CTA
    token = gl.load(record, cache_modifier=".cg")
    start = gl.load(record + 1, cache_modifier=".cg")
    tiles = gl.load(record + 2, cache_modifier=".cg")
    if tiles > 0:
        # Entries are counted from the program's first one on: that takes fewer registers.
        count = gl.load(share.length + token, cache_modifier=".cg") - start * TILE
        mine = place + token.to(gl.int64) * SELECTED + start * TILE
        last = last_to_ask_for(share, tiles, count)
        numbers = places_of_quarters(mine, 0, count)
        if SIDE == 0:
            for tile in gl.static_range(2):
                asked = places_of(mine, tile * TILE, count, TILE, LINES)
                into_l2(cache, asked, tile * TILE, last, ENTRY.size)
        loaded = first_pieces(cache, numbers, SIDE, ENTRY)
        if SIDE == 0:
            fetch_queries(q_half, q_rope, token, share, fetched, ring)
        for tile in range(tiles):
            if SIDE == 0:
                asked = places_of(mine, (tile + 2) * TILE, count, TILE, LINES)
            else:
                buffer = tile & 1
                mbarrier.wait(ring.empty.index(2 + buffer), ((tile >> 1) & 1) ^ 1)
                keys = cache + (ENTRY.rope + 16 * unknown_zero())  # not kept in registers beside `cache`
                for quarter in gl.static_range(QUARTERS):
                    own = gl.convert_layout(numbers[quarter], gl.SliceLayout(1, KEYS), assert_trivial=True)
                    entry = (keys + own.to(gl.int64) * ENTRY.size).to(gl.pointer_type(gl.bfloat16), bitcast=True)
                    copy_columns(entry, 0, fetched.rope.index(buffer).slice(quarter * ROWS, ROWS, dim=0), KEYS)
                async_copy.commit_group()
            following = places_of_quarters(mine, (tile + 1) * TILE, count)
            loaded = widen_half(cache, loaded, numbers, following, fetched, ring, tile, SIDE, ENTRY, True)
            if SIDE == 0:
                into_l2(cache, asked, (tile + 2) * TILE, last, ENTRY.size)
            numbers = following


@gluon.jit(do_not_specialize=["heads", "blocks"])
def attend_selected_wide_fp8(
    q_half, q_rope, cache, place, length, out, lse, partial, partial_lse, metadata, scale, heads, blocks,
    SELECTED: gl.constexpr, ENTRY: gl.constexpr, SPLIT: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Variant of `selected_wide.attend_selected` for FP8 entries."""
    if OVERLAP.dependent:
        wait_for_kernel_before()
        let_kernel_after_start()
    share = share_of_part(length, out, lse, partial, partial_lse, metadata, scale, heads, blocks)
    fetched, exchanged, ring, messages = wide_memory(1)
    group = (
        share, fetched, exchanged, ring, messages,
        SPLIT.unit, SPLIT.row_cost, SPLIT.invariant, OVERLAP.dependent, OVERLAP.early, True,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (left_group, group),
            (right_group, group),
            (fetch, (cache, q_half, q_rope, place, share, fetched, ring, 0, SELECTED, ENTRY)),
            (fetch, (cache, q_half, q_rope, place, share, fetched, ring, 1, SELECTED, ENTRY)),
        ],
        [4, 4, 4],
        [200, 48, 48],
    )
