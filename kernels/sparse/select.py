"""The positions of a token's largest scores in Triton.

First a number is found that little more scores reach than are selected. Scores are dealt to groups, several times as
many as positions are selected, and `find_maxima` takes the largest score of every group. If as many of these maxima
reach a number as positions are selected, so many scores do at least; and hardly more, because large scores rarely share
a group: those of a group lie far apart. `keep_candidates` finds such a number among the maxima and copies the scores
that reach it, the candidates. `list_positions` finds the least selected score among these, and from it the positions:
those of larger scores, and the first ones of scores that equal it.

Either search halves an interval of keys, integers that order as scores do, and counts how many keys reach its middle.
All of a token's programs do the same search, which is faster than telling each other. Programs of `keep_candidates`
take room with an atomic addition, so candidates of several blocks lie in any order; what is selected depends on their
keys and positions alone. If there is no room for all candidates, as where most scores are equal, the scores themselves
take their place.

A token that sees no more positions than are selected costs each launch a load.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_INTS = ["scores", "score_stride", "blocks"]
_ANYWHERE = ["bound", "fault"]
_NAN = tl.constexpr(0xFFFFFFFE)
"""The key of NaN. No key is above it, and none is 0."""
_GUESSES = tl.constexpr(8)
"""Middles of two scores that are tried among maxima before the middles of their keys, of which at most 32 are left.
Where scores have both signs this finds the interval sooner."""


class Cut(NamedTuple):
    """Division of scores among programs: one constant of a launch."""

    selected: int
    columns: int
    """Groups of a token's scores: position p is in group p % columns."""
    slack: int
    """Maxima that may reach the number found beside as many as are selected."""
    lanes: int
    """Candidates that there is room for, a power of two."""
    block: int
    """Scores that a program takes at a time."""


