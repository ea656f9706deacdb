"""The experts' products on Hopper for many tokens: tiles of 128 pairs by two blocks of WIDTH weight rows, on wgmma.

Programs claim work items (`items`), so that nobody waits for the slowest and items that share weights or inputs in L2
are under way at the same time. In each program one partition fetches and two multiply. The
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
from kernels.moe.items import announce, announcement, claim, pass_by, pipe_of, work_item

ROWS = gl.constexpr(128)
"""Pairs of a tile."""
HALF_TILE = gl.constexpr(64)
"""Pairs of a multiplying partition."""
LEAD = gl.constexpr(8)
"""Stages before the end of an item at which a program claims its next item."""


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
    act_box, weight_box, table, a_s, b_s, pipe,
    K: gl.constexpr, FEATURES: gl.constexpr, WIDTH: gl.constexpr, BLOCKS: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, CLAIMED: gl.constexpr = True,
):  # fmt: skip
    """The fetching partition of `down`: everything through the copy engine, a tile's pairs in halves, for whom they are
    meant. CLAIMED: the program claims its next item; otherwise it takes every so many-th, and need not ask for it: of
    items that are short and equal that is the faster."""
    STEP: gl.constexpr = weight_box.block_type.shape[1]
    steps: gl.constexpr = (K + STEP - 1) // STEP
    claimed_at: gl.constexpr = max(steps - LEAD, 0)
    tiles = gl.load(table)
    settled = gl.load(table + 1)
    step = 0
    turn = 0
    number = gl.program_id(0)
    item = work_item(table, tiles, settled, number, BLOCKS, GROUP)
    following = item
    while item.block >= 0:
        announce(item, pipe, turn)
        turn += 1
        both = item.pairs > HALF_TILE
        for i in range(steps):
            stage = step % STAGES
            bar = pipe.full.index(stage)
            mbarrier.wait(pipe.empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(bar, 2 * weight_box.block_type.nbytes + 2 * act_box.block_type.nbytes, pred=both)
            mbarrier.expect(
                bar, 2 * weight_box.block_type.nbytes + act_box.block_type.nbytes, pred=item.pairs <= HALF_TILE
            )
            tma.async_copy_global_to_shared(act_box, [item.first, i * STEP], bar, a_s.index(2 * stage))
            tma.async_copy_global_to_shared(
                act_box, [item.first + HALF_TILE, i * STEP], bar, a_s.index(2 * stage + 1), pred=both
            )
            fetch_weights(weight_box, item.expert, item.block, i * STEP, bar, b_s, stage, False, FEATURES, WIDTH)
            step += 1
            if i == claimed_at:
                if CLAIMED:
                    number = claim(table + 3, tiles * BLOCKS)
                else:
                    number += gl.num_programs(0)
            if i == (min(claimed_at + 1, steps - 1) if CLAIMED else claimed_at):
                following = work_item(table, tiles, settled, number, BLOCKS, GROUP)
        item = following
    announce(item, pipe, turn)


@gluon.jit
def report_full(full, step, STAGES: gl.constexpr, OUTSTANDING: gl.constexpr):
    """Report that `step` is there, once all but the last OUTSTANDING stages' own copies are."""
    async_copy.wait_group(OUTSTANDING)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(full.index(step % STAGES), count=1)


