"""`kernel.down` with sums of groups on Hopper, for any number of tokens: one ring of weights through all of a program's
work.

A group of an expert is short: an eighth of DeepSeek-V2-Lite's 1,408 features is three stages of 64. A program for each
(tile, block of features, group) spends most of its time in finding its tile, in waiting for its first weights, and in
ending. Here every multiprocessor has one program that takes every so many-th work item, which is WALK neighbouring
groups of a block. One partition fetches, and is ahead by as many stages as shared memory holds, across items, so that
memory never waits for the end of one. Two multiply, with half of the block's features each.

The copy engine sees inputs and weights as [rows, groups, features of a group] and fills with zeros what lies past a
group's features. A tile of at most 16 pairs has 16 rows fetched; rows of a stage beyond them hold anything, and what is
made of them is never stored.

Each group's sum is that of `kernel.down`: over the same features in the same order, by the same instruction. Which
program makes it, and what it made before, changes nothing of it.

The rules of `hopper` hold, with one exception: a program takes every so many-th item instead of claiming it. Under
programmatic dependent launch the weights of the first item are asked for before the wait for `gate_up`. The table and
the sorted pairs were written before `gate_up`, which lets this kernel start only after its own wait.

Written for Triton 3.6, as `hopper` is, and for the same reason.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.gluon.dependent import let_kernel_after_start, wait_for_kernel_before
from kernels.linear.hopper import STEP, TILED
from kernels.moe.hopper import block_start
from kernels.moe.items import announce, announcement, pipe_of, work_item

ROWS = gl.constexpr(64)
"""Pairs of a tile."""
FEW = gl.constexpr(16)
"""Pairs of a tile up to which no more are fetched."""
WIDTH = gl.constexpr(64)
"""Features of a multiplying partition; a block has twice as many."""
IN_GROUPS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3))


def box(matrix: Tensor, groups: int, rows: int) -> TensorDescriptor:
    """Make the descriptor with which the copy engine fetches `rows` x 64 elements of one of `groups` equal groups of a
    matrix's columns, 16-bit floats."""
    parts = matrix.view(matrix.shape[0], groups, -1)
    return TensorDescriptor.from_tensor(parts, [rows, 1, STEP.value], IN_GROUPS.value)


