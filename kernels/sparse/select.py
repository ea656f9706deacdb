"""The positions of a token's largest scores in Triton, by radix: the byte of the least selected score that is most
significant first, then the next, and at the end the positions of what is above it, and of the first that equal it.

Programs share a token's scores in contiguous parts. `count_bytes` counts, in a launch for each byte, how many scores of
a part have which value of it among those that agree with all bytes known so far; the launch after it adds the parts up.
Integers are added, each part writes its own memory, and there are no atomics, so what is selected does not depend on
the order of work. `list_positions` knows from the counts where in the result each part begins.

A token that sees no more positions than are selected costs each launch a load.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.sparse.workspace import BINS, LEVELS

_BINS = tl.constexpr(BINS)
_LEVELS = tl.constexpr(LEVELS)
_INTS = ["tokens", "scores", "score_stride"]
_ANYWHERE = ["bound", "fault"]


class Cut(NamedTuple):
    """How scores are shared: one constant of a launch."""

    selected: int
    parts: int
    part_lanes: int
    """Parts padded to a power of two."""
    block: int
    """Scores that a program takes at a time."""


@triton.jit
def key_of(x):
    """An unsigned integer that orders as the float does; NaN is above all."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)  # + 0.0: the two zeros are one value
    key = bits ^ tl.where(bits >> 31 != 0, 0xFFFFFFFF, 0x80000000).to(tl.uint32)
    return tl.where(x != x, 0xFFFFFFFF, key).to(tl.uint32)


@triton.jit
def scores_of(token, bound, scores, CUT: tl.constexpr):
    """How many scores a token has to be selected from, 0 if all are; and whether its bound makes no sense."""
    sees = tl.load(bound + token)
    wrong = (sees < 0) | (sees > scores)
    return tl.where(wrong | (sees <= CUT.selected), 0, sees), tl.where(wrong, 0, sees), wrong


@triton.jit
def part_of(seen, part, CUT: tl.constexpr):
    """Begin and end of a part, in whole blocks but for the last."""
    each = tl.cdiv(tl.cdiv(seen, CUT.block), CUT.parts) * CUT.block
    return part * each, tl.minimum(part * each + each, seen)


@triton.jit
def block_of(mine, first, end, CUT: tl.constexpr):
    """A block of a part's scores; those behind its end mean nothing."""
    at = first + tl.arange(0, CUT.block)
    # Rows are whole pages wide: up to the next multiple of 16 there is memory, and loads can be wide.
    return tl.load(mine + at, mask=at < tl.cdiv(end, 16) * 16, other=0.0, cache_modifier=".cg")


@triton.jit
def counts_of(count, token, tokens, LEVEL: tl.constexpr, CUT: tl.constexpr):
    """Counts of all parts of a token, [parts, values of a byte]."""
    part = tl.arange(0, CUT.part_lanes)[:, None]
    first = (token.to(tl.int64) + LEVEL * tokens) * CUT.parts * _BINS
    at = count + first + part * _BINS + tl.arange(0, _BINS)[None, :]
    return tl.load(at, mask=part < CUT.parts, other=0, cache_modifier=".cg")


