"""The experts' products on Hopper for many tokens whose activations are FP8, with weights in MXFP4: tiles of 256 pairs
by 128 weight rows, on wgmma in FP8.

A number of MXFP4 times a power of two is a number of e4m3, exactly, for 12 powers in a row. So a row's weights become
e4m3 with one exponent for the whole row, if the exponents of its groups are near enough to each other, and the row's
sums are multiplied by that power of two at their end (`kernels.matrix.MicroScaled4.least`).

wgmma reads weights in e4m3 from shared memory. The copy engine brings them there as they are stored, and a partition of
their own converts them, a thread one row at a time: a table of eight bytes has a group's magnitudes, one instruction
looks four of them up, and two more add the signs. What that costs is shared by all pairs of a tile, so tiles are tall.
A tile has four chunks of 64 pairs, the first and the third for one multiplying partition, the others for the other one;
chunks without pairs cost nothing.

As in `w8a8`, tensor cores sum 128 features at a time; plain cores multiply these sums by the pairs' scales and add them
up in fp32. `gate_up` makes the 128 features of an item in two passes over the inputs, with 64 rows of gate and 64 of up
in each, for they are rounded to FP8 with one scale: what the first pass makes waits in shared memory, in bf16, to which
the second's is rounded, too. `down` has 128 rows in one pass.

Items, claims and announcements are `hopper`'s. The pairs' inputs are sorted before (`gather`), so that the copy engine
fetches them. There are two rings: `raw` and `read` are the barriers of weights as they are stored, `full` and `empty`
those of inputs and converted weights.

No deadlock: weights wait for the converting partition alone, which waits for them and for the multiplying ones. Inputs
wait for the multiplying ones. These hand every stage back once, whether they have pairs or not, and wait for nothing
but full stages and announcements. An announcement's slot is written again STAGES + 1 items later. Weights are at most
RAW + STAGES stages ahead of what is multiplied, an item has four stages at least, and STAGES is at least 2: so whoever
reads has read the item that stood there, also once more behind its last stage (`_again`).

Sizes are multiples of 512, for the copy engine fetches a row's scales 16 at a time.

Written for Triton 3.6, as `hopper` is, and for the same private part of Gluon.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, has-type"

from __future__ import annotations

import torch
import triton
import triton.language as tl
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

from kernels.matrix import MicroScaled4
from kernels.moe.hopper import announce, claim, clamped, store_rows, work_item
from kernels.moe.hopper import announcement as chunks
from kernels.moe.w8a8 import TILED, announcement
from kernels.quantize import LEAST_SCALE, MOST

STEP = gl.constexpr(128)
"""Input features of a stage, and of a scale of the inputs."""
CHUNK = gl.constexpr(64)
"""Pairs of a product, and rows of weights that come at a time."""
CHUNKS = gl.constexpr(4)
"""Chunks of a tile."""
BLOCK = gl.constexpr(128)
"""Weight rows of a product."""
RAW = gl.constexpr(4)
"""Stages of weights as they are stored."""
LEAD = gl.constexpr(4)
"""Stages before the end of an item at which a program claims its next item."""
WORDS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=3))
WORD_ROWS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2))
SCALES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3))
SCALE_ROWS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2))
CONVERTED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
HELD = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
LARGEST = gl.constexpr(MOST)
LEAST = gl.constexpr(LEAST_SCALE)

_TO_E4M3 = gl.constexpr(
    """
    {
    .reg .b32 magnitudes, others, even, signs;
    and.b32 magnitudes, $2, 0x77777777;
    shl.b32 even, $2, 4;
    prmt.b32 signs, even, $2, 0x5140;
    shr.u32 others, magnitudes, 16;
    prmt.b32 magnitudes, $3, $4, magnitudes;
    lop3.b32 $0, signs, 0x80808080, magnitudes, 0xEA;
    prmt.b32 signs, even, $2, 0x7362;
    prmt.b32 others, $3, $4, others;
    lop3.b32 $1, signs, 0x80808080, others, 0xEA;
    }
    """
)
"""Conversion of eight numbers of a word to two words of e4m3, by a table of the magnitudes. Signs are the highest bits
of the word's bytes, and of those of the word four bits to the left."""


