"""The two groups of `wide`: left scores the first tile of a pair, right the second; each sums its half of the
values."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.mla_decode.narrow import let_kernel_after_start, wait_for_kernel_before
from kernels.mla_decode.schedule import WORKER_FIELDS
from kernels.mla_decode.wide_tile import (
    BLOCK,
    HALF,
    LOWEST,
    OUTPUT,
    SCORES,
    TILE,
    as_left_operand,
    next_share,
    scaled,
    scores,
    store_half,
    weigh,
    without_outside,
)

WORKER = gl.constexpr(WORKER_FIELDS)


@gluon.jit
def left_group(
    length, out, lse, partial, partial_lse, plan, scale, first, queries, drafts, heads, workers, worker, block,
    q_s, q_rope_s, kv_s, rope_s, weights_s, top_s, shrink_s, total_s,
    q_full, q_empty, full, empty, first_top, second_top, first_weights, totals,
    UNIT: gl.constexpr, ROW_COST: gl.constexpr, INVARIANT: gl.constexpr, DEPENDENT: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The group that scores the first tile of a pair and sums the left half of the values."""
    per_query: gl.constexpr = gl.SliceLayout(1, SCORES)
    record = plan + worker * WORKER
    row = gl.load(record)
    at = gl.load(record + 1)
    left = gl.load(record + 2)
    position = gl.load(record + 3)
    if DEPENDENT and EARLY:
        wait_for_kernel_before()
        let_kernel_after_start()
    back = drafts - (block * BLOCK + gl.arange(0, BLOCK, per_query)) // heads
    tiles = 0
    rows = 0
    full_pairs = 0
    while left > 0:
        tokens = gl.load(length + row)
        take, begin, end, units, start, stop, done = next_share(tokens, at, left, first, UNIT, ROW_COST, INVARIANT)
        if stop > start:
            bound = gl.minimum(tokens - back, tokens)
            sure = tokens - drafts
            top = gl.full([BLOCK], LOWEST, gl.float32, per_query)
            total = gl.zeros([BLOCK], gl.float32, per_query)
            sums = gl.zeros([BLOCK, HALF], gl.float32, OUTPUT)
            mbarrier.wait(q_full, rows & 1)
            for tile in range(start, stop, 2):
                buffer = tiles & 1
                phase = (tiles >> 1) & 1
                low = tile * TILE
                score = scores(q_s, q_rope_s, kv_s, rope_s, full, buffer, phase)
                weight, top, shrink = weigh(score, top, scale, low, first, sure, bound)
                top_s.index(0).store(top)
                shrink_s.index(0).store(shrink)
                gl.thread_barrier()
                mbarrier.arrive(first_top, count=1)
                total = total * shrink + gl.sum(weight, 1)
                sums = scaled(sums, shrink)
                if (low + TILE > tokens) | (low < first):
                    without_outside(kv_s.index(buffer), low, first, tokens)
                rounded = weight.to(gl.bfloat16)
                factor = as_left_operand(rounded)
                summing = warpgroup_mma(factor, kv_s.index(buffer), sums, is_async=True)
                if tile + 1 < stop:
                    mbarrier.wait(second_top, full_pairs & 1)
                    second_shrink = shrink_s.index(1).load(per_query)
                    top = top_s.index(1).load(per_query)
                    full_pairs += 1
                    shrunk = rounded.to(gl.float32) * second_shrink[:, None]
                    rope_s.index((tiles + 1) & 1).store(shrunk.to(gl.bfloat16))
                    fence_async_shared()
                    gl.thread_barrier()
                    mbarrier.arrive(first_weights, count=1)
                    sums, factor = warpgroup_mma_wait(0, deps=(summing, factor))
                    gl.thread_barrier()
                    mbarrier.arrive(empty.index(buffer), count=1)
                    total = total * second_shrink
                    sums = scaled(sums, second_shrink)
                    second = (tiles + 1) & 1
                    mbarrier.wait(full.index(second), ((tiles + 1) >> 1) & 1)
                    if (low + 2 * TILE > tokens) | (low + TILE < first):
                        without_outside(kv_s.index(second), low + TILE, first, tokens)
                    summing = warpgroup_mma(weights_s, kv_s.index(second), sums, is_async=True)
                    sums = warpgroup_mma_wait(0, deps=(summing,))
                    gl.thread_barrier()
                    mbarrier.arrive(empty.index(second), count=1)
                    tiles += 2
                else:
                    weights_s.store(rounded)
                    fence_async_shared()
                    gl.thread_barrier()
                    mbarrier.arrive(first_weights, count=1)
                    sums, factor = warpgroup_mma_wait(0, deps=(summing, factor))
                    gl.thread_barrier()
                    mbarrier.arrive(empty.index(buffer), count=1)
                    tiles += 1
            total_s.index(0).store(total)
            gl.thread_barrier()
            mbarrier.arrive(totals.index(0), count=1)
            mbarrier.wait(totals.index(1), rows & 1)
            total += total_s.index(1).load(per_query)
            rows += 1
            store_half(
                sums, total, top, q_s, q_empty, out, lse, partial, partial_lse, row, queries, block, workers, worker,
                position, (begin == 0) & (end == units), begin == 0, 0, INVARIANT,
            )  # fmt: skip
        left -= take
        position += take
        at = gl.where(done, 0, at + take)
        row = gl.where(done, row + 1, row)


