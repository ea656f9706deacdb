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
    until_there,
    weigh,
    without_outside,
)

WORKER = gl.constexpr(WORKER_FIELDS)


@gluon.jit
def left_group(
    share, fetched, exchanged, ring, messages, unit, row_cost, invariant, dependent, early,
    STORED: gl.constexpr = False,
):  # fmt: skip
    """The group that scores the first tile of a pair and sums the left half of the values. Its last arguments but one
    are fields of `Split` and `Overlap`; STORED: see `until_there`."""
    per_query: gl.constexpr = gl.SliceLayout(1, SCORES)
    record = share.plan + share.worker * WORKER
    row = gl.load(record, cache_modifier=".cg")
    at = gl.load(record + 1, cache_modifier=".cg")
    left = gl.load(record + 2, cache_modifier=".cg")
    position = gl.load(record + 3, cache_modifier=".cg")
    if dependent and early:
        wait_for_kernel_before()
        let_kernel_after_start()
    back = share.drafts - (share.block * BLOCK + gl.arange(0, BLOCK, per_query)) // share.heads
    tiles = 0
    rows = 0
    full_pairs = 0
    while left > 0:
        tokens = gl.load(share.length + row, cache_modifier=".cg")
        take, begin, end, units, start, stop, done = next_share(
            tokens, at, left, share.first, unit, row_cost, invariant
        )
        if stop > start:
            bound = gl.minimum(tokens - back, tokens)
            sure = tokens - share.drafts
            top = gl.full([BLOCK], LOWEST, gl.float32, per_query)
            total = gl.zeros([BLOCK], gl.float32, per_query)
            sums = gl.zeros([BLOCK, HALF], gl.float32, OUTPUT)
            mbarrier.wait(ring.q_full, rows & 1)
            for tile in range(start, stop, 2):
                buffer = tiles & 1
                phase = (tiles >> 1) & 1
                low = tile * TILE
                score = scores(fetched, ring.full, buffer, phase, STORED)
                weight, top, shrink = weigh(score, top, share.scale, low, share.first, sure, bound)
                exchanged.top.index(0).store(top)
                exchanged.shrink.index(0).store(shrink)
                gl.thread_barrier()
                mbarrier.arrive(messages.first_top, count=1)
                total = total * shrink + gl.sum(weight, 1)
                sums = scaled(sums, shrink)
                if (low + TILE > tokens) | (low < share.first):
                    without_outside(fetched.kv.index(buffer), low, share.first, tokens)
                rounded = weight.to(gl.bfloat16)
                factor = as_left_operand(rounded)
                summing = warpgroup_mma(factor, fetched.kv.index(buffer), sums, is_async=True)
                if tile + 1 < stop:
                    mbarrier.wait(messages.second_top, full_pairs & 1)
                    second_shrink = exchanged.shrink.index(1).load(per_query)
                    top = exchanged.top.index(1).load(per_query)
                    full_pairs += 1
                    shrunk = rounded.to(gl.float32) * second_shrink[:, None]
                    fetched.rope.index((tiles + 1) & 1).store(shrunk.to(gl.bfloat16))
                    fence_async_shared()
                    gl.thread_barrier()
                    mbarrier.arrive(messages.first_weights, count=1)
                    sums, factor = warpgroup_mma_wait(0, deps=(summing, factor))
                    gl.thread_barrier()
                    mbarrier.arrive(ring.empty.index(buffer), count=1)
                    total = total * second_shrink
                    sums = scaled(sums, second_shrink)
                    second = (tiles + 1) & 1
                    until_there(ring.full.index(second), ((tiles + 1) >> 1) & 1, STORED)
                    if (low + 2 * TILE > tokens) | (low + TILE < share.first):
                        without_outside(fetched.kv.index(second), low + TILE, share.first, tokens)
                    summing = warpgroup_mma(exchanged.weights, fetched.kv.index(second), sums, is_async=True)
                    sums = warpgroup_mma_wait(0, deps=(summing,))
                    gl.thread_barrier()
                    mbarrier.arrive(ring.empty.index(second), count=1)
                    tiles += 2
                else:
                    exchanged.weights.store(rounded)
                    fence_async_shared()
                    gl.thread_barrier()
                    mbarrier.arrive(messages.first_weights, count=1)
                    sums, factor = warpgroup_mma_wait(0, deps=(summing, factor))
                    gl.thread_barrier()
                    mbarrier.arrive(ring.empty.index(buffer), count=1)
                    tiles += 1
            exchanged.total.index(0).store(total)
            gl.thread_barrier()
            mbarrier.arrive(messages.totals.index(0), count=1)
            mbarrier.wait(messages.totals.index(1), rows & 1)
            total += exchanged.total.index(1).load(per_query)
            rows += 1
            store_half(
                sums, total, top, share, fetched, ring.q_empty, row, position,
                (begin == 0) & (end == units), begin == 0, 0, invariant,
            )  # fmt: skip
        left -= take
        position += take
        at = gl.where(done, 0, at + take)
        row = gl.where(done, row + 1, row)


