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
    LOWEST,
    PAIRS,
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
from kernels.mla_decode.split_kv import (
    LN2,
    TILE,
    divisor_and_log,
    first_in_tile,
    first_work,
    part_of,
    slot_of,
    work_behind,
)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The stage after, and the phase of its mbarriers."""
    stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
    return stage, gl.where(stage == 0, phase ^ 1, phase)


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
    work = first_work(share, ".cg")
    if OVERLAP.dependent and OVERLAP.early:
        wait_for_kernel_before()
        let_kernel_after_start()
    tiles = 0
    rows = 0
    stage = 0
    phase = 0
    while work.left > 0:
        part = part_of(work, share, SPLIT.unit, SPLIT.row_cost, SPLIT.invariant, ".cg")
        if part.stop > part.start:
            put_queries(q, work.row, part.tokens, share, queries, BLOCK, SPLIT.own)
            top = gl.full([BLOCK], LOWEST, gl.float32, per_query)
            total = sums_in_threads(gl.zeros([TILE, BLOCK], gl.float32, SUMS), BLOCK)
            mbarrier.wait(messages.full.index(stage), phase)
            begun = begin_scores(queries, fetched, stage, BLOCK)
            score, scales = end_scores(begun, fetched, stage, BLOCK)
            for tile in range(part.start, part.stop - 1):
                gl.thread_barrier()
                mbarrier.arrive(messages.empty.index(stage), count=1)
                stage, phase = next_stage(stage, phase, OVERLAP.stages)
                # While this tile is weighed, products of the next one run.
                mbarrier.wait(messages.full.index(stage), phase)
                begun = begin_scores(queries, fetched, stage, BLOCK)
                top, total = hand_weights(
                    score, scales, top, total, tile, tiles, work.row, part.tokens, share, queries, exchanged, messages,
                    BLOCK, SPLIT.own,
                )  # fmt: skip
                score, scales = end_scores(begun, fetched, stage, BLOCK)
                tiles += 1
            gl.thread_barrier()
            mbarrier.arrive(messages.empty.index(stage), count=1)
            stage, phase = next_stage(stage, phase, OVERLAP.stages)
            top, total = hand_weights(
                score, scales, top, total, part.stop - 1, tiles, work.row, part.tokens, share, queries, exchanged,
                messages, BLOCK, SPLIT.own,
            )  # fmt: skip
            tiles += 1
            whole = gl.convert_layout(gl.sum(gl.sum(total, 1), 0), per_query)
            divisor, log = divisor_and_log(whole, top - LIFT)
            mbarrier.wait(messages.factor_empty, (rows & 1) ^ 1)
            exchanged.factor.store(1.0 / divisor)
            gl.thread_barrier()
            mbarrier.arrive(messages.factor_full, count=1)
            rows += 1
            stored: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
            log = gl.convert_layout(log, stored)
            m = gl.arange(0, BLOCK, stored) + (share.block * BLOCK + unknown_zero())
            inside = m < share.queries
            if (part.begin == 0) & (part.end == part.units + PIECES):
                gl.store(share.lse + work.row.to(gl.int64) * share.queries + m, log * LN2, mask=inside)
            else:
                slot_out = slot_of(work.row, part.begin, share, SPLIT).to(gl.int64)
                gl.store(share.partial_lse + slot_out * share.queries + m, log, mask=inside)
        work = work_behind(work, part)


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
    work = first_work(share, ".cg")
    if OVERLAP.dependent and OVERLAP.early:
        wait_for_kernel_before()
    tiles = 0
    rows = 0
    stage = 0
    while work.left > 0:
        part = part_of(work, share, SPLIT.unit, SPLIT.row_cost, SPLIT.invariant, ".cg")
        if part.stop > part.start:
            even0 = gl.zeros([PAIRS, BLOCK], gl.float32, SUMS)
            odd0 = gl.zeros([PAIRS, BLOCK], gl.float32, SUMS)
            even1 = gl.zeros([PAIRS, BLOCK], gl.float32, SUMS)
            odd1 = gl.zeros([PAIRS, BLOCK], gl.float32, SUMS)
            for tile in range(part.start, part.stop):
                low = tile * TILE
                slot = tiles % SLOTS
                mbarrier.wait(messages.weights_full.index(slot), (tiles // SLOTS) & 1)
                first = first_in_tile(work.row, low, share, SPLIT.own)
                if (low + TILE > part.tokens) | (low < first):
                    without_outside(fetched.latent.index(stage * GROUPS + MINE), low, first, part.tokens)
                    without_outside(fetched.latent.index(stage * GROUPS + MINE + 1), low, first, part.tokens)
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
            whole = (part.begin == 0) & (part.end == part.units + PIECES)
            slot_out = slot_of(work.row, part.begin, share, SPLIT)
            to = gl.where(whole, share.out, share.partial)
            to += gl.where(whole, work.row, slot_out).to(gl.int64) * share.queries * LATENT
            store_pairs(to, even0, odd0, exchanged.factor, share, MINE * GROUP, BLOCK)
            store_pairs(to, even1, odd1, exchanged.factor, share, (MINE + 1) * GROUP, BLOCK)
            gl.thread_barrier()
            mbarrier.arrive(messages.factor_empty, count=1)
            rows += 1
        work = work_behind(work, part)