def word_box(matrix: MicroScaled4, gate: bool) -> TensorDescriptor:
    """Make the descriptor with which the copy engine fetches twice 64 rows' numbers of a stage."""
    return TensorDescriptor.from_tensor(_halves(matrix.data, gate), [2, CHUNK.value, STEP.value // 8], WORDS.value)


def scale_box(matrix: MicroScaled4, gate: bool) -> TensorDescriptor:
    """Make the descriptor with which the copy engine fetches the scales of twice 64 rows, of four stages."""
    return TensorDescriptor.from_tensor(_halves(matrix.scales, gate), [2, CHUNK.value, 4], SCALES.value)


def input_box(inputs: Tensor) -> TensorDescriptor:
    """Make the descriptor with which the copy engine fetches a chunk's inputs of a stage."""
    return TensorDescriptor.from_tensor(inputs, [CHUNK.value, STEP.value], TILED.value)


def _halves(stored: Tensor, gate: bool) -> Tensor:
    """Words [.., rows, words of a row] of all experts: an expert's gate, then its up; or 64 rows each."""
    words = stored.view(torch.int32)
    return words.view(-1, words.shape[1] // 2 if gate else CHUNK.value, words.shape[2])


@triton.jit(do_not_specialize=["pitch"])
def gather(
    x, x_scale, sorted_pair, table, out, out_scale, pitch,
    COLUMNS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Bring the tokens of the sorted pairs into their order: rows of K bytes, and scales of 128 of them, those of a
    group side by side, `pitch` from one group to the next. Grid: PLACES places of pairs each."""
    GROUPS: tl.constexpr = K // 128
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    tiles = tl.load(table)
    last = table + 4 * tiles
    end = tl.load(last + 1, mask=tiles > 0, other=0) + tl.load(last + 2, mask=tiles > 0, other=0)
    inside = (place < end)[:, None]
    token = (tl.load(sorted_pair + place, mask=place < end, other=0) // COLUMNS).to(tl.int64)[:, None]
    k = tl.arange(0, BLOCK)[None, :]
    g = tl.arange(0, BLOCK // 128)[None, :]
    number = tl.load(x + token * K + k, mask=inside & (k < K), other=0)
    scale = tl.load(x_scale + token * GROUPS + g, mask=inside & (g < GROUPS), other=0.0)
    tl.store(out + place.to(tl.int64)[:, None] * K + k, number, mask=inside & (k < K))
    tl.store(out_scale + g.to(tl.int64) * pitch + place[:, None], scale, mask=inside & (g < GROUPS))


@gluon.constexpr_function
def words_layout():
    """Layout of a stage's weights [128, 4 groups, 4 words]: a thread has a row."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0]],
        [[1, 0, 0], [2, 0, 0], [4, 0, 0], [8, 0, 0], [16, 0, 0]],
        [[32, 0, 0], [64, 0, 0]],
        [],
        [BLOCK.value, 4, 4],
    )


@gluon.constexpr_function
def raw_layout():
    """The same of words that are not in groups."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8]],
        [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]],
        [[32, 0], [64, 0]],
        [],
        [BLOCK.value, 16],
    )


@gluon.jit
def _stored_weights(words_s, scales_s, at):
    """The weights of a stage as they are stored, [128, 4, 4] words, and its rows' scales, four in a word. `at`: of the
    four stages whose scales are there."""
    layout: gl.constexpr = words_layout()
    groups: gl.constexpr = gl.SliceLayout(2, layout)
    four = gl.arange(0, 4, gl.SliceLayout(0, groups))
    scale = gl.sum(gl.where((four == at)[None, :], scales_s.load(groups), 0), 1)
    words = words_s.load(raw_layout()).reshape([BLOCK, 4, 4])
    return gl.convert_layout(words, layout, assert_trivial=True), scale


@gluon.jit
def _converted(words, scale, least):
    """Weights in e4m3, [128, 32] words. `least`: of a row, the byte of the scales whose numbers are not shifted."""
    four = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, words_layout())))
    shift = ((scale[:, None] >> (8 * four)[None, :]) & 0xFF) - least[:, None]
    low = shift * 0x08080800 + 0x14100800
    high = shift * 0x08080808 + 0x24201C18
    low, words = gl.broadcast(low[:, :, None], words)
    high, words = gl.broadcast(high[:, :, None], words)
    first, second = gl.inline_asm_elementwise(
        _TO_E4M3, "=r,=r,r,r,r", [words, low, high], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.join(first, second).reshape([BLOCK, 32])


@gluon.jit
def fetch_weights(
    w_box, s_box, table, raw_s, scale_s, work_s, raw, read, announced,
    GATE: gl.constexpr, K: gl.constexpr, FEATURES: gl.constexpr, BLOCKS: gl.constexpr, GROUP: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    """The leading partition: a warp that claims and announces items, and has the copy engine fetch their weights."""
    words: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    steps: gl.constexpr = K // STEP
    total: gl.constexpr = 2 * steps if GATE else steps
    claimed_at: gl.constexpr = max(total - LEAD, 0)
    counter: gl.constexpr = 2 if GATE else 3
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
        announce(expert, first, pairs, block, work_s, announced, turn, SLOTS, words)
        turn += 1
        for i in range(total):
            slot = step % RAW
            bar = raw.index(slot)
            k = i % steps
            # 64 rows of gate and of up; or 128 in two halves.
            matrix = 2 * expert if GATE else expert * (FEATURES // CHUNK) + 2 * block
            row = block * BLOCK + i // steps * CHUNK if GATE else 0
            mbarrier.wait(read.index(slot), (step // RAW & 1) ^ 1)
            mbarrier.expect(bar, w_box.block_type.nbytes + s_box.block_type.nbytes)
            tma.async_copy_global_to_shared(w_box, [matrix, row, k * (STEP // 8)], bar, raw_s.index(slot))
            tma.async_copy_global_to_shared(s_box, [matrix, row, k // 4 * 4], bar, scale_s.index(slot))
            step += 1
            if i == claimed_at:
                item = claim(table + counter, tiles * BLOCKS)
            if i == min(claimed_at + 1, total - 1):
                next_expert, next_first, next_pairs, next_block = work_item(table, tiles, settled, item, BLOCKS, GROUP)
        expert = next_expert
        first = next_first
        pairs = next_pairs
        block = next_block
    announce(expert, first, pairs, block, work_s, announced, turn, SLOTS, words)


@gluon.jit
def fetch_inputs(
    act_box, x_s, work_s, full, empty, announced,
    GATE: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """A warp that has the copy engine fetch inputs, of chunks that have pairs."""
    words: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    bytes: gl.constexpr = act_box.block_type.nbytes
    steps: gl.constexpr = K // STEP
    step = 0
    turn = 0
    first, pairs, block = chunks(work_s, announced, turn, SLOTS, words)
    while block >= 0:
        for i in range(2 * steps if GATE else steps):
            stage = step % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            for chunk in gl.static_range(CHUNKS):
                only = (pairs > chunk * CHUNK) & ((pairs <= (chunk + 1) * CHUNK) | (chunk == CHUNKS - 1))
                mbarrier.expect(bar, (chunk + 1) * bytes, pred=only)
            for chunk in gl.static_range(CHUNKS):
                tma.async_copy_global_to_shared(
                    act_box, [first + chunk * CHUNK, i % steps * STEP], bar, x_s.index(CHUNKS * stage + chunk),
                    pred=pairs > chunk * CHUNK,
                )  # fmt: skip
            step += 1
        turn += 1
        first, pairs, block = chunks(work_s, announced, turn, SLOTS, words)


@gluon.jit
def convert(
    least, raw_s, scale_s, w_s, work_s, raw, read, full, empty, announced,
    GATE: gl.constexpr, K: gl.constexpr, FEATURES: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """The converting partition: four warps, a thread of which has a row of every stage."""
    lanes: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, words_layout()))
    steps: gl.constexpr = K // STEP
    r = gl.arange(0, BLOCK, rows)
    at = r % CHUNK + r // CHUNK * FEATURES if GATE else r
    step = 0
    turn = 0
    expert, _first, _pairs, block = announcement(work_s, announced, turn, SLOTS, lanes)
    while block >= 0:
        row = least + expert.to(gl.int64) * (2 * FEATURES if GATE else FEATURES) + block * BLOCK
        last = step + (2 * steps if GATE else steps) - 1
        mbarrier.wait(raw.index(step % RAW), step // RAW & 1)
        words, scale = _stored_weights(raw_s.index(step % RAW), scale_s.index(step % RAW), 0)
        for half in range(2 if GATE else 1):
            lowest = gl.load(row + half * CHUNK + at).to(gl.int32)
            for i in range(steps):
                stage = step % STAGES
                value = _converted(words, scale, lowest)
                mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
                w_s.index(stage).store(value)
                # The next ones are on their way while these are fenced. Behind the last stage that one's are read once
                # more, and not used.
                after = gl.minimum(step + 1, last)
                mbarrier.wait(raw.index(after % RAW), after // RAW & 1)
                words, scale = _stored_weights(raw_s.index(after % RAW), scale_s.index(after % RAW), (i + 1) % 4)
                fence_async_shared()
                gl.thread_barrier()
                mbarrier.arrive(full.index(stage), count=1)
                mbarrier.arrive(read.index(step % RAW), count=1)
                step += 1
        turn += 1
        expert, _first, _pairs, block = announcement(work_s, announced, turn, SLOTS, lanes)


@gluon.constexpr_function
def sums_layout():
    """Layout of the sums of a chunk [64, 128]."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK.value, 32])


@gluon.jit
def _one(
    scale, rows, inside, pitch, x_s, w_s, full, empty, part, step,
    WHICH: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The sums of a partition's first chunk, the step behind them. `scale`: that of a tile's first pair, `pitch` from
    one group to the next; `rows`: of the chunk, `inside` those that are pairs."""
    sums = gl.zeros([CHUNK, BLOCK], gl.float32, sums_layout())
    factor = gl.load(scale + rows, mask=inside, other=0.0)
    for i in range(STEPS):
        # Nobody copies scales ahead: those of the next step are asked for a step before.
        scale += gl.where(i < STEPS - 1, pitch, 0)
        next_factor = gl.load(scale + rows, mask=inside, other=0.0)
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        weight = w_s.index(stage).permute((1, 0))
        part = warpgroup_mma(x_s.index(CHUNKS * stage + WHICH), weight, part, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=(part,))
        gl.thread_barrier()
        mbarrier.arrive(empty.index(stage), count=1)
        sums += part * factor[:, None]
        factor = next_factor
        step += 1
    return sums, part, step


@gluon.jit
def _two(
    scale, rows, inside, others_inside, pitch, x_s, w_s, full, empty, part, step,
    WHICH: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The sums of both chunks of a partition, the step behind them."""
    sums = gl.zeros([CHUNK, BLOCK], gl.float32, sums_layout())
    others = gl.zeros([CHUNK, BLOCK], gl.float32, sums_layout())
    factor = gl.load(scale + rows, mask=inside, other=0.0)
    other = gl.load(scale + (2 * CHUNK) + rows, mask=others_inside, other=0.0)
    for i in range(STEPS):
        scale += gl.where(i < STEPS - 1, pitch, 0)
        next_factor = gl.load(scale + rows, mask=inside, other=0.0)
        next_other = gl.load(scale + (2 * CHUNK) + rows, mask=others_inside, other=0.0)
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        weight = w_s.index(stage).permute((1, 0))
        part = warpgroup_mma(x_s.index(CHUNKS * stage + WHICH), weight, part, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=(part,))
        sums += part * factor[:, None]
        part = warpgroup_mma(x_s.index(CHUNKS * stage + WHICH + 2), weight, part, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=(part,))
        gl.thread_barrier()
        mbarrier.arrive(empty.index(stage), count=1)
        others += part * other[:, None]
        factor = next_factor
        other = next_other
        step += 1
    return sums, others, part, step


@gluon.jit
def _scaled(sums, least):
    """64 rows' sums times the powers of two of the rows, whose bytes are at `least`."""
    n = gl.arange(0, CHUNK, gl.SliceLayout(0, sums.type.layout))
    # A number that is not shifted has become 2^-5 times itself.
    return sums * ((gl.load(least + n).to(gl.int32) + 5) << 23).to(gl.float32, bitcast=True)[None, :]


@gluon.jit
def _rounded(
    before, value, bytes_s, out, out_scale, pitch, first, pairs, block, begin, FEATURES: gl.constexpr
):  # fmt: skip
    """Round the 128 features that both passes have made, with one scale for each pair, and write them by way of
    `bytes_s`, rows side by side."""
    lanes: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    scale = gl.maximum(gl.maximum(gl.max(gl.abs(before), 1), gl.max(gl.abs(value), 1)) / LARGEST, LEAST)
    inverse = 1 / scale
    r = begin + gl.arange(0, CHUNK, gl.SliceLayout(1, value.type.layout))
    gl.store(out_scale + block.to(gl.int64) * pitch + first + r, scale, mask=r < pairs)
    both = gl.join(before * inverse[:, None], value * inverse[:, None]).permute((0, 2, 1)).reshape([CHUNK, BLOCK])
    bytes_s.store(both.to(out.dtype.element_ty))
    gl.thread_barrier()
    m = begin + gl.arange(0, CHUNK, gl.SliceLayout(1, lanes))
    column = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, lanes))
    store_rows(bytes_s.load(lanes), out, first + m, column, m < pairs, FEATURES)


@gluon.jit
def _gated(
    sums, least, held_s, out, out_scale, pitch, expert, first, pairs, block, half, begin,
    FEATURES: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """Make of a chunk's sums of gate and up what `down` reads; the first half waits in `held_s` for the second."""
    gate, up = sums.reshape([CHUNK, 2, CHUNK]).permute((0, 2, 1)).split()
    least += expert.to(gl.int64) * (2 * FEATURES) + block * BLOCK + half * CHUNK
    gate = _scaled(gate, least)
    up = _scaled(up, least + FEATURES)
    if LIMIT > 0:
        gate, up = clamped(gate, up, LIMIT)
    value = (gate * (1 / (1 + gl.exp(-gate))) * up).to(gl.bfloat16)
    if half == 0:
        held_s.store(value)
    else:
        before = held_s.load(value.type.layout)
        gl.thread_barrier()
        bytes_s = held_s._reinterpret(out.dtype.element_ty, [CHUNK, BLOCK], TILED)
        _rounded(
            before.to(gl.float32), value.to(gl.float32), bytes_s, out, out_scale, pitch, first, pairs, block, begin,
            FEATURES,
        )  # fmt: skip


@gluon.jit
def _stored(sums, least, sorted_pair, out, expert, first, pairs, block, begin, FEATURES: gl.constexpr):
    """Write a chunk's results of `down`."""
    lanes: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    left, right = sums.reshape([CHUNK, 2, CHUNK]).permute((0, 2, 1)).split()
    least += expert.to(gl.int64) * FEATURES + block * BLOCK
    m = begin + gl.arange(0, CHUNK, gl.SliceLayout(1, lanes))
    column = block * BLOCK + gl.arange(0, CHUNK, gl.SliceLayout(0, lanes))
    pair = gl.load(sorted_pair + first + m, mask=m < pairs, other=0)
    left = gl.convert_layout(_scaled(left, least).to(out.dtype.element_ty), lanes)
    store_rows(left, out, pair, column, m < pairs, FEATURES)
    right = gl.convert_layout(_scaled(right, least + CHUNK).to(out.dtype.element_ty), lanes)
    store_rows(right, out, pair, column + CHUNK, m < pairs, FEATURES)


@gluon.jit
def _again(work_s, turn, SLOTS: gl.constexpr, LAYOUT: gl.constexpr):
    """What the item's announcement said: read once more behind its sums, where nothing that follows from it takes
    registers of these."""
    i = gl.arange(0, 4, LAYOUT)
    work = work_s.index(turn % SLOTS).load(LAYOUT)
    first = gl.sum(gl.where(i == 0, work, 0), 0)
    pairs = gl.sum(gl.where(i == 1, work, 0), 0)
    block = gl.sum(gl.where(i == 2, work, 0), 0)
    expert = gl.sum(gl.where(i == 3, work, 0), 0)
    return expert, first, pairs, block


@gluon.jit
def multiply(
    x_scale, least, sorted_pair, out, out_scale, pitch, x_s, w_s, held_s, work_s, full, empty, announced,
    WHICH: gl.constexpr, GATE: gl.constexpr, K: gl.constexpr, FEATURES: gl.constexpr, STAGES: gl.constexpr,
    LIMIT: gl.constexpr,
):  # fmt: skip
    """A multiplying partition: the first chunk of 64 pairs of every tile and the third, or the others."""
    words: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    steps: gl.constexpr = K // STEP
    passes: gl.constexpr = 2 if GATE else 1
    begin: gl.constexpr = WHICH * CHUNK
    behind: gl.constexpr = begin + 2 * CHUNK
    r = begin + gl.arange(0, CHUNK, gl.SliceLayout(1, sums_layout()))
    part = gl.zeros([CHUNK, BLOCK], gl.float32, sums_layout())
    step = 0
    turn = 0
    expert, first, pairs, block = announcement(work_s, announced, turn, STAGES + 1, words)
    while block >= 0:
        if pairs > behind:
            for half in range(passes):
                sums, others, part, step = _two(
                    x_scale + first, r, r < pairs, r + 2 * CHUNK < pairs, pitch, x_s, w_s, full, empty, part, step,
                    WHICH, steps, STAGES,
                )  # fmt: skip
                expert, first, pairs, block = _again(work_s, turn, STAGES + 1, words)
                if GATE:
                    _gated(sums, least, held_s.index(WHICH), out, out_scale, pitch, expert, first, pairs, block, half,
                           begin, FEATURES, LIMIT)  # fmt: skip
                    _gated(others, least, held_s.index(WHICH + 2), out, out_scale, pitch, expert, first, pairs, block,
                           half, behind, FEATURES, LIMIT)  # fmt: skip
                else:
                    _stored(sums, least, sorted_pair, out, expert, first, pairs, block, begin, FEATURES)
                    _stored(others, least, sorted_pair, out, expert, first, pairs, block, behind, FEATURES)
        elif pairs > begin:
            for half in range(passes):
                sums, part, step = _one(
                    x_scale + first, r, r < pairs, pitch, x_s, w_s, full, empty, part, step, WHICH, steps, STAGES
                )  # fmt: skip
                expert, first, pairs, block = _again(work_s, turn, STAGES + 1, words)
                if GATE:
                    _gated(sums, least, held_s.index(WHICH), out, out_scale, pitch, expert, first, pairs, block, half,
                           begin, FEATURES, LIMIT)  # fmt: skip
                else:
                    _stored(sums, least, sorted_pair, out, expert, first, pairs, block, begin, FEATURES)
        else:
            for _i in range(passes * steps):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), step // STAGES & 1)
                mbarrier.arrive(empty.index(stage), count=1)
                step += 1
        turn += 1
        expert, first, pairs, block = announcement(work_s, announced, turn, STAGES + 1, words)


@gluon.jit(do_not_specialize=["pitch"])
def product(
    act_box, x_scale, w_box, s_box, least, sorted_pair, table, out, out_scale, pitch,
    GATE: gl.constexpr, K: gl.constexpr, FEATURES: gl.constexpr, BLOCKS: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """`kernel.gate_up` (GATE) or `kernel.down` of the sorted pairs' inputs in FP8, which `act_box` describes;
    four warps, the others come on top.

    `x_scale`: of these, fp32 [K / 128, Y], `pitch` from one group to the next. `w_box` and `s_box`: descriptors of the
    experts' rows and of their scales; `least`: the rows' bytes (`MicroScaled4.least`). GATE: `out` and `out_scale` get
    FP8 of the sorted pairs; otherwise `out` gets the pairs' results, and `out_scale` is not looked at. FEATURES: of the
    output (GATE: of gate, and as many of up). LIMIT: see `activation`.
    """
    slots: gl.constexpr = STAGES + 1
    w_s = gl.allocate_shared_memory(act_box.dtype, [STAGES, BLOCK, STEP], TILED)
    raw_s = gl.allocate_shared_memory(gl.int32, [RAW, 2, CHUNK, STEP // 8], WORDS)
    scale_s = gl.allocate_shared_memory(gl.int32, [RAW, 2, CHUNK, 4], SCALES)
    x_s = gl.allocate_shared_memory(act_box.dtype, [CHUNKS * STAGES, CHUNK, STEP], TILED)
    held_s = gl.allocate_shared_memory(gl.bfloat16, [CHUNKS, CHUNK, CHUNK], HELD)
    raw = gl.allocate_shared_memory(gl.int64, [RAW, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [RAW, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    work_s = gl.allocate_shared_memory(gl.int32, [slots, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    announced = gl.allocate_shared_memory(gl.int64, [slots, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(slots):
        mbarrier.init(announced.index(slot), count=1)
    for slot in gl.static_range(RAW):
        mbarrier.init(raw.index(slot), count=1)
        mbarrier.init(read.index(slot), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.thread_barrier()
    word_rows_s = raw_s._reinterpret(gl.int32, [RAW, BLOCK, STEP // 8], WORD_ROWS)
    scale_rows_s = scale_s._reinterpret(gl.int32, [RAW, BLOCK, 4], SCALE_ROWS)
    converted_s = w_s._reinterpret(gl.int32, [STAGES, BLOCK, STEP // 4], CONVERTED)
    # The tuples stand in the calls: in a variable their constants would become run-time values.
    gl.warp_specialize(
        [
            (multiply, (x_scale, least, sorted_pair, out, out_scale, pitch, x_s, w_s, held_s, work_s, full, empty,
                        announced, 0, GATE, K, FEATURES, STAGES, LIMIT)),
            (multiply, (x_scale, least, sorted_pair, out, out_scale, pitch, x_s, w_s, held_s, work_s, full, empty,
                        announced, 1, GATE, K, FEATURES, STAGES, LIMIT)),
            (convert, (least, word_rows_s, scale_rows_s, converted_s, work_s, raw, read, full, empty, announced,
                       GATE, K, FEATURES, STAGES, slots)),
            (fetch_weights, (w_box, s_box, table, raw_s, scale_s, work_s, raw, read, announced,
                             GATE, K, FEATURES, BLOCKS, GROUP, slots)),
            (fetch_inputs, (act_box, x_s, work_s, full, empty, announced,
                            GATE, K, STAGES, slots)),
        ],
        [4, 4, 1, 1],
        [216, 56, 24, 24],
    )  # fmt: skip
