"""Input that Hopper's kernels of sparse attention get from a kernel in Triton: the cache indices of the entries that
are there, one after the other, and which of them each program takes."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.mla_decode.schedule import CTA_FIELDS
from kernels.page import PAGE_TOKENS
from kernels.sparse.attention import places_of

_PAGE = tl.constexpr(PAGE_TOKENS)
_CTA = tl.constexpr(CTA_FIELDS)


@triton.jit(
    do_not_specialize=["tokens", "rows", "columns", "pages", "table_stride", "results", "heads"],
    do_not_specialize_on_alignment=["table", "row", "fault"],
)
def find_places(
    selected, table, row, out, lse, place, length, pieces, metadata, fault,
    tokens, rows, columns, pages, table_stride, results, heads,
    SELECTED: tl.constexpr, LANES: tl.constexpr, PARTS: tl.constexpr, PART_LANES: tl.constexpr, ZEROS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Programs of one token. LANES and PART_LANES: SELECTED and PARTS, padded to powers of two.

    `place`: in the flattened cache, of the entries that are there, in their order; `length`: how many they are.
    `pieces`: programs that have some of them, PARTS at most. `metadata`: records as those of `kernels.mla_decode`, in
    which a row is a token; those of a token's parts are `tokens` records apart. The results of a token without entries
    are written here; they are `results` numbers. ZEROS are written at a time.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, LANES)
    position = tl.load(selected + token * SELECTED + slot, mask=slot < SELECTED, other=-1, cache_modifier=".cg")
    own = tl.load(row + token)
    found = places_of(position, table, own, rows, columns, pages, table_stride, fault, True)
    there = found >= 0
    rank = tl.cumsum(there.to(tl.int32), 0) - 1
    tl.store(place + token * SELECTED + rank, found, mask=there)
    count = tl.sum(there.to(tl.int32), 0)
    tl.store(length + token, count)

    part = tl.arange(0, PART_LANES)
    units = tl.cdiv(count, _PAGE)
    each = tl.maximum(tl.cdiv(units, PARTS), 1)
    begin = tl.minimum(part * each, units)
    record = metadata + (part * tokens + token) * _CTA
    tl.store(record, (part * 0 + token).to(tl.int32), mask=part < PARTS)
    tl.store(record + 1, begin, mask=part < PARTS)
    tl.store(record + 2, tl.minimum(each, units - begin), mask=part < PARTS)
    tl.store(record + 3, part * 0, mask=part < PARTS)
    tl.store(pieces + token, tl.cdiv(units, each))
    if count == 0:
        zero = tl.arange(0, ZEROS)
        for first in range(0, results, ZEROS):
            at = first + zero
            tl.store(out + token * results + at, tl.zeros((ZEROS,), out.dtype.element_ty), mask=at < results)
        for first in range(0, heads, ZEROS):
            at = first + zero
            tl.store(lse + token * heads + at, tl.full((ZEROS,), float("-inf"), tl.float32), mask=at < heads)
