"""Products of groups of input features with weights of their own on Hopper, both in FP8, of many tokens: all groups in
one launch.

An item is a tile of 128 tokens and some weight rows of a group: half a block of 128, for a single tile of tokens, so
that there are about as many items as programs, else one block or two. Programs stay and take every so many-th item. One
partition of a program fetches the tokens' and weights' numbers of 128 input features into a ring of stages, with the
copy engine; two others multiply them, 64 tokens each. The tensor cores make the sums of 128 features anew, where they
keep fewer bits than fp32 has, and plain cores multiply them with the scales of both sides and add them up in fp32
(DeepSeek-V3, arXiv:2412.19437, section 3.3). While one partition adds, the other has the tensor cores.

The order of a token's sums is the same for any number of tokens and rows of an item, so its result does not depend on
the other tokens.
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

ROWS = gl.constexpr(128)
"""Tokens of an item."""
HALF_TILE = gl.constexpr(64)
"""Tokens of a multiplying partition: rows of a wgmma."""
STEP = gl.constexpr(128)
"""Input features of a stage, and of a scale: 128 bytes, the width of a swizzled row."""
BLOCK = gl.constexpr(128)
"""Weight rows of a scale."""
TILED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2))


def box(matrix: Tensor, rows: int) -> TensorDescriptor:
    """Make the descriptor with which the copy engine fetches `rows` x 128 numbers of a matrix in FP8; behind its last
    row are zeros."""
    return TensorDescriptor.from_tensor(matrix, [rows, STEP.value], TILED.value)


@gluon.jit
def place_of(item, tiles, ITEMS: gl.constexpr):
    """(group, tile of tokens, place among the ITEMS that have the tile's products with a group): these are neighbours,
    so that what runs together shares tokens and weights in L2."""
    tile = item // ITEMS
    return tile // tiles, tile % tiles, item % ITEMS


@gluon.jit
def expect(x_box, weight_box, bar, rest, BLOCKS: gl.constexpr):
    """Announce the bytes of a stage, of whose tile there are `rest` tokens or fewer: these come in halves, and a half
    that has none does not."""
    weight_bytes: gl.constexpr = BLOCKS * weight_box.block_type.nbytes
    mbarrier.expect(bar, weight_bytes + 2 * x_box.block_type.nbytes, pred=rest > HALF_TILE)
    mbarrier.expect(bar, weight_bytes + x_box.block_type.nbytes, pred=rest <= HALF_TILE)


@gluon.jit
def fetch_tokens(x_box, first, k, rest, bar, x_s, stage):
    """Start fetching the tokens of a stage."""
    tma.async_copy_global_to_shared(x_box, [first, k], bar, x_s.index(2 * stage))
    tma.async_copy_global_to_shared(x_box, [first + HALF_TILE, k], bar, x_s.index(2 * stage + 1), pred=rest > HALF_TILE)


@gluon.jit
def fetch_weights(weight_box, row, k, bar, weight_s, stage, BLOCKS: gl.constexpr):
    """Start fetching the weights of a stage."""
    for block in gl.static_range(BLOCKS):
        at = [row + block * weight_box.block_type.shape[0], k]
        tma.async_copy_global_to_shared(weight_box, at, bar, weight_s.index(BLOCKS * stage + block))


@gluon.jit
def fetch(
    x_box, weight_box, x_s, weight_s, full, empty, tokens,
    GROUPS: gl.constexpr, F: gl.constexpr, K: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The fetching partition. Of the first item as many stages of weights as there is room for are under way before it
    waits for the kernel before."""
    steps: gl.constexpr = K // STEP
    own: gl.constexpr = BLOCKS * weight_box.block_type.shape[0]
    of_tile: gl.constexpr = F // own
    early: gl.constexpr = min(steps, STAGES) if DEPENDENT else 0
    tiles = (tokens + ROWS - 1) // ROWS
    item = gl.program_id(0)
    if DEPENDENT:
        group, tile, place = place_of(item, tiles, of_tile)
        first = tile * ROWS
        row = group * F + place * own
        for stage in range(early):
            expect(x_box, weight_box, full.index(stage), tokens - first, BLOCKS)
            fetch_weights(weight_box, row, stage * STEP, full.index(stage), weight_s, stage, BLOCKS)
        wait_for_kernel_before()
        for stage in range(early):
            fetch_tokens(x_box, first, group * K + stage * STEP, tokens - first, full.index(stage), x_s, stage)
    begin = early + 0 * item
    step = begin
    while item < GROUPS * tiles * of_tile:
        group, tile, place = place_of(item, tiles, of_tile)
        first = tile * ROWS
        row = group * F + place * own
        for i in range(begin, steps):
            stage = step % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            expect(x_box, weight_box, bar, tokens - first, BLOCKS)
            fetch_tokens(x_box, first, group * K + i * STEP, tokens - first, bar, x_s, stage)
            fetch_weights(weight_box, row, i * STEP, bar, weight_s, stage, BLOCKS)
            step += 1
        begin *= 0
        item += gl.num_programs(0)


@gluon.jit
def multiply(
    x_scale, weight_scale, out, x_s, weight_s, full, empty, tokens,
    WHICH: gl.constexpr, GROUPS: gl.constexpr, F: gl.constexpr, K: gl.constexpr, OUT_TOKEN: gl.constexpr,
    OUT_GROUP: gl.constexpr, WIDTH: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """A multiplying partition: the first 64 tokens of every tile, or the others."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 32])
    lanes: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    steps: gl.constexpr = K // STEP
    own: gl.constexpr = BLOCKS * WIDTH
    of_tile: gl.constexpr = F // own
    tiles = (tokens + ROWS - 1) // ROWS
    m = WHICH * HALF_TILE + gl.arange(0, HALF_TILE, gl.SliceLayout(1, lanes))
    r = WHICH * HALF_TILE + gl.arange(0, HALF_TILE, gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, lanes))
    part = gl.zeros([HALF_TILE, WIDTH], gl.float32, layout)
    step = 0
    item = gl.program_id(0)
    if DEPENDENT:
        wait_for_kernel_before()
    while item < GROUPS * tiles * of_tile:
        group, tile, place = place_of(item, tiles, of_tile)
        first = tile * ROWS
        if tokens - first > WHICH * HALF_TILE:
            there = first + r < tokens
            x_at = x_scale + (group * steps).to(gl.int64) * tokens + first + r
            left_at = weight_scale + (group * (F // BLOCK) + place * own // BLOCK) * steps
            right_at = left_at + (BLOCKS - 1) * steps
            # .cg: a dependent launch may find lines of an earlier kernel in L1.
            x_factor = gl.load(x_at, mask=there, other=0.0, cache_modifier=".cg")
            left_factor = gl.load(left_at)
            right_factor = gl.load(right_at)
            left = gl.zeros([HALF_TILE, WIDTH], gl.float32, layout)
            right = gl.zeros([HALF_TILE, WIDTH], gl.float32, layout)
            for i in range(steps):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), step // STAGES & 1)
                a = x_s.index(2 * stage + WHICH)
                part = warpgroup_mma(
                    a, weight_s.index(BLOCKS * stage).permute((1, 0)), part, use_acc=False, is_async=True
                )
                # Nobody copies scales ahead: those of the next step are asked for a step before.
                next = gl.minimum(i + 1, steps - 1)
                x_next = gl.load(x_at + next.to(gl.int64) * tokens, mask=there, other=0.0, cache_modifier=".cg")
                left_next = gl.load(left_at + next)
                right_next = gl.load(right_at + next)
                part = warpgroup_mma_wait(0, deps=(part,))
                if BLOCKS == 2:
                    left += part * (x_factor * left_factor)[:, None]
                    part = warpgroup_mma(
                        a, weight_s.index(BLOCKS * stage + 1).permute((1, 0)), part, use_acc=False, is_async=True
                    )
                    part = warpgroup_mma_wait(0, deps=(part,))
                gl.thread_barrier()
                mbarrier.arrive(empty.index(stage), count=1)
                if BLOCKS == 2:
                    right += part * (x_factor * right_factor)[:, None]
                else:
                    left += part * (x_factor * left_factor)[:, None]
                x_factor = x_next
                left_factor = left_next
                right_factor = right_next
                step += 1
            row = first + m
            to = out + row.to(gl.int64)[:, None] * OUT_TOKEN + group.to(gl.int64) * OUT_GROUP
            to += (place * own + column)[None, :]
            gl.store(to, gl.convert_layout(left.to(out.dtype.element_ty), lanes), mask=(row < tokens)[:, None])
            if BLOCKS == 2:
                value = gl.convert_layout(right.to(out.dtype.element_ty), lanes)
                gl.store(to + WIDTH, value, mask=(row < tokens)[:, None])
        else:
            for _i in range(steps):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), step // STAGES & 1)
                mbarrier.arrive(empty.index(stage), count=1)
                step += 1
        item += gl.num_programs(0)


@gluon.jit(do_not_specialize=["tokens"])
def multiply_groups(
    x_box, x_scale, weight_box, weight_scale, out, tokens,
    GROUPS: gl.constexpr, F: gl.constexpr, K: gl.constexpr, OUT_TOKEN: gl.constexpr, OUT_GROUP: gl.constexpr,
    WIDTH: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """out[t, g] = weight[g] · x[t, g]. Grid: programs; four warps, five others come on top.

    `x_box` describes float8_e4m3fn [tokens, GROUPS * K] in boxes of 64 rows, `weight_box` [GROUPS * F, K] in boxes of
    WIDTH. `x_scale`: fp32 [GROUPS * K / 128, tokens]; `weight_scale`: fp32 [GROUPS * F / 128, K / 128]. An item has
    BLOCKS times WIDTH weight rows: 64 or 128, or twice 128. F is a multiple of 128 and of them, K of 128.
    """
    dtype: gl.constexpr = weight_box.dtype
    if DEPENDENT:
        let_kernel_after_start()
    x_s = gl.allocate_shared_memory(dtype, [2 * STAGES, HALF_TILE, STEP], TILED)
    weight_s = gl.allocate_shared_memory(dtype, [BLOCKS * STAGES, WIDTH, STEP], TILED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.thread_barrier()
    # The tuples stand in the call: in a variable their constants would become run-time values.
    gl.warp_specialize(
        [
            (multiply, (x_scale, weight_scale, out, x_s, weight_s, full, empty, tokens,
                        0, GROUPS, F, K, OUT_TOKEN, OUT_GROUP, WIDTH, BLOCKS, STAGES, DEPENDENT)),
            (multiply, (x_scale, weight_scale, out, x_s, weight_s, full, empty, tokens,
                        1, GROUPS, F, K, OUT_TOKEN, OUT_GROUP, WIDTH, BLOCKS, STAGES, DEPENDENT)),
            (fetch, (x_box, weight_box, x_s, weight_s, full, empty, tokens, GROUPS, F, K, BLOCKS, STAGES,
                     DEPENDENT)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
