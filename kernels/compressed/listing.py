"""What Hopper's kernel of attention gets from a kernel in Triton: where the entries of each token lie, those that are
there one after the other. Neighbouring tokens of a row, which see nearly the same, may be listed together.

A token's record has `RECORD_FIELDS` numbers, of which a call without pairs has the first alone: how many entries its
list has, by how many first ones of them both tokens of a pair see, up to which one those go that only the first token
sees, and how many tokens the list is for. The list of a pair, and its record, are those of its first token; it reaches
into the second one's memory, whose own record is not read.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from kernels.compressed.attention import codes_of, drop_odd, list_entries, span_of
from kernels.compressed.entries import UNALIGNED, place_of

RECORD_FIELDS: Final = 4
_RECORD = tl.constexpr(RECORD_FIELDS)
_INTS = ["tokens", "rows", "places", "columns", "pages", "table_stride", "results", "most"]


@triton.jit
def list_token(
    token, ring, step, paged, selected, out, listed, record, position, row, slot, table, fault,
    rows, places, columns, pages, table_stride, results, most,
    SIZES: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """List the entries of one token."""
    own, place, _, sees, p, least, near, total, outside = span_of(token, position, row, slot, rows, places, most, SIZES)
    mine = listed + token * most
    found = total
    faults = outside.to(tl.int32)
    if SIZES.first:
        faults += list_entries(
            mine, sees, own, place, p, row, selected, table, 0, total, least, near, columns, pages, table_stride,
            SIZES, LANES,
        )  # fmt: skip
        tl.debug_barrier()
        drop_odd(mine, 0, total, ring, step, paged, SIZES, TILE)
    if SIZES.first or SIZES.ratio:
        found = 0
        for begin in range(0, total, LANES):
            i = begin + tl.arange(0, LANES)
            live = i < total
            if SIZES.first:
                code = tl.load(mine + i, mask=live, other=-1)
                tl.debug_barrier()  # other threads write where this one has read
            else:
                code, more = codes_of(
                    i, live, sees, own, place, p, row, selected, table, least, near, columns, pages, table_stride, SIZES
                )
                faults += more
            there = live & (code >= 0)
            tl.store(mine + found + tl.cumsum(there.to(tl.int32), 0) - 1, code, mask=there)
            found += tl.sum(there.to(tl.int32), 0)
    else:
        faults += list_entries(
            mine, sees, own, place, p, row, selected, table, 0, total, least, near, columns, pages, table_stride,
            SIZES, LANES,
        )  # fmt: skip
    tl.atomic_add(fault, faults.to(tl.int64), mask=faults > 0, sem="relaxed")
    own_record = record + token * _RECORD
    tl.store(own_record, found)
    tl.store(own_record + 1, found)
    tl.store(own_record + 2, found)
    tl.store(own_record + 3, 1)
    if found == 0:
        for begin in range(0, results, LANES):
            at = begin + tl.arange(0, LANES)
            tl.store(out + token * results + at, tl.zeros((LANES,), out.dtype.element_ty), mask=at < results)


@triton.jit
def is_among(number, numbers, count, STEPS: tl.constexpr):
    """Whether numbers are among the first `count`, fewer than 2 ** STEPS, of others, which rise."""
    before = tl.zeros_like(number)
    for step in tl.static_range(STEPS):
        probe = before + (1 << (STEPS - 1 - step))
        known = tl.load(numbers + probe - 1, mask=probe <= count, other=2147483647)
        before = tl.where(known < number, probe, before)
    return tl.load(numbers + before, mask=before < count, other=-1) == number


@triton.jit
def among_others(i, live, near, number_of, others, least_seen, p, selected, SIZES: tl.constexpr, STEPS: tl.constexpr):
    """Whether the neighbour at position `p` sees a token's entries numbered `i`, too: those of the window,
    whose `near` ones are numbered first, from its position on, and compressed ones where its selection has them."""
    seen = live & (i < near) & least_seen
    if SIZES.ratio:
        number = i - near
        compressed = live & (i >= near)
        end = (p + 1) // SIZES.ratio
        if SIZES.selected:
            number = tl.load(selected + number_of * SIZES.selected + number, mask=compressed, other=-1)
            chosen = is_among(number, selected + others * SIZES.selected, tl.minimum(end, SIZES.selected), STEPS)
            compressed = compressed & (number >= 0) & chosen
        seen = seen | (compressed & (number < end))
    return seen


@triton.jit
def list_pair(
    token, selected, listed, record, position, row, slot, table, fault,
    rows, places, columns, pages, table_stride, most,
    SIZES: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """List the entries of a token and the one behind it, of the same row, together."""
    after = token + 1
    own, place, _, _, p, least, near, total, outside = span_of(
        token, position, row, slot, rows, places, most, SIZES
    )  # fmt: skip
    mine = listed + token * most
    faults = outside.to(tl.int32)
    # Those of both tokens from the front on, the first one's from the back: so they are all looked at but once.
    shared = 0
    alone = 0
    for begin in range(0, total, LANES):
        i = begin + tl.arange(0, LANES)
        live = i < total
        code, more = codes_of(
            i, live, token, own, place, p, row, selected, table, least, near, columns, pages, table_stride, SIZES
        )
        faults += more
        there = live & (code >= 0)
        in_window = least + i > p + 1 - SIZES.window
        both = there & among_others(i, live, near, token, after, in_window, p + 1, selected, SIZES, STEPS)
        first = there & (both == 0)
        tl.store(mine + shared + tl.cumsum(both.to(tl.int32), 0) - 1, code, mask=both)
        tl.store(mine + total - alone - tl.cumsum(first.to(tl.int32), 0), code, mask=first)
        shared += tl.sum(both.to(tl.int32), 0)
        alone += tl.sum(first.to(tl.int32), 0)
    firsts = shared + alone
    if firsts < total:  # some are absent
        for begin in range(0, alone, LANES):
            i = begin + tl.arange(0, LANES)
            tl.debug_barrier()
            code = tl.load(mine + total - alone + i, mask=i < alone, other=-1)
            tl.debug_barrier()  # other threads write where this one has read
            tl.store(mine + shared + i, code, mask=i < alone)
    tl.debug_barrier()  # what the second token alone sees may be written where others have read
    _, _, _, _, p, least, near, total, outside = span_of(
        after, position, row, slot, rows, places, most, SIZES
    )  # fmt: skip
    faults += outside.to(tl.int32)
    at_second = firsts
    for begin in range(0, total, LANES):
        i = begin + tl.arange(0, LANES)
        live = i < total
        code, more = codes_of(
            i, live, after, own, place, p, row, selected, table, least, near, columns, pages, table_stride, SIZES
        )
        faults += more
        both = among_others(i, live, near, after, token, least + i < p, p - 1, selected, SIZES, STEPS)
        second = live & (code >= 0) & (both == 0)
        tl.store(mine + at_second + tl.cumsum(second.to(tl.int32), 0) - 1, code, mask=second)
        at_second += tl.sum(second.to(tl.int32), 0)
    tl.atomic_add(fault, faults.to(tl.int64), mask=faults > 0, sem="relaxed")
    own_record = record + token * _RECORD
    tl.store(own_record, at_second)
    tl.store(own_record + 1, shared)
    tl.store(own_record + 2, firsts)
    tl.store(own_record + 3, 2)


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=UNALIGNED)
def find_entries(
    ring, step, paged, selected, out, listed, record, position, row, slot, table, fault,
    tokens, rows, places, columns, pages, table_stride, results, most,
    SIZES: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, PAIRS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Programs of one token, with PAIRS of two. `listed`: [tokens, most], as `codes_of` says; `record`: see above. The
    output of a token without entries is written here; it is `results` numbers. LANES entries are listed at a time, and
    TILE looked at. STEPS: see `is_among`."""
    token = tl.program_id(0).to(tl.int64)
    if PAIRS:
        token *= 2
        after = tl.minimum(token + 1, tokens - 1)
        own, _, there, _ = place_of(token, row, slot, rows, places)
        p = tl.load(position + token)
        together = there & (p >= 0) & (tl.load(row + after) == own) & (tl.load(position + after) == p + 1)
        if together:
            list_pair(
                token, selected, listed, record, position, row, slot, table, fault,
                rows, places, columns, pages, table_stride, most, SIZES, LANES, STEPS,
            )  # fmt: skip
        else:
            for each in range(token, after + 1):
                list_token(
                    each, ring, step, paged, selected, out, listed, record, position, row, slot, table, fault,
                    rows, places, columns, pages, table_stride, results, most, SIZES, TILE, LANES,
                )  # fmt: skip
    else:
        list_token(
            token, ring, step, paged, selected, out, listed, record, position, row, slot, table, fault,
            rows, places, columns, pages, table_stride, results, most, SIZES, TILE, LANES,
        )  # fmt: skip
