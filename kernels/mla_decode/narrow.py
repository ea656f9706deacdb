"""Decode attention for Hopper when a row has at most 16 query vectors, or a row alone a few blocks of 16: bound by
memory, and by latency in small batches.

The portable kernel waits three times in a row: for the query, for a page id, for the cache. Here every copy of the
first tiles is under way before the first wait; page id and length of a CTA's first tile come with its plan record.
Where a CTA goes on with another row, that row's query and first tile are under way before this one's last product.
With programmatic dependent launch (`early`) the first cache tiles are even requested before the kernel before has
finished, as far as that kernel cannot have written them. Products use mma.sync: 16 query vectors are too few for
wgmma.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: SIM102 (a condition on compile-time constants must stay apart from one on run-time values)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from kernels.gluon.dependent import hand_on, let_kernel_after_start, wait_for_kernel_before
from kernels.mla_decode.narrow_tile import (
    added_values,
    copy_query,
    copy_tile,
    no_sums,
    places,
    products_layout,
    query_of_row,
    rings,
    scores,
    unknown_zero,
    whole_rows,
)
from kernels.mla_decode.schedule import PARTS_FIELD
from kernels.mla_decode.split_kv import CTA, LN2, divisor_and_log, first_entry, part_of_row, share_of, slot_of

_MASKED = gl.constexpr(-1.0e33)
_LOWEST = gl.constexpr(-1.0e30)
_PARTS = gl.constexpr(PARTS_FIELD)
_INTS = ["first", "table_stride", "queries", "drafts", "heads", "blocks", "ctas"]


@gluon.jit
def narrow_cta(
    q, cache, table, table_stride, record, share,
    ENTRY: gl.constexpr, SPLIT: gl.constexpr, TILE: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """One CTA's `Share`, whose record in the tile scheduler metadata is at `record`: its KV blocks of one or several
    rows, for one block of queries. Waits, and lets the kernel after start, where `OVERLAP.early`."""
    BLOCK: gl.constexpr = TILE.queries
    TOKENS: gl.constexpr = TILE.tokens
    PAGE: gl.constexpr = SPLIT.page
    STAGES: gl.constexpr = OVERLAP.stages
    EARLY: gl.constexpr = OVERLAP.dependent and OVERLAP.early
    LATENT: gl.constexpr = TILE.latent
    AHEAD: gl.constexpr = STAGES - 1
    mma: gl.constexpr = products_layout(gl.num_warps())
    per_query: gl.constexpr = gl.SliceLayout(1, mma)
    per_column: gl.constexpr = gl.SliceLayout(0, mma)

    row = gl.load(record)
    at = gl.load(record + 1)
    left = gl.load(record + 2)
    page = gl.load(record + 4)
    tokens = gl.load(record + 5)
    tiles, queries, shared = rings(STAGES, TILE, ENTRY)
    m = share.block * BLOCK + gl.arange(0, BLOCK, per_query)
    n = gl.arange(0, TOKENS, per_column)
    lowest_tile = share.first // SPLIT.unit * SPLIT.unit // TOKENS
    slot = 0  # of this row's first tile
    own = 0  # which of the two places has this row's query
    ahead = left < 0  # whether the row before has asked for both
    if EARLY:
        if left <= 0:
            wait_for_kernel_before()
            let_kernel_after_start()
    while left > 0:
        first = first_entry(row, share, SPLIT.own)
        part = part_of_row(tokens, at, left, share.first, SPLIT.unit, SPLIT.row_cost, False, TOKENS)
        take, start, stop = part.take, part.start, part.stop
        pages = table + row.to(gl.int64) * table_stride
        last = gl.maximum(tokens - 1, 0) // PAGE

        # What the kernel before may have written is asked for after it has finished: the row's newest entries and the
        # query. Everything older, when `OVERLAP.early`, before.
        settled = 0
        if EARLY:
            settled = tokens - share.drafts - 1
        for s in gl.static_range(AHEAD):
            asked = ahead & (s == 0)
            if (start + s < stop) & ((start + s + 1) * TOKENS <= settled) & (not asked):
                if s > 0:
                    page = gl.load(pages + gl.minimum((start + s) * TOKENS // PAGE, last))
                to = (slot + s) % STAGES
                copy_tile(cache, page, start + s, tokens, first, tiles, to, TILE, PAGE, ENTRY)
        if EARLY:
            wait_for_kernel_before()
            let_kernel_after_start()
        if (stop > start) & (not ahead):
            copy_query(q, row, share.block, share.queries, queries, own, TILE, ENTRY)
        for s in gl.static_range(AHEAD):
            asked = ahead & (s == 0)
            if (start + s < stop) & ((start + s + 1) * TOKENS > settled) & (not asked):
                if s > 0:
                    page = gl.load(pages + gl.minimum((start + s) * TOKENS // PAGE, last))
                to = (slot + s) % STAGES
                copy_tile(cache, page, start + s, tokens, first, tiles, to, TILE, PAGE, ENTRY)
            async_copy.commit_group()
        page = gl.load(pages + gl.minimum((start + AHEAD) * TOKENS // PAGE, last))
        # The next row, if this worker's share goes beyond this one, and whether it has entries there.
        goes_on = left > take
        next_tokens = gl.load(share.length + row + 1, mask=goes_on, other=0)
        next_page = gl.load(table + (row + 1).to(gl.int64) * table_stride + share.first // PAGE, mask=goes_on, other=0)
        next_first = share.first
        if SPLIT.own:
            at_first = share.seen + (row + 1).to(gl.int64) * (share.drafts + 2) + share.drafts + 1
            next_first = gl.load(at_first, mask=goes_on, other=0)
        follows = goes_on & (next_tokens > share.first) & (left - take > SPLIT.row_cost)

        # Tokens of the row after a query's; kept from row to row they would spill registers.
        token = (m + unknown_zero()) // share.heads
        if SPLIT.own:
            at_bound = share.seen + row.to(gl.int64) * (share.drafts + 2) + token
            bound = gl.load(at_bound, mask=m < share.queries, other=0)
        else:
            bound = gl.minimum(tokens - (share.drafts - token), tokens)
        top = gl.full([BLOCK], _LOWEST, gl.float32, per_query)
        weights = gl.zeros([BLOCK, TOKENS], gl.float32, mma)
        sums = no_sums(TILE, ENTRY)
        held = query_of_row(queries, own, stop > start, AHEAD, BLOCK, ENTRY)
        for tile in range(start, stop):
            stage = (slot + tile - start) % STAGES
            async_copy.wait_group(AHEAD - 1)
            gl.thread_barrier()  # the tile is there for all warps, and all of them are done with the one before
            here = tile + AHEAD < stop
            beyond = follows & (tile + AHEAD == stop)
            if here | beyond:
                free = (slot + tile - start + AHEAD) % STAGES
                copy_tile(
                    cache,
                    gl.where(here, page, next_page),
                    gl.where(here, tile + AHEAD, lowest_tile),
                    gl.where(here, tokens, next_tokens),
                    gl.where(here, first, next_first),
                    tiles,
                    free,
                    TILE,
                    PAGE,
                    ENTRY,
                )
            if beyond:
                copy_query(q, row + 1, share.block, share.queries, queries, 1 - own, TILE, ENTRY)
            async_copy.commit_group()
            page = gl.load(pages + gl.minimum((tile + AHEAD + 1) * TOKENS // PAGE, last))
            score = scores(held, queries, own, tiles, stage, shared, TILE, ENTRY) * share.scale
            entry = tile * TOKENS + n
            seen = (entry[None, :] < bound[:, None]) & (entry >= first)[None, :]
            score = gl.where(seen, score, _MASKED)
            new_top = gl.maximum(top, gl.max(score, 1))
            shrink = gl.exp2(top - new_top)
            weight = gl.exp2(score - new_top[:, None])
            weights = weights * shrink[:, None] + weight
            top = new_top
            sums = added_values(sums, shrink, weight, tiles, stage, shared, ENTRY)
        gl.thread_barrier()  # before the next row's copies

        if stop > start:
            total = gl.sum(weights, 1)
            divisor, log = divisor_and_log(total, top)
            rows = whole_rows(sums, divisor, BLOCK, ENTRY)
            at_out, inside = places(share.block * BLOCK, share.queries, TILE)
            if (part.begin == 0) & (part.end == part.units):
                base = row.to(gl.int64) * share.queries
                to = share.out + base * LATENT + at_out
                gl.store(to, rows.to(share.out.dtype.element_ty), mask=inside, eviction_policy="evict_last")
                gl.store(share.lse + base + m, log * LN2, mask=m < share.queries)
            else:
                base = slot_of(row, part.begin, share, SPLIT).to(gl.int64) * share.queries
                to = share.partial + base * LATENT + at_out
                gl.store(to, rows.to(share.partial.dtype.element_ty), mask=inside, eviction_policy="evict_last")
                gl.store(share.partial_lse + base + m, log, mask=m < share.queries)
        ahead = follows & (stop - start >= AHEAD) & (stop > start)
        slot = (slot + stop - start) % STAGES
        own = 1 - own
        # If anything is left the row is finished: a CTA's share ends inside its last row.
        left -= take
        row += 1
        at = at * 0
        tokens = next_tokens
        page = next_page


@gluon.jit(do_not_specialize=_INTS)
def attend_narrow(
    q,
    cache,
    table,
    length,
    seen,
    out,
    lse,
    partial,
    partial_lse,
    metadata,
    scale,
    first,
    table_stride,
    queries,
    drafts,
    heads,
    blocks,
    ctas,
    ENTRY: gl.constexpr,
    SPLIT: gl.constexpr,
    TILE: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Variant of `kernel.attend` without invariant mode, for 512 latent features or 256 and 64 roped ones in bfloat16,
    or FP8 entries of 512 + 64 (`narrow_fp8`). `OVERLAP.either`: works if the plan says that the row is short."""
    cta = gl.program_id(0) // blocks
    if OVERLAP.dependent and not OVERLAP.early:
        wait_for_kernel_before()
        let_kernel_after_start()
    record = metadata + cta * CTA
    works = True
    if OVERLAP.either:
        record = metadata + gl.program_id(0) // OVERLAP.either * CTA
        works = gl.load(record + _PARTS) > 1
    if works:
        share = share_of(
            length, seen, out, lse, partial, partial_lse, metadata, scale, first, queries, drafts, heads, ctas, blocks
        )
        narrow_cta(q, cache, table, table_stride, record, share, ENTRY, SPLIT, TILE, OVERLAP)
    else:
        if OVERLAP.dependent and OVERLAP.early:
            hand_on()
