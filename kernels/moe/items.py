"""The skeleton of grouped GEMM on Hopper, whatever weights and inputs are stored as: how programs find their work, and
how a program's partitions pass it on.

A call's work items (tile, block of features) are dealt out to a fixed number of programs: one each, and whenever a
program is about to end one it claims the next from a counter. One partition of a program claims items and announces
them to the others, and each goes through them on its own:

    item = announcement(pipe, 0)
    turn = 0
    while item.block >= 0:
        ...  # or `pass_by`, where it has nothing to do
        turn += 1
        item = announcement(pipe, turn)

`hopper`, `w8a8`, `w4a8` and `four_bit_grouped` say what a stage holds, who fills it and how it is multiplied.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


class Item(NamedTuple):
    """A work item, or of a number past the last one nothing but `block`."""

    expert: Any
    first: Any
    """The tile's first pair."""
    pairs: Any
    block: Any
    """Its block of features; past the last item -1."""


class Pipe(NamedTuple):
    """Shared memory by which a program's partitions pass on items, and mbarriers of its ring of stages."""

    work: Any
    """Announced items, int32 [slots, 4]."""
    announced: Any
    """[slots, 1]."""
    full: Any
    """[stages, 1]."""
    empty: Any
    """[stages, 1]."""


@gluon.jit
def pipe_of(STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """Return a `Pipe`, ready but for a fence and a barrier behind it. Those who fill a stage arrive ARRIVALS times; two
    partitions hand it back."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    work = gl.allocate_shared_memory(gl.int32, [STAGES + 1, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    announced = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES + 1):
        mbarrier.init(announced.index(slot), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=ARRIVALS)
        mbarrier.init(empty.index(stage), count=2)
    return Pipe(work=work, announced=announced, full=full, empty=empty)


@gluon.jit
def _spread_before(item, spread, tiles):
    """Return the number of items before `item` that are among the tiles to spread."""
    return (item.to(gl.int64) * spread // gl.maximum(tiles, 1)).to(gl.int32)


@gluon.jit
def work_item(
    table, tiles, settled, number, BLOCKS: gl.constexpr, GROUP: gl.constexpr, DEPENDENT: gl.constexpr = False
):
    """Return the `Item` of a number. A dependent launch may find lines of an earlier table in L1, and reads past it.

    Items go through the blocks of GROUP tiles at a time, tile by tile within a block, so that what runs together shares
    weights and inputs in L2. Those of the tiles behind the first `settled` have such an order of their own, and are
    spread evenly among the others.
    """
    CACHE: gl.constexpr = ".cg" if DEPENDENT else ""
    exists = number < tiles * BLOCKS
    spread = tiles - settled
    before = _spread_before(number, spread, tiles)
    is_spread = _spread_before(number + 1, spread, tiles) > before
    index = gl.where(is_spread, before, number - before)
    begin = index // (GROUP * BLOCKS) * GROUP
    size = gl.maximum(gl.minimum(gl.where(is_spread, spread, settled) - begin, GROUP), 1)
    place = index % (GROUP * BLOCKS)
    record = table + 4 * (gl.where(is_spread, settled, 0) + begin + place % size + 1)
    expert = gl.load(record, mask=exists, other=0, cache_modifier=CACHE)
    first = gl.load(record + 1, mask=exists, other=0, cache_modifier=CACHE)
    pairs = gl.load(record + 2, mask=exists, other=0, cache_modifier=CACHE)
    return Item(expert=expert, first=first, pairs=pairs, block=gl.where(exists, place // size, -1))


@gluon.jit
def claim(counter, items):
    """The program's next item. Every item brings one claim, and the last of all puts the counter back to 0."""
    claimed = gl.atomic_add(counter, 1, sem="relaxed")
    if claimed == items - 1:
        gl.store(counter, 0)
    return claimed + gl.num_programs(0)


@gluon.constexpr_function
def words_layout(warps):
    """Layout of an announced item: every thread has all of it."""
    return gl.BlockedLayout([4], [32], [warps], [0])


@gluon.jit
def announce(item, pipe, turn):
    """Tell the other partitions the program's item number `turn`."""
    SLOTS: gl.constexpr = pipe.announced.shape[0]
    slot = turn % SLOTS
    i = gl.arange(0, 4, words_layout(gl.num_warps()))
    rest = gl.where(i == 1, item.pairs, gl.where(i == 2, item.block, item.expert))
    pipe.work.index(slot).store(gl.where(i == 0, item.first, rest))
    gl.thread_barrier()
    mbarrier.arrive(pipe.announced.index(slot), count=1)


@gluon.jit
def announced_item(pipe, turn):
    """Return the program's item number `turn`, whose announcement was waited for."""
    SLOTS: gl.constexpr = pipe.announced.shape[0]
    LAYOUT: gl.constexpr = words_layout(gl.num_warps())
    i = gl.arange(0, 4, LAYOUT)
    work = pipe.work.index(turn % SLOTS).load(LAYOUT)
    first = gl.sum(gl.where(i == 0, work, 0), 0)
    pairs = gl.sum(gl.where(i == 1, work, 0), 0)
    block = gl.sum(gl.where(i == 2, work, 0), 0)
    expert = gl.sum(gl.where(i == 3, work, 0), 0)
    return Item(expert=expert, first=first, pairs=pairs, block=block)


@gluon.jit
def announcement(pipe, turn):
    """Wait for the program's item number `turn`, and return it."""
    SLOTS: gl.constexpr = pipe.announced.shape[0]
    mbarrier.wait(pipe.announced.index(turn % SLOTS), turn // SLOTS & 1)
    return announced_item(pipe, turn)


@gluon.jit
def pass_by(pipe, step, COUNT: gl.constexpr):
    """Hand back COUNT stages from `step` on without having read them, as a partition does whose pairs a tile lacks.
    Returns the step behind them."""
    STAGES: gl.constexpr = pipe.full.shape[0]
    for _i in range(COUNT):
        stage = step % STAGES
        mbarrier.wait(pipe.full.index(stage), step // STAGES & 1)
        mbarrier.arrive(pipe.empty.index(stage), count=1)
        step += 1
    return step
