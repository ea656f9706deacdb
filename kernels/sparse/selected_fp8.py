"""Attention over selected FP8 entries on Hopper: `kernels.mla_decode.fp8`, whose tiles are gathered entry by entry."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.gluon.dependent import let_kernel_after_start, wait_for_kernel_before
from kernels.mla_decode.fp8 import fp8_memory
from kernels.mla_decode.fp8_groups import next_stage, scoring_group, summing_group
from kernels.mla_decode.fp8_tile import GROUPS, PAIRS
from kernels.mla_decode.split_kv import CTA, TILE
from kernels.sparse.fetch import (
    HALF_TILE,
    THREADS,
    copy_columns,
    places_of,
    rows_layout,
    share_of_part,
    single_layout,
    tell,
)


@gluon.jit
def fetch(cache, place, share, fetched, messages, SELECTED: gl.constexpr, ENTRY: gl.constexpr, OVERLAP: gl.constexpr):
    """The fetching warps: the tiles of the program's part of a token's entries."""
    LATENTS: gl.constexpr = rows_layout(8)
    ALONE: gl.constexpr = single_layout(4)
    record = share.metadata + share.cta * CTA
    token = gl.load(record, cache_modifier=".cg").to(gl.int64)
    start = gl.load(record + 1, cache_modifier=".cg")
    stop = start + gl.load(record + 2, cache_modifier=".cg")
    if stop > start:
        count = gl.load(share.length + token, cache_modifier=".cg")
        mine = place + token * SELECTED
        at = places_of(mine, start * TILE, count, HALF_TILE, LATENTS)
        alone = places_of(mine, start * TILE, count, HALF_TILE, ALONE)
        stage = 0
        phase = 1
        for tile in range(start, stop):
            mbarrier.wait(messages.empty.index(stage), phase)
            # Half a tile at a time: addresses of all would take too many registers.
            for i in gl.static_range(TILE // HALF_TILE):
                entry = cache + at.to(gl.int64) * ENTRY.size
                scales = cache + alone.to(gl.int64) * ENTRY.size
                following = tile * TILE + (i + 1) * HALF_TILE
                at = places_of(mine, following, count, HALF_TILE, LATENTS)
                alone = places_of(mine, following, count, HALF_TILE, ALONE)
                pairs = entry.to(gl.pointer_type(gl.int16), bitcast=True)
                for g in gl.static_range(GROUPS):
                    latent = fetched.latent.index(stage * GROUPS + g).slice(i * HALF_TILE, HALF_TILE, dim=0)
                    copy_columns(pairs, g * PAIRS, latent, LATENTS)
                roped = entry.to(gl.pointer_type(gl.bfloat16), bitcast=True)
                copy_columns(
                    roped, ENTRY.rope // 2, fetched.rope.index(stage).slice(i * HALF_TILE, HALF_TILE, dim=0), LATENTS
                )
                factors = scales.to(gl.pointer_type(gl.float32), bitcast=True)
                to = fetched.scales.index(stage).slice(i * HALF_TILE, HALF_TILE, dim=0)
                copy_columns(factors, ENTRY.scales // 4, to, ALONE)
            tell(messages.full.index(stage))
            stage, phase = next_stage(stage, phase, OVERLAP.stages)


@gluon.jit(do_not_specialize=["heads", "blocks"])
def attend_selected_fp8(
    q, cache, place, length, out, lse, partial, partial_lse, metadata, scale, heads, blocks,
    SELECTED: gl.constexpr, ENTRY: gl.constexpr, SPLIT: gl.constexpr, TILE_OF: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Grid: blocks of heads times parts times tokens; four warps, the others come on top. What `places.find_places` has
    written is the plan. Of 512 latent features and 64 roped ones in bfloat16."""
    if OVERLAP.dependent:
        wait_for_kernel_before()
        let_kernel_after_start()
    share = share_of_part(length, out, lse, partial, partial_lse, metadata, scale, heads, blocks)
    BLOCK: gl.constexpr = TILE_OF.queries
    fetched, queries, exchanged, messages = fp8_memory(BLOCK, OVERLAP.stages, THREADS)
    gl.warp_specialize(
        [
            (scoring_group, (q, share, queries, fetched, exchanged, messages, BLOCK, SPLIT, OVERLAP)),
            (summing_group, (share, fetched, exchanged, messages, 0, BLOCK, SPLIT, OVERLAP)),
            (summing_group, (share, fetched, exchanged, messages, 1, BLOCK, SPLIT, OVERLAP)),
            (fetch, (cache, place, share, fetched, messages, SELECTED, ENTRY, OVERLAP)),
        ],
        [4, 4, 4],
        [128, 128, 40],
    )