@gluon.jit
def right_group(
    share, fetched, exchanged, ring, messages, unit, row_cost, invariant, dependent, early,
    STORED: gl.constexpr = False,
):  # fmt: skip
    """The group that scores the second tile of a pair and sums the right half of the values. Its last arguments but one
    are fields of `Split` and `Overlap`; STORED: see `until_there`."""
    per_query: gl.constexpr = gl.SliceLayout(1, SCORES)
    record = share.plan + share.worker * WORKER
    row = gl.load(record, cache_modifier=".cg")
    at = gl.load(record + 1, cache_modifier=".cg")
    left = gl.load(record + 2, cache_modifier=".cg")
    position = gl.load(record + 3, cache_modifier=".cg")
    if dependent and early:
        wait_for_kernel_before()
    back = share.drafts - (share.block * BLOCK + gl.arange(0, BLOCK, per_query)) // share.heads
    tiles = 0
    rows = 0
    pairs = 0
    while left > 0:
        tokens = gl.load(share.length + row, cache_modifier=".cg")
        take, begin, end, units, start, stop, done = next_share(
            tokens, at, left, share.first, unit, row_cost, invariant
        )
        if stop > start:
            bound = gl.minimum(tokens - back, tokens)
            sure = tokens - share.drafts
            top = gl.full([BLOCK], LOWEST, gl.float32, per_query)
            total = gl.zeros([BLOCK], gl.float32, per_query)
            sums = gl.zeros([BLOCK, HALF], gl.float32, OUTPUT)
            mbarrier.wait(ring.q_full, rows & 1)
            for tile in range(start, stop, 2):
                low = tile * TILE
                buffer = tiles & 1
                phase = (tiles >> 1) & 1
                second = (tiles + 1) & 1
                second_phase = ((tiles + 1) >> 1) & 1
                if tile + 1 < stop:
                    score = scores(fetched, ring.full, second, second_phase, STORED)
                    mbarrier.wait(messages.first_top, pairs & 1)
                    top = exchanged.top.index(0).load(per_query)
                    first_shrink = exchanged.shrink.index(0).load(per_query)
                    weight, top, shrink = weigh(score, top, share.scale, low + TILE, share.first, sure, bound)
                    rounded = weight.to(gl.bfloat16)
                    exchanged.weights.store(rounded)
                    exchanged.top.index(1).store(top)
                    exchanged.shrink.index(1).store(shrink)
                    fence_async_shared()
                    gl.thread_barrier()
                    mbarrier.arrive(messages.second_top, count=1)
                    shrink = shrink * first_shrink
                    total = total * shrink + gl.sum(weight, 1)
                    sums = scaled(sums, shrink)
                    until_there(ring.full.index(2 + buffer), phase, STORED)
                    if (low + TILE > tokens) | (low < share.first):
                        without_outside(fetched.kv.index(2 + buffer), low, share.first, tokens)
                    mbarrier.wait(messages.first_weights, pairs & 1)
                    summing = warpgroup_mma(
                        fetched.rope.index(second), fetched.kv.index(2 + buffer), sums, is_async=True
                    )
                    if (low + 2 * TILE > tokens) | (low + TILE < share.first):
                        without_outside(fetched.kv.index(2 + second), low + TILE, share.first, tokens)
                    sums = warpgroup_mma_wait(0, deps=(summing,))
                    gl.thread_barrier()
                    mbarrier.arrive(ring.empty.index(2 + buffer), count=1)
                    factor = as_left_operand(rounded)
                    summing = warpgroup_mma(factor, fetched.kv.index(2 + second), sums, is_async=True)
                    sums, factor = warpgroup_mma_wait(0, deps=(summing, factor))
                    gl.thread_barrier()
                    mbarrier.arrive(ring.empty.index(2 + second), count=1)
                    tiles += 2
                else:
                    mbarrier.wait(messages.first_top, pairs & 1)
                    top = exchanged.top.index(0).load(per_query)
                    shrink = exchanged.shrink.index(0).load(per_query)
                    total = total * shrink
                    sums = scaled(sums, shrink)
                    until_there(ring.full.index(2 + buffer), phase, STORED)
                    if (low + TILE > tokens) | (low < share.first):
                        without_outside(fetched.kv.index(2 + buffer), low, share.first, tokens)
                    mbarrier.wait(messages.first_weights, pairs & 1)
                    summing = warpgroup_mma(exchanged.weights, fetched.kv.index(2 + buffer), sums, is_async=True)
                    sums = warpgroup_mma_wait(0, deps=(summing,))
                    gl.thread_barrier()
                    mbarrier.arrive(ring.empty.index(2 + buffer), count=1)
                    tiles += 1
                pairs += 1
            exchanged.total.index(1).store(total)
            gl.thread_barrier()
            mbarrier.arrive(messages.totals.index(1), count=1)
            mbarrier.wait(messages.totals.index(0), rows & 1)
            total = exchanged.total.index(0).load(per_query) + total
            rows += 1
            store_half(
                sums, total, top, share, fetched, ring.q_empty, row, position,
                (begin == 0) & (end == units), begin == 0, 1, invariant,
            )  # fmt: skip
        left -= take
        position += take
        at = gl.where(done, 0, at + take)
        row = gl.where(done, row + 1, row)
