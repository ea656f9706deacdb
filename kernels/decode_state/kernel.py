"""The bookkeeping of a decode step in Triton: one program per row, no atomics, nothing read from padded rows. Where
drafts are verified, a program has a block of rows, and counts faults.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.page import PAGE_TOKENS

_PAGE = tl.constexpr(PAGE_TOKENS)
_INTS = ["pages", "drafts", "index", "tokens"]


@triton.jit
def _cache_slot(page_table, slot, position, pages, live, inside, SHARDS: tl.constexpr, SHARD: tl.constexpr):
    """Flat cache index of `position`; in the null page, which is page 0, for a row that is not live, and where another
    shard owns the page."""
    page = tl.load(page_table + slot.to(tl.int64) * pages + position // _PAGE, mask=inside & live, other=0)
    if SHARDS > 1:
        # As `Shards` has it, without negative numbers; the null page remains what it is.
        page = tl.where((page + SHARDS - 1) % SHARDS == SHARD, (page + SHARDS - 1) // SHARDS, 0)
    return page.to(tl.int64) * _PAGE + position % _PAGE


@triton.jit
def _store_places(
    page_table,
    slot,
    row,
    first,
    pages,
    live,
    position_out,
    cache_slot_out,
    length_out,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    SHARDS: tl.constexpr,
    SHARD: tl.constexpr,
):
    """Store where a row's tokens stand from position `first` on, and what the last of them sees; zeros for a row
    that is not live. Returns the positions [LANES]."""
    lane = tl.arange(0, LANES)
    inside = lane < WIDTH
    position = tl.where(live, first + lane, 0)
    at = row.to(tl.int64) * WIDTH + lane
    tl.store(position_out + at, position, mask=inside)
    cache_slot = _cache_slot(page_table, slot, position, pages, live, inside, SHARDS, SHARD)
    tl.store(cache_slot_out + at, cache_slot, mask=inside)
    tl.store(length_out + row, tl.where(live, first + WIDTH, 0).to(tl.int32))
    return position


@triton.jit(do_not_specialize=_INTS)
def feed(
    length_state,
    last_state,
    draft_state,
    page_state,
    slots,
    token_out,
    position_out,
    cache_slot_out,
    length_out,
    page_out,
    pages,
    drafts,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHARDS: tl.constexpr,
    SHARD: tl.constexpr,
):
    """Programs (row, chunk): every chunk copies its columns of the page table, chunk 0 writes the row's tokens too."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    live = slot >= 0
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    page = tl.load(page_state + slot * pages + column, mask=live & (column < pages), other=0)
    tl.store(page_out + row.to(tl.int64) * pages + column, page, mask=column < pages)
    if tl.program_id(1) == 0:
        lane = tl.arange(0, LANES)
        inside = lane < WIDTH
        last = tl.load(last_state + slot, mask=live, other=0)
        draft = tl.load(draft_state + slot * drafts + lane - 1, mask=live & inside & (lane > 0), other=0)
        length = tl.load(length_state + slot, mask=live, other=0)
        tl.store(token_out + row.to(tl.int64) * WIDTH + lane, tl.where(lane == 0, last, draft), mask=inside)
        _store_places(
            page_state,
            slot,
            row,
            length,
            pages,
            live,
            position_out,
            cache_slot_out,
            length_out,
            WIDTH,
            LANES,
            SHARDS,
            SHARD,
        )


@triton.jit(
    do_not_specialize=_INTS,
    do_not_specialize_on_alignment=["accepted_in"],  # it lies behind a number of tokens
)
def advance(
    length_state,
    last_state,
    page_state,
    slots,
    token_in,
    accepted_in,
    position_out,
    cache_slot_out,
    length_out,
    newest_out,
    token_state,
    pages,
    tokens,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    KEEPS_TOKENS: tl.constexpr,
    SHARDS: tl.constexpr,
    SHARD: tl.constexpr,
):
    """One program per row; the step's positions are computed anew, so that nothing is read that it writes."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    live = slot >= 0
    accepted = tl.load(accepted_in + row)
    newest = row.to(tl.int64) * WIDTH + accepted
    last = tl.load(token_in + newest)
    length = tl.load(length_state + slot, mask=live, other=0)
    first = length + 1
    position = _store_places(
        page_state, slot, row, first, pages, live, position_out, cache_slot_out, length_out, WIDTH, LANES, SHARDS, SHARD
    )
    tl.store(newest_out + row, newest)
    if KEEPS_TOKENS:
        lane = tl.arange(0, LANES)
        inside = lane < WIDTH
        token = tl.load(token_in + row.to(tl.int64) * WIDTH + lane, mask=inside, other=0)
        tl.store(token_state + slot * tokens + position, token.to(tl.int32), mask=inside & live & (position < tokens))
    tl.store(length_state + slot, length + accepted + 1, mask=live)
    tl.store(last_state + slot, last, mask=live)


@triton.jit(do_not_specialize=_INTS)
def feed_draft(
    length_state,
    draft_state,
    page_state,
    slots,
    token_in,
    index,
    position_out,
    cache_slot_out,
    length_out,
    pages,
    drafts,
    SHARDS: tl.constexpr,
    SHARD: tl.constexpr,
):
    """Feed the rows' drafts; one program per row."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    live = slot >= 0
    tl.store(draft_state + slot * drafts + index, tl.load(token_in + row), mask=live)
    length = tl.load(length_state + slot, mask=live, other=0)
    position = tl.where(live, length + index + 1, 0)
    tl.store(position_out + row, position)
    tl.store(cache_slot_out + row, _cache_slot(page_state, slot, position, pages, live, live, SHARDS, SHARD))
    tl.store(length_out + row, tl.where(live, position + 1, 0).to(tl.int32))


@triton.jit(
    do_not_specialize=["rows", "target_stride", "draft_stride", "vocab"],
    do_not_specialize_on_alignment=["accepted", "faults_out"],  # they lie behind a number of tokens
)
def accept_drafts_kernel(
    target,
    draft,
    accepted,
    fault,
    faults_out,
    rows,
    target_stride,
    draft_stride,
    vocab,
    DRAFTS: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    CHECKED: tl.constexpr,
    TOLD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A block of rows: the leading drafts that equal the target's token before them and are tokens. CHECKED: ids that
    are none count as faults (sums of integers, in whatever order). TOLD: the only program says how many faults there
    are now."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)[None, :]
    live = (row < rows)[:, None]
    place = row.to(tl.int64)[:, None]
    at_target, at_draft = target + place * target_stride + lane, draft + place * draft_stride + lane
    chosen = tl.load(at_target, mask=live & (lane <= DRAFTS), other=0, cache_modifier=".cg")
    drafted = tl.load(at_draft, mask=live & (lane < DRAFTS), other=0, cache_modifier=".cg")
    matches = (drafted == chosen) & (drafted >= 0) & (drafted < vocab)
    number = tl.min(tl.where(matches & (lane < DRAFTS), DRAFTS, tl.minimum(lane, DRAFTS)), 1)
    tl.store(accepted + row, number.to(tl.int64), mask=row < rows)
    if CHECKED:
        if TOLD:
            before = tl.load(fault, cache_modifier=".cg")
        wrong = ((chosen < 0) | (chosen >= vocab)).to(tl.int64) + ((drafted < 0) | (drafted >= vocab)).to(tl.int64)
        wrong = tl.sum(tl.sum(wrong, 1), 0)
        if wrong > 0:
            tl.atomic_add(fault, wrong)
        if TOLD:
            tl.store(faults_out, before + wrong)