@gluon.jit
def fetch_gathered(
    x, weight_box, sorted_pair, table, a_s, b_s, pipe,
    X_STRIDE: gl.constexpr, COLUMNS: gl.constexpr,
    K: gl.constexpr, FEATURES: gl.constexpr, WIDTH: gl.constexpr, BLOCKS: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The fetching partition of `gate_up`: four warps that copy the tokens of a tile's pairs 16 bytes per thread."""
    STEP: gl.constexpr = weight_box.block_type.shape[1]
    lanes: gl.constexpr = gl.BlockedLayout([1, STEP // 8], [4, 8], [4, 1], [1, 0])
    m = gl.arange(0, ROWS, gl.SliceLayout(1, lanes))
    column = gl.arange(0, STEP, gl.SliceLayout(0, lanes))
    lag: gl.constexpr = STAGES - 2
    steps: gl.constexpr = (K + STEP - 1) // STEP
    claimed_at: gl.constexpr = max(steps - LEAD, 0)
    tiles = gl.load(table)
    settled = gl.load(table + 1)
    step = 0
    turn = 0
    number = gl.program_id(0)
    item = work_item(table, tiles, settled, number, BLOCKS, GROUP)
    pair = gl.load(sorted_pair + item.first + m, mask=m < item.pairs, other=0)
    following = item
    next_pair = pair
    while item.block >= 0:
        announce(item, pipe, turn)
        turn += 1
        source = x + (pair // COLUMNS).to(gl.int64)[:, None] * X_STRIDE + column[None, :]
        for i in range(steps):
            stage = step % STAGES
            bar = pipe.full.index(stage)
            mbarrier.wait(pipe.empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(bar, 2 * weight_box.block_type.nbytes)
            fetch_weights(weight_box, item.expert, item.block, i * STEP, bar, b_s, stage, True, FEATURES, WIDTH)
            inside = (m < item.pairs)[:, None]
            if K % STEP != 0:
                inside = inside & (i * STEP + column < K)[None, :]
            async_copy.async_copy_global_to_shared(
                a_s.index(stage), source + i * STEP, mask=inside, cache_modifier=".cg"
            )
            async_copy.commit_group()
            if step >= lag:
                report_full(pipe.full, step - lag, STAGES, lag)
            step += 1
            if i == claimed_at:
                number = claim(table + 2, tiles * BLOCKS)
            if i == min(claimed_at + 1, steps - 1):
                following = work_item(table, tiles, settled, number, BLOCKS, GROUP)
            if i == min(claimed_at + 3, steps - 1):
                next_pair = gl.load(sorted_pair + following.first + m, mask=m < following.pairs, other=0)
        item = following
        pair = next_pair
    announce(item, pipe, turn)
    for behind in gl.static_range(lag):
        if step >= lag - behind:
            report_full(pipe.full, step - lag + behind, STAGES, lag - 1 - behind)


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
    sorted_pair, out, a_s, b_s, pipe,
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
    step = 0
    turn = 0
    item = announcement(pipe, turn)
    while item.block >= 0:
        if item.pairs > WHICH * HALF_TILE:
            row = item.first + m
            if not GATE:
                row = gl.load(sorted_pair + row, mask=m < item.pairs, other=0)
            sums = gl.zeros([HALF_TILE, 2 * WIDTH], gl.float32, layout)
            for i in range(steps):
                stage = step % STAGES
                mbarrier.wait(pipe.full.index(stage), step // STAGES & 1)
                sums = warpgroup_mma(
                    a_s.index(2 * stage + WHICH), b_s.index(stage).permute((1, 0)), sums, is_async=True
                )
                sums = warpgroup_mma_wait(1, deps=(sums,))
                gl.thread_barrier()
                mbarrier.arrive(pipe.empty.index((step + STAGES - 1) % STAGES), count=1, pred=i > 0)
                step += 1
            sums = warpgroup_mma_wait(0, deps=(sums,))
            gl.thread_barrier()
            mbarrier.arrive(pipe.empty.index((step + STAGES - 1) % STAGES), count=1)
            left, right = sums.reshape([HALF_TILE, 2, WIDTH]).permute((0, 2, 1)).split()
            if GATE:
                if LIMIT > 0:
                    left, right = clamped(left, right, LIMIT)
                value = left * (1 / (1 + gl.exp(-left))) * right
                value = gl.convert_layout(value.to(out.dtype.element_ty), lanes)
                store_rows(value, out, row, block_start(item.block, FEATURES, WIDTH) + column, m < item.pairs, FEATURES)
            else:
                feature = block_start(item.block, FEATURES, 2 * WIDTH) + column
                value = gl.convert_layout(left.to(out.dtype.element_ty), lanes)
                store_rows(value, out, row, feature, m < item.pairs, FEATURES)
                value = gl.convert_layout(right.to(out.dtype.element_ty), lanes)
                store_rows(value, out, row, feature + WIDTH, m < item.pairs, FEATURES)
        else:
            step = pass_by(pipe, step, steps)
        turn += 1
        item = announcement(pipe, turn)


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
    pipe = pipe_of(STAGES, 2 if GATE else 1)
    fence_async_shared()
    gl.thread_barrier()
    a_half_tiles = a_s._reinterpret(dtype, [2 * STAGES, HALF_TILE, STEP], TILED)
    b_pairs = b_s._reinterpret(dtype, [STAGES, 2 * WIDTH, STEP], TILED)
    # The tuples stand in the calls: in a variable their constants would become run-time values.
    if GATE:
        gl.warp_specialize(
            [
                (multiply, (sorted_pair, out, a_half_tiles, b_pairs, pipe,
                            0, GATE, K, FEATURES, WIDTH, STAGES, LIMIT)),
                (multiply, (sorted_pair, out, a_half_tiles, b_pairs, pipe,
                            1, GATE, K, FEATURES, WIDTH, STAGES, LIMIT)),
                (fetch_gathered, (x, weight_box, sorted_pair, table, a_s, b_s, pipe,
                                  X_STRIDE, COLUMNS, K, FEATURES, WIDTH, BLOCKS, GROUP, STAGES)),
            ],
            [4, 4],
            [224, 64],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply, (sorted_pair, out, a_half_tiles, b_pairs, pipe,
                            0, GATE, K, FEATURES, WIDTH, STAGES, LIMIT)),
                (multiply, (sorted_pair, out, a_half_tiles, b_pairs, pipe,
                            1, GATE, K, FEATURES, WIDTH, STAGES, LIMIT)),
                (fetch_sorted, (act_box, weight_box, table, a_half_tiles, b_s, pipe,
                                K, FEATURES, WIDTH, BLOCKS, GROUP, STAGES)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
