"""Adjusted logits in Triton: what a slot's penalties, biases and min_tokens make of a block of one row.

Every product and quotient is rounded on its own (launches turn the fusing of multiply and add off), so the adjusted
logits equal the reference's bit for bit.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kernels.sampling import tables

_REALS = tl.constexpr(len(tables.NEUTRAL_REAL))
_WHOLES = tl.constexpr(len(tables.NEUTRAL_WHOLE))
_TEMPERATURE = tl.constexpr(tables.TEMPERATURE)
_TOP_P = tl.constexpr(tables.TOP_P)
_MIN_P = tl.constexpr(tables.MIN_P)
_REPETITION = tl.constexpr(tables.REPETITION)
_FREQUENCY = tl.constexpr(tables.FREQUENCY)
_PRESENCE = tl.constexpr(tables.PRESENCE)
_SEED = tl.constexpr(tables.SEED)
_TOP_K = tl.constexpr(tables.TOP_K)
_MIN_TOKENS = tl.constexpr(tables.MIN_TOKENS)
_BIASED = tl.constexpr(tables.BIASED)
_GENERATED = tl.constexpr(tables.GENERATED)
_NO_ID = tl.constexpr(2**31 - 1)


class SlotPointers(NamedTuple):
    """The tensors of `tables.SlotTables` and of `workspace.TokenMasks` as a launch takes them and a kernel sees them:
    one argument."""

    real: Any
    whole: Any
    stop: Any
    bias_id: Any
    bias: Any
    seen: Any
    mask_index: Any
    mask_bits: Any


class Adjustment(NamedTuple):
    """Parts of the adjustment of logits that are compiled in: one constant of a launch."""

    vocab: int
    """Ids of the vocabulary."""
    stops: int
    """Stop ids a slot has room for."""
    biases: int
    """Biases a slot has room for."""
    bias_lanes: int
    """Number of biases, padded to a power of two."""
    counted: bool
    """Whether some slot may have penalties, so that its tokens are counted."""
    masked: bool
    """Whether some row may have a mask."""
    words: int
    """Integers of a mask."""


class RowLayout(NamedTuple):
    """Layout of logits rows and their drafts: one constant of a launch."""

    stride: int
    """Elements from one logits row to the next."""
    width: int
    """Logits rows of a decode row."""
    windows: bool
    """Whether still more drafts lie before each logits row, as many as `SampledRows.window_N` says."""
    drafted: bool
    """Whether there are drafts."""
    by_slot: bool
    """Whether drafts lie in the order of slots, not of sampled rows."""


class PeakBlocks(NamedTuple):
    """The blocks of ids of which `kernel.peak` keeps the largest logit each: one constant of a launch."""

    number: int
    """Blocks of a logits row."""
    lanes: int
    """Number of blocks, padded to a power of two."""


@triton.jit
def real_value(real, slot, COLUMN: tl.constexpr):
    """Load one float parameter of a slot."""
    return tl.load(real + slot * _REALS + COLUMN)


@triton.jit
def whole_value(whole, slot, COLUMN: tl.constexpr):
    """Load one integer parameter of a slot."""
    return tl.load(whole + slot * _WHOLES + COLUMN, cache_modifier=".cg")


@triton.jit
def row_and_place(n, decode_tokens, WIDTH: tl.constexpr):
    """Sampled row and place in its window of logits row `n`: WIDTH logits rows per decode row, then one per row."""
    decode = n < decode_tokens
    row = tl.where(decode, n // WIDTH, n - decode_tokens + decode_tokens // WIDTH)
    return row, tl.where(decode, n % WIDTH, 0)


@triton.jit
def drafts_before(n, place, before, windows, LAYOUT: tl.constexpr):
    """Return the number of drafts before logits row `n`, at `place` of its window."""
    window = place * 0
    if LAYOUT.drafted:
        window = place + before
        if LAYOUT.windows:
            window += tl.load(windows + n).to(tl.int32)
    return window


@triton.jit
def mask_of(n, tables, ADJUST: tl.constexpr):
    """Return the offset of the mask of logits row `n`, below 0 where it has none."""
    mask = n.to(tl.int64) * 0 - 1
    if ADJUST.masked:
        mask = tl.load(tables.mask_index + n).to(tl.int64) * ADJUST.words
    return mask


@triton.jit
def adjusted(x, v, first, last, slot, mask, window, drafts, tables, ADJUST: tl.constexpr):
    """Logits `x` of the ids `v` (all in `first` ... `last`) of a row, NaN made +inf. `mask`: as `mask_of` says.
    `drafts`: the `window` drafts before it. Ids outside the vocabulary must come with -inf and keep it, unless they
    would be +inf."""
    if ADJUST.masked:  # noqa: SIM102 - the outer one is the compiler's
        if mask >= 0:
            word = tl.load(tables.mask_bits + mask + (v >> 5), mask=v < ADJUST.vocab, other=0)
            # Added, so that NaN stays and +inf becomes NaN: a mask must not make a broken row pass for sound.
            x += tl.where(((word >> (v & 31)) & 1) != 0, 0.0, float("-inf"))
    if ADJUST.counted:
        repetition = real_value(tables.real, slot, _REPETITION)
        frequency = real_value(tables.real, slot, _FREQUENCY)
        presence = real_value(tables.real, slot, _PRESENCE)
        if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
            count = tl.load(tables.seen + slot * ADJUST.vocab + v, mask=v < ADJUST.vocab, other=0, cache_modifier=".cg")
            for index in range(window):
                draft = tl.load(drafts + index, cache_modifier=".cg")
                draft = tl.where((draft >= 0) & (draft < ADJUST.vocab), draft, -1).to(tl.int32)
                count += tl.where(v == draft, 2, 0)
            penalised = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
            x = tl.where(count != 0, penalised, x)
            times = count >> 1
            x = x - times.to(tl.float32) * frequency
            x = x - tl.where(times != 0, presence, 0.0)
    biased = whole_value(tables.whole, slot, _BIASED)
    if biased > 0:
        lane = tl.arange(0, ADJUST.bias_lanes)
        ids = tl.load(tables.bias_id + slot * ADJUST.biases + lane, mask=lane < biased, other=_NO_ID)
        begin = tl.sum((ids < first).to(tl.int32), 0)
        end = tl.sum((ids <= last).to(tl.int32), 0)
        for index in range(begin, end):
            here = v == tl.load(tables.bias_id + slot * ADJUST.biases + index).to(tl.int32)
            x = tl.where(here, x + tl.load(tables.bias + slot * ADJUST.biases + index), x)
    if whole_value(tables.whole, slot, _GENERATED) + window < whole_value(tables.whole, slot, _MIN_TOKENS):
        for index in range(ADJUST.stops):
            x = tl.where(v == tl.load(tables.stop + slot * ADJUST.stops + index).to(tl.int32), float("-inf"), x)
    return tl.where(x != x, float("inf"), x)


@triton.jit
def lowest_of_largest(value, ids):
    """The largest of `value` and the lowest of `ids` that has it, both [n]."""
    top = tl.max(value, 0)
    return top, tl.min(tl.where(value == top, ids, _NO_ID), 0)
