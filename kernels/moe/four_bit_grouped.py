"""The experts' products on Hopper for many tokens with weights of four bits in groups of 32: tiles of ROWS pairs by 256
weight rows, on wgmma, with the weights as the left operand.

That operand may come from registers. So weights stay as they are stored until a thread has them, and become what the
checkpoint means there: a number times its group's scale, rounded to bf16 once. The right operand is the pairs' inputs
in shared memory, and a tile of results is [weight rows, pairs].

Items, claims, announcements and the ring are `hopper`'s. Here the two multiplying partitions have the same pairs and
different weights, 128 rows each in two chunks of 64: of gate and of up, so that both results of a feature lie in one
thread, or neighbours of `down`. A partition makes one chunk's weights bf16 while the tensor cores multiply the other's;
registers of a product that is under way are never written. A tile with at most half of ROWS pairs costs products of
half the width.

A thread of the tensor cores' left operand has two features, the two that lie eight further, and so on. Of weights as
they are stored that would be pieces of four words. But a sum does not care in what order its terms are numbered: so
inputs lie in memory as `place` says, every 64 features in an order in which a thread's are neighbours in the weights'
memory, and each word has one reader. `rearrange` brings the tokens into that order; what `gate_up` makes has it
already.

The two numbers of a word that are 16 bits apart become bf16 at once. INT4: behind the exponent of 128 they are the
lowest bits, and 128 + 8 less is exact. MXFP4: see `e2m1`.

A stage has 128 input features. Their four scales of a row are a part of the 16 bytes that the copy engine fetches at
least, from a multiple of 16 bytes on: of INT4 half, of MXFP4 a quarter. So stages go in turns of two or four, each of
which gets the same 16 bytes and reads its own four. Inputs come with cp.async, sorted ones as well as gathered ones: so
nobody reads rows past a tile's pairs.

No deadlock, as in `hopper`: a multiplying partition holds at most the stage that it multiplies when it waits for the
next, and the fetching one reports that as full once it has filled the STAGES - 2 after it, which need nothing more.

Written for Triton 3.6: a stage's narrower half is a view that only a private part of Gluon makes. `kernels.moe` asks
whether it is there before it chooses these kernels.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, has-type"

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.linear.hopper import TILED
from kernels.matrix import FourBits
from kernels.moe import e2m1
from kernels.moe.hopper import clamped, report_full, store_rows
from kernels.moe.items import announce, announcement, claim, pipe_of, work_item

STEP = gl.constexpr(128)
"""Input features of a stage."""
HALF_TILE = gl.constexpr(64)
"""Features that have an order of their own, and features of a swizzled row."""
BLOCK = gl.constexpr(128)
"""Weight rows that come at a time."""
CHUNK = gl.constexpr(64)
"""Pairs of a partition, and of a product."""
LEAD = gl.constexpr(4)
"""Stages before the end of an item at which a program claims its next item."""
WORDS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2))
FETCHED: Final = 16
"""Bytes of scales of a row that come at a time."""

_INT4_TO_BF16 = gl.constexpr(
    """
    {
    .reg .b32 word, bits, place;
    mov.b32 place, 0x43084308;
    lop3.b32 bits, $4, 0x000F000F, 0x43004300, 0xEA;
    sub.rn.bf16x2 bits, bits, place;
    mul.rn.bf16x2 $0, bits, $5;
    shr.u32 word, $4, 4;
    lop3.b32 bits, word, 0x000F000F, 0x43004300, 0xEA;
    sub.rn.bf16x2 bits, bits, place;
    mul.rn.bf16x2 $1, bits, $5;
    shr.u32 word, $4, 8;
    lop3.b32 bits, word, 0x000F000F, 0x43004300, 0xEA;
    sub.rn.bf16x2 bits, bits, place;
    mul.rn.bf16x2 $2, bits, $5;
    shr.u32 word, $4, 12;
    lop3.b32 bits, word, 0x000F000F, 0x43004300, 0xEA;
    sub.rn.bf16x2 bits, bits, place;
    mul.rn.bf16x2 $3, bits, $5;
    }
    """
)
"""Conversion of eight numbers to the four pairs that are 16 bits apart, times a scale. (0x4300 is 128, 0x4308 136.)"""


@gluon.constexpr_function
def turn_of(FORMAT):
    """Return how many stages have their scales in the same bytes."""
    return FETCHED // (4 * (2 if FORMAT == "int4" else 1))


@gluon.constexpr_function
def scales_layout(FORMAT):
    """Layout of the scales of a stage's rows."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16 if FORMAT == "int4" else 8, rank=2)


