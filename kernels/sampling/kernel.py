"""Sampling in Triton: three kernels per call, four when some row filters, without atomics between programs.

`peak` takes every row's largest adjusted logit, a block of ids per program. `search.search` finds the floors of rows
with top_k or top_p. `draw` adds the noise and takes the largest sum, for rows with a temperature. `finish` joins the
blocks of each row. What a row needs is read from its slot's parameters, so a captured graph serves any mix of rows; a
row that needs nothing of a kernel costs it a few loads. The largest of blocks, with the lowest id at ties, does not
depend on how the row was cut.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.sampling.rows import (
    _MIN_P,
    _NO_ID,
    _SEED,
    _TEMPERATURE,
    _TOP_K,
    _TOP_P,
    adjusted,
    drafts_before,
    lowest_of_largest,
    mask_of,
    real_value,
    row_and_place,
    whole_value,
)

_INTS = ["decode_tokens", "before", "nobody", "ahead", "programs", "draft_stride"]
_LARGEST_UNIFORM = tl.constexpr(1.0 - 2.0**-24)
_HOPELESS = tl.constexpr(-25.75)
"""Noise lies between -2.82 and 22.88: an id so far below the peak, which is an id too, never wins."""


@triton.jit(do_not_specialize=_INTS)
def peak(
    logits,
    slots,
    windows,
    drafts,
    tables,
    peak_out,
    peak_id_out,
    decode_tokens,
    before,
    nobody,
    draft_stride,
    LAYOUT: tl.constexpr,
    ADJUST: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Programs (logits row, block of ids): the block's largest adjusted logit and its lowest id. NaN counts as +inf."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.program_id(0)
    # Backwards: of many rows the L2 cache holds what the product has written last.
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    first = block * BLOCK
    v = first + tl.arange(0, BLOCK)
    at_logit = logits + n.to(tl.int64) * LAYOUT.stride + v
    x = tl.load(at_logit, mask=v < ADJUST.vocab, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
    row, window = row_and_place(n, decode_tokens, LAYOUT.width)
    slot = tl.load(slots + row)
    if (slot >= 0) & (slot < nobody):
        window = drafts_before(n, window, before, windows, LAYOUT)
        own = drafts + (slot if LAYOUT.by_slot else row.to(tl.int64)) * draft_stride
        mask = mask_of(n, tables, ADJUST)
        x = adjusted(x, v, first, first + BLOCK - 1, slot, mask, window, own, tables, ADJUST)
    top, best = lowest_of_largest(x, v)
    at = n * tl.num_programs(1) + block
    tl.store(peak_out + at, top)
    tl.store(peak_id_out + at, best)


@triton.jit
def row_peak(peak_in, n, PEAKS: tl.constexpr):
    """The largest adjusted logit of a row."""
    lane = tl.arange(0, PEAKS.lanes)
    at = peak_in + n * PEAKS.number + lane
    return tl.max(tl.load(at, mask=lane < PEAKS.number, other=float("-inf"), cache_modifier=".cg"), 0)


@triton.jit
def slot_floor(real, slot):
    """The least scaled logit that the filters of `filters.FLOORS` keep, as far as a row's parameters alone say it."""
    return tl.log(real_value(real, slot, _MIN_P))


@triton.jit
def is_searched(top_k, top_p, VOCAB: tl.constexpr):
    """Whether a row's floor takes a search: `search.search` must have found it."""
    return ((top_k > 0) & (top_k < VOCAB)) | (top_p < 1.0)


@triton.jit
def gumbel(word):
    """Gumbel variables from random words, as `reference.gumbel_from_words` makes them."""
    v = tl.minimum(word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, _LARGEST_UNIFORM)
    # -log(1 - v), with the rounding of 1 - v made good (Goldberg 1991, theorem 4).
    u = 1.0 - v
    tiny = u == 1.0
    return -tl.log(tl.where(tiny, v, tl.log(u) * tl.div_rn(v, tl.where(tiny, 1.0, u - 1.0))))


