"""The skeleton of split-KV attention on Hopper, whatever entries are stored as: which part of which row a CTA takes,
which entries of it are attended to, and where results go.

`narrow`, `wide`, `wide_fp8` and `fp8` are loops over the same `Work`, which the tile scheduler's metadata describe
(`kernel.schedule_splits`). Every group of warps goes through it on its own, and so needs no message from another:

    work = first_work(share, ".cg")
    while work.left > 0:
        part = part_of(work, share, unit, row_cost, invariant, ".cg")
        if part.stop > part.start:
            ...  # tiles part.start to part.stop of the row
        work = work_behind(work, part)

What they do with a tile depends on its format, and on how groups share it out: that is in the files of each.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: SIM102 (a condition on compile-time constants must stay apart from one on run-time values)

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.gluon.dependent import wait_for_kernel_before
from kernels.mla_decode.records import Share
from kernels.mla_decode.schedule import CTA_FIELDS, ROW_FIELDS
from kernels.strands import FINE_ROUNDS

TILE = gl.constexpr(64)
"""Cache tokens of a tile on wgmma: a page."""
LN2 = gl.constexpr(0.6931471805599453)
CTA = gl.constexpr(CTA_FIELDS)
_ROW = gl.constexpr(ROW_FIELDS)
_FINE_ROUNDS = gl.constexpr(FINE_ROUNDS)


class Work(NamedTuple):
    """What is left of a CTA's share."""

    row: Any
    at: Any
    """KV blocks of the row, with what its start is counted as, that come before."""
    left: Any
    """KV blocks, with what the starts of rows are counted as."""


class Part(NamedTuple):
    """What a CTA takes of one row."""

    tokens: Any
    """Of the row."""
    take: Any
    """KV blocks, with what the start of the row is counted as."""
    begin: Any
    end: Any
    """The row's KV blocks that are taken."""
    units: Any
    """The row's KV blocks."""
    start: Any
    stop: Any
    """The row's tiles that are taken."""
    done: Any
    """Whether nothing of the row is left."""


@gluon.jit
def share_of(
    length, seen, out, lse, partial, partial_lse, metadata, scale, first, queries, drafts, heads, ctas, blocks
):  # fmt: skip
    """The `Share` of a program: a CTA has as many programs as a row has blocks of query vectors."""
    return Share(
        length=length,
        seen=seen,
        out=out,
        lse=lse,
        partial=partial,
        partial_lse=partial_lse,
        metadata=metadata,
        scale=scale,
        first=first,
        queries=queries,
        drafts=drafts,
        heads=heads,
        ctas=ctas,
        cta=gl.program_id(0) // blocks,
        block=gl.program_id(0) % blocks,
    )


@gluon.jit
def first_work(share, CACHE: gl.constexpr):
    """Return the `Work` of a CTA's whole share, loaded with the cache modifier CACHE."""
    record = share.metadata + share.cta * CTA
    row = gl.load(record, cache_modifier=CACHE)
    at = gl.load(record + 1, cache_modifier=CACHE)
    left = gl.load(record + 2, cache_modifier=CACHE)
    return Work(row=row, at=at, left=left)


@gluon.jit
def first_work_to_fetch(share, EARLY: gl.constexpr):
    """`first_work` of warps that fetch. EARLY: they wait for the kernel before where they need to, or here if they have
    nothing to fetch."""
    work = first_work(share, "")
    if EARLY:
        if work.left <= 0:
            wait_for_kernel_before()
    return work


@gluon.jit
def part_of(work, share, unit, row_cost, invariant, CACHE: gl.constexpr):
    """Return the `Part` that a CTA takes of the row that `work` begins with. Constants: see `Split`."""
    tokens = gl.load(share.length + work.row, cache_modifier=CACHE)
    return part_of_row(tokens, work.at, work.left, share.first, unit, row_cost, invariant, TILE)


@gluon.jit
def part_of_row(tokens, at, left, first, unit, row_cost, invariant, TOKENS: gl.constexpr):
    """Return the `Part` of a row of `tokens`, in tiles of TOKENS, whose entries before `first` nobody attends to."""
    lowest = first // unit
    units = gl.where(tokens > first, (tokens + unit - 1) // unit - lowest, 0)
    span = gl.where(units > 0, units + row_cost, 0)
    take = gl.minimum(left, span - at)
    if invariant:
        block = lowest + at
        others = gl.where(block < invariant, 0, gl.where(block < _FINE_ROUNDS * invariant, 1, 3))
        take = gl.minimum(take, (block | others) + 1 - block)
    begin = gl.maximum(at - row_cost, 0)
    end = at + take - row_cost
    start = (lowest + begin) * unit // TOKENS
    stop = (gl.minimum((lowest + end) * unit, tokens) + TOKENS - 1) // TOKENS
    stop = gl.where(end > begin, stop, start)
    done = at + take >= span
    return Part(tokens=tokens, take=take, begin=begin, end=end, units=units, start=start, stop=stop, done=done)


@gluon.jit
def work_behind(work, part):
    """Return the `Work` that follows."""
    left = work.left - part.take
    at = gl.where(part.done, 0, work.at + part.take)
    return Work(row=gl.where(part.done, work.row + 1, work.row), at=at, left=left)


@gluon.jit
def first_entry(row, share, OWN: gl.constexpr):
    """Return the first entry of a row that is attended to. OWN: `Split.own`."""
    first = share.first
    if OWN:
        first = gl.load(share.seen + row.to(gl.int64) * (share.drafts + 2) + share.drafts + 1, cache_modifier=".cg")
    return first


@gluon.jit
def first_in_tile(row, low, share, OWN: gl.constexpr):
    """`first_entry`, as far as it says what a tile begins with: a shard's own entries begin inside their first tile.
    Loaded for each tile, it takes no register."""
    first = share.first
    if OWN:
        at = share.seen + row.to(gl.int64) * (share.drafts + 2) + share.drafts + 1
        first = gl.load(at, mask=low == 0, other=0, cache_modifier=".cg")
    return first


@gluon.jit
def divisor_and_log(total, top):
    """What sums of values are divided by, and the logarithm to the base 2 of a sum of weights `total` whose maximum is
    `top`: without entries 1 and -inf."""
    divisor = gl.where(total > 0, total, 1.0)
    return divisor, gl.where(total > 0, top + gl.log2(divisor), float("-inf"))


@gluon.jit
def pieces_before(block, single):
    """Return the number of a row's pieces that begin before a KV block of it. `single`: `Split.invariant`."""
    pairs = gl.minimum(gl.maximum(block - single, 0), (_FINE_ROUNDS - 1) * single)
    fours = gl.maximum(block - _FINE_ROUNDS * single, 0)
    return gl.minimum(block, single) + (pairs + 1) // 2 + (fours + 3) // 4


@gluon.jit
def slot_of(row, begin, share, SPLIT: gl.constexpr):
    """Return the slot of a piece that begins with the row's KV block `begin`."""
    slot = gl.where(begin == 0, share.ctas + share.cta, share.cta)
    if SPLIT.invariant:
        lowest = share.first // SPLIT.unit
        piece = pieces_before(lowest + begin, SPLIT.invariant) - pieces_before(lowest, SPLIT.invariant)
        slot = gl.load(share.metadata + share.ctas * CTA + row * _ROW, cache_modifier=".cg") + piece
    return slot
