"""Own pages, bounds and candidates in Triton."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.page import PAGE_TOKENS
from kernels.sparse_shards.reference import ABSENT

_PAGE = tl.constexpr(PAGE_TOKENS)
_ABSENT = tl.constexpr(ABSENT)
_MINUS_INFINITY = tl.constexpr(-(1 << 23))
"""Its bits, as an integer."""


@triton.jit(do_not_specialize=["pages", "table_stride"], do_not_specialize_on_alignment=["table"])
def find_own_pages(
    table, local, own, column, before, pages, table_stride, COLUMNS: tl.constexpr, SHARDS: tl.constexpr,
    SHARD: tl.constexpr,
):  # fmt: skip
    """One program per row. It looks at COLUMNS at a time, and keeps count of the own pages before them."""
    row = tl.program_id(0).to(tl.int64)
    found = 0
    for start in range(0, pages, COLUMNS):
        at = start + tl.arange(0, COLUMNS)
        inside = at < pages
        page = tl.load(table + row * table_stride + at, mask=inside, other=0)
        # As `kernels.page.Shards` has it, which rounds down: the remainder here has the sign of what is divided. A page
        # below 0 is a fault, which its owner is to count.
        rest = page + SHARDS - 1
        over = rest % SHARDS
        over = tl.where(over < 0, over + SHARDS, over)
        mine = (page != 0) & (over == SHARD)
        here = (rest - over) // SHARDS
        one = mine.to(tl.int32)
        earlier = found + tl.cumsum(one, 0) - one
        tl.store(local + row * pages + at, tl.where(mine, here, 0), mask=inside)
        tl.store(before + row * pages + at, earlier, mask=inside)
        tl.store(own + row * pages + earlier, here, mask=mine)
        tl.store(column + row * pages + earlier, at, mask=mine)
        found += tl.sum(one, 0)


@triton.jit(
    do_not_specialize=["tokens", "rows", "pages"], do_not_specialize_on_alignment=["row", "bound", "out", "first"]
)
def own_bounds(row, bound, local, before, out, first, tokens, rows, pages, TOKENS: tl.constexpr):
    """Programs of TOKENS tokens."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    of_row = tl.load(row + token, mask=inside, other=-1)
    sees = tl.load(bound + token, mask=inside, other=0)
    there = (of_row >= 0) & (of_row < rows)
    counted = there & (sees > 0) & (sees <= pages * _PAGE)
    mine = tl.where(there, of_row, 0).to(tl.int64) * pages
    column = tl.where(counted, sees - 1, 0) // _PAGE
    page = tl.load(local + mine + column, mask=counted, other=0)
    earlier = tl.load(before + mine + column, mask=counted, other=0)
    found = earlier * _PAGE + tl.where(page != 0, sees - column * _PAGE, 0)
    tl.store(out + token, tl.where(counted, found, sees), mask=inside)
    begins = tl.load(local + mine, mask=there, other=0)
    tl.store(first + token, (begins != 0).to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["score_stride", "pages"], do_not_specialize_on_alignment=["row"])
def offer_candidates(
    index, score, row, column, part, score_stride, pages, SELECTED: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Programs (BLOCK candidates, token)."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < SELECTED
    at = tl.load(index + token * SELECTED + lane, mask=inside, other=-1, cache_modifier=".cg")
    there = at >= 0
    own = tl.load(row + token).to(tl.int64)
    x = tl.load(score + token * score_stride + at, mask=there, other=0.0, cache_modifier=".cg")
    begin = tl.load(column + own * pages + at // _PAGE, mask=there, other=0)
    out = part + token * (2 * SELECTED) + lane
    tl.store(out, tl.where(there, x.to(tl.int32, bitcast=True), _MINUS_INFINITY), mask=inside)
    tl.store(out + SELECTED, tl.where(there, begin * _PAGE + at % _PAGE, _ABSENT), mask=inside)


@triton.jit
def _before(positions, position, SELECTED: tl.constexpr, STEPS: tl.constexpr):
    """How many of some SELECTED positions, which rise, are below a position. The interval that is left is halved in
    every step."""
    low = position * 0
    high = low + SELECTED
    for _ in tl.static_range(STEPS):
        open = low < high
        middle = (low + high) // 2
        found = tl.load(positions + middle, mask=open, other=0, cache_modifier=".cg")
        below = open & (found < position)
        high = tl.where(open & (found >= position), middle, high)
        low = tl.where(below, middle + 1, low)
    return low


@triton.jit
def order_candidates(
    part, score, position, count, COLUMNS: tl.constexpr, SHARDS: tl.constexpr, SELECTED: tl.constexpr,
    STEPS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Programs (BLOCK candidates of a shard, token): where they stand among those of all. STEPS: bits of SELECTED."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(1).to(tl.int64)
    shard = tl.program_id(0) % SHARDS
    lane = tl.program_id(0) // SHARDS * BLOCK + tl.arange(0, BLOCK)
    # int32 words: the scores of a shard, then its positions.
    all = part + token * (SHARDS * 2 * SELECTED)
    mine = all + shard * (2 * SELECTED)
    own = tl.load(mine + SELECTED + lane, mask=lane < SELECTED, other=_ABSENT, cache_modifier=".cg")
    there = own != _ABSENT
    x = tl.load(mine + lane, mask=there, other=0, cache_modifier=".cg")
    rank = lane
    for step in tl.static_range(1, SHARDS):
        other = (shard + step) % SHARDS
        rank += _before(all + other * (2 * SELECTED) + SELECTED, own, SELECTED, STEPS)
    tl.store(score + token * COLUMNS + rank, x.to(tl.float32, bitcast=True), mask=there)
    tl.store(position + token * COLUMNS + rank, own, mask=there)
    if tl.program_id(0) == 0:
        each = tl.arange(0, SHARDS)
        number = _before(all + each * (2 * SELECTED) + SELECTED, each * 0 + _ABSENT, SELECTED, STEPS)
        tl.store(count + token, tl.sum(number, 0))


@triton.jit(do_not_specialize=["first", "rows", "pages"], do_not_specialize_on_alignment=["row"])
def keep_selected(
    index, position, selected, row, local, own, first, rows, pages, INDEXED: tl.constexpr, COLUMNS: tl.constexpr,
    SELECTED: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Programs (BLOCK positions, token). INDEXED: whether `index` says which of COLUMNS `position`s are selected."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < SELECTED
    at = token * SELECTED + lane
    if INDEXED:
        which = tl.load(index + at, mask=inside, other=-1, cache_modifier=".cg")
        found = tl.load(position + token * COLUMNS + which, mask=which >= 0, other=-1, cache_modifier=".cg")
        found = tl.where(found < first, -1, found)
        tl.store(selected + at, found, mask=inside)
    else:
        found = tl.load(selected + at, mask=inside, other=-1, cache_modifier=".cg")
    of_row = tl.load(row + token)
    there = (found >= 0) & (found < pages * _PAGE) & (of_row >= 0) & (of_row < rows)
    mine = local + tl.where((of_row >= 0) & (of_row < rows), of_row, 0).to(tl.int64) * pages
    page = tl.load(mine + found // _PAGE, mask=there, other=0)
    tl.store(own + at, tl.where(there & (page == 0), -1, found), mask=inside)
