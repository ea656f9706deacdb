"""The groups of `fp8`: one scores, two sum a half of the values each."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from kernels.gluon.dependent import let_kernel_after_start, wait_for_kernel_before
from kernels.mla_decode.fp8_scores import begin_scores, end_scores, put_queries
from kernels.mla_decode.fp8_tile import (
    GROUP,
    GROUPS,
    LATENT,
    LIFT,
    LN2,
    LOWEST,
    PAIRS,
    TILE,
    inverse_of,
    put_weights,
    slots_of,
    sums_in_threads,
    sums_layout,
    units_of,
    weigh,
)
from kernels.mla_decode.fp8_values import add_values, store_pairs, without_outside
from kernels.mla_decode.narrow_tile import unknown_zero
from kernels.mla_decode.schedule import CTA_FIELDS, ROW_FIELDS
from kernels.mla_decode.wide_tile import first_in_tile, next_share, pieces_before

CTA = gl.constexpr(CTA_FIELDS)
ROW = gl.constexpr(ROW_FIELDS)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The stage after, and the phase of its mbarriers."""
    stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
    return stage, gl.where(stage == 0, phase ^ 1, phase)


@gluon.jit
def slot_of(row, begin, share, SPLIT: gl.constexpr):
    """The slot of a piece that begins with the row's KV block `begin`."""
    slot = gl.where(begin == 0, share.ctas + share.cta, share.cta)
    if SPLIT.invariant:
        lowest = share.first // SPLIT.unit
        piece = pieces_before(lowest + begin, SPLIT.invariant) - pieces_before(lowest, SPLIT.invariant)
        slot = gl.load(share.metadata + share.ctas * CTA + row * ROW, cache_modifier=".cg") + piece
    return slot


