"""Sorts the (token, expert) pairs by expert on the device: a counting sort without atomics in memory.

The pairs of an expert keep their order. They are cut into tiles of at most ROWS pairs of one expert; tile i is
described by four int32 at `table + 4 * (i + 1)`: expert, first sorted pair, pairs. At `table` stand the number of
tiles, how many of them come before those that `hopper` is to spread among the others, and its two counters, 0. Ids that
are no expert's belong to no tile.

Of few tokens `sort_few` is the whole sort; of others it is `place`, and before it `count` where one program does not
look at all pairs.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_INTS = ["pairs", "length", "segments", "settled"]


@triton.jit
def _load(ids, at, end, EXPERTS: tl.constexpr):
    """Ids of the pairs `at`, int32, -1 for those that are no expert's or lie past `end`."""
    id = tl.load(ids + at, mask=at < end, other=-1, cache_modifier=".cg")
    return tl.where((id >= 0) & (id < EXPERTS), id, -1).to(tl.int32)


@triton.jit
def _put(id, expert, sorted_out, here, pair):
    """Write the expert's pairs among `pair` from place `here` on; the place behind them."""
    mine = (id == expert).to(tl.int32)
    tl.store(sorted_out + here + tl.cumsum(mine, 0) - 1, pair, mask=mine > 0)
    return here + tl.sum(mine, 0)