@triton.jit
def key_of(x):
    """An unsigned integer that orders as the float does; NaN is above all."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)  # + 0.0: the two zeros are one value
    key = bits ^ tl.where(bits >> 31 != 0, 0xFFFFFFFF, 0x80000000).to(tl.uint32)
    return tl.where(x != x, _NAN, key).to(tl.uint32)


@triton.jit
def score_of(key):
    """The float of a key."""
    bits = key ^ tl.where(key >> 31 != 0, 0x80000000, 0xFFFFFFFF).to(tl.uint32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def scores_of(token, bound, scores, CUT: tl.constexpr):
    """Return the number of scores a token has to be selected from, 0 if all are selected; the number it sees; and
    whether its bound makes no sense."""
    sees = tl.load(bound + token, cache_modifier=".cg")
    wrong = (sees < 0) | (sees > scores)
    return tl.where(wrong | (sees <= CUT.selected), 0, sees), tl.where(wrong, 0, sees), wrong


@triton.jit
def part_of(seen, CUT: tl.constexpr):
    """Begin and end of a program's part, in whole blocks but for the last. Where there are more programs than blocks,
    the last ones end before they begin."""
    each = tl.cdiv(tl.cdiv(seen, CUT.block), tl.num_programs(0)) * CUT.block
    begin = tl.program_id(0) * each
    return begin, tl.minimum(begin + each, seen)


@triton.jit
def keys_at(mine, at, end):
    """Keys of the scores at some positions, 0 at and behind `end`."""
    # Rows are whole pages wide: up to the next multiple of 16 there is memory, and loads can be wide.
    x = tl.load(mine + at, mask=at < tl.cdiv(end, 16) * 16, other=0.0, cache_modifier=".cg")
    return tl.where(at < end, key_of(x), 0)


@triton.jit
def middle_of(low, high, step, GUESSES: tl.constexpr):
    """Return where to cut an interval of keys: somewhere between its ends."""
    middle = low + (high - low) // 2
    if GUESSES > 0:
        guess = key_of(score_of(low) * 0.5 + score_of(high) * 0.5)
        guess = tl.minimum(tl.maximum(guess, low + 1), high - 1)
        middle = tl.where(step < GUESSES, guess, middle)
    return middle


@triton.jit
def least_of(key, SELECTED: tl.constexpr, SLACK: tl.constexpr, GUESSES: tl.constexpr):
    """A number that at least SELECTED of the keys reach and at most SLACK more, or that many more equal. There are
    SELECTED keys at least; zeros are none."""
    low = tl.min(tl.where(key == 0, _NAN, key), 0)
    high = tl.max(key, 0) + 1  # fewer reach it
    reached = tl.sum((key > 0).to(tl.int32), 0)
    step = 0
    while (reached > SELECTED + SLACK) & (high - low > 1):
        middle = middle_of(low, high, step, GUESSES)
        number = tl.sum((key >= middle).to(tl.int32), 0)
        enough = number >= SELECTED
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        reached = tl.where(enough, number, reached)
        step += 1
    return low


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_ANYWHERE)
def find_maxima(
    score, bound, best, taken, scores, score_stride, CUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Programs (COLUMNS groups, token): the largest key of each group, 0 if it has no score. ROWS: scores of a group
    that are loaded at a time. `score_stride` is in lines of 16 scores, so that the compiler knows how they lie."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(1)
    seen, _, _ = scores_of(token, bound, scores, CUT)
    if seen > 0:
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        row = tl.arange(0, ROWS)
        mine = score + token.to(tl.int64) * score_stride * 16
        top = tl.zeros((COLUMNS,), tl.uint32)
        for first in range(0, tl.cdiv(seen, CUT.columns), ROWS):
            key = keys_at(mine, (first + row)[:, None] * CUT.columns + column[None, :], seen)
            top = tl.maximum(top, tl.max(key, 0))
        tl.store(best + token.to(tl.int64) * CUT.columns + column, top.to(tl.int32, bitcast=True))
        if tl.program_id(0) == 0:
            tl.store(taken + token, 0)


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_ANYWHERE)
def keep_candidates(
    score, bound, best, taken, least, begins, candidate, position, scores, score_stride, blocks,
    CUT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Programs (part, token): the candidates of the part, their keys and positions, block by block. `begins`: of every
    block where its candidates begin, and how many they are."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(1).to(tl.int64)
    seen, _, _ = scores_of(token, bound, scores, CUT)
    if seen > 0:
        begin, end = part_of(seen, CUT)
        mine = score + token * score_stride * 16
        lane = tl.arange(0, CUT.block)
        key = keys_at(mine, begin + lane, end)
        top = tl.load(best + token * CUT.columns + tl.arange(0, CUT.columns), cache_modifier=".cg")
        threshold = least_of(top.to(tl.uint32, bitcast=True), CUT.selected, CUT.slack, _GUESSES)
        if tl.program_id(0) == 0:
            tl.store(least + token, threshold.to(tl.int32, bitcast=True))
        for first in range(begin, end, CUT.block):
            at = first + lane
            following = keys_at(mine, at + CUT.block, end)
            keep = key >= threshold
            rank = tl.cumsum(keep.to(tl.int32), 0) - 1
            number = tl.sum(keep.to(tl.int32), 0)
            place = tl.atomic_add(taken + token, number, sem="relaxed")
            to = place + rank
            inside = keep & (to < CUT.lanes)
            to = token * CUT.lanes + to
            tl.store(candidate + to, key.to(tl.int32, bitcast=True), mask=inside)
            tl.store(position + to, at, mask=inside)
            own = begins + (token * blocks + first // CUT.block) * 2
            tl.store(own, place)
            tl.store(own + 1, number)
            key = following


@triton.jit
def least_of_scores(mine, seen, least, CUT: tl.constexpr, LANES: tl.constexpr):
    """The key of the least selected of all scores, which is `least` or larger; how many are larger than that, and how
    many of these and of its equals lie before the program's part."""
    lane = tl.arange(0, LANES)
    low = least
    high = least + 1  # tried first: most scores are equal where there are many candidates
    top = tl.full((), _NAN, tl.uint32) + 1
    while high - low > 0:
        number = tl.full((LANES,), 0, tl.int32)
        for first in range(0, seen, LANES):
            number += (keys_at(mine, first + lane, seen) >= high).to(tl.int32)
        enough = tl.sum(number, 0) >= CUT.selected
        # `top` is a number that too few reach, `high` the one that is tried.
        low = tl.where(enough, high, low)
        top = tl.where(enough, top, high)
        high = low + (top - low) // 2
    return low


