"""The experts' products on Hopper for many tokens whose activations are FP8, as are the weights: `hopper`'s tiles,
rings and items, with other multiplying partitions.

A stage has 128 input features: a swizzled row of 128 bytes, as many features as share a scale. Of each block of 128
weight rows the tensor cores make the sums of these features anew, in registers of their own, where they keep fewer bits
than fp32 has. Plain cores multiply them with the scale of a pair's group and that of the block, and add them to the
sums in fp32 (DeepSeek-V3, arXiv:2412.19437, section 3.3). That takes a thread 64 registers beside its 128 sums, so a
partition has one product under way at a time; while it adds, the other partition has the tensor cores.

`gate_up` makes of a tile's 128 features of gate and of up 128 inputs of `down`: one group. So it rounds them to FP8
itself, in fp32 until then, with a scale for each pair.

Sizes are multiples of 128, for blocks must not be cut. Everything else is as in `hopper`, barriers included.

Written for Triton 3.6, as `hopper` is, and for the same private part of Gluon.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.moe.hopper import HALF_TILE, ROWS, block_start, clamped, fetch_gathered, fetch_sorted, store_rows
from kernels.moe.items import announcement, pass_by, pipe_of
from kernels.quantize import LEAST_SCALE, MOST

STEP = gl.constexpr(128)
"""Input features of a stage, and of a scale."""
BLOCK = gl.constexpr(128)
"""Weight rows of a scale, and of a product."""
TILED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2))
LARGEST = gl.constexpr(MOST)
LEAST = gl.constexpr(LEAST_SCALE)


def box(matrix: Tensor, rows: int) -> TensorDescriptor:
    """Make the descriptor with which the copy engine fetches `rows` x 128 numbers of a matrix in FP8."""
    return TensorDescriptor.from_tensor(matrix, [rows, STEP.value], TILED.value)


@gluon.jit
def multiply(
    sorted_pair, x_scale, weight_scale, out, out_scale, a_s, b_s, pipe,
    WHICH: gl.constexpr, GATE: gl.constexpr, COLUMNS: gl.constexpr, K: gl.constexpr, FEATURES: gl.constexpr,
    STAGES: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """A multiplying partition: the first 64 pairs of every tile, or the others."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 32])
    per: gl.constexpr = 16 if GATE else 8
    lanes: gl.constexpr = gl.BlockedLayout([1, per], [per // 4, 128 // per], [4, 1], [1, 0])
    steps: gl.constexpr = K // STEP
    blocks: gl.constexpr = FEATURES // BLOCK
    m = WHICH * HALF_TILE + gl.arange(0, HALF_TILE, gl.SliceLayout(1, lanes))
    r = WHICH * HALF_TILE + gl.arange(0, HALF_TILE, gl.SliceLayout(1, layout))
    column = gl.arange(0, BLOCK, gl.SliceLayout(0, lanes))
    step = 0
    turn = 0
    part = gl.zeros([HALF_TILE, BLOCK], gl.float32, layout)
    item = announcement(pipe, turn)
    while item.block >= 0:
        if item.pairs > WHICH * HALF_TILE:
            row = item.first + m
            scaled = item.first + r
            if GATE:
                x_row = gl.load(sorted_pair + scaled, mask=r < item.pairs, other=0) // COLUMNS
                weight_row = item.expert * (2 * blocks) + item.block
            else:
                x_row = scaled
                row = gl.load(sorted_pair + row, mask=m < item.pairs, other=0)
                weight_row = item.expert * blocks + block_start(item.block, FEATURES, 2 * BLOCK) // BLOCK
            x_at = x_scale + x_row.to(gl.int64) * steps
            left_at = weight_scale + weight_row.to(gl.int64) * steps
            right_at = left_at + (blocks if GATE else 1) * steps
            x_factor = gl.load(x_at, mask=r < item.pairs, other=0.0)
            left_factor = gl.load(left_at)
            right_factor = gl.load(right_at)
            left = gl.zeros([HALF_TILE, BLOCK], gl.float32, layout)
            right = gl.zeros([HALF_TILE, BLOCK], gl.float32, layout)
            for i in range(steps):
                # Nobody copies scales ahead: those of the next step are asked for a step before.
                next = gl.minimum(i + 1, steps - 1)
                x_next = gl.load(x_at + next, mask=r < item.pairs, other=0.0)
                left_next = gl.load(left_at + next)
                right_next = gl.load(right_at + next)
                stage = step % STAGES
                mbarrier.wait(pipe.full.index(stage), step // STAGES & 1)
                a = a_s.index(2 * stage + WHICH)
                part = warpgroup_mma(a, b_s.index(2 * stage).permute((1, 0)), part, use_acc=False, is_async=True)
                part = warpgroup_mma_wait(0, deps=(part,))
                left += part * (x_factor * left_factor)[:, None]
                part = warpgroup_mma(a, b_s.index(2 * stage + 1).permute((1, 0)), part, use_acc=False, is_async=True)
                part = warpgroup_mma_wait(0, deps=(part,))
                gl.thread_barrier()
                mbarrier.arrive(pipe.empty.index(stage), count=1)
                right += part * (x_factor * right_factor)[:, None]
                x_factor = x_next
                left_factor = left_next
                right_factor = right_next
                step += 1
            if GATE:
                if LIMIT > 0:
                    left, right = clamped(left, right, LIMIT)
                value = left * (1 / (1 + gl.exp(-left))) * right
                scale = gl.maximum(gl.max(gl.abs(value), 1) / LARGEST, LEAST)
                value = (value * (1 / scale)[:, None]).to(out.dtype.element_ty)
                store_rows(
                    gl.convert_layout(value, lanes), out, row, item.block * BLOCK + column, m < item.pairs, FEATURES
                )
                gl.store(out_scale + scaled.to(gl.int64) * blocks + item.block, scale, mask=r < item.pairs)
            else:
                feature = block_start(item.block, FEATURES, 2 * BLOCK) + column
                value = gl.convert_layout(left.to(out.dtype.element_ty), lanes)
                store_rows(value, out, row, feature, m < item.pairs, FEATURES)
                value = gl.convert_layout(right.to(out.dtype.element_ty), lanes)
                store_rows(value, out, row, feature + BLOCK, m < item.pairs, FEATURES)
        else:
            step = pass_by(pipe, step, steps)
        turn += 1
        item = announcement(pipe, turn)


@gluon.jit
def product(
    x, x_scale, act_box, weight_box, weight_scale, sorted_pair, table, out, out_scale,
    GATE: gl.constexpr, COLUMNS: gl.constexpr, K: gl.constexpr, FEATURES: gl.constexpr, BLOCKS: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, LIMIT: gl.constexpr, CLAIMED: gl.constexpr,
):  # fmt: skip
    """`kernel.gate_up` of the tokens `x` (GATE), or `kernel.down` of `act_box`; four warps, the others come on top.

    `x`: float8_e4m3fn [T, K], `x_scale`: fp32 [T, K / 128] (GATE), or of the sorted pairs, whose numbers `act_box`
    describes (boxes of 64 rows). `weight_box` describes the experts' rows, laid end to end (boxes of 128 rows);
    `weight_scale`: theirs, fp32. GATE: `out` and `out_scale` get FP8 of the sorted pairs; otherwise `out` gets the
    pairs' results, and `out_scale` is not looked at. FEATURES: of the output (GATE: of gate, and as many of up). LIMIT:
    see `activation`. CLAIMED: see `fetch_sorted`.
    """
    dtype: gl.constexpr = weight_box.dtype
    a_s = gl.allocate_shared_memory(dtype, [STAGES, ROWS, STEP], TILED)
    b_s = gl.allocate_shared_memory(dtype, [2 * STAGES, BLOCK, STEP], TILED)
    pipe = pipe_of(STAGES, 2 if GATE else 1)
    fence_async_shared()
    gl.thread_barrier()
    a_half_tiles = a_s._reinterpret(dtype, [2 * STAGES, HALF_TILE, STEP], TILED)
    # The tuples stand in the calls: in a variable their constants would become run-time values.
    if GATE:
        gl.warp_specialize(
            [
                (multiply, (sorted_pair, x_scale, weight_scale, out, out_scale, a_half_tiles, b_s, pipe,
                            0, GATE, COLUMNS, K, FEATURES, STAGES, LIMIT)),
                (multiply, (sorted_pair, x_scale, weight_scale, out, out_scale, a_half_tiles, b_s, pipe,
                            1, GATE, COLUMNS, K, FEATURES, STAGES, LIMIT)),
                (fetch_gathered, (x, weight_box, sorted_pair, table, a_s, b_s, pipe,
                                  K, COLUMNS, K, FEATURES, BLOCK, BLOCKS, GROUP, STAGES)),
            ],
            [4, 4],
            [224, 64],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply, (sorted_pair, x_scale, weight_scale, out, out_scale, a_half_tiles, b_s, pipe,
                            0, GATE, COLUMNS, K, FEATURES, STAGES, LIMIT)),
                (multiply, (sorted_pair, x_scale, weight_scale, out, out_scale, a_half_tiles, b_s, pipe,
                            1, GATE, COLUMNS, K, FEATURES, STAGES, LIMIT)),
                (fetch_sorted, (act_box, weight_box, table, a_half_tiles, b_s, pipe,
                                K, FEATURES, BLOCK, BLOCKS, GROUP, STAGES, CLAIMED)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