@triton.jit(do_not_specialize=_INTS)
def count(
    ids,
    counts,
    pairs,
    length,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    SPAN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program s counts the pairs of every expert in segment s, which has `length` pairs, into row s of `counts`."""
    segment = tl.program_id(0)
    begin = segment * length
    end = tl.minimum(begin + length, pairs)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    for at in range(begin, end, SPAN):
        id = _load(ids, at + tl.arange(0, SPAN), end, EXPERTS)
        total += tl.histogram(tl.where(id >= 0, id, 0), BINS, mask=id >= 0)
    tl.store(counts + segment * EXPERTS + expert, total, mask=expert < EXPERTS)


@triton.jit(do_not_specialize=_INTS)
def place(
    ids,
    counts,
    sorted_out,
    table,
    pairs,
    length,
    segments,
    settled,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (x, s) puts the pairs of expert x in segment s at their places; s = 0 describes the expert's tiles.

    The tiles of expert `settled` and of those behind it are to be spread (EXPERTS: of none). A single segment of at
    most SPAN pairs is counted here; `counts` then is not read.
    """
    expert = tl.program_id(0)
    segment = tl.program_id(1)
    begin = segment * length
    end = tl.minimum(begin + length, pairs)
    x = tl.arange(0, BINS)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    if SEGMENTS == 1:
        id = _load(ids, tl.arange(0, SPAN), end, EXPERTS)
        total = tl.histogram(tl.where(id >= 0, id, 0), BINS, mask=id >= 0)
        earlier = 0
    else:
        s = tl.arange(0, SEGMENTS)
        at = s[:, None] * EXPERTS + x[None, :]
        part = tl.load(
            counts + at, mask=(s < segments)[:, None] & (x < EXPERTS)[None, :], other=0, cache_modifier=".cg"
        )
        total = tl.sum(part, 0)
        earlier = tl.sum(tl.where((s < segment)[:, None] & (x == expert)[None, :], part, 0))
    first = tl.sum(tl.where(x < expert, total, 0), 0)

    here = first + earlier
    if SEGMENTS == 1:
        _put(id, expert, sorted_out, here, tl.arange(0, SPAN))
    else:
        for at in range(begin, end, SPAN):
            pair = at + tl.arange(0, SPAN)
            here = _put(_load(ids, pair, end, EXPERTS), expert, sorted_out, here, pair)

    if segment == 0:
        tiles = (total + ROWS - 1) // ROWS
        tile = tl.sum(tl.where(x < expert, tiles, 0), 0)
        own = tl.sum(tl.where(x == expert, total, 0), 0)
        for done in range(0, own, ROWS * 32):
            row = done + tl.arange(0, 32) * ROWS
            record = table + 4 * (tile + row // ROWS + 1)
            tl.store(record, expert, mask=row < own)
            tl.store(record + 1, first + row, mask=row < own)
            tl.store(record + 2, tl.minimum(own - row, ROWS), mask=row < own)
        if expert == 0:
            tl.store(table, tl.sum(tiles, 0))
            tl.store(table + 1, tl.sum(tl.where(x < settled, tiles, 0), 0))
            tl.store(table + 2, 0)
            tl.store(table + 3, 0)


@triton.jit(do_not_specialize=["tokens", "shift", "settled"])
def sort_few(
    ids,
    sorted_out,
    table,
    tokens,
    shift,
    settled,
    EXPERTS: tl.constexpr,
    SHARED: tl.constexpr,
    COLUMNS: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Programs (x, 0) put the pairs of expert x at their places, programs (x, 1) describe its tiles: each looks at all
    choices of at most TOKENS tokens, none of which chooses an expert twice. Tiles are of 2**shift pairs, at least 2:
    not compiled in, so that one kernel serves all numbers of tokens up to a power of two. `settled`: as of `place`."""
    expert = tl.program_id(0)
    t = tl.arange(0, TOKENS)
    c = tl.arange(0, COLUMN_BLOCK)
    pair = t[:, None] * COLUMNS + c[None, :]
    exists = (t < tokens)[:, None] & (c < COLUMNS)[None, :]
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    id = tl.load(ids + pair, mask=exists, other=-1, cache_modifier=".cg").to(tl.uint64)
    id = tl.where(id < EXPERTS, id.to(tl.int32), -1)
    if tl.program_id(1) == 0:
        first = tl.sum(((id >= 0) & (id < expert)).to(tl.int32))
        found = tl.sum(tl.where(id == expert, (c[None, :] << 1) | 1, 0), 1)
        has = found & 1
        tl.store(sorted_out + first + tl.cumsum(has, 0) - 1, t * COLUMNS + (found >> 1), mask=has > 0)
    else:
        _describe(id, expert, table, shift, settled, EXPERTS, SHARED, WORDS, TOKENS)


@triton.jit
def _describe(
    id,
    expert,
    table,
    shift,
    settled,
    EXPERTS: tl.constexpr,
    SHARED: tl.constexpr,
    WORDS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Write the expert's records.

    A token's choices become WORDS words of a bit per expert. Counters are a byte, four in a word, and take every eighth
    bit; a byte holds the sum over 128 tokens, and half a word that over all. The last SHARED experts, which would take
    a power of two of words to themselves, are counted one by one by the programs that need it.
    """
    ROUTED: tl.constexpr = EXPERTS - SHARED
    PART: tl.constexpr = min(TOKENS, 128)
    rows = 1 << shift
    lower = tl.minimum(expert, ROUTED)
    routed = tl.where(expert < ROUTED, expert, -1)
    counter = tl.arange(0, 8 * WORDS)
    chosen = tl.zeros([TOKENS, 8 * WORDS], tl.int32)
    bit = 1 << (id & 31)
    for word in tl.static_range(WORDS):
        bits = tl.reduce_or(tl.where(id >> 5 == word, bit, 0), 1)
        chosen = tl.where((counter // 8 == word)[None, :], bits[:, None], chosen)
    ones = (chosen >> (counter % 8)[None, :]) & 0x01010101
    counted = tl.sum(tl.reshape(ones, [TOKENS // PART, PART, 8 * WORDS]), 1)
    first = tl.zeros([8 * WORDS], tl.int32)
    tile = tl.zeros([8 * WORDS], tl.int32)
    own = tl.zeros([8 * WORDS], tl.int32)
    for odd in tl.static_range(2):
        low = counter // 8 * 32 + odd * 8 + counter % 8
        high = low + 16
        before = tl.where(low < lower, 0xFFFF, 0) | tl.where(high < lower, -0x10000, 0)
        this = tl.where(low == routed, 0xFFFF, 0) | tl.where(high == routed, -0x10000, 0)
        total = tl.sum((counted >> (8 * odd)) & 0xFF00FF, 0)
        tiles = ((total + (rows - 1) * 0x10001) >> shift) & ((0xFFFF >> shift) * 0x10001)
        first += total & before
        tile += tiles & before
        own += total & this
    first = tl.sum(first, 0)
    tile = tl.sum(tile, 0)
    own = tl.sum(own, 0)
    first = (first & 0xFFFF) + (first >> 16)
    tile = (tile & 0xFFFF) + (tile >> 16)
    own = (own & 0xFFFF) + (own >> 16)
    for x in range(ROUTED, expert + 1):
        first += own
        tile += (own + rows - 1) >> shift
        own = tl.sum((id == x).to(tl.int32))

    index = tl.arange(0, TOKENS // 2)
    row = index << shift
    record = table + 4 * (tile + index + 1)
    tl.store(record, expert, mask=row < own)
    tl.store(record + 1, first + row, mask=row < own)
    tl.store(record + 2, tl.minimum(own - row, rows), mask=row < own)
    behind = tile + ((own + rows - 1) >> shift)
    if expert == settled - 1:
        tl.store(table + 1, behind)
    if expert == EXPERTS - 1:
        tl.store(table, behind)
        tl.store(table + 2, 0)
        tl.store(table + 3, 0)
