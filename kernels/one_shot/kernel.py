"""The exchange in Triton. A thread has whole pieces of 16 bytes, from its own rank's part to the result.

Behind the last piece there are pieces of zeros, so that a program's threads all do the same; their results alone are
not stored.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.one_shot.words import EMPTY_WORD, SEND, numbers, packed, read_words, sendable, store_words


@triton.jit
def _summed(words, WORD: tl.constexpr, RANKS: tl.constexpr, FP32: tl.constexpr):
    """The numbers of one word of the sum, of every rank's pieces."""
    low, high = numbers(words[WORD], FP32)
    for rank in tl.static_range(1, RANKS):
        more, more_high = numbers(words[4 * rank + WORD], FP32)
        low += more
        high += more_high
    return low, high


@triton.jit
def _summed_word(words, WORD: tl.constexpr, RANKS: tl.constexpr, FP32: tl.constexpr):
    """Return one word of the sum."""
    low, high = _summed(words, WORD, RANKS, FP32)
    return packed(low, high, FP32)


@triton.jit
def _entered(words, WORD: tl.constexpr, residual, residual_high, norm, RANKS: tl.constexpr):
    """Two numbers of the residual with the sum added, as words; the word of both times the norm's weights; the sum of
    their squares."""
    low, high = _summed(words, WORD, RANKS, False)
    low += residual.to(tl.float32, bitcast=True)
    high += residual_high.to(tl.float32, bitcast=True)
    weight, weight_high = numbers(norm, False)
    word = packed(low * weight, high * weight_high, False)
    return low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True), word, low * low + high * high


@triton.jit(do_not_specialize=["pieces", "rank"])
def one_shot(
    part,
    inbox,
    addresses,
    turns,
    out,
    pieces,
    rank,
    residual,
    norm,
    square,
    RANKS: tl.constexpr,
    ROW: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANE_BYTES: tl.constexpr,
    RANK_BYTES: tl.constexpr,
    TAKE: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    WHAT: tl.constexpr,
    FP32: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """out = the sum of the parts ("sum"), or every rank's part, with those of a row of ROW pieces side by side
    ("gather"). "add": residual += the sum, out = residual * norm, sums of squares by 16 features.

    Grid: lanes. Of the inbox [half, rank, lane, step, thread, 16 bytes] a program has its lane."""
    lane = tl.program_id(0)
    thread = tl.arange(0, BLOCK)
    inboxes = ()  # everybody begins with another one, and ends with its own, which nobody waits for
    for other in tl.static_range(1, RANKS + 1):
        inboxes = inboxes + (tl.load(addresses + (rank + other) % RANKS),)  # noqa: RUF005 - Triton knows no other way
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()  # after the wait: kernels after this may read before theirs what precedes this one
    turn = tl.load(turns + lane, cache_modifier=".cg")
    half = (turn & 1).to(tl.int64) * (RANKS * RANK_BYTES) + lane * LANE_BYTES
    place = half + thread * 16
    for step in tl.static_range(STEPS):
        piece = (step * tl.num_programs(0) + lane) * BLOCK + thread
        inside = piece < pieces
        a, b, c, d = read_words(part.to(tl.int64) + tl.minimum(piece, pieces - 1).to(tl.int64) * 16)
        a = sendable(a, inside)
        b = sendable(b, inside)
        c = sendable(c, inside)
        d = sendable(d, inside)
        for other in tl.static_range(RANKS):
            to = inboxes[other] + rank * RANK_BYTES + place + step * (BLOCK * 16)
            tl.inline_asm_elementwise(SEND, "=r,l,r,r,r,r", [to, a, b, c, d], dtype=tl.int32, is_pure=False, pack=1)
    for step in tl.static_range(STEPS):
        piece = (step * tl.num_programs(0) + lane) * BLOCK + thread
        inside = piece < pieces
        if WHAT == "add":  # read while parts arrive
            kept = tl.minimum(piece, pieces - 1).to(tl.int64)
            r0, r1, r2, r3 = read_words(residual.to(tl.int64) + kept * 32)
            r4, r5, r6, r7 = read_words(residual.to(tl.int64) + kept * 32 + 16)
            w0, w1, w2, w3 = read_words(norm.to(tl.int64) + kept % ROW * 16)
        arrived = inbox.to(tl.int64) + place + step * (BLOCK * 16)
        words = tl.inline_asm_elementwise(
            TAKE, CONSTRAINTS, [arrived, EMPTY_WORD], dtype=(tl.int32,) * (4 * RANKS), is_pure=False, pack=1
        )
        if WHAT == "gather":
            first = (piece // ROW * RANKS) * ROW + piece % ROW
            for source in tl.static_range(RANKS):
                at = out.to(tl.int64) + (first + source * ROW).to(tl.int64) * 16
                store_words(
                    at, inside, words[4 * source], words[4 * source + 1], words[4 * source + 2], words[4 * source + 3]
                )
        else:
            at = out.to(tl.int64) + piece.to(tl.int64) * 16
            if WHAT == "add":
                r0, r1, a, square_a = _entered(words, 0, r0, r1, w0, RANKS)
                r2, r3, b, square_b = _entered(words, 1, r2, r3, w1, RANKS)
                r4, r5, c, square_c = _entered(words, 2, r4, r5, w2, RANKS)
                r6, r7, d, square_d = _entered(words, 3, r6, r7, w3, RANKS)
                store_words(residual.to(tl.int64) + piece.to(tl.int64) * 32, inside, r0, r1, r2, r3)
                store_words(residual.to(tl.int64) + piece.to(tl.int64) * 32 + 16, inside, r4, r5, r6, r7)
                of_16 = tl.sum(tl.reshape(square_a + square_b + square_c + square_d, [BLOCK // 2, 2]), 1)
                pair = (step * tl.num_programs(0) + lane) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
                tl.store(square + pair, of_16, mask=pair * 2 < pieces)
            else:
                a = _summed_word(words, 0, RANKS, FP32)
                b = _summed_word(words, 1, RANKS, FP32)
                c = _summed_word(words, 2, RANKS, FP32)
                d = _summed_word(words, 3, RANKS, FP32)
            store_words(at, inside, a, b, c, d)
    tl.debug_barrier()  # all threads have read whose turn it is
    tl.store(turns + lane, turn + 1)
