"""Products of up to 128 tokens with MXFP8 weights on Hopper, on wgmma, bound by the time in which weights are read.

The steps of all blocks of 128 or 256 weight rows, of 128 input features each, are shared out evenly among the programs,
as in `stream_k`: a program that does not have all steps of a block leaves a piece of its sums, which
`kernels.linear.pieces` adds up. The copy engine fetches weights, as they are stored, and tokens into a ring of stages.
All stages of weights are under way before a program waits for the kernel before (programmatic dependent launch).

Weights are the left operand, which the tensor cores take from registers, and a block has all tokens at once: so every
weight becomes bf16 once. Its number is multiplied by the power of 2 of its group there, which rounds nothing.

A warp fetches, and two or four groups of four warps multiply 64 or 128 rows of a block each. These do not wait for each
other: while one has its products made by the tensor cores, another makes weights bf16. With more rows in a block the
tokens, which every program reads for each of its blocks, take less of the L2 cache's bandwidth.

Gluon, for compute capability 9.0.
"""

# ruff: noqa: RUF005
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, has-type"

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
from kernels.linear.hopper import TILED as TOKENS
from kernels.linear.stream_k import STEP
from kernels.linear.stream_k import TILED as WEIGHTS

HALF = gl.constexpr(64)
"""Features of a product: of bf16 they are 128 bytes, the width of a swizzled row."""
CHUNK = gl.constexpr(64)
"""Weight rows of a wgmma."""
PIECE = gl.constexpr(128)
"""Weight rows that lie side by side in a piece of the sums."""

# As `kernels.narrow_floats.wide`, and the product with the power of 2 of the group, of which each of the two has one.
_WIDEN = gl.constexpr(
    """
    {
    .reg .b32 both, sign, large;
    cvt.u32.u16 both, $1;
    prmt.b32 both, both, 0, 0x1404;
    and.b32 sign, both, 0x80008000;
    shr.u32 both, both, 4;
    and.b32 both, both, 0x07F007F0;
    or.b32 both, both, sign;
    mov.b32 large, 0x7B807B80;
    mul.rn.bf16x2 both, both, large;
    mul.rn.bf16x2 $0, both, $2;
    }
    """
)


def token_box(x_TE: Tensor, columns: int) -> TensorDescriptor:
    """Make the descriptor with which the copy engine fetches 64 features of `columns` tokens, in bf16; behind the last
    token are zeros."""
    return TensorDescriptor.from_tensor(x_TE, [columns, HALF.value], TOKENS.value)


@gluon.constexpr_function
def sums_layout(columns):
    """Layout of the sums of a chunk, [64, columns]."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def step_layout():
    """Layout of a step's bytes [64, 128]: of each 16 features the left operand's."""
    return gl.DistributedLinearLayout(
        [[0, 1], [8, 0], [0, 8], [0, 16], [0, 32], [0, 64]],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )


@gluon.constexpr_function
def groups_layout():
    """The same of half of the features, in two groups: [64, 2, 32]."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 0, 16], [0, 1, 0]],
        [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 2, 32],
    )


@gluon.constexpr_function
def rows_layout():
    """Layout of the rows [64] whose scales a thread loads."""
    return gl.SliceLayout(1, gl.SliceLayout(2, groups_layout()))