@gluon.constexpr_function
def scale_dtype(FORMAT):
    """Dtype of the scales."""
    return gl.bfloat16 if FORMAT == "int4" else gl.uint8


def word_box(matrix: FourBits) -> TensorDescriptor:
    """Make the descriptor with which the copy engine fetches 128 rows' numbers of a stage."""
    halfwords = matrix.data.view(torch.int16).flatten(0, 1)
    return TensorDescriptor.from_tensor(halfwords, [BLOCK.value, STEP.value // 4], WORDS.value)


def scale_box(matrix: FourBits, format: str) -> TensorDescriptor:
    """Make the descriptor with which the copy engine fetches the scales of 128 rows of a turn."""
    box = [BLOCK.value, FETCHED // matrix.scales.itemsize]
    return TensorDescriptor.from_tensor(matrix.scales.flatten(0, 1), box, scales_layout(format))


@triton.jit
def place(i):
    """Return which of 64 features is at place i of their order."""
    two, eighth, quarter, one = i // 16, i // 8 % 2, i // 2 % 4, i % 2
    return 16 * quarter + 8 * (two // 2) + 4 * one + 2 * (two % 2) + eighth


@triton.jit
def rearrange(x, out, X_STRIDE: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """out[t, 64 j + i] = x[t, 64 j + place(i)]. Grid: tokens, blocks of features."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * X_STRIDE + at // 64 * 64 + place(at % 64), mask=at < K, other=0.0)
    tl.store(out + row * K + at, value, mask=at < K)


@gluon.constexpr_function
def words_layout():
    """Layout of a chunk's numbers of a stage [64, 32], 16 bits each: a thread has 16 neighbours of every 64 features,
    of two rows."""
    registers = [[0, 1], [0, 2], [8, 0], [0, 16]]
    return gl.DistributedLinearLayout(
        registers, [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 32]
    )


@gluon.constexpr_function
def block_layout():
    """Layout of a chunk's numbers of 64 features [64, 2, 8], in two groups."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [8, 0, 0]],
        [[0, 0, 4], [0, 1, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 2, 8],
    )


@gluon.constexpr_function
def sums_layout(WIDTH):
    """Layout of the sums of a chunk [64, WIDTH]."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])


@gluon.jit
def _fetch_rows(w_box, s_box, row, i, bar, w_s, s_s, slot, FORMAT: gl.constexpr):
    """Start copying 128 rows of weights of an item's stage i."""
    TURN: gl.constexpr = turn_of(FORMAT)
    tma.async_copy_global_to_shared(w_box, [row, i * (STEP // 4)], bar, w_s.index(slot))
    tma.async_copy_global_to_shared(s_box, [row, i // TURN * (4 * TURN)], bar, s_s.index(slot))


@gluon.jit
def fetch(
    x, w_box, s_box, sorted_pair, table, x_s, w_s, s_s, pipe,
    FORMAT: gl.constexpr, GATE: gl.constexpr, COLUMNS: gl.constexpr, K: gl.constexpr, FEATURES: gl.constexpr,
    BLOCKS: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The fetching partition: four warps that copy a tile's inputs 16 bytes per thread, and weights by the copy
    engine."""
    lanes: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    m = gl.arange(0, ROWS, gl.SliceLayout(1, lanes))
    column = gl.arange(0, HALF_TILE, gl.SliceLayout(0, lanes))
    lag: gl.constexpr = STAGES - 2
    steps: gl.constexpr = K // STEP
    claimed_at: gl.constexpr = max(steps - LEAD, 0)
    counter: gl.constexpr = 2 if GATE else 3
    bytes: gl.constexpr = 2 * (w_box.block_type.nbytes + s_box.block_type.nbytes)
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
        # Not while the item before is fetched, for want of registers: stages that are under way hide it.
        source_row = item.first + m
        if GATE:
            source_row = gl.load(sorted_pair + source_row, mask=m < item.pairs, other=0) // COLUMNS
        source = x + source_row.to(gl.int64)[:, None] * K + column[None, :]
        inside = (m < item.pairs)[:, None] & (column >= 0)[None, :]
        for i in range(steps):
            stage = step % STAGES
            bar = pipe.full.index(stage)
            mbarrier.wait(pipe.empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(bar, bytes)
            if GATE:
                row = item.expert * (2 * FEATURES) + item.block * BLOCK
                second = row + FEATURES
            else:
                row = item.expert * FEATURES + item.block * (2 * BLOCK)
                second = row + BLOCK
            _fetch_rows(w_box, s_box, row, i, bar, w_s, s_s, 2 * stage, FORMAT)
            _fetch_rows(w_box, s_box, second, i, bar, w_s, s_s, 2 * stage + 1, FORMAT)
            for half in gl.static_range(2):
                async_copy.async_copy_global_to_shared(
                    x_s.index(2 * stage + half), source + i * STEP + half * HALF_TILE, mask=inside, cache_modifier=".cg"
                )
            async_copy.commit_group()
            if step >= lag:
                report_full(pipe.full, step - lag, STAGES, lag)
            step += 1
            if i == claimed_at:
                number = claim(table + counter, tiles * BLOCKS)
            if i == min(claimed_at + 1, steps - 1):
                following = work_item(table, tiles, settled, number, BLOCKS, GROUP)
        item = following
    announce(item, pipe, turn)
    for behind in gl.static_range(lag):
        if step >= lag - behind:
            report_full(pipe.full, step - lag + behind, STAGES, lag - 1 - behind)


@gluon.jit
def _words(w_s, slot):
    """A chunk's numbers of the two halves of a stage's features, [64, 2, 8] each."""
    tile = w_s.index(slot).load(words_layout())
    first, second = tile.reshape([CHUNK, 2, 16]).permute((0, 2, 1)).split()
    first = gl.convert_layout(first.reshape([CHUNK, 2, 8]), block_layout(), assert_trivial=True)
    second = gl.convert_layout(second.reshape([CHUNK, 2, 8]), block_layout(), assert_trivial=True)
    return first, second


@gluon.jit
def _scales(s_s, slot, AT: gl.constexpr, SECOND: gl.constexpr):
    """A chunk's factors [64, 2] of the first half, or the second, of the features of the stage AT of a turn."""
    scale = s_s.index(slot).slice(4 * AT + 2 * SECOND, 2, 1).load(gl.SliceLayout(2, block_layout()))
    if scale.dtype == gl.uint8:
        scale = e2m1.factor(scale)
    return scale


@gluon.jit
def _weights(words, scale, FORMAT: gl.constexpr, WIDTH: gl.constexpr):
    """Numbers times factors in bf16: a left operand [64, 64], its features in their order."""
    left: gl.constexpr = gl.DotOperandLayout(0, sums_layout(WIDTH), 2)
    kinds: gl.constexpr = (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16)
    convert: gl.constexpr = _INT4_TO_BF16 if FORMAT == "int4" else e2m1.TO_BF16
    scale, words = gl.broadcast(scale[:, :, None], words)
    a, b, c, d = gl.inline_asm_elementwise(
        convert, "=r,=r,=r,=r,r,r", [words, scale], dtype=kinds, is_pure=True, pack=2
    )  # fmt: skip
    # [row, quarter, two of four, one, the other two of four, eighth], see `place`.
    both = gl.join(gl.join(a, c), gl.join(b, d)).reshape([CHUNK, 4, 2, 2, 2, 2])
    both = both.permute((0, 2, 4, 5, 1, 3)).reshape([CHUNK, HALF_TILE])
    return gl.convert_layout(both, left, assert_trivial=True)


@gluon.jit
def _multiplied(
    x_s, w_s, s_s, pipe, step, turns,
    WHICH: gl.constexpr, FORMAT: gl.constexpr, WIDTH: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The sums of a partition's two chunks [64, WIDTH] over `turns` turns of stages from `step` on, of the first WIDTH
    pairs of the tile; `x_s` has PART pieces of WIDTH rows for 64 features."""
    layout: gl.constexpr = sums_layout(WIDTH)
    top = gl.zeros([CHUNK, WIDTH], gl.float32, layout)
    low = gl.zeros([CHUNK, WIDTH], gl.float32, layout)
    TURN: gl.constexpr = turn_of(FORMAT)
    last = step + TURN * turns - 1
    mbarrier.wait(pipe.full.index(step % STAGES), step // STAGES & 1)
    slot = 4 * (step % STAGES) + WHICH
    top_first, top_second = _words(w_s, slot)
    a = _weights(top_first, _scales(s_s, slot, 0, 0), FORMAT, WIDTH)
    for _i in range(turns):
        for at in gl.static_range(TURN):
            stage = step % STAGES
            slot = 4 * stage + WHICH
            low_first, low_second = _words(w_s, slot + 2)
            x_first = x_s.index(2 * PART * stage).permute((1, 0))
            x_second = x_s.index(2 * PART * stage + PART).permute((1, 0))

            # One product is under way while the next one's weights become bf16. None is at the end of a turn: the loop
            # would carry registers that are still read, and ptxas would let every product wait for the one before.
            top = warpgroup_mma(a, x_first, top, is_async=True)
            if at > 0:
                low, b = warpgroup_mma_wait(1, deps=(low, b))  # noqa: F821 - of the stage before
                gl.thread_barrier()
                mbarrier.arrive(pipe.empty.index((step + STAGES - 1) % STAGES), count=1)
            b = _weights(low_first, _scales(s_s, slot + 2, at, 0), FORMAT, WIDTH)
            low = warpgroup_mma(b, x_first, low, is_async=True)
            top, a = warpgroup_mma_wait(1, deps=(top, a))
            a = _weights(top_second, _scales(s_s, slot, at, 1), FORMAT, WIDTH)
            top = warpgroup_mma(a, x_second, top, is_async=True)
            low, b = warpgroup_mma_wait(1, deps=(low, b))
            b = _weights(low_second, _scales(s_s, slot + 2, at, 1), FORMAT, WIDTH)
            low = warpgroup_mma(b, x_second, low, is_async=True)
            top, a = warpgroup_mma_wait(1, deps=(top, a))
            # Behind the last stage that one's are read once more, and not used.
            step += 1
            after = gl.minimum(step, last)
            mbarrier.wait(pipe.full.index(after % STAGES), after // STAGES & 1)
            slot = 4 * (after % STAGES) + WHICH
            top_first, top_second = _words(w_s, slot)
            a = _weights(top_first, _scales(s_s, slot, (at + 1) % TURN, 0), FORMAT, WIDTH)
            if at == TURN - 1:
                low, b = warpgroup_mma_wait(0, deps=(low, b))
                gl.thread_barrier()
                mbarrier.arrive(pipe.empty.index(stage), count=1)
    return top, low, step


@gluon.jit
def _stored(value, target, first, sorted_pair, feature, pairs, begin, GATE: gl.constexpr, FEATURES: gl.constexpr):
    """Write results [pairs, 64] of the tile's pairs from `begin` on."""
    lanes: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    m = begin + gl.arange(0, value.shape[0], gl.SliceLayout(1, lanes))
    column = gl.arange(0, CHUNK, gl.SliceLayout(0, lanes))
    row = first + m
    if not GATE:
        row = gl.load(sorted_pair + row, mask=m < pairs, other=0)
    store_rows(gl.convert_layout(value, lanes), target, row, feature + column, m < pairs, FEATURES)


@gluon.jit
def _finished(
    top, low, out, sorted_pair, item, begin,
    WHICH: gl.constexpr, GATE: gl.constexpr, FEATURES: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """Write what a partition's sums of up to 64 pairs make, those from `begin` on."""
    WIDTH: gl.constexpr = top.shape[1]
    dtype: gl.constexpr = out.dtype.element_ty
    if GATE:
        if LIMIT > 0:
            top, low = clamped(top, low, LIMIT)
        value = (top * (1 / (1 + gl.exp(-top))) * low).to(dtype)
        value = value.reshape([4, 2, 2, 2, 2, WIDTH]).permute((5, 1, 3, 4, 0, 2)).reshape([WIDTH, CHUNK])
        feature = item.block * BLOCK + WHICH * CHUNK
        _stored(value, out, item.first, sorted_pair, feature, item.pairs, begin, GATE, FEATURES)
    else:
        feature = item.block * (2 * BLOCK) + WHICH * CHUNK
        value = top.to(dtype).permute((1, 0))
        _stored(value, out, item.first, sorted_pair, feature, item.pairs, begin, GATE, FEATURES)
        value = low.to(dtype).permute((1, 0))
        _stored(value, out, item.first, sorted_pair, feature + BLOCK, item.pairs, begin, GATE, FEATURES)


@gluon.jit
def _wide_item(
    sorted_pair, out, x_s, w_s, s_s, pipe, step, turns, item,
    WHICH: gl.constexpr, FORMAT: gl.constexpr, GATE: gl.constexpr, FEATURES: gl.constexpr, ROWS: gl.constexpr,
    STAGES: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """Everything of a tile of more than half of ROWS pairs; the step behind it. What is written takes turns in shared
    memory, one half of the pairs after the other."""
    top, low, step = _multiplied(x_s, w_s, s_s, pipe, step, turns, WHICH, FORMAT, ROWS, 1, STAGES)
    top_near, top_far = top.reshape([CHUNK, 2, ROWS // 2]).permute((0, 2, 1)).split()
    low_near, low_far = low.reshape([CHUNK, 2, ROWS // 2]).permute((0, 2, 1)).split()
    _finished(top_near, low_near, out, sorted_pair, item, 0, WHICH, GATE, FEATURES, LIMIT)
    _finished(top_far, low_far, out, sorted_pair, item, ROWS // 2, WHICH, GATE, FEATURES, LIMIT)
    return step


@gluon.jit
def _narrow_item(
    sorted_pair, out, x_s, w_s, s_s, pipe, step, turns, item,
    WHICH: gl.constexpr, FORMAT: gl.constexpr, GATE: gl.constexpr, FEATURES: gl.constexpr, ROWS: gl.constexpr,
    STAGES: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """Compute a tile of at most ROWS pairs, as `_wide_item` does; `x_s` has halves of a stage's inputs."""
    top, low, step = _multiplied(x_s, w_s, s_s, pipe, step, turns, WHICH, FORMAT, ROWS, 2, STAGES)
    _finished(top, low, out, sorted_pair, item, 0, WHICH, GATE, FEATURES, LIMIT)
    return step


@gluon.jit
def multiply(
    sorted_pair, out, x_s, x_half_tiles, w_s, s_s, pipe, turns,
    WHICH: gl.constexpr, FORMAT: gl.constexpr, GATE: gl.constexpr, FEATURES: gl.constexpr, ROWS: gl.constexpr,
    STAGES: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """A multiplying partition: the first chunk of weight rows of either block, or the second."""
    step = 0
    turn = 0
    item = announcement(pipe, turn)
    while item.block >= 0:
        # Of each width a function: values of one name in both branches would have to be of one type.
        if item.pairs > ROWS // 2:
            step = _wide_item(
                sorted_pair, out, x_s, w_s, s_s, pipe, step, turns, item,
                WHICH, FORMAT, GATE, FEATURES, ROWS, STAGES, LIMIT,
            )  # fmt: skip
        else:
            step = _narrow_item(
                sorted_pair, out, x_half_tiles, w_s, s_s, pipe, step, turns, item,
                WHICH, FORMAT, GATE, FEATURES, ROWS // 2, STAGES, LIMIT,
            )  # fmt: skip
        turn += 1
        item = announcement(pipe, turn)


@gluon.jit(do_not_specialize=["turns"])
def product(
    x, w_box, s_box, sorted_pair, table, out, turns,
    FORMAT: gl.constexpr, GATE: gl.constexpr, COLUMNS: gl.constexpr, K: gl.constexpr, FEATURES: gl.constexpr,
    BLOCKS: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """`scaled.gate_up` of the tokens `x` (GATE), or `scaled.down` of the sorted pairs' `x`; four warps, the others come
    on top. Rows of `x`, contiguous, have K features in the order of `place`, and so have those of `out` (GATE).

    `turns`: of an item, K / (128 stages of a turn). It is no constant, so that all sizes have one machine code: what
    the compiler made of a loop of a single turn computed something else on a GPU.

    `w_box` and `s_box`: descriptors of the experts' rows, laid end to end, and of their scales. FEATURES: of the output
    (GATE: of gate, and as many of up). FORMAT: of the weights, "int4" or "mxfp4". LIMIT: see `activation`.
    """
    AT_ONCE: gl.constexpr = 4 * turn_of(FORMAT)
    x_s = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, ROWS, HALF_TILE], TILED)
    w_s = gl.allocate_shared_memory(gl.int16, [2 * STAGES, BLOCK, STEP // 4], WORDS)
    s_s = gl.allocate_shared_memory(scale_dtype(FORMAT), [2 * STAGES, BLOCK, AT_ONCE], scales_layout(FORMAT))
    pipe = pipe_of(STAGES, 2)
    fence_async_shared()
    gl.thread_barrier()
    x_half_tiles = x_s._reinterpret(gl.bfloat16, [4 * STAGES, ROWS // 2, HALF_TILE], TILED)
    w_chunks = w_s._reinterpret(gl.int16, [4 * STAGES, CHUNK, STEP // 4], WORDS)
    s_chunks = s_s._reinterpret(scale_dtype(FORMAT), [4 * STAGES, CHUNK, AT_ONCE], scales_layout(FORMAT))
    # The tuples stand in the calls: in a variable their constants would become run-time values.
    gl.warp_specialize(
        [
            (multiply, (sorted_pair, out, x_s, x_half_tiles, w_chunks, s_chunks, pipe, turns,
                        0, FORMAT, GATE, FEATURES, ROWS, STAGES, LIMIT)),
            (multiply, (sorted_pair, out, x_s, x_half_tiles, w_chunks, s_chunks, pipe, turns,
                        1, FORMAT, GATE, FEATURES, ROWS, STAGES, LIMIT)),
            (fetch, (x, w_box, s_box, sorted_pair, table, x_s, w_s, s_s, pipe,
                     FORMAT, GATE, COLUMNS, K, FEATURES, BLOCKS, GROUP, ROWS, STAGES)),
        ],
        [4, 4],
        [224, 64],
    )  # fmt: skip