@triton.jit
def next_byte(number, wanted):
    """Of how many scores have which value of a byte: the byte of the least score of the `wanted` largest, and how many
    of those with this byte are wanted."""
    reaching = tl.cumsum(number, 0, reverse=True)  # so many have this value or a larger one
    byte = tl.sum((reaching >= wanted).to(tl.int32), 0) - 1
    larger = tl.sum(tl.where(tl.arange(0, _BINS) > byte, number, 0), 0)
    return byte, wanted - larger


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_ANYWHERE)
def count_bytes(
    score, bound, count, above, found, tokens, scores, score_stride, LEVEL: tl.constexpr, CUT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Programs (part, token). `found`: of every level the bytes known before it, and how many scores that have them are
    wanted. `above`: how many scores of a part have a larger byte before that. `score_stride` is in lines of 16 scores,
    so that the compiler knows how they lie."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    part, token = tl.program_id(0), tl.program_id(1)
    seen, _, _ = scores_of(token, bound, scores, CUT)
    if seen > 0:
        bin = tl.arange(0, _BINS)
        begin, end = part_of(seen, part, CUT)
        mine = score + token.to(tl.int64) * score_stride * 16
        x = block_of(mine, begin, end, CUT)
        known = tl.full((), 0, tl.uint32)
        if LEVEL > 0:
            wanted = tl.full((), CUT.selected, tl.int32)
            if LEVEL > 1:
                before = found + (token.to(tl.int64) + (LEVEL - 1) * tokens) * 2
                known = tl.load(before, cache_modifier=".cg").to(tl.uint32, bitcast=True)
                wanted = tl.load(before + 1, cache_modifier=".cg")
            both = counts_of(count, token, tokens, LEVEL - 1, CUT)
            byte, wanted = next_byte(tl.sum(both, 0), wanted)
            known = (known << 8) | byte.to(tl.uint32)
            of_part = token.to(tl.int64) * CUT.parts + part
            at_own = count + ((token.to(tl.int64) + (LEVEL - 1) * tokens) * CUT.parts + part) * _BINS
            own = tl.load(at_own + bin, cache_modifier=".cg")
            larger = tl.sum(tl.where(bin > byte, own, 0), 0)
            if LEVEL > 1:
                larger += tl.load(above + of_part, cache_modifier=".cg")
            tl.store(above + of_part, larger)
            if part == 0:
                now = found + (token.to(tl.int64) + LEVEL * tokens) * 2
                tl.store(now, known.to(tl.int32, bitcast=True))
                tl.store(now + 1, wanted)
        number = tl.zeros((_BINS,), tl.int32)
        for first in range(begin, end, CUT.block):
            following = block_of(mine, first + CUT.block, end, CUT)
            inside = first + tl.arange(0, CUT.block) < end
            key = key_of(x)
            x = following
            if LEVEL == 0:
                number += tl.histogram((key >> 24).to(tl.int32), _BINS, mask=inside)
            else:
                inside = inside & ((key >> (32 - 8 * LEVEL)) == known)
                # Few blocks have any, once two bytes are known.
                if tl.max(inside.to(tl.int32), 0) > 0:
                    number += tl.histogram(((key >> (24 - 8 * LEVEL)) & 0xFF).to(tl.int32), _BINS, mask=inside)
        at_count = ((token.to(tl.int64) + LEVEL * tokens) * CUT.parts + part) * _BINS
        tl.store(count + at_count + bin, number)


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_ANYWHERE)
def list_positions(
    score, bound, count, above, found, selected, fault, tokens, scores, score_stride, CUT: tl.constexpr,
    LANES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Programs (part, token): the selected positions of the part, where they belong among all. LANES: positions written
    at a time for a token that has no more than are selected."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    part, token = tl.program_id(0), tl.program_id(1)
    seen, all, wrong = scores_of(token, bound, scores, CUT)
    out = selected + token.to(tl.int64) * CUT.selected
    if seen > 0:
        begin, end = part_of(seen, part, CUT)
        mine = score + token.to(tl.int64) * score_stride * 16
        x = block_of(mine, begin, end, CUT)
        before = found + (token.to(tl.int64) + (_LEVELS - 1) * tokens) * 2
        known = tl.load(before, cache_modifier=".cg").to(tl.uint32, bitcast=True)
        wanted = tl.load(before + 1, cache_modifier=".cg")
        both = counts_of(count, token, tokens, _LEVELS - 1, CUT)
        byte, wanted = next_byte(tl.sum(both, 0), wanted)
        threshold = (known << 8) | byte.to(tl.uint32)
        bin = tl.arange(0, _BINS)[None, :]
        lane = tl.arange(0, CUT.part_lanes)
        larger = tl.sum(tl.where(bin > byte, both, 0), 1)
        at_above = above + token.to(tl.int64) * CUT.parts + lane
        larger += tl.load(at_above, mask=lane < CUT.parts, other=0, cache_modifier=".cg")
        equal = tl.sum(tl.where(bin == byte, both, 0), 1)
        # Of equal scores the first ones, so those of the first parts.
        taken = tl.minimum(tl.maximum(wanted - (tl.cumsum(equal, 0) - equal), 0), equal)
        earlier = lane < part
        place = tl.sum(tl.where(earlier, larger + taken, 0), 0)
        left = tl.sum(tl.where(lane == part, taken, 0), 0)
        for first in range(begin, end, CUT.block):
            following = block_of(mine, first + CUT.block, end, CUT)
            at = first + tl.arange(0, CUT.block)
            inside = at < end
            key = key_of(x)
            x = following
            is_larger = inside & (key > threshold)
            is_equal = inside & (key == threshold)
            # Two counts in one integer.
            flags = is_larger.to(tl.int32) + (is_equal.to(tl.int32) << 16)
            earlier_flags = tl.cumsum(flags, 0) - flags
            larger_before = earlier_flags & 0xFFFF
            equal_before = earlier_flags >> 16
            take = is_larger | (is_equal & (equal_before < left))
            tl.store(out + place + larger_before + tl.minimum(equal_before, left), at, mask=take)
            total = tl.sum(flags, 0)
            taken_here = tl.minimum(total >> 16, left)
            place += (total & 0xFFFF) + taken_here
            left -= taken_here
    else:
        if part == 0:
            tl.atomic_add(fault, 1, mask=wrong, sem="relaxed")
        for first in range(part * LANES, CUT.selected, CUT.parts * LANES):
            at = first + tl.arange(0, LANES)
            tl.store(out + at, tl.where(at < all, at, -1), mask=at < CUT.selected)