@gluon.jit
def right_group(
    length, out, lse, partial, partial_lse, plan, scale, first, queries, drafts, heads, workers, worker, block,
    q_s, q_rope_s, kv_s, rope_s, weights_s, top_s, shrink_s, total_s,
    q_full, q_empty, full, empty, first_top, second_top, first_weights, totals,
    UNIT: gl.constexpr, ROW_COST: gl.constexpr, INVARIANT: gl.constexpr, DEPENDENT: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The group that scores the second tile of a pair and sums the right half of the values."""
    per_query: gl.constexpr = gl.SliceLayout(1, SCORES)
    record = plan + worker * WORKER
    row = gl.load(record)
    at = gl.load(record + 1)
    left = gl.load(record + 2)
    position = gl.load(record + 3)
    if DEPENDENT and EARLY:
        wait_for_kernel_before()
    back = drafts - (block * BLOCK + gl.arange(0, BLOCK, per_query)) // heads
    tiles = 0
    rows = 0
    pairs = 0
    while left > 0:
        tokens = gl.load(length + row)
        take, begin, end, units, start, stop, done = next_share(tokens, at, left, first, UNIT, ROW_COST, INVARIANT)
        if stop > start:
            bound = gl.minimum(tokens - back, tokens)
            sure = tokens - drafts
            top = gl.full([BLOCK], LOWEST, gl.float32, per_query)
            total = gl.zeros([BLOCK], gl.float32, per_query)
            sums = gl.zeros([BLOCK, HALF], gl.float32, OUTPUT)
            mbarrier.wait(q_full, rows & 1)
            for tile in range(start, stop, 2):
                low = tile * TILE
                buffer = tiles & 1
                phase = (tiles >> 1) & 1
                second = (tiles + 1) & 1
                second_phase = ((tiles + 1) >> 1) & 1
                if tile + 1 < stop:
                    score = scores(q_s, q_rope_s, kv_s, rope_s, full, second, second_phase)
                    mbarrier.wait(first_top, pairs & 1)
                    top = top_s.index(0).load(per_query)
                    first_shrink = shrink_s.index(0).load(per_query)
                    weight, top, shrink = weigh(score, top, scale, low + TILE, first, sure, bound)
                    rounded = weight.to(gl.bfloat16)
                    weights_s.store(rounded)
                    top_s.index(1).store(top)
                    shrink_s.index(1).store(shrink)
                    fence_async_shared()
                    gl.thread_barrier()
                    mbarrier.arrive(second_top, count=1)
                    shrink = shrink * first_shrink
                    total = total * shrink + gl.sum(weight, 1)
                    sums = scaled(sums, shrink)
                    mbarrier.wait(full.index(2 + buffer), phase)
                    if (low + TILE > tokens) | (low < first):
                        without_outside(kv_s.index(2 + buffer), low, first, tokens)
                    mbarrier.wait(first_weights, pairs & 1)
                    summing = warpgroup_mma(rope_s.index(second), kv_s.index(2 + buffer), sums, is_async=True)
                    if (low + 2 * TILE > tokens) | (low + TILE < first):
                        without_outside(kv_s.index(2 + second), low + TILE, first, tokens)
                    sums = warpgroup_mma_wait(0, deps=(summing,))
                    gl.thread_barrier()
                    mbarrier.arrive(empty.index(2 + buffer), count=1)
                    factor = as_left_operand(rounded)
                    summing = warpgroup_mma(factor, kv_s.index(2 + second), sums, is_async=True)
                    sums, factor = warpgroup_mma_wait(0, deps=(summing, factor))
                    gl.thread_barrier()
                    mbarrier.arrive(empty.index(2 + second), count=1)
                    tiles += 2
                else:
                    mbarrier.wait(first_top, pairs & 1)
                    top = top_s.index(0).load(per_query)
                    shrink = shrink_s.index(0).load(per_query)
                    total = total * shrink
                    sums = scaled(sums, shrink)
                    mbarrier.wait(full.index(2 + buffer), phase)
                    if (low + TILE > tokens) | (low < first):
                        without_outside(kv_s.index(2 + buffer), low, first, tokens)
                    mbarrier.wait(first_weights, pairs & 1)
                    summing = warpgroup_mma(weights_s, kv_s.index(2 + buffer), sums, is_async=True)
                    sums = warpgroup_mma_wait(0, deps=(summing,))
                    gl.thread_barrier()
                    mbarrier.arrive(empty.index(2 + buffer), count=1)
                    tiles += 1
                pairs += 1
            total_s.index(1).store(total)
            gl.thread_barrier()
            mbarrier.arrive(totals.index(1), count=1)
            mbarrier.wait(totals.index(0), rows & 1)
            total = total_s.index(0).load(per_query) + total
            rows += 1
            store_half(
                sums, total, top, q_s, q_empty, out, lse, partial, partial_lse, row, queries, block, workers, worker,
                position, (begin == 0) & (end == units), begin == 0, 1, INVARIANT,
            )  # fmt: skip
        left -= take
        position += take
        at = gl.where(done, 0, at + take)
        row = gl.where(done, row + 1, row)
