"""Products on Hopper of up to 64 activations with weights, both in FP8, bound by the time in which the weights stream
through the chip.

The work is cut into steps, of 128 weight rows and 128 input features each, and every program takes equally many that
follow one another ("Stream-K", arXiv:2301.03598): no multiprocessor waits for others, whatever the number of rows is. A
program's share begins and ends in the middle of a block of rows: then it leaves a piece of the block's sums in fp32,
and the kernel behind adds the pieces up in their order (`pieces`). Which program does what follows from the sizes
alone, so a token's result does not depend on what the others hold.

The copy engine fetches weights and tokens into a ring of stages. A step's weights are the left operand of wgmma and the
tokens its columns. 128 features are also a group of the tokens' scales and a block of the weights': the tensor cores,
which keep fewer bits than fp32 has, make the sums of these features anew, and they are added in fp32 (DeepSeek-V3,
arXiv:2412.19437, section 3.3). Weights never change, so the first of them are under way before the kernel before has
ended (programmatic dependent launch).
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

BLOCK = gl.constexpr(128)
"""Weight rows of a step, and of a scale."""
STEP = gl.constexpr(128)
"""Input features of a step, and of a scale: 128 bytes, the width of a swizzled row."""
TILED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2))


def box(matrix: Tensor, rows: int) -> TensorDescriptor:
    """Make the descriptor with which the copy engine fetches `rows` x 128 numbers of a matrix in FP8; behind its last
    row are zeros."""
    return TensorDescriptor.from_tensor(matrix, [rows, STEP.value], TILED.value)


@gluon.jit
def scales_of(x_scale, weight_scale, step, tokens, scale_stride, COLUMNS: gl.constexpr, STEPS: gl.constexpr):
    """Load the scales of a step: those of the tokens, [COLUMNS], times that of the weights."""
    block = step // STEPS
    group = step - block * STEPS
    t = gl.arange(0, COLUMNS, gl.SliceLayout(0, sums_layout(COLUMNS)))
    # .cg: a dependent launch may find lines of an earlier kernel in L1.
    token = gl.load(x_scale + group * scale_stride + t, mask=t < tokens, other=0.0, cache_modifier=".cg")
    return token * gl.load(weight_scale + block * STEPS + group)


@gluon.constexpr_function
def sums_layout(columns):
    """Layout of the sums of a block of weight rows, [128, columns], in four warps."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 32])


@gluon.jit(do_not_specialize=["tokens", "scale_stride"])
def multiply(
    x_box, x_scale, weight_box, weight_scale, out, pieces, tokens, scale_stride,
    ROWS: gl.constexpr, K: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """out[t] = weight · x[t], or pieces of it. Grid: programs, of which each has its share of the steps.

    `x_box` and `weight_box` describe float8_e4m3fn in rows of K input features, with boxes of COLUMNS and of 128 rows.
    `x_scale`: fp32, of group g and token t at g * `scale_stride` + t. `weight_scale`: fp32 [ROWS / 128, K / 128].
    `out`: bf16 [tokens, ROWS], written where one program makes all of a block's sums. `pieces`: fp32
    [programs + blocks, COLUMNS, 128]; that of a program p and a block b lies at p + b.
    """
    steps: gl.constexpr = K // STEP
    blocks: gl.constexpr = (ROWS + BLOCK - 1) // BLOCK
    layout: gl.constexpr = sums_layout(COLUMNS)
    stored: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, 4], [0, 1])
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    step = program * (blocks * steps) // programs
    end = (program + 1) * (blocks * steps) // programs
    if DEPENDENT:
        let_kernel_after_start()
    weight_s = gl.allocate_shared_memory(weight_box.dtype, [STAGES, BLOCK, STEP], TILED)
    x_s = gl.allocate_shared_memory(x_box.dtype, [STAGES, COLUMNS, STEP], TILED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()
    gl.thread_barrier()
    for stage in gl.static_range(STAGES):
        ahead = step + stage
        at = [ahead // steps * BLOCK, ahead % steps * STEP]
        mbarrier.expect(full.index(stage), x_box.block_type.nbytes + weight_box.block_type.nbytes, pred=ahead < end)
        tma.async_copy_global_to_shared(weight_box, at, full.index(stage), weight_s.index(stage), pred=ahead < end)
    if DEPENDENT:
        wait_for_kernel_before()
    for stage in gl.static_range(STAGES):
        ahead = step + stage
        at = [0, ahead % steps * STEP]
        tma.async_copy_global_to_shared(x_box, at, full.index(stage), x_s.index(stage), pred=ahead < end)
    scales = scales_of(x_scale, weight_scale, step, tokens, scale_stride, COLUMNS, steps)
    part = gl.zeros([BLOCK, COLUMNS], gl.float32, layout)
    stage = 0
    phase = 0
    while step < end:
        block = step // steps
        first = step
        until = gl.minimum(end, (block + 1) * steps)
        total = gl.zeros([BLOCK, COLUMNS], gl.float32, layout)
        while step < until:
            mbarrier.wait(full.index(stage), phase)
            tokens_s = x_s.index(stage).permute((1, 0))
            part = warpgroup_mma(weight_s.index(stage), tokens_s, part, use_acc=False, is_async=True)
            # Nobody copies scales ahead: those of the next step are asked for a step before.
            later = gl.minimum(step + 1, end - 1)
            later_scales = scales_of(x_scale, weight_scale, later, tokens, scale_stride, COLUMNS, steps)
            part = warpgroup_mma_wait(0, deps=(part,))
            gl.thread_barrier()
            ahead = step + STAGES
            at = [ahead // steps * BLOCK, ahead % steps * STEP]
            mbarrier.expect(full.index(stage), x_box.block_type.nbytes + weight_box.block_type.nbytes, pred=ahead < end)
            tma.async_copy_global_to_shared(weight_box, at, full.index(stage), weight_s.index(stage), pred=ahead < end)
            at = [0, ahead % steps * STEP]
            tma.async_copy_global_to_shared(x_box, at, full.index(stage), x_s.index(stage), pred=ahead < end)
            total += part * scales[None, :]
            scales = later_scales
            stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
            phase = gl.where(stage == 0, phase ^ 1, phase)
            step += 1
        if until - first == steps:
            value = gl.convert_layout(total.to(out.dtype.element_ty), stored)
            f = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, stored))
            t = gl.arange(0, COLUMNS, gl.SliceLayout(0, stored))
            inside = (f < ROWS)[:, None] & (t < tokens)[None, :]
            gl.store(out + t.to(gl.int64)[None, :] * ROWS + f[:, None], value, mask=inside)
        else:
            r = gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
            c = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
            gl.store(pieces + ((program + block) * COLUMNS + c[None, :]) * BLOCK + r[:, None], total)
