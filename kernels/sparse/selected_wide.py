"""Attention over selected entries in bfloat16 on Hopper: `kernels.mla_decode.wide`, whose tiles are gathered entry by
entry."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.gluon.dependent import let_kernel_after_start, wait_for_kernel_before
from kernels.mla_decode.split_kv import CTA, TILE
from kernels.mla_decode.wide import fetch_queries, wide_memory
from kernels.mla_decode.wide_groups import left_group, right_group
from kernels.mla_decode.wide_tile import HALF_LATENT, ROPE
from kernels.sparse.fetch import THREADS, copy_columns, places_of, rows_layout, share_of_part, tell

_SLICE = gl.constexpr(64)


@gluon.jit
def fetch(cache, q_half, q_rope, place, share, fetched, ring, SELECTED: gl.constexpr):
    """The fetching warps: the queries, and the tiles of the program's part of a token's entries. To tell the L2 cache
    of them earlier, as is done of FP8 entries, takes longer here."""
    VECTOR: gl.constexpr = 2 * HALF_LATENT + ROPE
    LATENTS: gl.constexpr = rows_layout(8)
    record = share.metadata + share.cta * CTA
    token = gl.load(record, cache_modifier=".cg")
    start = gl.load(record + 1, cache_modifier=".cg")
    stop = start + gl.load(record + 2, cache_modifier=".cg")
    if stop > start:
        fetch_queries(q_half, q_rope, token, share, fetched, ring)
        count = gl.load(share.length + token, cache_modifier=".cg")
        mine = place + token.to(gl.int64) * SELECTED
        at = places_of(mine, start * TILE, count, TILE, LATENTS)
        for tile in range(start, stop):
            tiles = tile - start
            entry = cache + at.to(gl.int64) * VECTOR
            at = places_of(mine, (tile + 1) * TILE, count, TILE, LATENTS)
            buffer = tiles & 1
            phase = ((tiles >> 1) & 1) ^ 1
            mbarrier.wait(ring.empty.index(buffer), phase)
            left = fetched.kv.index(buffer)
            for i in gl.static_range(HALF_LATENT // _SLICE):
                copy_columns(entry, i * _SLICE, left.slice(i * _SLICE, _SLICE, dim=1), LATENTS)
            tell(ring.full.index(buffer))
            mbarrier.wait(ring.empty.index(2 + buffer), phase)
            right = fetched.kv.index(2 + buffer)
            for i in gl.static_range(HALF_LATENT // _SLICE):
                copy_columns(entry, HALF_LATENT + i * _SLICE, right.slice(i * _SLICE, _SLICE, dim=1), LATENTS)
            copy_columns(entry, 2 * HALF_LATENT, fetched.rope.index(buffer), LATENTS)
            tell(ring.full.index(2 + buffer))


@gluon.jit(do_not_specialize=["heads", "blocks"])
def attend_selected(
    q_half, q_rope, cache, place, length, out, lse, partial, partial_lse, metadata, scale, heads, blocks,
    SELECTED: gl.constexpr, SPLIT: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Grid: blocks of heads times parts times tokens; four warps, the others come on top. What `places.find_places` has
    written is the plan. `q_half`, `q_rope`: see `kernels.mla_decode.wide.boxes`."""
    if OVERLAP.dependent:
        wait_for_kernel_before()
        let_kernel_after_start()
    share = share_of_part(length, out, lse, partial, partial_lse, metadata, scale, heads, blocks)
    fetched, exchanged, ring, messages = wide_memory(THREADS)
    group = (
        share, fetched, exchanged, ring, messages,
        SPLIT.unit, SPLIT.row_cost, SPLIT.invariant, OVERLAP.dependent, OVERLAP.early,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (left_group, group),
            (right_group, group),
            (fetch, (cache, q_half, q_rope, place, share, fetched, ring, SELECTED)),
        ],
        [4, 4],
        [232, 40],
    )