@triton.jit
def list_block(out, key, at, threshold, place, left):
    """Write those of some positions, in their order, that are selected: of keys above the threshold, and the first
    `left` that equal it. Returns `place` and `left` as they are behind them."""
    is_larger = key > threshold
    is_equal = key == threshold
    # Two counts in one integer.
    flags = is_larger.to(tl.int32) + (is_equal.to(tl.int32) << 16)
    earlier = tl.cumsum(flags, 0) - flags
    larger_before = earlier & 0xFFFF
    equal_before = earlier >> 16
    take = is_larger | (is_equal & (equal_before < left))
    tl.store(out + place + larger_before + tl.minimum(equal_before, left), at, mask=take)
    total = tl.sum(flags, 0)
    taken = tl.minimum(total >> 16, left)
    return place + (total & 0xFFFF) + taken, left - taken


@triton.jit
def candidates_at(keys, positions, i, end):
    """Keys and positions of the candidates numbered `i`, zeros at and behind `end`."""
    key = tl.load(keys + i, mask=i < end, other=0, cache_modifier=".cg").to(tl.uint32, bitcast=True)
    return key, tl.load(positions + i, mask=i < end, other=0, cache_modifier=".cg")


@triton.jit
def before_part(key, at, begin, threshold):
    """Count, for some positions, keys above the threshold and its equals before `begin`, as two counts in one integer;
    and keys above it in all."""
    larger = (key > threshold).to(tl.int32)
    both = larger + ((key == threshold).to(tl.int32) << 16)
    return tl.sum(tl.where(at < begin, both, 0), 0), tl.sum(larger, 0)


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=_ANYWHERE)
def list_positions(
    score, bound, taken, least, begins, candidate, position, selected, fault, scores, score_stride, blocks,
    CUT: tl.constexpr, LANES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Programs (part, token): the selected positions of the part, where they belong among all. LANES: positions
    taken at a time."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    part, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    seen, all, wrong = scores_of(token, bound, scores, CUT)
    out = selected + token * CUT.selected
    if seen > 0:
        begin, end = part_of(seen, CUT)
        candidates = tl.load(taken + token, cache_modifier=".cg")
        if candidates <= CUT.lanes:
            keys = candidate + token * CUT.lanes
            positions = position + token * CUT.lanes
            key, at = candidates_at(keys, positions, tl.arange(0, CUT.lanes), candidates)
            threshold = least_of(key, CUT.selected, 0, 0)
            before, larger = before_part(key, at, begin, threshold)
            left = CUT.selected - larger
            earlier = tl.minimum(before >> 16, left)
            place = (before & 0xFFFF) + earlier
            left -= earlier
            own = begins + token * blocks * 2
            for block in range(begin // CUT.block, tl.cdiv(end, CUT.block)):
                start = tl.load(own + block * 2, cache_modifier=".cg")
                stop = start + tl.load(own + block * 2 + 1, cache_modifier=".cg")
                for first in range(start, stop, LANES):
                    some, places = candidates_at(keys, positions, first + tl.arange(0, LANES), stop)
                    place, left = list_block(out, some, places, threshold, place, left)
        else:
            mine = score + token * score_stride * 16
            lane = tl.arange(0, LANES)
            known = tl.load(least + token, cache_modifier=".cg").to(tl.uint32, bitcast=True)
            threshold = least_of_scores(mine, seen, known, CUT, LANES)
            place = 0
            equal = 0
            left = CUT.selected
            for first in range(0, seen, LANES):
                at = first + lane
                before, larger = before_part(keys_at(mine, at, seen), at, begin, threshold)
                left -= larger
                place += before & 0xFFFF
                equal += before >> 16
            earlier = tl.minimum(equal, left)
            place += earlier
            left -= earlier
            for first in range(begin, end, LANES):
                at = first + lane
                place, left = list_block(out, keys_at(mine, at, end), at, threshold, place, left)
    else:
        if part == 0:
            tl.atomic_add(fault, 1, mask=wrong, sem="relaxed")
        for first in range(part * LANES, CUT.selected, tl.num_programs(0) * LANES):
            at = first + tl.arange(0, LANES)
            tl.store(out + at, tl.where(at < all, at, -1), mask=at < CUT.selected)
