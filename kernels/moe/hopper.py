"""The experts' products on Hopper for many tokens: tiles of 128 pairs by two blocks of WIDTH weight rows, on wgmma.

A call's work items (tile, block of features) are dealt out to a fixed number of programs: one each, and whenever a
program is about to end one it claims the next from a counter, so that nobody waits for the slowest and items that share
weights or inputs in L2 are under way at the same time. In each program one partition fetches and two multiply. The
fetching one claims items and fills a ring of stages, each of 64 input features of the tile's pairs and of the two
blocks of weights, and runs ahead into the next item. The multiplying ones are four warps of 64 pairs each; a tile of
at most 64 pairs costs only one of them products. Neither waits for the other, only for the ring: while one stores its
results, the other has the tensor cores.

The two blocks are WIDTH rows of gate and the same of up, or neighbours of `down`: one wgmma multiplies with both, and
both results of a gate and its up lie in one thread.

`gate_up` gathers the tokens of its pairs with cp.async, by four warps: writing the inputs in sorted order first, for
the copy engine, would write and read 4 KB per pair more, a twentieth of all the time; `down` finds them sorted.
cp.async belongs to another proxy than wgmma: the fetching threads wait for their copies, STAGES - 2 stages behind,
fence, and only then report a stage as full. Weights always come through the copy engine.

Memory rules as in `kernel`: rows become int64 before they are multiplied (the copy engine's coordinates are rows); rows
past a tile's pairs are zero or other pairs' and never stored; the table of tiles is read on the device. Which program
computes an item changes nothing of the result.

No deadlock: the fetching partition announces every item before its first stage, and for each of an item's steps it
fills a stage once and either multiplying one hands it back once, whether it has pairs or not. They hold at most the
stage they multiply and the one before it, so STAGES - 2 more can always be filled, and that many after it a stage is
reported full; the last ones at the end. An announcement's slot is written again STAGES + 1 items later: as an item has
at least one stage, the item that stood there has been handed back, so it has been read.

On one H200 these are faster than Triton's by about a tenth at 1024 tokens of DeepSeek-V2-Lite and more, slower by 5
hundredths at 256 (bench/moe.py prints both side by side): `schedule.tiling` takes them in place of Triton's tallest
tiles.

Written for Triton 3.6: a stage's halves are views that only a private part of Gluon makes. `kernels.moe` asks whether
it is there before it chooses these kernels.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.linear.hopper import STEP, TILED

ROWS = gl.constexpr(128)
"""Pairs of a tile."""
HALF_TILE = gl.constexpr(64)
"""Pairs of a multiplying partition."""
LEAD = gl.constexpr(8)
"""Stages before the end of an item at which a program claims its next item."""


@gluon.jit
def _spread_before(item, spread, tiles):
    """Return the number of items before `item` that are among the tiles to spread."""
    return (item.to(gl.int64) * spread // gl.maximum(tiles, 1)).to(gl.int32)


@gluon.jit
def work_item(table, tiles, settled, item, BLOCKS: gl.constexpr, GROUP: gl.constexpr):
    """(expert, first pair, pairs, block) of a work item; past the last, block -1.

    Items go through the blocks of GROUP tiles at a time, tile by tile within a block, so that what runs together shares
    weights and inputs in L2. Those of the tiles behind the first `settled` have such an order of their own, and are
    spread evenly among the others.
    """
    exists = item < tiles * BLOCKS
    spread = tiles - settled
    before = _spread_before(item, spread, tiles)
    is_spread = _spread_before(item + 1, spread, tiles) > before
    index = gl.where(is_spread, before, item - before)
    begin = index // (GROUP * BLOCKS) * GROUP
    size = gl.maximum(gl.minimum(gl.where(is_spread, spread, settled) - begin, GROUP), 1)
    place = index % (GROUP * BLOCKS)
    record = table + 4 * (gl.where(is_spread, settled, 0) + begin + place % size + 1)
    expert = gl.load(record, mask=exists, other=0)
    first = gl.load(record + 1, mask=exists, other=0)
    pairs = gl.load(record + 2, mask=exists, other=0)
    return expert, first, pairs, gl.where(exists, place // size, -1)


@gluon.jit
def claim(counter, items):
    """The program's next item. Every item brings one claim, and the last of all puts the counter back to 0."""
    claimed = gl.atomic_add(counter, 1, sem="relaxed")
    if claimed == items - 1:
        gl.store(counter, 0)
    return claimed + gl.num_programs(0)