@gluon.jit
def halves(stage_s):
    """The bytes of a step, as two tiles of two groups of features: [64, 2, 32] each."""
    tile = stage_s.load(step_layout())
    first, second = tile.reshape([CHUNK, 2, HALF]).permute((0, 2, 1)).split()
    first = gl.convert_layout(first.reshape([CHUNK, 2, HALF // 2]), groups_layout(), assert_trivial=True)
    second = gl.convert_layout(second.reshape([CHUNK, 2, HALF // 2]), groups_layout(), assert_trivial=True)
    return first, second


@gluon.jit
def scales_of(
    scale, step,
    WHICH: gl.constexpr, ROWS: gl.constexpr, STEPS: gl.constexpr, GROUPS: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    """Load the four scales of a step of every row of a partition: of each chunk a word for each row, [64]."""
    block = step // STEPS
    words = ()
    for chunk in gl.static_range(CHUNKS):
        first = block * (GROUPS * CHUNKS * CHUNK) + (WHICH * CHUNKS + chunk) * CHUNK
        row = first + gl.arange(0, CHUNK, rows_layout())
        if ROWS % (GROUPS * CHUNKS * CHUNK) != 0:
            row = gl.minimum(row, ROWS - 1)
        words = words + (gl.load(scale + row * STEPS + (step - block * STEPS)),)
    return words


@gluon.jit
def left_operand(tile, scales, SECOND: gl.constexpr, COLUMNS: gl.constexpr):
    """Half of a step's weights in bf16, [64, 64]."""
    group = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, groups_layout()))) + 2 * SECOND
    # Two equal numbers of bf16. The least exponent counts as 0, as in `kernels.matrix`.
    power = ((scales[:, None] >> (8 * group)[None, :]) & 0xFF) * 0x00800080
    power, tile = gl.broadcast(power[:, :, None], tile)
    weight = gl.inline_asm_elementwise(_WIDEN, "=r,h,r,r", [tile, power], dtype=gl.bfloat16, is_pure=True, pack=2)
    left: gl.constexpr = gl.DotOperandLayout(0, sums_layout(COLUMNS), 2)
    return gl.convert_layout(weight.reshape([CHUNK, HALF]), left, assert_trivial=True)


@gluon.jit
def fetch_weights(weight_box, step, bar, weight_s, stage, STEPS: gl.constexpr):
    """Start fetching the weights of a step."""
    at = [step // STEPS * weight_box.block_type.shape[0], step % STEPS * STEP]
    tma.async_copy_global_to_shared(weight_box, at, bar, weight_s.index(stage))


@gluon.jit
def fetch_tokens(x_box, step, bar, x_s, stage, STEPS: gl.constexpr):
    """Start fetching the tokens' features of a step."""
    for half in gl.static_range(2):
        feature = step % STEPS * STEP + half * HALF
        tma.async_copy_global_to_shared(x_box, [0, feature], bar, x_s.index(2 * stage + half))


@gluon.jit
def fetch(
    x_box, weight_box, x_s, weight_s, full, empty, begin, end,
    STEPS: gl.constexpr, STAGES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The fetching partition. As many stages of weights as there is room for are under way before it waits for the
    kernel before."""
    bytes: gl.constexpr = 2 * x_box.block_type.nbytes + weight_box.block_type.nbytes
    early = gl.minimum(end - begin, STAGES)
    for stage in range(early):
        mbarrier.expect(full.index(stage), bytes)
        fetch_weights(weight_box, begin + stage, full.index(stage), weight_s, stage, STEPS)
    if DEPENDENT:
        wait_for_kernel_before()
    for stage in range(early):
        fetch_tokens(x_box, begin + stage, full.index(stage), x_s, stage, STEPS)
    for i in range(STAGES, end - begin):
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), (i // STAGES & 1) ^ 1)
        mbarrier.expect(full.index(stage), bytes)
        fetch_weights(weight_box, begin + i, full.index(stage), weight_s, stage, STEPS)
        fetch_tokens(x_box, begin + i, full.index(stage), x_s, stage, STEPS)


@gluon.jit
def store(
    total, out, pieces, block, chunk: gl.constexpr, tokens, whole,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """Store the sums of a chunk of a block: as results if they are `whole`, else as a piece."""
    row: gl.constexpr = chunk * CHUNK
    layout: gl.constexpr = sums_layout(COLUMNS)
    stored: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    if whole:
        value = gl.convert_layout(total.to(out.dtype.element_ty), stored)
        f = block * BLOCK + row + gl.arange(0, CHUNK, gl.SliceLayout(1, stored))
        t = gl.arange(0, COLUMNS, gl.SliceLayout(0, stored))
        inside = (f < ROWS)[:, None] & (t < tokens)[None, :]
        gl.store(out + t[None, :] * ROWS + f[:, None], value, mask=inside)
    else:
        piece = (gl.program_id(0) + block) * (BLOCK // PIECE) + row // PIECE
        r = row % PIECE + gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
        c = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
        gl.store(pieces + (piece * COLUMNS + c[None, :]) * PIECE + r[:, None], total)


@gluon.jit
def multiply(
    scale, out, pieces, x_s, weight_s, full, empty, step, end, tokens,
    WHICH: gl.constexpr, ROWS: gl.constexpr, STEPS: gl.constexpr, COLUMNS: gl.constexpr, GROUPS: gl.constexpr,
    CHUNKS: gl.constexpr, STAGES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """A multiplying partition, of one or two chunks of every block."""
    BLOCK: gl.constexpr = GROUPS * CHUNKS * CHUNK
    # Nobody copies scales ahead: they are asked for two steps before; one, where steps of two chunks take longer.
    AHEAD: gl.constexpr = 2 // CHUNKS
    scales = scales_of(scale, step, WHICH, ROWS, STEPS, GROUPS, CHUNKS)
    next_scales = scales_of(scale, gl.minimum(step + 1, end - 1), WHICH, ROWS, STEPS, GROUPS, CHUNKS)
    if DEPENDENT:
        wait_for_kernel_before()
    stage = 0
    phase = 0
    while step < end:
        block = step // STEPS
        first = step
        until = gl.minimum(end, (block + 1) * STEPS)
        sums = ()
        for _chunk in gl.static_range(CHUNKS):
            sums = sums + (gl.zeros([CHUNK, COLUMNS], gl.float32, sums_layout(COLUMNS)),)
        while step < until:
            later_scales = scales_of(scale, gl.minimum(step + AHEAD, end - 1), WHICH, ROWS, STEPS, GROUPS, CHUNKS)
            mbarrier.wait(full.index(stage), phase)
            x_first = x_s.index(2 * stage).permute((1, 0))
            x_second = x_s.index(2 * stage + 1).permute((1, 0))
            under_way = ()
            for chunk in gl.static_range(CHUNKS):
                chunk_s = weight_s.index(stage).slice((WHICH * CHUNKS + chunk) * CHUNK, CHUNK)
                first_half, second_half = halves(chunk_s)
                a = left_operand(first_half, scales[chunk], 0, COLUMNS)
                total = warpgroup_mma(a, x_first, sums[chunk], is_async=True)
                b = left_operand(second_half, scales[chunk], 1, COLUMNS)
                under_way = under_way + (warpgroup_mma(b, x_second, total, is_async=True), b)
                # The next chunk's weights may be written where those are that have been multiplied.
                a = warpgroup_mma_wait(1, deps=(a,))
            made = warpgroup_mma_wait(0, deps=under_way)
            sums = ()
            for chunk in gl.static_range(CHUNKS):
                sums = sums + (made[2 * chunk],)
            gl.thread_barrier()
            mbarrier.arrive(empty.index(stage), count=1)
            scales = next_scales if AHEAD == 2 else later_scales
            next_scales = later_scales
            stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
            phase = gl.where(stage == 0, phase ^ 1, phase)
            step += 1
        for chunk in gl.static_range(CHUNKS):
            whole = until - first == STEPS
            store(sums[chunk], out, pieces, block, WHICH * CHUNKS + chunk, tokens, whole, ROWS, COLUMNS, BLOCK)


@gluon.jit(do_not_specialize=["tokens"])
def mxfp8_multiply(
    x_box, weight_box, scale, out, pieces, tokens,
    ROWS: gl.constexpr, K: gl.constexpr, COLUMNS: gl.constexpr, GROUPS: gl.constexpr, CHUNKS: gl.constexpr,
    STAGES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """out[t] = weight · x[t], or pieces of it. Grid: programs, of which each has its share of the steps; four warps, of
    one of the GROUPS that multiply, and the others come on top.

    `x_box` describes bf16 in rows of K input features, with boxes of COLUMNS tokens and 64 features; `weight_box`
    uint8, with boxes of B = 64 * GROUPS * CHUNKS rows and 128 features. `scale`: int32 [ROWS, K / 128], four exponents
    each. `out`: [tokens, ROWS], written where one program makes all of a block's sums. `pieces`: fp32
    [programs + blocks, B / 128, COLUMNS, 128]; that of a program p and a block b lies at p + b.
    """
    steps: gl.constexpr = K // STEP
    BLOCK: gl.constexpr = GROUPS * CHUNKS * CHUNK
    total: gl.constexpr = (ROWS + BLOCK - 1) // BLOCK * steps
    begin = gl.program_id(0) * total // gl.num_programs(0)
    end = (gl.program_id(0) + 1) * total // gl.num_programs(0)
    if DEPENDENT:
        let_kernel_after_start()
    weight_s = gl.allocate_shared_memory(weight_box.dtype, [STAGES, BLOCK, STEP], WEIGHTS)
    x_s = gl.allocate_shared_memory(x_box.dtype, [2 * STAGES, COLUMNS, HALF], TOKENS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    fence_async_shared()
    gl.thread_barrier()
    # The tuples stand in the call: in a variable their constants would become run-time values.
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (multiply, (scale, out, pieces, x_s, weight_s, full, empty, begin, end, tokens,
                            0, ROWS, steps, COLUMNS, GROUPS, CHUNKS, STAGES, DEPENDENT)),
                (multiply, (scale, out, pieces, x_s, weight_s, full, empty, begin, end, tokens,
                            1, ROWS, steps, COLUMNS, GROUPS, CHUNKS, STAGES, DEPENDENT)),
                (fetch, (x_box, weight_box, x_s, weight_s, full, empty, begin, end, steps, STAGES, DEPENDENT)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply, (scale, out, pieces, x_s, weight_s, full, empty, begin, end, tokens,
                            0, ROWS, steps, COLUMNS, GROUPS, CHUNKS, STAGES, DEPENDENT)),
                (multiply, (scale, out, pieces, x_s, weight_s, full, empty, begin, end, tokens,
                            1, ROWS, steps, COLUMNS, GROUPS, CHUNKS, STAGES, DEPENDENT)),
                (multiply, (scale, out, pieces, x_s, weight_s, full, empty, begin, end, tokens,
                            2, ROWS, steps, COLUMNS, GROUPS, CHUNKS, STAGES, DEPENDENT)),
                (multiply, (scale, out, pieces, x_s, weight_s, full, empty, begin, end, tokens,
                            3, ROWS, steps, COLUMNS, GROUPS, CHUNKS, STAGES, DEPENDENT)),
                (fetch, (x_box, weight_box, x_s, weight_s, full, empty, begin, end, steps, STAGES, DEPENDENT)),
            ],
            [4, 4, 4, 1],
            [112, 112, 112, 24],
        )  # fmt: skip
