"""Places of selected entries that ranks give each other, where they share out the pages of one cache
(`kernels.page.Shards`) and each attends to all of them (`workers.models.attention.sparse_entries`).

Shape legend: R rows of page tables, P pages of a row, K = 64 entries per page, T tokens, S selected positions, X >= S
places of a token in whole pages.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.page import NULL_PAGE, PAGE_TOKENS, Shards, pages_for

_PAGE = tl.constexpr(PAGE_TOKENS)


@dataclass(frozen=True)
class SelectedPlaces:
    """Where the selected entries of some tokens are, and the tables of a cache that holds nothing but them, each token
    a row of its own."""

    place_TX: Tensor
    """int64: entry of this rank's cache, pages laid end to end; 0 in the place of others' and behind the last one."""
    owner_TX: Tensor
    """int64: the shard that has each of them, 0 behind the last one."""
    index_TS: Tensor
    """int32: their positions in that cache, -1 where nothing is selected."""
    page_TY: Tensor
    """int32 [T, X / K]: its page table."""
    row_T: Tensor
    """int32: 0, 1, 2, ..."""

    @staticmethod
    def allocate(tokens: int, selected: int, empty: Callable[..., Tensor]) -> SelectedPlaces:
        """Take memory from `empty(*shape, dtype=...)`."""
        pages = pages_for(selected)
        wide = tokens, pages * PAGE_TOKENS
        return SelectedPlaces(
            place_TX=empty(*wide, dtype=torch.int64),
            owner_TX=empty(*wide, dtype=torch.int64),
            index_TS=empty(tokens, selected, dtype=torch.int32),
            page_TY=empty(tokens, pages, dtype=torch.int32),
            row_T=empty(tokens, dtype=torch.int32),
        )

    def of_first(self, tokens: int) -> SelectedPlaces:
        """The part of the first so many tokens."""
        fields = self.place_TX, self.owner_TX, self.index_TS, self.page_TY, self.row_T
        return SelectedPlaces(*(x[:tokens] for x in fields))


def find_places(
    selected_TS: Tensor,
    own_TS: Tensor,
    row_T: Tensor,
    page_RP: Tensor,
    local_RP: Tensor,
    pages: int,
    shards: Shards,
    out: SelectedPlaces,
    fault_1: Tensor,
) -> None:
    """Find the places of `selected_TS` (int32: positions, -1 for none), of which this rank has `own_TS` (the same, -1
    in the place of others').

    `row_T` (int32): the row of each token in `page_RP` (int32, global ids) and `local_RP` (this rank's ids of the same
    pages). Own pages outside of this rank's cache of `pages` are counted in `fault_1` (int64), and not followed.
    """
    compute = launch_find_places if selected_TS.is_cuda else find_places_reference
    compute(selected_TS, own_TS, row_T, page_RP, local_RP, pages, shards, out, fault_1)


def find_places_reference(
    selected_TS: Tensor,
    own_TS: Tensor,
    row_T: Tensor,
    page_RP: Tensor,
    local_RP: Tensor,
    pages: int,
    shards: Shards,
    out: SelectedPlaces,
    fault_1: Tensor,
) -> None:
    """`find_places` in plain torch."""
    tokens, selected = selected_TS.shape
    position_TS, there_TS = selected_TS.long().clamp(min=0), selected_TS >= 0
    at = row_T.long().unsqueeze(1), position_TS // PAGE_TOKENS
    local_TS, own = local_RP[at].long(), own_TS >= 0
    outside_TS = own & ((local_TS <= NULL_PAGE) | (local_TS >= pages))
    fault_1 += outside_TS.sum()
    place_TS = local_TS * PAGE_TOKENS + position_TS % PAGE_TOKENS
    owner_TS = (page_RP[at].long() - 1) % shards.count
    out.place_TX.zero_()
    out.owner_TX.zero_()
    out.place_TX[:, :selected] = torch.where(own & ~outside_TS, place_TS, 0)
    out.owner_TX[:, :selected] = torch.where(there_TS, owner_TS, 0)
    index_S = torch.arange(selected, dtype=torch.int32, device=selected_TS.device)
    out.index_TS.copy_(torch.where(there_TS & ~outside_TS, index_S, -1))
    out.page_TY.copy_(torch.arange(out.page_TY.numel(), dtype=torch.int32).view_as(out.page_TY))
    out.row_T.copy_(torch.arange(tokens, dtype=torch.int32))


def launch_find_places(
    selected_TS: Tensor,
    own_TS: Tensor,
    row_T: Tensor,
    page_RP: Tensor,
    local_RP: Tensor,
    pages: int,
    shards: Shards,
    out: SelectedPlaces,
    fault_1: Tensor,
) -> None:
    """`find_places` as a Triton kernel."""
    tokens, selected = selected_TS.shape
    find_places_kernel[(pages_for(selected), tokens)](
        *(selected_TS, own_TS, row_T, page_RP, local_RP, fault_1),
        *(out.place_TX, out.owner_TX, out.index_TS, out.page_TY, out.row_T),
        page_RP.stride(0),
        local_RP.stride(0),
        pages,
        SELECTED=selected,
        SHARDS=shards.count,
        num_warps=2,
    )


@triton.jit(
    do_not_specialize=["table_stride", "local_stride", "pages"],
    do_not_specialize_on_alignment=["selected", "own_selected", "row", "table", "local"],
)
def find_places_kernel(
    selected,
    own_selected,
    row,
    table,
    local,
    fault,
    place_out,
    owner_out,
    index_out,
    page_out,
    row_out,
    table_stride,
    local_stride,
    pages,
    SELECTED: tl.constexpr,
    SHARDS: tl.constexpr,
):
    """Programs (page of places, token)."""
    page_index, token = tl.program_id(0), tl.program_id(1)
    wide = tl.num_programs(0) * _PAGE
    k = page_index * _PAGE + tl.arange(0, _PAGE)
    at = token.to(tl.int64) * SELECTED + k
    position = tl.load(selected + at, mask=k < SELECTED, other=-1, cache_modifier=".cg")
    own = tl.load(own_selected + at, mask=k < SELECTED, other=-1, cache_modifier=".cg") >= 0
    there = position >= 0
    whose = tl.load(row + token).to(tl.int64)
    column = tl.maximum(position, 0) // _PAGE
    page = tl.load(table + whose * table_stride + column, mask=there, other=1)
    here = tl.load(local + whose * local_stride + column, mask=own, other=0)
    outside = own & ((here <= 0) | (here >= pages))
    place = here.to(tl.int64) * _PAGE + position % _PAGE
    into = token.to(tl.int64) * wide + k
    tl.store(place_out + into, tl.where(own & (outside == 0), place, 0))
    owner = (page + SHARDS - 1) % SHARDS
    tl.store(owner_out + into, tl.where(there & (owner >= 0), owner, 0).to(tl.int64))
    tl.store(index_out + at, tl.where(there & (outside == 0), k, -1), mask=k < SELECTED)
    tl.store(page_out + token * tl.num_programs(0) + page_index, token * tl.num_programs(0) + page_index)
    if page_index == 0:
        tl.store(row_out + token, token)
    wrong = tl.sum(outside.to(tl.int64), 0)
    if wrong > 0:
        tl.atomic_add(fault, wrong)
