"""The two groups of `wide`: they score tiles in turns, left the first of a row; each sums its half of the values of all
tiles."""

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

from kernels.gluon.dependent import let_kernel_after_start, wait_for_kernel_before
from kernels.mla_decode.schedule import CTA_FIELDS
from kernels.mla_decode.wide_tile import (
    BLOCK,
    LOWEST,
    SCORES,
    TILE,
    as_left_operand,
    begin_scores,
    begins_or_ends_in,
    buffer_of,
    next_share,
    output_layout,
    phase_of,
    scaled,
    seen_entries,
    store_half,
    until_there,
    weigh,
    without_outside,
)

CTA = gl.constexpr(CTA_FIELDS)


@gluon.jit
def left_group(
    share, fetched, exchanged, ring, messages, unit, row_cost, invariant, dependent, early,
    STORED: gl.constexpr = False, OWN: gl.constexpr = False, PIECES: gl.constexpr = 0,
):  # fmt: skip
    """The group that scores a row's first tile, its third and so on, and sums the left half of the values. Its last
    arguments but three are fields of `Split` and `Overlap`; STORED: see `until_there`; OWN: see `first_entry`; PIECES:
    1 where a row that a CTA has alone is a piece, too, else 0."""
    HALF: gl.constexpr = fetched.kv.shape[2]
    per_query: gl.constexpr = gl.SliceLayout(1, SCORES)
    record = share.metadata + share.cta * CTA
    row = gl.load(record, cache_modifier=".cg")
    at = gl.load(record + 1, cache_modifier=".cg")
    left = gl.load(record + 2, cache_modifier=".cg")
    position = gl.load(record + 3, cache_modifier=".cg")
    if dependent and early:
        wait_for_kernel_before()
        let_kernel_after_start()
    tiles = 0
    rows = 0
    seconds = 0
    while left > 0:
        tokens = gl.load(share.length + row, cache_modifier=".cg")
        take, begin, end, units, start, stop, done = next_share(
            tokens, at, left, share.first, unit, row_cost, invariant
        )
        if stop > start:
            bound = seen_entries(tokens, share)
            sure = tokens - share.drafts
            top = gl.full([BLOCK], LOWEST, gl.float32, per_query)
            total = gl.zeros([BLOCK], gl.float32, per_query)
            sums = gl.zeros([BLOCK, HALF], gl.float32, output_layout(STORED, HALF))
            mbarrier.wait(ring.q_full, rows & 1)
            for tile in range(start, stop, 2):
                buffer = buffer_of(tiles, fetched)
                phase = phase_of(tiles, fetched)
                low = tile * TILE
                score = begin_scores(fetched, ring.full, buffer, phase, STORED)
                score = warpgroup_mma_wait(0, deps=(score,))
                weight, top, shrink = weigh(score, top, share, row, low, sure, bound, OWN)
                rounded = weight.to(gl.bfloat16)
                exchanged.top.index(0).store(top)
                exchanged.shrink.index(0).store(shrink)
                # Right reads them before it hands that half of the tile back.
                fetched.rope.index(buffer).store(rounded)
                fence_async_shared()
                gl.thread_barrier()
                mbarrier.arrive(messages.first, count=1)
                total = total * shrink + gl.sum(weight, 1)
                sums = scaled(sums, shrink)
                if begins_or_ends_in(low, tokens, share, OWN):
                    without_outside(fetched.kv.index(buffer), low, row, tokens, share, OWN)
                factor = as_left_operand(rounded, sums)
                summing = warpgroup_mma(factor, fetched.kv.index(buffer), sums, is_async=True)
                sums, factor = warpgroup_mma_wait(0, deps=(summing, factor))
                gl.thread_barrier()
                mbarrier.arrive(ring.empty.index(buffer), count=1)
                tiles += 1
                if tile + 1 < stop:
                    second = buffer_of(tiles, fetched)
                    mbarrier.wait(messages.second, seconds & 1)
                    top = exchanged.top.index(1).load(per_query)
                    shrink = exchanged.shrink.index(1).load(per_query)
                    seconds += 1
                    total = total * shrink
                    sums = scaled(sums, shrink)
                    until_there(ring.full.index(second), phase_of(tiles, fetched), STORED)
                    if begins_or_ends_in(low + TILE, tokens, share, OWN):
                        without_outside(fetched.kv.index(second), low + TILE, row, tokens, share, OWN)
                    summing = warpgroup_mma(exchanged.weights, fetched.kv.index(second), sums, is_async=True)
                    sums = warpgroup_mma_wait(0, deps=(summing,))
                    gl.thread_barrier()
                    mbarrier.arrive(ring.empty.index(second), count=1)
                    tiles += 1
            exchanged.total.index(0).store(total)
            gl.thread_barrier()
            mbarrier.arrive(messages.totals.index(0), count=1)
            mbarrier.wait(messages.totals.index(1), rows & 1)
            total += exchanged.total.index(1).load(per_query)
            rows += 1
            store_half(
                sums, total, top, share, fetched, ring.q_empty, row, position,
                (begin == 0) & (end == units + PIECES), begin == 0, 0, invariant,
            )  # fmt: skip
            position += 1  # in invariant mode the slot of the next piece
        left -= take
        at = gl.where(done, 0, at + take)
        row = gl.where(done, row + 1, row)