@gluon.jit
def announce(expert, first, pairs, block, work_s, announced, turn, SLOTS: gl.constexpr, LAYOUT: gl.constexpr):
    """Tell the multiplying partitions the program's item number `turn`."""
    slot = turn % SLOTS
    i = gl.arange(0, 4, LAYOUT)
    work_s.index(slot).store(gl.where(i == 0, first, gl.where(i == 1, pairs, gl.where(i == 2, block, expert))))
    gl.thread_barrier()
    mbarrier.arrive(announced.index(slot), count=1)


@gluon.jit
def announcement(work_s, announced, turn, SLOTS: gl.constexpr, LAYOUT: gl.constexpr):
    """(first pair, pairs, block) of the program's item number `turn`."""
    slot = turn % SLOTS
    mbarrier.wait(announced.index(slot), turn // SLOTS & 1)
    i = gl.arange(0, 4, LAYOUT)
    work = work_s.index(slot).load(LAYOUT)
    first = gl.sum(gl.where(i == 0, work, 0), 0)
    pairs = gl.sum(gl.where(i == 1, work, 0), 0)
    block = gl.sum(gl.where(i == 2, work, 0), 0)
    return first, pairs, block


@gluon.jit
def block_start(block, FEATURES: gl.constexpr, BLOCK: gl.constexpr):
    """First feature of a block. The last is moved back into the matrix: it computes some features that its neighbour
    computes as well."""
    return gl.multiple_of(gl.minimum(block * BLOCK, FEATURES - BLOCK), 16)


@gluon.jit
def fetch_weights(
    weight_box, expert, block, k, bar, b_s, stage, GATE: gl.constexpr, FEATURES: gl.constexpr, WIDTH: gl.constexpr
):
    """Start copying a stage's two blocks of weights."""
    if GATE:
        row = expert * (2 * FEATURES) + block_start(block, FEATURES, WIDTH)
        second = row + FEATURES
    else:
        row = expert * FEATURES + block_start(block, FEATURES, 2 * WIDTH)
        second = row + WIDTH
    tma.async_copy_global_to_shared(weight_box, [row, k], bar, b_s.index(2 * stage))
    tma.async_copy_global_to_shared(weight_box, [second, k], bar, b_s.index(2 * stage + 1))


@gluon.jit
def fetch_sorted(
    act_box, weight_box, table, a_s, b_s, work_s, full, empty, announced,
    K: gl.constexpr, FEATURES: gl.constexpr, WIDTH: gl.constexpr, BLOCKS: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, CLAIMED: gl.constexpr = True,
):  # fmt: skip
    """The fetching partition of `down`: everything through the copy engine, a tile's pairs in halves, for whom they are
    meant. CLAIMED: the program claims its next item; otherwise it takes every so many-th, and need not ask for it: of
    items that are short and equal that is the faster."""
    words: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    STEP: gl.constexpr = weight_box.block_type.shape[1]
    steps: gl.constexpr = (K + STEP - 1) // STEP
    claimed_at: gl.constexpr = max(steps - LEAD, 0)
    tiles = gl.load(table)
    settled = gl.load(table + 1)
    step = 0
    turn = 0
    item = gl.program_id(0)
    expert, first, pairs, block = work_item(table, tiles, settled, item, BLOCKS, GROUP)
    next_expert = expert
    next_first = first
    next_pairs = pairs
    next_block = block
    while block >= 0:
        announce(expert, first, pairs, block, work_s, announced, turn, STAGES + 1, words)
        turn += 1
        both = pairs > HALF_TILE
        for i in range(steps):
            stage = step % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(bar, 2 * weight_box.block_type.nbytes + 2 * act_box.block_type.nbytes, pred=both)
            mbarrier.expect(bar, 2 * weight_box.block_type.nbytes + act_box.block_type.nbytes, pred=pairs <= HALF_TILE)
            tma.async_copy_global_to_shared(act_box, [first, i * STEP], bar, a_s.index(2 * stage))
            tma.async_copy_global_to_shared(
                act_box, [first + HALF_TILE, i * STEP], bar, a_s.index(2 * stage + 1), pred=both
            )
            fetch_weights(weight_box, expert, block, i * STEP, bar, b_s, stage, False, FEATURES, WIDTH)
            step += 1
            if i == claimed_at:
                if CLAIMED:
                    item = claim(table + 3, tiles * BLOCKS)
                else:
                    item += gl.num_programs(0)
            if i == (min(claimed_at + 1, steps - 1) if CLAIMED else claimed_at):
                next_expert, next_first, next_pairs, next_block = work_item(table, tiles, settled, item, BLOCKS, GROUP)
        expert = next_expert
        first = next_first
        pairs = next_pairs
        block = next_block
    announce(expert, first, pairs, block, work_s, announced, turn, STAGES + 1, words)


@gluon.jit
def report_full(full, step, STAGES: gl.constexpr, OUTSTANDING: gl.constexpr):
    """Report that `step` is there, once all but the last OUTSTANDING stages' own copies are."""
    async_copy.wait_group(OUTSTANDING)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(full.index(step % STAGES), count=1)


@gluon.jit
def fetch_gathered(
    x, weight_box, sorted_pair, table, a_s, b_s, work_s, full, empty, announced,
    X_STRIDE: gl.constexpr, COLUMNS: gl.constexpr,
    K: gl.constexpr, FEATURES: gl.constexpr, WIDTH: gl.constexpr, BLOCKS: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The fetching partition of `gate_up`: four warps that copy the tokens of a tile's pairs 16 bytes per thread."""
    STEP: gl.constexpr = weight_box.block_type.shape[1]
    lanes: gl.constexpr = gl.BlockedLayout([1, STEP // 8], [4, 8], [4, 1], [1, 0])
    words: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    m = gl.arange(0, ROWS, gl.SliceLayout(1, lanes))
    column = gl.arange(0, STEP, gl.SliceLayout(0, lanes))
    lag: gl.constexpr = STAGES - 2
    steps: gl.constexpr = (K + STEP - 1) // STEP
    claimed_at: gl.constexpr = max(steps - LEAD, 0)
    tiles = gl.load(table)
    settled = gl.load(table + 1)
    step = 0
    turn = 0
    item = gl.program_id(0)
    expert, first, pairs, block = work_item(table, tiles, settled, item, BLOCKS, GROUP)
    pair = gl.load(sorted_pair + first + m, mask=m < pairs, other=0)
    next_expert = expert
    next_first = first
    next_pairs = pairs
    next_block = block
    next_pair = pair
    while block >= 0:
        announce(expert, first, pairs, block, work_s, announced, turn, STAGES + 1, words)
        turn += 1
        source = x + (pair // COLUMNS).to(gl.int64)[:, None] * X_STRIDE + column[None, :]
        for i in range(steps):
            stage = step % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(bar, 2 * weight_box.block_type.nbytes)
            fetch_weights(weight_box, expert, block, i * STEP, bar, b_s, stage, True, FEATURES, WIDTH)
            inside = (m < pairs)[:, None]
            if K % STEP != 0:
                inside = inside & (i * STEP + column < K)[None, :]
            async_copy.async_copy_global_to_shared(
                a_s.index(stage), source + i * STEP, mask=inside, cache_modifier=".cg"
            )
            async_copy.commit_group()
            if step >= lag:
                report_full(full, step - lag, STAGES, lag)
            step += 1
            if i == claimed_at:
                item = claim(table + 2, tiles * BLOCKS)
            if i == min(claimed_at + 1, steps - 1):
                next_expert, next_first, next_pairs, next_block = work_item(table, tiles, settled, item, BLOCKS, GROUP)
            if i == min(claimed_at + 3, steps - 1):
                next_pair = gl.load(sorted_pair + next_first + m, mask=m < next_pairs, other=0)
        expert = next_expert
        first = next_first
        pairs = next_pairs
        block = next_block
        pair = next_pair
    announce(expert, first, pairs, block, work_s, announced, turn, STAGES + 1, words)
    for behind in gl.static_range(lag):
        if step >= lag - behind:
            report_full(full, step - lag + behind, STAGES, lag - 1 - behind)


@gluon.jit
def store_rows(value, target, row, column, inside, STRIDE: gl.constexpr):
    """Write results row by row, 16 bytes per thread."""
    pointer = target + row.to(gl.int64)[:, None] * STRIDE + column[None, :]
    gl.store(pointer, value, mask=inside[:, None])


@gluon.jit
def clamped(gate, up, LIMIT: gl.constexpr):
    """Clamp as `activation.clamped` does."""
    gate = gl.where(gate > LIMIT, LIMIT, gate)
    up = gl.where(up > LIMIT, LIMIT, gl.where(up < -LIMIT, -LIMIT, up))
    return gate, up


@gluon.jit
def multiply(
    sorted_pair, out, a_s, b_s, work_s, full, empty, announced,
    WHICH: gl.constexpr, GATE: gl.constexpr, K: gl.constexpr, FEATURES: gl.constexpr, WIDTH: gl.constexpr,
    STAGES: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """A multiplying partition: the first 64 pairs of every tile, or the others."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 2 * WIDTH, 16]
    )
    lanes: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    steps: gl.constexpr = (K + STEP - 1) // STEP
    m = WHICH * HALF_TILE + gl.arange(0, HALF_TILE, gl.SliceLayout(1, lanes))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, lanes))
    words: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    step = 0
    turn = 0
    first, pairs, block = announcement(work_s, announced, turn, STAGES + 1, words)
    while block >= 0:
        if pairs > WHICH * HALF_TILE:
            row = first + m
            if not GATE:
                row = gl.load(sorted_pair + row, mask=m < pairs, other=0)
            sums = gl.zeros([HALF_TILE, 2 * WIDTH], gl.float32, layout)
            for i in range(steps):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), step // STAGES & 1)
                sums = warpgroup_mma(
                    a_s.index(2 * stage + WHICH), b_s.index(stage).permute((1, 0)), sums, is_async=True
                )
                sums = warpgroup_mma_wait(1, deps=(sums,))
                gl.thread_barrier()
                mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=i > 0)
                step += 1
            sums = warpgroup_mma_wait(0, deps=(sums,))
            gl.thread_barrier()
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
            left, right = sums.reshape([HALF_TILE, 2, WIDTH]).permute((0, 2, 1)).split()
            if GATE:
                if LIMIT > 0:
                    left, right = clamped(left, right, LIMIT)
                value = left * (1 / (1 + gl.exp(-left))) * right
                value = gl.convert_layout(value.to(out.dtype.element_ty), lanes)
                store_rows(value, out, row, block_start(block, FEATURES, WIDTH) + column, m < pairs, FEATURES)
            else:
                feature = block_start(block, FEATURES, 2 * WIDTH) + column
                value = gl.convert_layout(left.to(out.dtype.element_ty), lanes)
                store_rows(value, out, row, feature, m < pairs, FEATURES)
                value = gl.convert_layout(right.to(out.dtype.element_ty), lanes)
                store_rows(value, out, row, feature + WIDTH, m < pairs, FEATURES)
        else:
            for _i in range(steps):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), step // STAGES & 1)
                mbarrier.arrive(empty.index(stage), count=1)
                step += 1
        turn += 1
        first, pairs, block = announcement(work_s, announced, turn, STAGES + 1, words)


@gluon.jit
def product(
    x, act_box, weight_box, sorted_pair, table, out,
    GATE: gl.constexpr, X_STRIDE: gl.constexpr, COLUMNS: gl.constexpr, K: gl.constexpr, FEATURES: gl.constexpr,
    WIDTH: gl.constexpr, BLOCKS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """`kernel.gate_up` of the tokens `x` (GATE), or `kernel.down` of `act_box`; four warps, the others come on top.

    `act_box` and `weight_box`: descriptors of the sorted pairs' inputs (boxes of 64 rows) and of the experts' rows,
    laid end to end (boxes of WIDTH rows). FEATURES: of the output (GATE: of gate, and as many of up). LIMIT: see
    `activation`.
    """
    dtype: gl.constexpr = weight_box.dtype
    a_s = gl.allocate_shared_memory(dtype, [STAGES, ROWS, STEP], TILED)
    b_s = gl.allocate_shared_memory(dtype, [2 * STAGES, WIDTH, STEP], TILED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    work_s = gl.allocate_shared_memory(gl.int32, [STAGES + 1, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    announced = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES + 1):
        mbarrier.init(announced.index(slot), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2 if GATE else 1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.thread_barrier()
    a_half_tiles = a_s._reinterpret(dtype, [2 * STAGES, HALF_TILE, STEP], TILED)
    b_pairs = b_s._reinterpret(dtype, [STAGES, 2 * WIDTH, STEP], TILED)
    # The tuples stand in the calls: in a variable their constants would become run-time values.
    if GATE:
        gl.warp_specialize(
            [
                (multiply, (sorted_pair, out, a_half_tiles, b_pairs, work_s, full, empty, announced,
                            0, GATE, K, FEATURES, WIDTH, STAGES, LIMIT)),
                (multiply, (sorted_pair, out, a_half_tiles, b_pairs, work_s, full, empty, announced,
                            1, GATE, K, FEATURES, WIDTH, STAGES, LIMIT)),
                (fetch_gathered, (x, weight_box, sorted_pair, table, a_s, b_s, work_s, full, empty, announced,
                                  X_STRIDE, COLUMNS, K, FEATURES, WIDTH, BLOCKS, GROUP, STAGES)),
            ],
            [4, 4],
            [224, 64],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply, (sorted_pair, out, a_half_tiles, b_pairs, work_s, full, empty, announced,
                            0, GATE, K, FEATURES, WIDTH, STAGES, LIMIT)),
                (multiply, (sorted_pair, out, a_half_tiles, b_pairs, work_s, full, empty, announced,
                            1, GATE, K, FEATURES, WIDTH, STAGES, LIMIT)),
                (fetch_sorted, (act_box, weight_box, table, a_half_tiles, b_s, work_s, full, empty, announced,
                                K, FEATURES, WIDTH, BLOCKS, GROUP, STAGES)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
