"""The floors of top_k and top_p in Triton, without a sort: one program per row narrows a bracket around each threshold.

Both filters have one form: the largest value t of the row at which the ids of logit >= t reach a weight, in number (k)
or in mass (top_p of the total). Passes over the row (which the L2 cache holds) weigh it above two pivots at once,
until few enough ids are left between two of them to be kept aside and searched bit by bit. Values are compared as they
are, so the k-th value is exact; masses are sums of fp32 exponentials in a fixed order. top_k keeps all ids that have
the k-th value. Where more ids have the least logit of top_p's set than it takes, one more pass finds the last of them
that belongs to it; a row without such ties makes no such pass.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.sampling.kernel import _INTS, is_searched, row_peak, slot_floor
from kernels.sampling.rows import (
    _NO_ID,
    _TEMPERATURE,
    _TOP_K,
    _TOP_P,
    adjusted,
    drafts_before,
    mask_of,
    real_value,
    row_and_place,
    whole_value,
)

_LOG2E = tl.constexpr(1.4426950408889634)
_LARGEST = tl.constexpr(3.0e38)
_LOWEST_KEY = tl.constexpr(-2139095041)
"""Key of -inf."""


class SearchCut(NamedTuple):
    """Division of a search over a logits row: one constant of a launch."""

    rows: int
    lanes: int
    """Ids are read in blocks of `rows` x `lanes`; sums run over a lane first."""
    aside: int
    """Ids that are kept aside and searched bit by bit, once so few are left."""


@triton.jit
def key_of(x):
    """An integer that orders as the float does."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # + 0.0: the two zeros are one value
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """The float of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def between(value, low, high):
    """Key of `value`, moved strictly between two keys that are not neighbours."""
    return tl.minimum(tl.maximum(key_of(value), low + 1), high - 1)


@triton.jit
def halfway(low, high):
    """The key in the middle, rounded down."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def row_block(first, offset, SIZE: tl.constexpr, mine, slot, mask, window, own, tables, ADJUST: tl.constexpr):
    """Ids `first` + `offset` (SIZE of them) and their adjusted logits, -inf past the vocabulary."""
    v = first + offset
    x = tl.load(mine + v, mask=v < ADJUST.vocab, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
    x = adjusted(x, v, first, first + SIZE - 1, slot, mask, window, own, tables, ADJUST)
    return v, x


@triton.jit
def allowed(mine, slot, mask, window, own, tables, ADJUST: tl.constexpr, CUT: tl.constexpr):
    """Count the ids of the row whose logit is above -inf."""
    LANES: tl.constexpr = CUT.lanes
    BLOCK: tl.constexpr = CUT.rows * LANES
    inner = tl.arange(0, CUT.rows)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    number = tl.zeros((LANES,), tl.int32)
    for first in range(0, ADJUST.vocab, BLOCK):
        _, x = row_block(first, inner, BLOCK, mine, slot, mask, window, own, tables, ADJUST)
        number += tl.sum((x > float("-inf")).to(tl.int32), 0)
    return tl.sum(number, 0)


@triton.jit
def largest_reaching(
    target, low, number_low, top, temperature, rate, aside, mine, slot, mask, window, own, tables,
    ADJUST: tl.constexpr, BY_MASS: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Key of the largest logit of the row at which the ids of at least that logit reach `target`, in number or BY_MASS.

    Those of at least the key `low`, `number_low` ids (or fewer, if that is all of them), are known to. The second
    result is 0, or, BY_MASS, how many of the ids that have this logit it takes, if it takes fewer than there are.
    """
    LANES: tl.constexpr = CUT.lanes
    BLOCK: tl.constexpr = CUT.rows * LANES
    PIECE: tl.constexpr = BLOCK // 2
    inner = tl.arange(0, CUT.rows)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    # Ids of at least `low` reach the target, ids of at least `high` do not.
    high = key_of(top) + 1
    number_high = tl.full((), 0, tl.int32)
    above = 0.0
    reach = 2.0
    halve = False
    while (number_low - number_high > CUT.aside) & (low + 1 < high):
        value_high = tl.minimum(value_of(high), top)
        value_low = value_of(low)
        near = value_high - (value_high - value_low) * 0.33
        far = value_high - (value_high - value_low) * 0.67
        unknown = number_low == ADJUST.vocab
        if ADJUST.masked:
            unknown = unknown | (low == _LOWEST_KEY + 1)
        if unknown:  # nothing known below yet
            near = tl.maximum(value_high - reach, near)
            far = tl.maximum(value_high - 4.0 * reach, far)
            reach *= 16.0
        key_0 = between(near, low, high)
        key_1 = between(far, low, high)
        if halve:  # every second pass halves the keys, so that any distribution comes to an end
            key_0 = halfway(low, high)
        halve = halve == 0
        value_0 = value_of(key_0)
        value_1 = value_of(key_1)
        mass_0 = tl.zeros((LANES,), tl.float32)
        mass_1 = tl.zeros((LANES,), tl.float32)
        count_0 = tl.zeros((LANES,), tl.int32)
        count_1 = tl.zeros((LANES,), tl.int32)
        for first in range(0, ADJUST.vocab, BLOCK):
            _, x = row_block(first, inner, BLOCK, mine, slot, mask, window, own, tables, ADJUST)
            count_0 += tl.sum((x >= value_0).to(tl.int32), 0)
            count_1 += tl.sum((x >= value_1).to(tl.int32), 0)
            if BY_MASS:
                mass = tl.exp2((x - top) * rate)
                mass_0 += tl.sum(tl.where(x >= value_0, mass, 0.0), 0)
                mass_1 += tl.sum(tl.where(x >= value_1, mass, 0.0), 0)
        for pivot in tl.static_range(2):
            key = key_0 if pivot == 0 else key_1
            number = tl.sum(count_0 if pivot == 0 else count_1, 0)
            weight = number.to(tl.float32)
            if BY_MASS:
                weight = tl.sum(mass_0 if pivot == 0 else mass_1, 0)
            if weight >= target:
                if key > low:
                    low = key
                    number_low = number
            else:
                if key < high:
                    high = key
                    number_high = number
                    above = weight
    # Ids that are scaled to the same as that logit, and the weight of those above them.
    equal = number_low - number_high
    if low + 1 < high:
        # Keep the ids between aside and search them bit by bit.
        least = value_of(low)
        limit = value_of(high)
        used = tl.full((), 0, tl.int32)
        tl.debug_barrier()
        for first in range(0, ADJUST.vocab, PIECE):
            v, x = row_block(first, tl.arange(0, PIECE), PIECE, mine, slot, mask, window, own, tables, ADJUST)
            inside = (x >= least) & (x < limit) & (v < ADJUST.vocab)
            place = used + tl.cumsum(inside.to(tl.int32), 0) - 1
            tl.store(aside + place, x, mask=inside)
            used += tl.sum(inside.to(tl.int32), 0)
        tl.debug_barrier()
        lane = tl.arange(0, CUT.aside)
        x = tl.load(aside + lane, cache_modifier=".cg")  # the unused ones mean nothing
        weight = tl.where(lane < used, 1.0, 0.0)
        if BY_MASS:
            weight = tl.where(lane < used, tl.exp2((x - top) * rate), 0.0)
        while low + 1 < high:
            middle = halfway(low, high)
            enough = above + tl.sum(tl.where(x >= value_of(middle), weight, 0.0), 0) >= target
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        if BY_MASS:
            scaled = scaled_by(x, top, temperature)
            least_scaled = scaled_by(value_of(low), top, temperature)
            above += tl.sum(tl.where(scaled > least_scaled, weight, 0.0), 0)
            equal = tl.sum(((scaled == least_scaled) & (lane < used)).to(tl.int32), 0)
    taken = tl.full((), 0, tl.int32)
    if BY_MASS:
        # Of a mass that underflows to 0 none are enough: all stay.
        needed = tl.maximum(tl.ceil(tl.div_rn(target - above, tl.exp2((value_of(low) - top) * rate))), 1.0)
        taken = tl.where(needed < equal.to(tl.float32), needed, 0.0).to(tl.int32)
    return low, taken


@triton.jit
def scaled_by(x, top, temperature):
    """Logits below `top` over the temperature, as `kernel.draw` compares them with the floor."""
    below = x - top
    return tl.div_rn(below, tl.zeros_like(below) + temperature)


@triton.jit
def last_of_equal(
    number, least, top, temperature, mine, slot, mask, window, own, tables, ADJUST: tl.constexpr, PIECE: tl.constexpr
):
    """The id of number `number`, from 1 on in ascending order, of those whose scaled logit is `least`."""
    last = tl.full((), _NO_ID, tl.int32)
    found = tl.full((), 0, tl.int32)
    for first in range(0, ADJUST.vocab, PIECE):
        v, x = row_block(first, tl.arange(0, PIECE), PIECE, mine, slot, mask, window, own, tables, ADJUST)
        same = ((scaled_by(x, top, temperature) == least) & (v < ADJUST.vocab)).to(tl.int32)
        here = (same != 0) & (found + tl.cumsum(same, 0) == number)
        last = tl.minimum(last, tl.min(tl.where(here, v, _NO_ID), 0))
        found += tl.sum(same, 0)
    return last


@triton.jit(do_not_specialize=_INTS)
def search(
    logits,
    slots,
    windows,
    drafts,
    tables,
    peak_in,
    floor_out,
    last_out,
    aside,
    decode_tokens,
    before,
    nobody,
    draft_stride,
    LAYOUT: tl.constexpr,
    ADJUST: tl.constexpr,
    PEAKS: tl.constexpr,
    CUT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program per logits row: the least scaled logit that min_p, then top_k, then top_p keep, and the highest id
    that is kept of those that have it, if it takes a search.

    `aside` has room for the values that are kept aside of every row.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    LANES: tl.constexpr = CUT.lanes
    BLOCK: tl.constexpr = CUT.rows * LANES
    n = tl.program_id(0)
    row, window = row_and_place(n, decode_tokens, LAYOUT.width)
    slot = tl.load(slots + row)
    temperature = 0.0
    top_k = tl.full((), 0, tl.int64)
    top_p = 1.0
    if (slot >= 0) & (slot < nobody):
        temperature = real_value(tables.real, slot, _TEMPERATURE)
        top_k = whole_value(tables.whole, slot, _TOP_K)
        top_p = real_value(tables.real, slot, _TOP_P)
    if (temperature != 0.0) & is_searched(top_k, top_p, ADJUST.vocab):
        top = row_peak(peak_in, n, PEAKS)
        if tl.abs(top) < float("inf"):
            window = drafts_before(n, window, before, windows, LAYOUT)
            own = drafts + (slot if LAYOUT.by_slot else row.to(tl.int64)) * draft_stride
            mine = logits + n.to(tl.int64) * LAYOUT.stride
            beside = aside + n.to(tl.int64) * CUT.aside
            mask = mask_of(n, tables, ADJUST)
            rate = tl.minimum(_LOG2E / temperature, _LARGEST)
            floor = slot_floor(tables.real, slot)
            low = tl.full((), _LOWEST_KEY, tl.int32)
            finite = tl.full((), ADJUST.vocab, tl.int32)
            if ADJUST.masked:  # noqa: SIM102 - the outer one is the compiler's
                if (mask >= 0) & (top_k > 0) & (top_k < ADJUST.vocab):
                    # A mask may leave fewer ids than top_k keeps, or few enough to be kept aside at once.
                    finite = allowed(mine, slot, mask, window, own, tables, ADJUST, CUT)
                    low = tl.where(top_k <= finite, _LOWEST_KEY + 1, low)
            if (top_k > 0) & (top_k < ADJUST.vocab) & (top_k <= finite):
                low, _ = largest_reaching(
                    top_k.to(tl.float32), low, finite, top, temperature, rate, beside,
                    mine, slot, mask, window, own, tables, ADJUST, False, CUT,
                )  # fmt: skip
            taken = tl.full((), 0, tl.int32)
            if top_p < 1.0:
                # What min_p and top_k left: its mass, and how many ids.
                low = tl.maximum(low, key_of(top + temperature * floor))
                least = value_of(low)
                mass = tl.zeros((LANES,), tl.float32)
                number = tl.zeros((LANES,), tl.int32)
                inner = tl.arange(0, CUT.rows)[:, None] * LANES + tl.arange(0, LANES)[None, :]
                for first in range(0, ADJUST.vocab, BLOCK):
                    v, x = row_block(first, inner, BLOCK, mine, slot, mask, window, own, tables, ADJUST)
                    kept = (x >= least) & (v < ADJUST.vocab)
                    mass += tl.sum(tl.where(kept, tl.exp2((x - top) * rate), 0.0), 0)
                    number += tl.sum(kept.to(tl.int32), 0)
                low, taken = largest_reaching(
                    top_p * tl.sum(mass, 0), low, tl.sum(number, 0), top, temperature, rate, beside,
                    mine, slot, mask, window, own, tables, ADJUST, True, CUT,
                )  # fmt: skip
            least_scaled = tl.div_rn(value_of(low) - top, temperature)
            last = tl.full((), _NO_ID, tl.int32)
            if (taken > 0) & (least_scaled >= floor):
                last = last_of_equal(
                    taken, least_scaled, top, temperature, mine, slot, mask, window, own, tables, ADJUST, BLOCK // 2
                )
            tl.store(floor_out + n, tl.maximum(floor, least_scaled))
            tl.store(last_out + n, last)