@gluon.jit
def hand_weights(
    score, scales, top, total, tile, tiles, row, tokens, share, queries, exchanged, messages,
    BLOCK: gl.constexpr, OWN: gl.constexpr,
):  # fmt: skip
    """Hand the weights of the scores of a tile, the scoring group's number `tiles`, to the other groups. Returns the
    maximum so far, and the sums of weights so far, which every thread has of its entries."""
    SUMS: gl.constexpr = sums_layout(BLOCK)
    low = tile * TILE
    SLOTS: gl.constexpr = slots_of(BLOCK)
    slot = tiles % SLOTS
    first = first_in_tile(row, low, share, OWN)
    there, exponent = units_of(scales, low, first, tokens, BLOCK)
    unit = queries.unit.load(gl.SliceLayout(0, SUMS))
    weight, top, shrink = weigh(score, exponent, top, unit, queries.back, low, first, tokens, share, BLOCK)
    mbarrier.wait(messages.weights_empty.index(slot), ((tiles // SLOTS) & 1) ^ 1)
    put_weights(weight, scales, there, exponent, exchanged.weights, slot)
    exchanged.shrink.index(slot).store(shrink)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(messages.weights_full.index(slot), count=1)
    added = sums_in_threads(weight * inverse_of(exponent), BLOCK)
    same: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, added.type.layout))
    total = total * gl.convert_layout(shrink, same, assert_trivial=True)[None, None, :] + added
    return top, total


@gluon.jit
def scoring_group(
    q, share, queries, fetched, exchanged, messages,
    BLOCK: gl.constexpr, SPLIT: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Scores every tile, and hands its weights to the other groups."""
    SUMS: gl.constexpr = sums_layout(BLOCK)
    PIECES: gl.constexpr = 1 if SPLIT.invariant else 0  # see `wide.wide_cta`
    per_query: gl.constexpr = gl.SliceLayout(0, SUMS)
    record = share.metadata + share.cta * CTA
    row = gl.load(record, cache_modifier=".cg")
    at = gl.load(record + 1, cache_modifier=".cg")
    left = gl.load(record + 2, cache_modifier=".cg")
    if OVERLAP.dependent and OVERLAP.early:
        wait_for_kernel_before()
        let_kernel_after_start()
    tiles = 0
    rows = 0
    stage = 0
    phase = 0
    while left > 0:
        tokens = gl.load(share.length + row, cache_modifier=".cg")
        take, begin, end, units, start, stop, done = next_share(
            tokens, at, left, share.first, SPLIT.unit, SPLIT.row_cost, SPLIT.invariant
        )
        if stop > start:
            put_queries(q, row, tokens, share, queries, BLOCK, SPLIT.own)
            top = gl.full([BLOCK], LOWEST, gl.float32, per_query)
            total = sums_in_threads(gl.zeros([TILE, BLOCK], gl.float32, SUMS), BLOCK)
            mbarrier.wait(messages.full.index(stage), phase)
            begun = begin_scores(queries, fetched, stage, BLOCK)
            score, scales = end_scores(begun, fetched, stage, BLOCK)
            for tile in range(start, stop - 1):
                gl.thread_barrier()
                mbarrier.arrive(messages.empty.index(stage), count=1)
                stage, phase = next_stage(stage, phase, OVERLAP.stages)
                # While this tile is weighed, products of the next one run.
                mbarrier.wait(messages.full.index(stage), phase)
                begun = begin_scores(queries, fetched, stage, BLOCK)
                top, total = hand_weights(
                    score, scales, top, total, tile, tiles, row, tokens, share, queries, exchanged, messages,
                    BLOCK, SPLIT.own,
                )  # fmt: skip
                score, scales = end_scores(begun, fetched, stage, BLOCK)
                tiles += 1
            gl.thread_barrier()
            mbarrier.arrive(messages.empty.index(stage), count=1)
            stage, phase = next_stage(stage, phase, OVERLAP.stages)
            top, total = hand_weights(
                score, scales, top, total, stop - 1, tiles, row, tokens, share, queries, exchanged, messages,
                BLOCK, SPLIT.own,
            )  # fmt: skip
            tiles += 1
            whole = gl.convert_layout(gl.sum(gl.sum(total, 1), 0), per_query)
            divisor = gl.where(whole > 0, whole, 1.0)
            log = gl.where(whole > 0, top - LIFT + gl.log2(divisor), float("-inf"))
            mbarrier.wait(messages.factor_empty, (rows & 1) ^ 1)
            exchanged.factor.store(1.0 / divisor)
            gl.thread_barrier()
            mbarrier.arrive(messages.factor_full, count=1)
            rows += 1
            stored: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
            log = gl.convert_layout(log, stored)
            m = gl.arange(0, BLOCK, stored) + (share.block * BLOCK + unknown_zero())
            inside = m < share.queries
            if (begin == 0) & (end == units + PIECES):
                gl.store(share.lse + row.to(gl.int64) * share.queries + m, log * LN2, mask=inside)
            else:
                slot_out = slot_of(row, begin, share, SPLIT).to(gl.int64)
                gl.store(share.partial_lse + slot_out * share.queries + m, log, mask=inside)
        left -= take
        at = gl.where(done, 0, at + take)
        row = gl.where(done, row + 1, row)


@gluon.jit
def summing_group(
    share, fetched, exchanged, messages, WHICH_HALF: gl.constexpr,
    BLOCK: gl.constexpr, SPLIT: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Sums the values of two groups of features: the first two, or the last (`WHICH_HALF` 0 or 1)."""
    SUMS: gl.constexpr = sums_layout(BLOCK)
    MINE: gl.constexpr = 2 * WHICH_HALF
    SLOTS: gl.constexpr = slots_of(BLOCK)
    PIECES: gl.constexpr = 1 if SPLIT.invariant else 0
    per_query: gl.constexpr = gl.SliceLayout(0, SUMS)
    record = share.metadata + share.cta * CTA
    row = gl.load(record, cache_modifier=".cg")
    at = gl.load(record + 1, cache_modifier=".cg")
    left = gl.load(record + 2, cache_modifier=".cg")
    if OVERLAP.dependent and OVERLAP.early:
        wait_for_kernel_before()
    tiles = 0
    rows = 0
    stage = 0
    while left > 0:
        tokens = gl.load(share.length + row, cache_modifier=".cg")
        take, begin, end, units, start, stop, done = next_share(
            tokens, at, left, share.first, SPLIT.unit, SPLIT.row_cost, SPLIT.invariant
        )
        if stop > start:
            even0 = gl.zeros([PAIRS, BLOCK], gl.float32, SUMS)
            odd0 = gl.zeros([PAIRS, BLOCK], gl.float32, SUMS)
            even1 = gl.zeros([PAIRS, BLOCK], gl.float32, SUMS)
            odd1 = gl.zeros([PAIRS, BLOCK], gl.float32, SUMS)
            for tile in range(start, stop):
                low = tile * TILE
                slot = tiles % SLOTS
                mbarrier.wait(messages.weights_full.index(slot), (tiles // SLOTS) & 1)
                first = first_in_tile(row, low, share, SPLIT.own)
                if (low + TILE > tokens) | (low < first):
                    without_outside(fetched.latent.index(stage * GROUPS + MINE), low, first, tokens)
                    without_outside(fetched.latent.index(stage * GROUPS + MINE + 1), low, first, tokens)
                    fence_async_shared()  # a later copy of the engine overwrites what threads have stored
                    gl.thread_barrier()
                shrink = exchanged.shrink.index(slot).load(per_query)[None, :]
                sums = (even0 * shrink, odd0 * shrink, even1 * shrink, odd1 * shrink)
                even0, odd0, even1, odd1 = add_values(sums, fetched, exchanged, stage, slot, WHICH_HALF, BLOCK)
                gl.thread_barrier()
                mbarrier.arrive(messages.weights_empty.index(slot), count=1)
                mbarrier.arrive(messages.empty.index(stage), count=1)
                stage = gl.where(stage + 1 == OVERLAP.stages, 0, stage + 1)
                tiles += 1
            mbarrier.wait(messages.factor_full, rows & 1)
            whole = (begin == 0) & (end == units + PIECES)
            slot_out = slot_of(row, begin, share, SPLIT)
            to = gl.where(whole, share.out, share.partial)
            to += gl.where(whole, row, slot_out).to(gl.int64) * share.queries * LATENT
            store_pairs(to, even0, odd0, exchanged.factor, share, MINE * GROUP, BLOCK)
            store_pairs(to, even1, odd1, exchanged.factor, share, (MINE + 1) * GROUP, BLOCK)
            gl.thread_barrier()
            mbarrier.arrive(messages.factor_empty, count=1)
            rows += 1
        left -= take
        at = gl.where(done, 0, at + take)
        row = gl.where(done, row + 1, row)
