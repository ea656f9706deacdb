"""The experts' products on Hopper for many tokens: tiles of 128 pairs by two blocks of WIDTH weight rows, on wgmma.

A fixed number of programs take the work items (tile, block of features) of a call in turn. In each, one partition
fetches and two multiply. The fetching one fills a ring of stages, each of 64 input features of the tile's pairs and of
the two blocks of weights, and runs ahead into the next item. The multiplying ones are four warps of 64 pairs each; a
tile of at most 64 pairs costs only one of them products. Neither waits for the other, only for the ring: while one
stores its results, the other has the tensor cores.

The two blocks are WIDTH rows of gate and the same of up, or neighbours of `down`: one wgmma multiplies with both, and
both results of a gate and its up lie in one thread.

`gate_up` gathers the tokens of its pairs with cp.async, by four warps: writing the inputs in sorted order first, for
the copy engine, would write and read 4 KB a pair more, a twentieth of all the time; `down` finds them sorted.
cp.async belongs to another proxy than wgmma: the fetching threads wait for their copies, STAGES - 2 stages behind,
fence, and only then report a stage as full. Weights always come through the copy engine.

Memory rules as in `kernel`: rows become int64 before they are multiplied (the copy engine's coordinates are rows); rows
past a tile's pairs are zero or other pairs' and never stored; the table of tiles is read on the device.

No deadlock: all partitions walk the same items, and for each of an item's steps the fetching one fills a stage once and
either multiplying one hands it back once, whether it has pairs or not. They hold at most the stage they multiply and
the one before it, so STAGES - 2 more can always be filled, and that many after it a stage is reported full; the last
ones at the end.

On one H200 these are the faster ones by 1 to 5 hundredths at 1024 tokens of DeepSeek-V2-Lite and more, the slower ones
by 2 at 256 (bench/moe.py prints both side by side): `schedule.tiling` takes them in place of Triton's tallest tiles.
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
HALF = gl.constexpr(64)
"""Pairs of a multiplying partition."""


@gluon.jit
def work_item(table, tiles, item, BLOCKS: gl.constexpr, GROUP: gl.constexpr):
    """(expert, first pair, pairs, block) of a work item, no pairs past the last. Items go through the blocks of GROUP
    tiles at a time, tile by tile within a block, so that what runs together shares weights and inputs in L2."""
    begin = item // (GROUP * BLOCKS) * GROUP
    size = gl.maximum(gl.minimum(tiles - begin, GROUP), 1)
    place = item % (GROUP * BLOCKS)
    exists = item < tiles * BLOCKS
    record = table + 4 * (begin + place % size + 1)
    expert = gl.load(record, mask=exists, other=0)
    first = gl.load(record + 1, mask=exists, other=0)
    pairs = gl.load(record + 2, mask=exists, other=0)
    return expert, first, pairs, place // size


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
    act_box, weight_box, table, a_s, b_s, full, empty,
    K: gl.constexpr, FEATURES: gl.constexpr, WIDTH: gl.constexpr, BLOCKS: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The fetching partition of `down`: everything through the copy engine."""
    tiles = gl.load(table)
    step = 0
    item = gl.program_id(0)
    expert, first, _pairs, block = work_item(table, tiles, item, BLOCKS, GROUP)
    while item < tiles * BLOCKS:
        item += gl.num_programs(0)
        next_expert, next_first, _pairs, next_block = work_item(table, tiles, item, BLOCKS, GROUP)
        for k in range(0, K, STEP):
            stage = step % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(bar, 2 * weight_box.block_type.nbytes + act_box.block_type.nbytes)
            tma.async_copy_global_to_shared(act_box, [first, k], bar, a_s.index(stage))
            fetch_weights(weight_box, expert, block, k, bar, b_s, stage, False, FEATURES, WIDTH)
            step += 1
        expert = next_expert
        first = next_first
        block = next_block


@gluon.jit
def report_full(full, step, STAGES: gl.constexpr, OUTSTANDING: gl.constexpr):
    """Once all but the last OUTSTANDING stages' own copies are there: tell that `step` is."""
    async_copy.wait_group(OUTSTANDING)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(full.index(step % STAGES), count=1)


