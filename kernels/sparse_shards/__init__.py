"""Selection of sparse attention (`kernels.sparse`) where ranks share out the pages of one cache, see
`kernels.page.Shards`.

A shard scores the entries that it has, selects the best of those, and offers them to the others: score and position of
as many as a token attends to. From what all have offered, laid in the order of positions, each selects by itself, with
`kernels.sparse.select_positions` both times. The shard that has an entry offers it if it is among the best of all, so
what is selected is what one rank would select that has the whole cache, ties included: the order of scores is total,
and where scores are equal the lowest positions come first.

In the order in which a pass takes them: `find_own_pages` and `own_bounds` once; `offer_candidates`, `order_candidates`
and `keep_selected` wherever an indexer selects. As in `kernels.sparse` no grid depends on what tensors hold, and
nothing allocates or waits. `dependent` asks for programmatic dependent launch.

Shape legend: D shards, R rows of a page table, P pages of a row, K = 64 entries per page, T tokens, N scores of a
token, S selected positions, Y = 2 S words of a shard's candidates, X >= D S candidates of all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.page import PAGE_TOKENS, Shards
from kernels.sparse_shards import launch, reference

__all__ = [
    "Candidates",
    "OwnPages",
    "candidate_columns",
    "find_own_pages",
    "keep_selected",
    "offer_candidates",
    "order_candidates",
    "own_bounds",
]


@dataclass(frozen=True)
class OwnPages:
    """This shard's part of page tables: int32 [R, P] each. Behind the pages with entries all of it is arbitrary."""

    local_RP: Tensor
    """Local ids by the columns of the whole table; the null page in the place of others' pages."""
    own_RP: Tensor
    """Local ids of the own pages alone, one behind the other, in the order of the row."""
    column_RP: Tensor
    """Columns of these in the whole table."""
    before_RP: Tensor
    """Number of own pages before each column."""

    @staticmethod
    def allocate(rows: int, pages: int, empty: Callable[..., Tensor]) -> OwnPages:
        """Take memory from `empty(*shape, dtype=...)`."""
        return OwnPages(*(empty(rows, pages, dtype=torch.int32) for _ in range(4)))


@dataclass(frozen=True)
class Candidates:
    """Candidates of some tokens: those that this shard offers, those of all shards, and these in the order of their
    positions. All but `count_T` is arbitrary behind a token's last candidate."""

    part_TY: Tensor
    """int32: the bits of S scores in fp32, then their S positions, which rise."""
    part_TDY: Tensor
    """int32: what all shards offer."""
    score_TX: Tensor
    """fp32."""
    position_TX: Tensor
    """int32."""
    count_T: Tensor
    """int32."""
    index_TS: Tensor
    """int32: which of them are selected."""

    @staticmethod
    def allocate(tokens: int, shards: int, selected: int, empty: Callable[..., Tensor]) -> Candidates:
        """Take memory from `empty(*shape, dtype=...)`."""
        columns = candidate_columns(shards, selected)
        return Candidates(
            part_TY=empty(tokens, 2 * selected, dtype=torch.int32),
            part_TDY=empty(tokens, shards, 2 * selected, dtype=torch.int32),
            score_TX=empty(tokens, columns, dtype=torch.float32),
            position_TX=empty(tokens, columns, dtype=torch.int32),
            count_T=empty(tokens, dtype=torch.int32),
            index_TS=empty(tokens, selected, dtype=torch.int32),
        )

    def first(self, tokens: int) -> Candidates:
        """The memory of the first so many tokens."""
        return Candidates(
            *(self.part_TY[:tokens], self.part_TDY[:tokens]),
            *(self.score_TX[:tokens], self.position_TX[:tokens], self.count_T[:tokens], self.index_TS[:tokens]),
        )


def candidate_columns(shards: int, selected: int) -> int:
    """Columns of the candidates of all shards: whole pages, as `kernels.sparse.select_positions` wants scores to be."""
    return -(-shards * selected // PAGE_TOKENS) * PAGE_TOKENS


def find_own_pages(page_RP: Tensor, out: OwnPages, shards: Shards) -> None:
    """Find this shard's pages. `page_RP` (int32, rows contiguous): page tables of global ids, arbitrary behind a row's
    entries."""
    compute = launch.find_own_pages if page_RP.is_cuda else reference.find_own_pages
    compute(page_RP, out, shards)


def own_bounds(row_T: Tensor, bound_T: Tensor, pages: OwnPages, own_T: Tensor, first_T: Tensor) -> None:
    """Count the own entries that tokens see.

    - `row_T`, `bound_T` (int32): row of each token, and entries of it that the token sees in the whole cache.
    - `own_T` (int32): how many of these are the shard's. Rows outside of the table and bounds outside of a row keep
      their bound, so that `kernels.sparse.index_scores` counts them as faults.
    - `first_T` (bool): whether the shard has the first page of the token's row.
    """
    compute = launch.own_bounds if row_T.is_cuda else reference.own_bounds
    compute(row_T, bound_T, pages, own_T, first_T)


def offer_candidates(
    index_TS: Tensor, score_TN: Tensor, row_T: Tensor, pages: OwnPages, part_TY: Tensor, *, dependent: bool = False
) -> None:
    """Write score and position of what a shard has selected for some tokens among its own entries.

    `index_TS` (int32): the selected ones of the own entries, rising, -1 behind the last one. `score_TN` (fp32): scores
    of the own entries. `part_TY`: see `Candidates`; the positions are those in the whole row.
    """
    if index_TS.is_cuda:
        launch.offer_candidates(index_TS, score_TN, row_T, pages, part_TY, dependent=dependent)
        return
    reference.offer_candidates(index_TS, score_TN, row_T, pages, part_TY)


def order_candidates(candidates: Candidates, *, dependent: bool = False) -> None:
    """Lay what all shards offer in the order of positions: from `part_TDY` to `score_TX`, `position_TX`, `count_T`. No
    two shards offer the same position."""
    if candidates.part_TDY.is_cuda:
        launch.order_candidates(candidates, dependent=dependent)
        return
    reference.order_candidates(candidates)


def keep_selected(
    candidates: Candidates | None,
    selected_TS: Tensor,
    row_T: Tensor,
    pages: OwnPages,
    own_TS: Tensor,
    *,
    first: int = 0,
    dependent: bool = False,
) -> None:
    """Write the positions that are selected of `candidates`, by `index_TS`, to `selected_TS` (int32, -1 where there is
    none or where it is below `first`); without candidates those that it holds stay. `own_TS` (int32): those of them
    whose entries this shard has, -1 in the place of others. Positions and rows outside of the table stay, so that
    `kernels.sparse.sparse_decode` counts them as faults."""
    if selected_TS.is_cuda:
        launch.keep_selected(candidates, selected_TS, row_T, pages, own_TS, first, dependent=dependent)
        return
    reference.keep_selected(candidates, selected_TS, row_T, pages, own_TS, first)
