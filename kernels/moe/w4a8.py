"""The experts' products on Hopper for many tokens whose activations are FP8, with weights in MXFP4: tiles of 256 pairs
by 128 weight rows, on wgmma in FP8.

A number of MXFP4 times a power of two is a number of e4m3, exactly, for 12 powers in a row. So a row's weights become
e4m3 with one exponent for the whole row, if the exponents of its groups are near enough to each other, and the row's
sums are multiplied by that power of two at their end (`kernels.matrix.MicroScaled4.least`).

wgmma reads weights in e4m3 from shared memory. The copy engine brings them there as they are stored, and a partition of
their own converts them (`w4a8_weights`), a thread one row at a time: a table of eight bytes has a group's magnitudes,
one instruction looks four of them up, and two more add the signs. What that costs is shared by all pairs of a tile, so
tiles are tall. A tile has four chunks of 64 pairs, the first and the third for one multiplying partition, the others
for the other one; chunks without pairs cost nothing.

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
reads has read the item that stood there, also once more behind its last stage (`items.announced_item`).

Sizes are multiples of 512, for the copy engine fetches a row's scales 16 at a time.

Written for Triton 3.6, as `hopper` is, and for the same private part of Gluon.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, has-type"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.moe.items import announcement, pipe_of
from kernels.moe.w4a8_products import multiply
from kernels.moe.w4a8_tile import BLOCK, CHUNK, CHUNKS, STEP
from kernels.moe.w4a8_weights import (
    CONVERTED,
    RAW,
    SCALE_ROWS,
    SCALE_SLOTS,
    SCALES,
    WORD_ROWS,
    WORDS,
    convert,
    fetch_weights,
)
from kernels.moe.w8a8 import TILED

HELD = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


def input_box(inputs: Tensor) -> TensorDescriptor:
    """Make the descriptor with which the copy engine fetches a chunk's inputs of a stage."""
    return TensorDescriptor.from_tensor(inputs, [CHUNK.value, STEP.value], TILED.value)


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


@gluon.jit
def fetch_inputs(
    act_box, x_s, pipe,
    GATE: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warp that has the copy engine fetch inputs, of chunks that have pairs."""
    bytes: gl.constexpr = act_box.block_type.nbytes
    steps: gl.constexpr = K // STEP
    step = 0
    turn = 0
    item = announcement(pipe, turn)
    while item.block >= 0:
        for i in range(2 * steps if GATE else steps):
            stage = step % STAGES
            bar = pipe.full.index(stage)
            mbarrier.wait(pipe.empty.index(stage), (step // STAGES & 1) ^ 1)
            for chunk in gl.static_range(CHUNKS):
                only = (item.pairs > chunk * CHUNK) & ((item.pairs <= (chunk + 1) * CHUNK) | (chunk == CHUNKS - 1))
                mbarrier.expect(bar, (chunk + 1) * bytes, pred=only)
            for chunk in gl.static_range(CHUNKS):
                tma.async_copy_global_to_shared(
                    act_box, [item.first + chunk * CHUNK, i % steps * STEP], bar, x_s.index(CHUNKS * stage + chunk),
                    pred=item.pairs > chunk * CHUNK,
                )  # fmt: skip
            step += 1
        turn += 1
        item = announcement(pipe, turn)


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
    w_s = gl.allocate_shared_memory(act_box.dtype, [STAGES, BLOCK, STEP], TILED)
    raw_s = gl.allocate_shared_memory(gl.int32, [RAW, 2, CHUNK, STEP // 8], WORDS)
    scale_s = gl.allocate_shared_memory(gl.int32, [SCALE_SLOTS, 2, CHUNK, 4], SCALES)
    x_s = gl.allocate_shared_memory(act_box.dtype, [CHUNKS * STAGES, CHUNK, STEP], TILED)
    held_s = gl.allocate_shared_memory(gl.bfloat16, [CHUNKS, CHUNK, CHUNK], HELD)
    raw = gl.allocate_shared_memory(gl.int64, [RAW, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [RAW, 1], mbarrier.MBarrierLayout())
    pipe = pipe_of(STAGES, 2)
    for slot in gl.static_range(RAW):
        mbarrier.init(raw.index(slot), count=1)
        mbarrier.init(read.index(slot), count=1)
    fence_async_shared()
    gl.thread_barrier()
    word_rows_s = raw_s._reinterpret(gl.int32, [RAW, BLOCK, STEP // 8], WORD_ROWS)
    scale_rows_s = scale_s._reinterpret(gl.int32, [SCALE_SLOTS, BLOCK, 4], SCALE_ROWS)
    converted_s = w_s._reinterpret(gl.int32, [STAGES, BLOCK, STEP // 4], CONVERTED)
    # The tuples stand in the calls: in a variable their constants would become run-time values.
    gl.warp_specialize(
        [
            (multiply, (x_scale, least, sorted_pair, out, out_scale, pitch, x_s, w_s, held_s, pipe,
                        0, GATE, K, FEATURES, STAGES, LIMIT)),
            (multiply, (x_scale, least, sorted_pair, out, out_scale, pitch, x_s, w_s, held_s, pipe,
                        1, GATE, K, FEATURES, STAGES, LIMIT)),
            (convert, (least, word_rows_s, scale_rows_s, converted_s, pipe, raw, read,
                       GATE, K, FEATURES, STAGES)),
            (fetch_weights, (w_box, s_box, table, raw_s, scale_s, pipe, raw, read,
                             GATE, K, FEATURES, BLOCKS, GROUP)),
            (fetch_inputs, (act_box, x_s, pipe,
                            GATE, K, STAGES)),
        ],
        [4, 4, 1, 1],
        [216, 56, 24, 24],
    )  # fmt: skip
