"""Weights of `w4a8`: one partition has them fetched as they are stored, in MXFP4, another one converts them to e4m3."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, has-type"

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.matrix import MicroScaled4
from kernels.moe.items import announce, announcement, claim, work_item
from kernels.moe.w4a8_tile import BLOCK, CHUNK, STEP

RAW = gl.constexpr(4)
"""Stages of weights as they are stored."""
SHARED = gl.constexpr(4)
"""Neighbouring stages whose scales come at once, 16 bytes of a row; an item has a multiple of so many stages."""
SCALE_SLOTS = gl.constexpr(2)
"""Places for these scales. A place is written again for the stage `SHARED + 1` behind the last one that reads it.
Stages are asked for once the one `RAW` before has been read; as `RAW` is at most `SHARED + 1`, that last one has been
read then."""
LEAD = gl.constexpr(4)
"""Stages before the end of an item at which a program claims its next item."""
WORDS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=3))
WORD_ROWS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2))
SCALES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3))
SCALE_ROWS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2))
CONVERTED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))

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
    return TensorDescriptor.from_tensor(_halves(matrix.scales, gate), [2, CHUNK.value, SHARED.value], SCALES.value)


def _halves(stored: Tensor, gate: bool) -> Tensor:
    """Words [.., rows, words of a row] of all experts: an expert's gate, then its up; or 64 rows each."""
    words = stored.view(torch.int32)
    return words.view(-1, words.shape[1] // 2 if gate else CHUNK.value, words.shape[2])


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
    four = gl.arange(0, SHARED, gl.SliceLayout(0, groups))
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
    w_box, s_box, table, raw_s, scale_s, pipe, raw, read,
    GATE: gl.constexpr, K: gl.constexpr, FEATURES: gl.constexpr, BLOCKS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """The leading partition: a warp that claims and announces items, and has the copy engine fetch their weights."""
    steps: gl.constexpr = K // STEP
    total: gl.constexpr = 2 * steps if GATE else steps
    claimed_at: gl.constexpr = max(total - LEAD, 0)
    counter: gl.constexpr = 2 if GATE else 3
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
        for i in range(total):
            slot = step % RAW
            bar = raw.index(slot)
            k = i % steps
            # 64 rows of gate and of up; or 128 in two halves.
            matrix = 2 * item.expert if GATE else item.expert * (FEATURES // CHUNK) + 2 * item.block
            row = item.block * BLOCK + i // steps * CHUNK if GATE else 0
            mbarrier.wait(read.index(slot), (step // RAW & 1) ^ 1)
            scaled = k % SHARED == 0
            mbarrier.expect(bar, w_box.block_type.nbytes + s_box.block_type.nbytes, pred=scaled)
            mbarrier.expect(bar, w_box.block_type.nbytes, pred=k % SHARED != 0)
            tma.async_copy_global_to_shared(w_box, [matrix, row, k * (STEP // 8)], bar, raw_s.index(slot))
            tma.async_copy_global_to_shared(
                s_box, [matrix, row, k], bar, scale_s.index(step // SHARED % SCALE_SLOTS), pred=scaled
            )  # fmt: skip
            step += 1
            if i == claimed_at:
                number = claim(table + counter, tiles * BLOCKS)
            if i == min(claimed_at + 1, total - 1):
                following = work_item(table, tiles, settled, number, BLOCKS, GROUP)
        item = following
    announce(item, pipe, turn)


@gluon.jit
def convert(
    least, raw_s, scale_s, w_s, pipe, raw, read,
    GATE: gl.constexpr, K: gl.constexpr, FEATURES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The converting partition: four warps, a thread of which has a row of every stage."""
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, words_layout()))
    steps: gl.constexpr = K // STEP
    r = gl.arange(0, BLOCK, rows)
    at = r % CHUNK + r // CHUNK * FEATURES if GATE else r
    step = 0
    turn = 0
    item = announcement(pipe, turn)
    while item.block >= 0:
        row = least + item.expert.to(gl.int64) * (2 * FEATURES if GATE else FEATURES) + item.block * BLOCK
        last = step + (2 * steps if GATE else steps) - 1
        mbarrier.wait(raw.index(step % RAW), step // RAW & 1)
        words, scale = _stored_weights(raw_s.index(step % RAW), scale_s.index(step // SHARED % SCALE_SLOTS), 0)
        for half in range(2 if GATE else 1):
            lowest = gl.load(row + half * CHUNK + at).to(gl.int32)
            for i in range(steps):
                stage = step % STAGES
                value = _converted(words, scale, lowest)
                mbarrier.wait(pipe.empty.index(stage), (step // STAGES & 1) ^ 1)
                w_s.index(stage).store(value)
                # The next ones are on their way while these are fenced. Behind the last stage that one's are read once
                # more, and not used.
                after = gl.minimum(step + 1, last)
                mbarrier.wait(raw.index(after % RAW), after // RAW & 1)
                scales = scale_s.index(after // SHARED % SCALE_SLOTS)
                words, scale = _stored_weights(raw_s.index(after % RAW), scales, (i + 1) % SHARED)
                fence_async_shared()
                gl.thread_barrier()
                mbarrier.arrive(pipe.full.index(stage), count=1)
                mbarrier.arrive(read.index(step % RAW), count=1)
                step += 1
        turn += 1
        item = announcement(pipe, turn)
