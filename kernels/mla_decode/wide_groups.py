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
from kernels.mla_decode.split_kv import CTA, TILE, first_work, part_of, work_behind
from kernels.mla_decode.wide_tile import (
    BLOCK,
    LOWEST,
    SCORES,
    as_left_operand,
    begin_scores,
    begins_or_ends_in,
    buffer_of,
    output_layout,
    phase_of,
    scaled,
    seen_entries,
    store_half,
    until_there,
    weigh,
    without_outside,
)


@gluon.jit
def no_sums(STORED: gl.constexpr, HALF: gl.constexpr):
    """(maximum, sum of weights, sums of values) of a group that has seen no tile."""
    per_query: gl.constexpr = gl.SliceLayout(1, SCORES)
    top = gl.full([BLOCK], LOWEST, gl.float32, per_query)
    total = gl.zeros([BLOCK], gl.float32, per_query)
    return top, total, gl.zeros([BLOCK, HALF], gl.float32, output_layout(STORED, HALF))


@gluon.jit
def tell_weights(rounded, top, shrink, weights_s, exchanged, message, SIDE: gl.constexpr):
    """Tell the other group what the group on SIDE, 0 the left and 1 the right one, has made of a tile's scores."""
    exchanged.top.index(SIDE).store(top)
    exchanged.shrink.index(SIDE).store(shrink)
    weights_s.store(rounded)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(message, count=1)


@gluon.jit
def told_weights(sums, total, exchanged, SIDE: gl.constexpr):
    """What the group on SIDE has told: (own sums, shrunk; maximum; own sum of weights, shrunk)."""
    per_query: gl.constexpr = gl.SliceLayout(1, SCORES)
    top = exchanged.top.index(SIDE).load(per_query)
    shrink = exchanged.shrink.index(SIDE).load(per_query)
    return scaled(sums, shrink), top, total * shrink


@gluon.jit
def total_of_both(total, exchanged, messages, mine, other, phase):
    """The sum of both groups' weights, which they tell each other in the places `mine` and `other`."""
    exchanged.total.index(mine).store(total)
    gl.thread_barrier()
    mbarrier.arrive(messages.totals.index(mine), count=1)
    mbarrier.wait(messages.totals.index(other), phase)
    return total + exchanged.total.index(other).load(gl.SliceLayout(1, SCORES))


@gluon.jit
def left_group(
    share, fetched, exchanged, ring, messages, unit, row_cost, invariant, dependent, early,
    STORED: gl.constexpr = False, OWN: gl.constexpr = False, PIECES: gl.constexpr = 0,
):  # fmt: skip
    """The group that scores a row's first tile, its third and so on, and sums the left half of the values. Its last
    arguments but three are fields of `Split` and `Overlap`; STORED: see `until_there`; OWN: see `first_entry`; PIECES:
    1 where a row that a CTA has alone is a piece, too, else 0."""
    HALF: gl.constexpr = fetched.kv.shape[2]
    work = first_work(share, ".cg")
    position = gl.load(share.metadata + share.cta * CTA + 3, cache_modifier=".cg")
    if dependent and early:
        wait_for_kernel_before()
        let_kernel_after_start()
    tiles = 0
    rows = 0
    seconds = 0
    while work.left > 0:
        part = part_of(work, share, unit, row_cost, invariant, ".cg")
        row, tokens, start, stop = work.row, part.tokens, part.start, part.stop
        if stop > start:
            bound = seen_entries(tokens, share)
            sure = tokens - share.drafts
            top, total, sums = no_sums(STORED, HALF)
            mbarrier.wait(ring.q_full, rows & 1)
            for tile in range(start, stop, 2):
                buffer = buffer_of(tiles, fetched)
                phase = phase_of(tiles, fetched)
                low = tile * TILE
                score = begin_scores(fetched, ring.full, buffer, phase, STORED)
                score = warpgroup_mma_wait(0, deps=(score,))
                weight, top, shrink = weigh(score, top, share, row, low, sure, bound, OWN)
                rounded = weight.to(gl.bfloat16)
                # Right reads them before it hands that half of the tile back.
                tell_weights(rounded, top, shrink, fetched.rope.index(buffer), exchanged, messages.first, 0)
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
                    sums, top, total = told_weights(sums, total, exchanged, 1)
                    seconds += 1
                    until_there(ring.full.index(second), phase_of(tiles, fetched), STORED)
                    if begins_or_ends_in(low + TILE, tokens, share, OWN):
                        without_outside(fetched.kv.index(second), low + TILE, row, tokens, share, OWN)
                    summing = warpgroup_mma(exchanged.weights, fetched.kv.index(second), sums, is_async=True)
                    sums = warpgroup_mma_wait(0, deps=(summing,))
                    gl.thread_barrier()
                    mbarrier.arrive(ring.empty.index(second), count=1)
                    tiles += 1
            total = total_of_both(total, exchanged, messages, 0, 1, rows & 1)
            rows += 1
            store_half(
                sums, total, top, share, fetched, ring.q_empty, row, position,
                (part.begin == 0) & (part.end == part.units + PIECES), part.begin == 0, 0, invariant,
            )  # fmt: skip
            position += 1  # in invariant mode the slot of the next piece
        work = work_behind(work, part)


@gluon.jit
def begin_firsts(
    sums, total, fetched, exchanged, full, buffer, phase, low, row, tokens, share,
    STORED: gl.constexpr, OWN: gl.constexpr,
):  # fmt: skip
    """Begin to multiply the weights of a tile that left has scored with right's half of the values. Returns (sums on
    their way, maximum, sum of right's weights)."""
    BUFFERS: gl.constexpr = fetched.rope.shape[0]
    sums, top, total = told_weights(sums, total, exchanged, 0)
    until_there(full.index(BUFFERS + buffer), phase, STORED)
    if begins_or_ends_in(low, tokens, share, OWN):
        without_outside(fetched.kv.index(BUFFERS + buffer), low, row, tokens, share, OWN)
    summing = warpgroup_mma(fetched.rope.index(buffer), fetched.kv.index(BUFFERS + buffer), sums, is_async=True)
    return summing, top, total


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
    work = first_work(share, ".cg")
    position = gl.load(share.metadata + share.cta * CTA + 3, cache_modifier=".cg")
    if dependent and early:
        wait_for_kernel_before()
    tiles = 0
    rows = 0
    firsts = 0
    while work.left > 0:
        part = part_of(work, share, unit, row_cost, invariant, ".cg")
        row, tokens, start, stop = work.row, part.tokens, part.start, part.stop
        if stop > start:
            bound = seen_entries(tokens, share)
            sure = tokens - share.drafts
            top, total, sums = no_sums(STORED, HALF)
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
                    tell_weights(rounded, top, shrink, exchanged.weights, exchanged, messages.second, 1)
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
            total = total_of_both(total, exchanged, messages, 1, 0, rows & 1)
            rows += 1
            store_half(
                sums, total, top, share, fetched, ring.q_empty, row, position,
                (part.begin == 0) & (part.end == part.units + PIECES), part.begin == 0, 1, invariant,
            )  # fmt: skip
            position += 1  # in invariant mode the slot of the next piece
        work = work_behind(work, part)
