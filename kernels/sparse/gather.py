"""The gather for invariant mode in Triton: each token's selected entries, one after the other in pages of its own, as
`kernels.mla_decode` reads them."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.page import PAGE_TOKENS
from kernels.sparse.attention import places_of

_PAGE = tl.constexpr(PAGE_TOKENS)


@triton.jit(
    do_not_specialize=["rows", "columns", "pages", "table_stride"],
    do_not_specialize_on_alignment=["table", "row", "fault"],
)
def gather(
    cache,
    table,
    row,
    selected,
    fault,
    own_cache,
    own_table,
    length,
    rows,
    columns,
    pages,
    table_stride,
    SELECTED: tl.constexpr,
    LANES: tl.constexpr,
    WORDS: tl.constexpr,
    WORD_LANES: tl.constexpr,
):
    """Programs (page of selected positions, token). Entries are WORDS words, LANES is a power of two not below
    SELECTED."""
    index, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    own = tl.load(row + token)
    mine = selected + token * SELECTED
    first = index * _PAGE
    slot = tl.arange(0, LANES)
    listed = tl.load(mine + slot, mask=slot < SELECTED, other=-1)
    there = places_of(listed, table, own, rows, columns, pages, table_stride, fault, False) >= 0
    earlier = tl.sum((there & (slot < first)).to(tl.int32), 0)
    tl.store(own_table + token * tl.num_programs(0) + index, (token * tl.num_programs(0) + index).to(tl.int32))
    if index == 0:
        tl.store(length + token, tl.sum(there.to(tl.int32), 0))

    k = first + tl.arange(0, _PAGE)
    position = tl.load(mine + k, mask=k < SELECTED, other=-1)
    place = places_of(position, table, own, rows, columns, pages, table_stride, fault, True)
    found = place >= 0
    into = token * tl.num_programs(0) * _PAGE + earlier + tl.cumsum(found.to(tl.int32), 0) - 1
    word = tl.arange(0, WORD_LANES)
    wanted = found[:, None] & (word < WORDS)[None, :]
    entry = tl.load(cache + place.to(tl.int64)[:, None] * WORDS + word[None, :], mask=wanted, other=0)
    tl.store(own_cache + into[:, None] * WORDS + word[None, :], entry, mask=wanted)