@gluon.jit
def begin_firsts(
    sums, total, fetched, exchanged, full, buffer, phase, low, row, tokens, share,
    STORED: gl.constexpr, OWN: gl.constexpr,
):  # fmt: skip
    """Begin to multiply the weights of a tile that left has scored with right's half of the values. Returns (sums on
    their way, maximum, sum of right's weights)."""
    BUFFERS: gl.constexpr = fetched.rope.shape[0]
    per_query: gl.constexpr = gl.SliceLayout(1, SCORES)
    top = exchanged.top.index(0).load(per_query)
    shrink = exchanged.shrink.index(0).load(per_query)
    sums = scaled(sums, shrink)
    until_there(full.index(BUFFERS + buffer), phase, STORED)
    if begins_or_ends_in(low, tokens, share, OWN):
        without_outside(fetched.kv.index(BUFFERS + buffer), low, row, tokens, share, OWN)
    summing = warpgroup_mma(fetched.rope.index(buffer), fetched.kv.index(BUFFERS + buffer), sums, is_async=True)
    return summing, top, total * shrink


@gluon.jit
def right_group(
    share, fetched, exchanged, ring, messages, unit, row_cost, invariant, dependent, early,
    STORED: gl.constexpr = False, OWN: gl.constexpr = False, PIECES: gl.constexpr = 0,
):  # fmt: skip
    """The group that scores a row's second tile, its fourth and so on, and sums the right half of the values. Its last
    arguments but three are fields of `Split` and `Overlap`; STORED: see `until_there`; OWN: see `first_entry`; PIECES:
    1 where a row that a CTA has alone is a piece, too, else 0."""
    BUFFERS: gl.constexpr = fetched.rope.shape[0]
    HALF: gl.constexpr = fetched.kv.shape[2]
    per_query: gl.constexpr = gl.SliceLayout(1, SCORES)
    record = share.metadata + share.cta * CTA
    row = gl.load(record, cache_modifier=".cg")
    at = gl.load(record + 1, cache_modifier=".cg")
    left = gl.load(record + 2, cache_modifier=".cg")
    position = gl.load(record + 3, cache_modifier=".cg")
    if dependent and early:
        wait_for_kernel_before()
    tiles = 0
    rows = 0
    firsts = 0
    while left > 0:
        tokens = gl.load(share.length + row, cache_modifier=".cg")
        take, begin, end, units, start, stop, done = next_share(
            tokens, at, left, share.first, unit, row_cost, invariant
        )
        if stop > start:
            bound = seen_entries(tokens, share)
            sure = tokens - share.drafts
            top = gl.full([BLOCK], LOWEST, gl.float32, per_query)
            total = gl.zeros([BLOCK], gl.float32, per_query)
            sums = gl.zeros([BLOCK, HALF], gl.float32, output_layout(STORED, HALF))
            mbarrier.wait(ring.q_full, rows & 1)
            for tile in range(start, stop, 2):
                low = tile * TILE
                buffer = buffer_of(tiles, fetched)
                phase = phase_of(tiles, fetched)
                second = buffer_of(tiles + 1, fetched)
                if tile + 1 < stop:
                    score = begin_scores(fetched, ring.full, second, phase_of(tiles + 1, fetched), STORED)
                    mbarrier.wait(messages.first, firsts & 1)
                    # ptxas lets no product be under way while sums are scaled that the next one adds to.
                    score = warpgroup_mma_wait(0, deps=(score,))
                    summing, top, total = begin_firsts(
                        sums, total, fetched, exchanged, ring.full, buffer, phase, low, row, tokens, share,
                        STORED, OWN,
                    )  # fmt: skip
                    weight, top, shrink = weigh(score, top, share, row, low + TILE, sure, bound, OWN)
                    rounded = weight.to(gl.bfloat16)
                    exchanged.top.index(1).store(top)
                    exchanged.shrink.index(1).store(shrink)
                    exchanged.weights.store(rounded)
                    fence_async_shared()
                    gl.thread_barrier()
                    mbarrier.arrive(messages.second, count=1)
                    total = total * shrink + gl.sum(weight, 1)
                    if begins_or_ends_in(low + TILE, tokens, share, OWN):
                        without_outside(fetched.kv.index(BUFFERS + second), low + TILE, row, tokens, share, OWN)
                    sums = warpgroup_mma_wait(0, deps=(summing,))
                    gl.thread_barrier()
                    mbarrier.arrive(ring.empty.index(BUFFERS + buffer), count=1)
                    sums = scaled(sums, shrink)
                    factor = as_left_operand(rounded, sums)
                    summing = warpgroup_mma(factor, fetched.kv.index(BUFFERS + second), sums, is_async=True)
                    sums, factor = warpgroup_mma_wait(0, deps=(summing, factor))
                    gl.thread_barrier()
                    mbarrier.arrive(ring.empty.index(BUFFERS + second), count=1)
                    tiles += 2
                else:
                    mbarrier.wait(messages.first, firsts & 1)
                    summing, top, total = begin_firsts(
                        sums, total, fetched, exchanged, ring.full, buffer, phase, low, row, tokens, share,
                        STORED, OWN,
                    )  # fmt: skip
                    sums = warpgroup_mma_wait(0, deps=(summing,))
                    gl.thread_barrier()
                    mbarrier.arrive(ring.empty.index(BUFFERS + buffer), count=1)
                    tiles += 1
                firsts += 1
            exchanged.total.index(1).store(total)
            gl.thread_barrier()
            mbarrier.arrive(messages.totals.index(1), count=1)
            mbarrier.wait(messages.totals.index(0), rows & 1)
            total = exchanged.total.index(0).load(per_query) + total
            rows += 1
            store_half(
                sums, total, top, share, fetched, ring.q_empty, row, position,
                (begin == 0) & (end == units + PIECES), begin == 0, 1, invariant,
            )  # fmt: skip
            position += 1  # in invariant mode the slot of the next piece
        left -= take
        at = gl.where(done, 0, at + take)
        row = gl.where(done, row + 1, row)