@gluon.jit
def fetch_gathered(
    x, weight_box, sorted_pair, table, a_s, b_s, full, empty,
    X_STRIDE: gl.constexpr, COLUMNS: gl.constexpr,
    K: gl.constexpr, FEATURES: gl.constexpr, WIDTH: gl.constexpr, BLOCKS: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The fetching partition of `gate_up`: four warps that copy the tokens of a tile's pairs 16 bytes a thread."""
    lanes: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    m = gl.arange(0, ROWS, gl.SliceLayout(1, lanes))
    column = gl.arange(0, STEP, gl.SliceLayout(0, lanes))
    lag: gl.constexpr = STAGES - 2
    tiles = gl.load(table)
    step = 0
    item = gl.program_id(0)
    # What the next item needs is under way during an item: its pairs, and the record of the one after.
    expert, first, pairs, block = work_item(table, tiles, item, BLOCKS, GROUP)
    pair = gl.load(sorted_pair + first + m, mask=m < pairs, other=0)
    next_expert, next_first, next_pairs, next_block = work_item(table, tiles, item + gl.num_programs(0), BLOCKS, GROUP)
    while item < tiles * BLOCKS:
        item += gl.num_programs(0)
        next_pair = gl.load(sorted_pair + next_first + m, mask=m < next_pairs, other=0)
        after_expert, after_first, after_pairs, after_block = work_item(
            table, tiles, item + gl.num_programs(0), BLOCKS, GROUP
        )
        source = x + (pair // COLUMNS).to(gl.int64)[:, None] * X_STRIDE + column[None, :]
        for k in range(0, K, STEP):
            stage = step % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(bar, 2 * weight_box.block_type.nbytes)
            fetch_weights(weight_box, expert, block, k, bar, b_s, stage, True, FEATURES, WIDTH)
            inside = (m < pairs)[:, None]
            if K % STEP != 0:
                inside = inside & (k + column < K)[None, :]
            async_copy.async_copy_global_to_shared(a_s.index(stage), source + k, mask=inside, cache_modifier=".cg")
            async_copy.commit_group()
            if step >= lag:
                report_full(full, step - lag, STAGES, lag)
            step += 1
        pair = next_pair
        expert = next_expert
        pairs = next_pairs
        block = next_block
        next_expert = after_expert
        next_first = after_first
        next_pairs = after_pairs
        next_block = after_block
    for behind in gl.static_range(lag):
        if step >= lag - behind:
            report_full(full, step - lag + behind, STAGES, lag - 1 - behind)


@gluon.jit
def store_rows(value, target, row, column, inside, STRIDE: gl.constexpr):
    """Write results row by row, 16 bytes a thread."""
    pointer = target + row.to(gl.int64)[:, None] * STRIDE + column[None, :]
    gl.store(pointer, value, mask=inside[:, None])


@gluon.jit
def multiply(
    sorted_pair, table, out, a_s, b_s, full, empty,
    WHICH: gl.constexpr, GATE: gl.constexpr, K: gl.constexpr, FEATURES: gl.constexpr, WIDTH: gl.constexpr,
    BLOCKS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A multiplying partition: the first 64 pairs of every tile, or the others."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 2 * WIDTH, 16]
    )
    lanes: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    steps: gl.constexpr = (K + STEP - 1) // STEP
    m = WHICH * HALF + gl.arange(0, HALF, gl.SliceLayout(1, lanes))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, lanes))
    tiles = gl.load(table)
    step = 0
    item = gl.program_id(0)
    _expert, first, pairs, block = work_item(table, tiles, item, BLOCKS, GROUP)
    while item < tiles * BLOCKS:
        item += gl.num_programs(0)
        _expert, next_first, next_pairs, next_block = work_item(table, tiles, item, BLOCKS, GROUP)
        if pairs > WHICH * HALF:
            row = first + m
            if not GATE:
                row = gl.load(sorted_pair + row, mask=m < pairs, other=0)
            sums = gl.zeros([HALF, 2 * WIDTH], gl.float32, layout)
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
            left, right = sums.reshape([HALF, 2, WIDTH]).permute((0, 2, 1)).split()
            if GATE:
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
        first = next_first
        pairs = next_pairs
        block = next_block


@gluon.jit
def product(
    x, act_box, weight_box, sorted_pair, table, out,
    GATE: gl.constexpr, X_STRIDE: gl.constexpr, COLUMNS: gl.constexpr, K: gl.constexpr, FEATURES: gl.constexpr,
    WIDTH: gl.constexpr, BLOCKS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`kernel.gate_up` of the tokens `x` (GATE), or `kernel.down` of `act_box`; four warps, the others come on top.

    `act_box` and `weight_box`: descriptors of the sorted pairs' inputs (boxes of 128 rows) and of the experts' rows,
    laid end to end (boxes of WIDTH rows). FEATURES: of the output (GATE: of gate, and as many of up).
    """
    dtype: gl.constexpr = weight_box.dtype
    a_s = gl.allocate_shared_memory(dtype, [STAGES, ROWS, STEP], TILED)
    b_s = gl.allocate_shared_memory(dtype, [2 * STAGES, WIDTH, STEP], TILED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2 if GATE else 1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.thread_barrier()
    a_halves = a_s._reinterpret(dtype, [2 * STAGES, HALF, STEP], TILED)
    b_pairs = b_s._reinterpret(dtype, [STAGES, 2 * WIDTH, STEP], TILED)
    # The tuples stand in the calls: in a variable their constants would become run-time values.
    if GATE:
        gl.warp_specialize(
            [
                (multiply, (sorted_pair, table, out, a_halves, b_pairs, full, empty,
                            0, GATE, K, FEATURES, WIDTH, BLOCKS, GROUP, STAGES)),
                (multiply, (sorted_pair, table, out, a_halves, b_pairs, full, empty,
                            1, GATE, K, FEATURES, WIDTH, BLOCKS, GROUP, STAGES)),
                (fetch_gathered, (x, weight_box, sorted_pair, table, a_s, b_s, full, empty,
                                  X_STRIDE, COLUMNS, K, FEATURES, WIDTH, BLOCKS, GROUP, STAGES)),
            ],
            [4, 4],
            [224, 64],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply, (sorted_pair, table, out, a_halves, b_pairs, full, empty,
                            0, GATE, K, FEATURES, WIDTH, BLOCKS, GROUP, STAGES)),
                (multiply, (sorted_pair, table, out, a_halves, b_pairs, full, empty,
                            1, GATE, K, FEATURES, WIDTH, BLOCKS, GROUP, STAGES)),
                (fetch_sorted, (act_box, weight_box, table, a_s, b_s, full, empty,
                                K, FEATURES, WIDTH, BLOCKS, GROUP, STAGES)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
