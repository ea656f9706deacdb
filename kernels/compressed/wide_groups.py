"""The two groups of `wide`: they score tiles in turns, left the first of a token; each sums its half of the features of
all tiles. As those of `kernels.mla_decode.wide_groups`, for tokens of few tiles."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.compressed.wide_tile import HALF, begin_scores, item_of, step_behind, steps_of, store_half, weigh
from kernels.mla_decode.split_kv import TILE
from kernels.mla_decode.wide_groups import no_sums, tell_weights, told_weights, total_of_both
from kernels.mla_decode.wide_tile import as_left_operand, scaled


@gluon.jit
def left_group(call, fetched, exchanged, ring, messages, SIZES: gl.constexpr, PAIRS: gl.constexpr):
    """The group that scores a token's first tile, its third and so on, and sums the left half of the features."""
    tiles = 0
    rows = 0
    seconds = 0
    step = 0
    steps = steps_of(call, PAIRS)
    item = item_of(call, step, PAIRS)
    while step < steps:
        step = step_behind(step, item, PAIRS)
        following = item_of(call, step, PAIRS)
        count = item.count
        if count > 0:
            top, total, sums = no_sums(False, HALF)
            mbarrier.wait(ring.q_full, rows & 1)
            for low in range(0, count, 2 * TILE):
                buffer = tiles & 1
                score = begin_scores(fetched, ring.full, buffer, (tiles >> 1) & 1)
                score = warpgroup_mma_wait(0, deps=(score,))
                weight, top, shrink = weigh(score, top, call, item, low, PAIRS)
                rounded = weight.to(gl.bfloat16)
                # Right reads them before it hands that half of the tile back.
                tell_weights(rounded, top, shrink, fetched.weights.index(buffer), exchanged, messages.first, 0)
                if low + 2 * TILE >= count:
                    mbarrier.arrive(ring.q_empty, count=1)
                total = total * shrink + gl.sum(weight, 1)
                sums = scaled(sums, shrink)
                factor = as_left_operand(rounded, sums)
                summing = warpgroup_mma(factor, fetched.kv.index(buffer), sums, is_async=True)
                sums, factor = warpgroup_mma_wait(0, deps=(summing, factor))
                tiles += 1
                if low + TILE < count:
                    gl.thread_barrier()
                    mbarrier.arrive(ring.empty.index(buffer), count=1)
                    second = tiles & 1
                    mbarrier.wait(messages.second, seconds & 1)
                    sums, top, total = told_weights(sums, total, exchanged, 1)
                    seconds += 1
                    mbarrier.wait(ring.full.index(second), (tiles >> 1) & 1)
                    summing = warpgroup_mma(exchanged.weights, fetched.kv.index(second), sums, is_async=True)
                    sums = warpgroup_mma_wait(0, deps=(summing,))
                    tiles += 1
                    if low + 2 * TILE < count:
                        gl.thread_barrier()
                        mbarrier.arrive(ring.empty.index(second), count=1)
            own = 2 * (rows & 1)
            total = total_of_both(total, exchanged, messages, own, own + 1, (rows >> 1) & 1)
            rows += 1
            last = (tiles & 1) ^ 1
            store_half(sums, total, top, call, item, fetched.kv.index(last), ring.empty.index(last), 0, SIZES, PAIRS)
        item = following


@gluon.jit
def begin_firsts(sums, total, fetched, exchanged, full, buffer, phase):
    """Begin to multiply the weights of a tile that left has scored with right's half of its features. Returns (sums on
    their way, maximum, sum of right's weights)."""
    sums, top, total = told_weights(sums, total, exchanged, 0)
    mbarrier.wait(full.index(2 + buffer), phase)
    summing = warpgroup_mma(fetched.weights.index(buffer), fetched.kv.index(2 + buffer), sums, is_async=True)
    return summing, top, total


@gluon.jit
def right_group(call, fetched, exchanged, ring, messages, SIZES: gl.constexpr, PAIRS: gl.constexpr):
    """The group that scores a token's second tile, its fourth and so on, and sums the right half of the features."""
    tiles = 0
    rows = 0
    firsts = 0
    step = 0
    steps = steps_of(call, PAIRS)
    item = item_of(call, step, PAIRS)
    while step < steps:
        step = step_behind(step, item, PAIRS)
        following = item_of(call, step, PAIRS)
        count = item.count
        if count > 0:
            top, total, sums = no_sums(False, HALF)
            mbarrier.wait(ring.q_full, rows & 1)
            if count <= TILE:
                gl.thread_barrier()  # none that waits still may miss that they came
                mbarrier.arrive(ring.q_empty, count=1)
            for low in range(0, count, 2 * TILE):
                buffer = tiles & 1
                phase = (tiles >> 1) & 1
                second = (tiles + 1) & 1
                if low + TILE < count:
                    score = begin_scores(fetched, ring.full, second, ((tiles + 1) >> 1) & 1)
                    mbarrier.wait(messages.first, firsts & 1)
                    # ptxas lets no product be under way while sums are scaled that the next one adds to.
                    score = warpgroup_mma_wait(0, deps=(score,))
                    summing, top, total = begin_firsts(sums, total, fetched, exchanged, ring.full, buffer, phase)
                    weight, top, shrink = weigh(score, top, call, item, low + TILE, PAIRS)
                    rounded = weight.to(gl.bfloat16)
                    tell_weights(rounded, top, shrink, exchanged.weights, exchanged, messages.second, 1)
                    if low + 3 * TILE >= count:
                        mbarrier.arrive(ring.q_empty, count=1)
                    total = total * shrink + gl.sum(weight, 1)
                    sums = warpgroup_mma_wait(0, deps=(summing,))
                    gl.thread_barrier()
                    mbarrier.arrive(ring.empty.index(2 + buffer), count=1)
                    sums = scaled(sums, shrink)
                    factor = as_left_operand(rounded, sums)
                    summing = warpgroup_mma(factor, fetched.kv.index(2 + second), sums, is_async=True)
                    sums, factor = warpgroup_mma_wait(0, deps=(summing, factor))
                    tiles += 2
                    if low + 2 * TILE < count:
                        gl.thread_barrier()
                        mbarrier.arrive(ring.empty.index(2 + second), count=1)
                else:
                    mbarrier.wait(messages.first, firsts & 1)
                    summing, top, total = begin_firsts(sums, total, fetched, exchanged, ring.full, buffer, phase)
                    sums = warpgroup_mma_wait(0, deps=(summing,))
                    tiles += 1
                firsts += 1
            own = 2 * (rows & 1)
            total = total_of_both(total, exchanged, messages, own + 1, own, (rows >> 1) & 1)
            rows += 1
            last = 2 + ((tiles & 1) ^ 1)
            store_half(sums, total, top, call, item, fetched.kv.index(last), ring.empty.index(last), 1, SIZES, PAIRS)
        item = following