@triton.jit(do_not_specialize=_INTS)
def draw(
    logits,
    slots,
    positions,
    windows,
    drafts,
    tables,
    peak_in,
    floor_in,
    last_in,
    score_out,
    score_id_out,
    decode_tokens,
    before,
    nobody,
    draft_stride,
    ahead,
    LAYOUT: tl.constexpr,
    ADJUST: tl.constexpr,
    PEAKS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Programs (logits row, part of its blocks): the part's largest sum of logit and noise over the ids kept."""
    if DEPENDENT:
        gdc_launch_dependents()
    n = tl.program_id(0)
    row, window = row_and_place(n, decode_tokens, LAYOUT.width)
    if DEPENDENT:
        gdc_wait()
    slot = tl.load(slots + row)
    temperature = 0.0
    if (slot >= 0) & (slot < nobody):
        temperature = real_value(tables.real, slot, _TEMPERATURE)
    if temperature != 0.0:
        top = row_peak(peak_in, n, PEAKS)
        if tl.abs(top) < float("inf"):
            window = drafts_before(n, window, before, windows, LAYOUT)
            own = drafts + (slot if LAYOUT.by_slot else row.to(tl.int64)) * draft_stride
            mask = mask_of(n, tables, ADJUST)
            floor = slot_floor(tables.real, slot)
            last = tl.full((), _NO_ID, tl.int32)
            if is_searched(
                whole_value(tables.whole, slot, _TOP_K), real_value(tables.real, slot, _TOP_P), ADJUST.vocab
            ):
                floor = tl.load(floor_in + n, cache_modifier=".cg")
                last = tl.load(last_in + n, cache_modifier=".cg")
            floor = tl.maximum(floor, _HOPELESS)
            seed = whole_value(tables.whole, slot, _SEED)
            position = tl.load(positions + n) + ahead
            quad = tl.arange(0, BLOCK // 4)[:, None]
            inner = quad * 4 + tl.arange(0, 4)[None, :]
            best = tl.full((BLOCK // 4, 4), float("-inf"), tl.float32)
            best_id = tl.full((BLOCK // 4, 4), _NO_ID, tl.int32)
            part = tl.program_id(1)
            for block in range(part, tl.cdiv(ADJUST.vocab, BLOCK), tl.num_programs(1)):
                first = block * BLOCK
                v = first + inner
                at_logit = logits + n.to(tl.int64) * LAYOUT.stride + v
                x = tl.load(at_logit, mask=v < ADJUST.vocab, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
                x = adjusted(x, v, first, first + BLOCK - 1, slot, mask, window, own, tables, ADJUST)
                scaled = tl.div_rn(x - top, tl.zeros_like(x) + temperature)
                if tl.max(tl.max(scaled, 1), 0) >= floor:
                    counter = first // 4 + quad
                    low = tl.zeros_like(counter) + position.to(tl.int32)
                    high = tl.zeros_like(counter) + (position >> 32).to(tl.int32)
                    w0, w1, w2, w3 = tl.philox(seed, counter, low, high, tl.zeros_like(counter))
                    word = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(BLOCK // 4, 4)
                    kept = (scaled > floor) | ((scaled == floor) & (v <= last))
                    score = tl.where(kept & (v < ADJUST.vocab), scaled + gumbel(word), float("-inf"))
                    better = score > best  # later blocks have higher ids: equal ones do not replace
                    best = tl.where(better, score, best)
                    best_id = tl.where(better, v, best_id)
            largest = tl.max(tl.max(best, 1), 0)
            lowest = tl.min(tl.min(tl.where(best == largest, best_id, _NO_ID), 1), 0)
            at = n * tl.num_programs(1) + part
            tl.store(score_out + at, largest)
            tl.store(score_id_out + at, lowest)


@triton.jit(
    do_not_specialize=_INTS,
    do_not_specialize_on_alignment=["fault"],  # named rows lie behind a number of tokens
)
def finish(
    slots,
    real,
    peak_in,
    peak_id_in,
    score_in,
    score_id_in,
    token_out,
    fault,
    decode_tokens,
    nobody,
    programs,
    WIDTH: tl.constexpr,
    PEAKS: tl.constexpr,
    LANES: tl.constexpr,
    NOISE: tl.constexpr,
    NAMED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program per logits row: its token. Unsound rows get token 0 and are counted, or NAMED: each by itself; padded
    rows get token 0."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.program_id(0)
    row = row_and_place(n, decode_tokens, WIDTH)[0]
    lane = tl.arange(0, LANES)
    value = tl.load(peak_in + n * PEAKS + lane, mask=lane < PEAKS, other=float("-inf"), cache_modifier=".cg")
    ids = tl.load(peak_id_in + n * PEAKS + lane, mask=lane < PEAKS, other=_NO_ID, cache_modifier=".cg")
    top, token = lowest_of_largest(value, ids)
    slot = tl.load(slots + row)
    owned = (slot >= 0) & (slot < nobody)
    sound = tl.abs(top) < float("inf")
    if NOISE:
        temperature = 0.0
        if owned & sound:
            temperature = real_value(real, slot, _TEMPERATURE)
        if temperature != 0.0:
            at = n * programs + lane
            value = tl.load(score_in + at, mask=lane < programs, other=float("-inf"), cache_modifier=".cg")
            ids = tl.load(score_id_in + at, mask=lane < programs, other=_NO_ID, cache_modifier=".cg")
            token = lowest_of_largest(value, ids)[1]
    tl.store(token_out + n, tl.where(owned & sound, token, 0).to(tl.int64))
    if NAMED:
        tl.store(fault + n, (owned & (sound == 0)).to(tl.int64))
    elif owned & (sound == 0):
        tl.atomic_add(fault, 1)


@triton.jit(do_not_specialize=["rows", "nobody", "more", "token_stride", "vocab"])
def count(
    slots,
    tokens,
    counts,
    whole,
    seen,
    fault,
    rows,
    nobody,
    more,
    token_stride,
    vocab,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    WHOLES: tl.constexpr,
    GENERATED: tl.constexpr,
    COUNTED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A block of rows: their tokens as generated ones of their slots. Sums of integers, in whatever order."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    slot = tl.load(slots + row, mask=row < rows, other=-1)
    owned = (slot >= 0) & (slot < nobody)
    number = tl.load(counts + row, mask=owned, other=0, cache_modifier=".cg") + more
    tl.atomic_add(whole + slot * WHOLES + GENERATED, number, mask=owned)
    emitted = (lane[None, :] < tl.minimum(number, WIDTH)[:, None]) & owned[:, None]
    place = row.to(tl.int64)[:, None] * token_stride + lane[None, :]
    token = tl.load(tokens + place, mask=emitted, other=0, cache_modifier=".cg")
    valid = (token >= 0) & (token < vocab)
    wrong = tl.sum(tl.sum((emitted & (valid == 0)).to(tl.int64), 1), 0)
    if wrong > 0:
        tl.atomic_add(fault, wrong)
    if COUNTED:
        tl.atomic_add(seen + slot[:, None] * vocab + token, tl.zeros_like(token).to(tl.int32) + 2, mask=emitted & valid)