@gluon.jit
def _begin_stage(
    act_box, few_box, weight_box, item, step, bar, b_s, stage,
    FEATURES: gl.constexpr, GROUPS: gl.constexpr, WALK: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """Tell a stage what it waits for, and start copying the weights of an item's step."""
    SHARES: gl.constexpr = GROUPS // WALK
    weights: gl.constexpr = weight_box.block_type.nbytes
    mbarrier.expect(bar, weights + few_box.block_type.nbytes, pred=item.pairs <= FEW)
    mbarrier.expect(bar, weights + act_box.block_type.nbytes, pred=item.pairs > FEW)
    row = item.expert * FEATURES + block_start(item.block // SHARES, FEATURES, 2 * WIDTH)
    group = item.block % SHARES * WALK + step // STEPS
    tma.async_copy_global_to_shared(weight_box, [row, group, step % STEPS * STEP], bar, b_s.index(stage))


@gluon.jit
def fetch(
    act_box, few_box, weight_box, table, a_s, few_s, b_s, pipe,
    COUNT: gl.constexpr, FEATURES: gl.constexpr, GROUPS: gl.constexpr, WALK: gl.constexpr, BLOCKS: gl.constexpr,
    STAGES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The fetching partition."""
    STEPS: gl.constexpr = (COUNT + STEP - 1) // STEP
    SHARES: gl.constexpr = GROUPS // WALK
    AHEAD: gl.constexpr = min(WALK * STEPS, STAGES)
    # .cg: a dependent launch may find lines of an earlier table in L1.
    tiles = gl.load(table, cache_modifier=".cg")
    settled = gl.load(table + 1, cache_modifier=".cg")
    number = gl.program_id(0)
    item = work_item(table, tiles, settled, number, BLOCKS * SHARES, 1, DEPENDENT)
    number += gl.num_programs(0)
    following = work_item(table, tiles, settled, number, BLOCKS * SHARES, 1, DEPENDENT)
    announce(item, pipe, 0)
    if item.block >= 0:
        for i in range(AHEAD):
            bar = pipe.full.index(i)
            _begin_stage(act_box, few_box, weight_box, item, i, bar, b_s, i, FEATURES, GROUPS, WALK, STEPS)
    if DEPENDENT:
        wait_for_kernel_before()
    step = 0
    turn = 0
    while item.block >= 0:
        for i in range(WALK * STEPS):
            stage = step % STAGES
            bar = pipe.full.index(stage)
            if step >= AHEAD:
                mbarrier.wait(pipe.empty.index(stage), (step // STAGES & 1) ^ 1)
                _begin_stage(act_box, few_box, weight_box, item, i, bar, b_s, stage, FEATURES, GROUPS, WALK, STEPS)
            group = item.block % SHARES * WALK + i // STEPS
            k = i % STEPS * STEP
            tma.async_copy_global_to_shared(
                few_box, [item.first, group, k], bar, few_s.index(4 * stage), pred=item.pairs <= FEW
            )
            tma.async_copy_global_to_shared(
                act_box, [item.first, group, k], bar, a_s.index(stage), pred=item.pairs > FEW
            )
            step += 1
        turn += 1
        item = following
        number += gl.num_programs(0)
        following = work_item(table, tiles, settled, number, BLOCKS * SHARES, 1, DEPENDENT)
        announce(item, pipe, turn)
    if DEPENDENT:
        let_kernel_after_start()


@gluon.jit
def multiply(
    sorted_pair, partial, a_s, b_s, pipe,
    WHICH: gl.constexpr, COUNT: gl.constexpr, FEATURES: gl.constexpr, GROUPS: gl.constexpr, WALK: gl.constexpr,
    STAGES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """A multiplying partition: the first half of every block's features, or the other."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    STEPS: gl.constexpr = (COUNT + STEP - 1) // STEP
    SHARES: gl.constexpr = GROUPS // WALK
    m = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = WHICH * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    step = 0
    turn = 0
    item = announcement(pipe, turn)
    if DEPENDENT:
        wait_for_kernel_before()
    while item.block >= 0:
        inside = m < item.pairs
        pair = gl.load(sorted_pair + item.first + m, mask=inside, other=0, cache_modifier=".cg")
        feature = block_start(item.block // SHARES, FEATURES, 2 * WIDTH) + column
        target = partial + (pair.to(gl.int64) * GROUPS + item.block % SHARES * WALK)[:, None] * FEATURES
        target += feature[None, :]
        for group in range(WALK):
            sums = gl.zeros([ROWS, WIDTH], gl.float32, layout)
            for i in gl.static_range(STEPS):
                stage = step % STAGES
                mbarrier.wait(pipe.full.index(stage), step // STAGES & 1)
                weights = b_s.index(2 * stage + WHICH).permute((1, 0))
                sums = warpgroup_mma(a_s.index(stage), weights, sums, is_async=True)
                if i > 0:
                    sums = warpgroup_mma_wait(1, deps=(sums,))
                    gl.thread_barrier()
                    mbarrier.arrive(pipe.empty.index((step + STAGES - 1) % STAGES), count=1)
                step += 1
            sums = warpgroup_mma_wait(0, deps=(sums,))
            gl.thread_barrier()
            mbarrier.arrive(pipe.empty.index((step + STAGES - 1) % STAGES), count=1)
            gl.store(target + group * FEATURES, sums, mask=inside[:, None])
        turn += 1
        item = announcement(pipe, turn)


@gluon.jit
def group_sums(
    act_box, few_box, weight_box, sorted_pair, table, partial,
    COUNT: gl.constexpr, FEATURES: gl.constexpr, GROUPS: gl.constexpr, WALK: gl.constexpr, BLOCKS: gl.constexpr,
    STAGES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """partial[pair, g] = down[expert] · act[i] over the g-th of GROUPS groups of COUNT features, in fp32, for every
    sorted pair i. Grid: any number of programs of four warps, to which eight more come; one stands on a multiprocessor.

    `act_box`, `few_box` and `weight_box`: descriptors (`box`) of the sorted pairs' inputs, of 64 and of 16 rows, and of
    the experts' rows of weights, laid end to end, of 128.
    """
    dtype: gl.constexpr = weight_box.dtype
    a_s = gl.allocate_shared_memory(dtype, [STAGES, ROWS, 1, STEP], IN_GROUPS)
    b_s = gl.allocate_shared_memory(dtype, [STAGES, 2 * WIDTH, 1, STEP], IN_GROUPS)
    pipe = pipe_of(STAGES, 1)
    fence_async_shared()
    gl.thread_barrier()
    few_s = a_s._reinterpret(dtype, [4 * STAGES, FEW, 1, STEP], IN_GROUPS)
    a_tiles = a_s._reinterpret(dtype, [STAGES, ROWS, STEP], TILED)
    b_halves = b_s._reinterpret(dtype, [2 * STAGES, WIDTH, STEP], TILED)
    # The tuples stand in the calls: in a variable their constants would become run-time values.
    gl.warp_specialize(
        [
            (multiply, (sorted_pair, partial, a_tiles, b_halves, pipe,
                        0, COUNT, FEATURES, GROUPS, WALK, STAGES, DEPENDENT)),
            (multiply, (sorted_pair, partial, a_tiles, b_halves, pipe,
                        1, COUNT, FEATURES, GROUPS, WALK, STAGES, DEPENDENT)),
            (fetch, (act_box, few_box, weight_box, table, a_s, few_s, b_s, pipe,
                     COUNT, FEATURES, GROUPS, WALK, BLOCKS, STAGES, DEPENDENT)),
        ],
        [4, 1],
        [128, 56],
    )  # fmt: skip
