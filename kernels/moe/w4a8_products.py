"""The multiplying partitions of `w4a8`, and what becomes of their sums.

Written for Triton 3.6, as `w4a8` is, and for the same private part of Gluon.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, has-type"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from kernels.moe.hopper import clamped, store_rows
from kernels.moe.items import announced_item, announcement, pass_by
from kernels.moe.w4a8_tile import BLOCK, CHUNK, CHUNKS, STEP
from kernels.moe.w8a8 import TILED
from kernels.quantize import LEAST_SCALE, MOST

LARGEST = gl.constexpr(MOST)
LEAST = gl.constexpr(LEAST_SCALE)


@gluon.constexpr_function
def sums_layout():
    """Layout of the sums of a chunk [64, 128]."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK.value, 32])


@gluon.jit
def _one(
    scale, rows, inside, pitch, x_s, w_s, pipe, part, step,
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
        mbarrier.wait(pipe.full.index(stage), step // STAGES & 1)
        weight = w_s.index(stage).permute((1, 0))
        part = warpgroup_mma(x_s.index(CHUNKS * stage + WHICH), weight, part, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=(part,))
        gl.thread_barrier()
        mbarrier.arrive(pipe.empty.index(stage), count=1)
        sums += part * factor[:, None]
        factor = next_factor
        step += 1
    return sums, part, step


@gluon.jit
def _two(
    scale, rows, inside, others_inside, pitch, x_s, w_s, pipe, part, step,
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
        mbarrier.wait(pipe.full.index(stage), step // STAGES & 1)
        weight = w_s.index(stage).permute((1, 0))
        part = warpgroup_mma(x_s.index(CHUNKS * stage + WHICH), weight, part, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=(part,))
        sums += part * factor[:, None]
        part = warpgroup_mma(x_s.index(CHUNKS * stage + WHICH + 2), weight, part, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=(part,))
        gl.thread_barrier()
        mbarrier.arrive(pipe.empty.index(stage), count=1)
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
    before, value, bytes_s, out, out_scale, pitch, item, begin, FEATURES: gl.constexpr
):  # fmt: skip
    """Round the 128 features that both passes have made, with one scale for each pair, and write them by way of
    `bytes_s`, rows side by side."""
    lanes: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    scale = gl.maximum(gl.maximum(gl.max(gl.abs(before), 1), gl.max(gl.abs(value), 1)) / LARGEST, LEAST)
    inverse = 1 / scale
    r = begin + gl.arange(0, CHUNK, gl.SliceLayout(1, value.type.layout))
    gl.store(out_scale + item.block.to(gl.int64) * pitch + item.first + r, scale, mask=r < item.pairs)
    both = gl.join(before * inverse[:, None], value * inverse[:, None]).permute((0, 2, 1)).reshape([CHUNK, BLOCK])
    bytes_s.store(both.to(out.dtype.element_ty))
    gl.thread_barrier()
    m = begin + gl.arange(0, CHUNK, gl.SliceLayout(1, lanes))
    column = item.block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, lanes))
    store_rows(bytes_s.load(lanes), out, item.first + m, column, m < item.pairs, FEATURES)


@gluon.jit
def _gated(
    sums, least, held_s, out, out_scale, pitch, item, half, begin,
    FEATURES: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """Make of a chunk's sums of gate and up what `down` reads; the first half waits in `held_s` for the second."""
    gate, up = sums.reshape([CHUNK, 2, CHUNK]).permute((0, 2, 1)).split()
    least += item.expert.to(gl.int64) * (2 * FEATURES) + item.block * BLOCK + half * CHUNK
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
            before.to(gl.float32), value.to(gl.float32), bytes_s, out, out_scale, pitch, item, begin, FEATURES,
        )  # fmt: skip


@gluon.jit
def _stored(sums, least, sorted_pair, out, item, begin, FEATURES: gl.constexpr):
    """Write a chunk's results of `down`."""
    lanes: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    left, right = sums.reshape([CHUNK, 2, CHUNK]).permute((0, 2, 1)).split()
    least += item.expert.to(gl.int64) * FEATURES + item.block * BLOCK
    m = begin + gl.arange(0, CHUNK, gl.SliceLayout(1, lanes))
    column = item.block * BLOCK + gl.arange(0, CHUNK, gl.SliceLayout(0, lanes))
    pair = gl.load(sorted_pair + item.first + m, mask=m < item.pairs, other=0)
    left = gl.convert_layout(_scaled(left, least).to(out.dtype.element_ty), lanes)
    store_rows(left, out, pair, column, m < item.pairs, FEATURES)
    right = gl.convert_layout(_scaled(right, least + CHUNK).to(out.dtype.element_ty), lanes)
    store_rows(right, out, pair, column + CHUNK, m < item.pairs, FEATURES)


@gluon.jit
def multiply(
    x_scale, least, sorted_pair, out, out_scale, pitch, x_s, w_s, held_s, pipe,
    WHICH: gl.constexpr, GATE: gl.constexpr, K: gl.constexpr, FEATURES: gl.constexpr, STAGES: gl.constexpr,
    LIMIT: gl.constexpr,
):  # fmt: skip
    """A multiplying partition: the first chunk of 64 pairs of every tile and the third, or the others."""
    steps: gl.constexpr = K // STEP
    passes: gl.constexpr = 2 if GATE else 1
    begin: gl.constexpr = WHICH * CHUNK
    behind: gl.constexpr = begin + 2 * CHUNK
    r = begin + gl.arange(0, CHUNK, gl.SliceLayout(1, sums_layout()))
    part = gl.zeros([CHUNK, BLOCK], gl.float32, sums_layout())
    step = 0
    turn = 0
    item = announcement(pipe, turn)
    while item.block >= 0:
        if item.pairs > behind:
            for half in range(passes):
                sums, others, part, step = _two(
                    x_scale + item.first, r, r < item.pairs, r + 2 * CHUNK < item.pairs, pitch, x_s, w_s, pipe, part,
                    step, WHICH, steps, STAGES,
                )  # fmt: skip
                # Once more behind the sums, where nothing that follows from it takes registers of these.
                item = announced_item(pipe, turn)
                if GATE:
                    _gated(sums, least, held_s.index(WHICH), out, out_scale, pitch, item, half,
                           begin, FEATURES, LIMIT)  # fmt: skip
                    _gated(others, least, held_s.index(WHICH + 2), out, out_scale, pitch, item,
                           half, behind, FEATURES, LIMIT)  # fmt: skip
                else:
                    _stored(sums, least, sorted_pair, out, item, begin, FEATURES)
                    _stored(others, least, sorted_pair, out, item, behind, FEATURES)
        elif item.pairs > begin:
            for half in range(passes):
                sums, part, step = _one(
                    x_scale + item.first, r, r < item.pairs, pitch, x_s, w_s, pipe, part, step, WHICH, steps, STAGES
                )  # fmt: skip
                item = announced_item(pipe, turn)
                if GATE:
                    _gated(sums, least, held_s.index(WHICH), out, out_scale, pitch, item, half,
                           begin, FEATURES, LIMIT)  # fmt: skip
                else:
                    _stored(sums, least, sorted_pair, out, item, begin, FEATURES)
        else:
            step = pass_by(pipe, step, passes * steps)
        turn += 1
        item = announcement(pipe, turn)
