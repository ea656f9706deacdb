"""References of `kernels.sparse_shards` in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from kernels.page import NULL_PAGE, PAGE_TOKENS, Shards

if TYPE_CHECKING:
    from kernels.sparse_shards import Candidates, OwnPages

ABSENT: Final = 0x7FFFFFFF
"""Position of a candidate that is not there: behind all others. It is no word by which ranks tell each other that
nothing has arrived yet (`kernels.one_shot.words`), as -1 is."""


def find_own_pages(page_RP: Tensor, out: OwnPages, shards: Shards) -> None:
    rest_RP = page_RP.long() + (shards.count - 1)
    own_RP = (page_RP != NULL_PAGE) & (rest_RP % shards.count == shards.index)
    out.local_RP.copy_(torch.where(own_RP, rest_RP // shards.count, NULL_PAGE))
    out.before_RP.copy_(own_RP.cumsum(1) - own_RP.long())
    # Stable, so that the own pages stay in order.
    column_RP = own_RP.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    out.column_RP.copy_(column_RP)
    out.own_RP.copy_(out.local_RP.gather(1, column_RP))


def own_bounds(row_T: Tensor, bound_T: Tensor, pages: OwnPages, own_T: Tensor, first_T: Tensor) -> None:
    rows, columns = pages.local_RP.shape
    inside_T = (row_T >= 0) & (row_T < rows)
    row_T = row_T.clamp(0, max(rows - 1, 0)).long()
    counted_T = inside_T & (bound_T > 0) & (bound_T <= columns * PAGE_TOKENS)
    column_T = torch.div((bound_T.long() - 1).where(counted_T, 0), PAGE_TOKENS, rounding_mode="floor")
    there_T = pages.local_RP[row_T, column_T] != NULL_PAGE
    whole_T = pages.before_RP[row_T, column_T].long() * PAGE_TOKENS
    found_T = whole_T + there_T * (bound_T.long() - column_T * PAGE_TOKENS)
    own_T.copy_(found_T.where(counted_T, bound_T.long()))
    first_T.copy_(inside_T & (pages.local_RP[row_T, 0] != NULL_PAGE))


def offer_candidates(index_TS: Tensor, score_TN: Tensor, row_T: Tensor, pages: OwnPages, part_TY: Tensor) -> None:
    there_TS, at_TS = index_TS >= 0, index_TS.clamp(min=0).long()
    column_TS = pages.column_RP[row_T.clamp(min=0).long().unsqueeze(1), at_TS // PAGE_TOKENS]
    position_TS = column_TS * PAGE_TOKENS + at_TS % PAGE_TOKENS
    score_TS = score_TN.gather(1, at_TS).masked_fill(~there_TS, -torch.inf)
    part_TY.copy_(torch.cat([score_TS.view(torch.int32), position_TS.where(there_TS, ABSENT).int()], 1))


def order_candidates(candidates: Candidates) -> None:
    score_TDS, position_TDS = candidates.part_TDY.tensor_split(2, dim=2)
    position_TX, order_TX = position_TDS.flatten(1).sort(dim=1, stable=True)
    columns = position_TX.shape[1]
    candidates.position_TX[:, :columns] = position_TX
    candidates.score_TX[:, :columns] = score_TDS.flatten(1).gather(1, order_TX).view(torch.float32)
    candidates.count_T.copy_((position_TX != ABSENT).sum(1))


def keep_selected(
    candidates: Candidates | None, selected_TS: Tensor, row_T: Tensor, pages: OwnPages, own_TS: Tensor, first: int
) -> None:
    if candidates is not None:
        index_TS = candidates.index_TS
        position_TS = candidates.position_TX.gather(1, index_TS.clamp(min=0).long())
        selected_TS.copy_(position_TS.where((index_TS >= 0) & (position_TS >= first), -1))
    rows, columns = pages.local_RP.shape
    row_T1 = row_T.unsqueeze(1)
    inside_TS = (selected_TS >= 0) & (selected_TS < columns * PAGE_TOKENS) & (row_T1 >= 0) & (row_T1 < rows)
    page_TS = pages.local_RP[row_T1.clamp(0, max(rows - 1, 0)).long(), (selected_TS // PAGE_TOKENS).where(inside_TS, 0)]
    own_TS.copy_(selected_TS.masked_fill(inside_TS & (page_TS == NULL_PAGE), -1))
