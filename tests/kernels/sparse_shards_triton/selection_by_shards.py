"""Selection by all shards in one process: each has the scores of its own entries, and is handed what the others offer.
What has to be selected is found by Python's sort of (score, position) alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import sparse, sparse_shards
from kernels.page import NULL_PAGE, PAGE_TOKENS, Shards, pages_for
from kernels.sparse import launch as sparse_launch
from kernels.sparse_shards import Candidates, OwnPages, launch

ARBITRARY_PAGE = 2147480000
MANY = 2048
"""Selected positions from which on the reference selects among the scores, whose kernels have tests of their own."""


@dataclass(frozen=True)
class Case:
    """Rows of `lengths` entries, and tokens of them with bounds; `owners`: which shard has each page of a row, drawn
    where it is None."""

    lengths: list[int]
    tokens: list[tuple[int, int]]
    """Row and bound of each."""
    selected: int
    count: int
    """Shards."""
    first: int = 0
    owners: list[int] | None = None
    seed: int = 0

    @property
    def columns(self) -> int:
        """Columns of the page table; some are behind all rows."""
        return max(map(pages_for, self.lengths)) + 2

    def table(self) -> Tensor:
        """Page table of global ids, int32, with arbitrary ones behind the rows."""
        random = torch.Generator().manual_seed(self.seed)
        free = [[1 + owner + self.count * turn for turn in range(1000)] for owner in range(self.count)]
        page_RP = torch.full((len(self.lengths), self.columns), ARBITRARY_PAGE, dtype=torch.int32)
        page_RP[1::2] = NULL_PAGE
        for row, length in enumerate(self.lengths):
            for column in range(pages_for(length)):
                if self.owners is None:
                    owner = int(torch.randint(0, self.count, (1,), generator=random))
                else:
                    owner = self.owners[column % len(self.owners)]
                page_RP[row, column] = free[owner].pop(0)
        return page_RP

    def wanted(self, score_RN: Tensor) -> list[list[int]]:
        """Positions that each token selects, of the scores of every row's entries."""
        found = []
        for row, bound in self.tokens:
            scores = score_RN[row, :bound].tolist()
            scores[: self.first] = [-math.inf] * min(self.first, bound)
            # NaN is above all numbers, and -0 equals 0 here as well.
            key = [(0 if math.isnan(x) else 1, 0.0 if math.isnan(x) else -x, at) for at, x in enumerate(scores)]
            best = sorted(range(bound), key=key.__getitem__)[: self.selected]
            found.append(sorted(position for position in best if position >= self.first))
        return found


@dataclass(frozen=True)
class Found:
    """What one shard has found."""

    selected_TS: Tensor
    own_TS: Tensor
    pages: OwnPages


def garbage(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full((*shape, dtype.itemsize), 170, dtype=torch.uint8).view(dtype).view(shape)


def selected_by(case: Case, score_RN: Tensor, *, kernels: bool, fault_1: Tensor) -> list[Found]:
    """Let every shard select. `kernels`: whether Triton's are launched."""
    how = launch if kernels else sparse_shards
    options = {"dependent": False} if kernels else {}
    table_RP, tokens = case.table(), len(case.tokens)
    row_T, bound_T = torch.tensor(case.tokens, dtype=torch.int32).view(-1, 2).t().contiguous()
    parts: list[Candidates] = []
    found: list[Found] = []
    for index in range(case.count):
        pages = OwnPages.allocate(*table_RP.shape, garbage)
        how.find_own_pages(table_RP, pages, Shards(case.count, index))
        own_T, first_T = garbage(tokens, dtype=torch.int32), torch.zeros(tokens, dtype=torch.bool)
        how.own_bounds(row_T, bound_T, pages, own_T, first_T)
        score_TN = torch.full((tokens, case.columns * PAGE_TOKENS), 1e30)
        for token, (row, _) in enumerate(case.tokens):
            for own in range(int(own_T[token])):
                column = int(pages.column_RP[row, own // PAGE_TOKENS])
                score_TN[token, own] = score_RN[row, column * PAGE_TOKENS + own % PAGE_TOKENS]
        if case.first:
            score_TN[:, : case.first].masked_fill_(first_T.unsqueeze(1), -torch.inf)
        candidates = Candidates.allocate(tokens, case.count, case.selected, garbage)
        selected_TS = garbage(tokens, case.selected, dtype=torch.int32)
        _select(score_TN, own_T, selected_TS, fault_1, kernels=kernels)
        how.offer_candidates(selected_TS, score_TN, row_T, pages, candidates.part_TY, **options)
        parts.append(candidates)
        found.append(Found(selected_TS, torch.full_like(selected_TS, -7), pages))
    for candidates, own in zip(parts, found, strict=True):
        candidates.part_TDY.copy_(torch.stack([part.part_TY for part in parts], 1))
        how.order_candidates(candidates, **options)
        _select(candidates.score_TX, candidates.count_T, candidates.index_TS, fault_1, kernels=kernels)
        if kernels:
            launch.keep_selected(candidates, own.selected_TS, row_T, own.pages, own.own_TS, case.first, dependent=False)
        else:
            sparse_shards.keep_selected(candidates, own.selected_TS, row_T, own.pages, own.own_TS, first=case.first)
    return found


def _select(score_TN: Tensor, bound_T: Tensor, selected_TS: Tensor, fault_1: Tensor, *, kernels: bool) -> None:
    tensors = score_TN, bound_T, selected_TS, fault_1
    if kernels and selected_TS.shape[1] < MANY:  # of more the interpreter would take minutes
        sizes = *score_TN.shape, garbage
        workspace = sparse.SelectWorkspace.allocate(*sizes, selected=selected_TS.shape[1], hopper=False)
        sparse_launch.select_positions(*tensors, workspace)
    else:
        sparse.select_positions(*tensors)


def check(case: Case, score_RN: Tensor, *, kernels: bool) -> None:
    """All shards select what has to be selected, and each keeps what it has of it."""
    fault_1, table_RP = torch.zeros(1, dtype=torch.int64), case.table()
    found = selected_by(case, score_RN, kernels=kernels, fault_1=fault_1)
    assert int(fault_1) == 0
    for token, want in enumerate(case.wanted(score_RN)):
        row = case.tokens[token][0]
        owner = {at: (int(table_RP[row, at // PAGE_TOKENS]) - 1) % case.count for at in want}
        for index, own in enumerate(found):
            assert _listed(own.selected_TS[token]) == want, (token, index)
            assert _listed(own.own_TS[token]) == [at for at in want if owner[at] == index], (token, index)


def _listed(position_S: Tensor) -> list[int]:
    return [at for at in position_S.tolist() if at != -1]


def drawn(case: Case, values: Sequence[float]) -> Tensor:
    """Scores of every row's entries, drawn from few values, so that most of them are equal to others."""
    random = torch.Generator().manual_seed(case.seed + 1)
    which_RN = torch.randint(0, len(values), (len(case.lengths), case.columns * PAGE_TOKENS), generator=random)
    return torch.tensor(list(values), dtype=torch.float32)[which_RN]
