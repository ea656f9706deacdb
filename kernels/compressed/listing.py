"""What Hopper's kernel of attention gets from a kernel in Triton: where the entries of each token lie, those that are
there one after the other."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.compressed.attention import codes_of, drop_odd, list_entries, span_of
from kernels.compressed.entries import UNALIGNED

_INTS = ["rows", "places", "columns", "pages", "table_stride", "results", "most"]


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=UNALIGNED)
def find_entries(
    ring, step, paged, selected, out, listed, count, position, row, slot, table, fault,
    rows, places, columns, pages, table_stride, results, most,
    SIZES: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Programs of one token. `listed`: [tokens, most], as `codes_of` says; `count`: how many of a token's entries are
    there. The output of a token without entries is written here; it is `results` numbers. LANES entries are listed at a
    time, and TILE looked at."""
    token = tl.program_id(0).to(tl.int64)
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
    tl.store(count + token, found)
    if found == 0:
        for begin in range(0, results, LANES):
            at = begin + tl.arange(0, LANES)
            tl.store(out + token * results + at, tl.zeros((LANES,), out.dtype.element_ty), mask=at < results)
