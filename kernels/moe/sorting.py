"""Sorts the (token, expert) pairs by expert on the device: a counting sort without atomics.

The pairs of an expert keep their order. They are cut into tiles of at most ROWS pairs of one expert; tile i is
described by four int32 at `table + 4 * (i + 1)`: expert, first sorted pair, pairs. The number of tiles stands at
`table`. Ids that are no expert's belong to no tile.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_INTS = ["pairs", "length", "segments"]


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
        gdc_wait()
        gdc_launch_dependents()
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
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (x, s) puts the pairs of expert x in segment s at their places; s = 0 describes the expert's tiles.

    A single segment of at most SPAN pairs is counted here; `counts` then is not read.
    """
    expert = tl.program_id(0)
    segment = tl.program_id(1)
    begin = segment * length
    end = tl.minimum(begin + length, pairs)
    x = tl.arange(0, BINS)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
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
