"""Launches the kernels of `kernels.sparse_shards`. Allocates nothing and waits for nothing, so it may be captured into
a CUDA graph. Dependent launches are safe where rows and own pages were written before a plain launch; all else is read
past L1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from kernels.page import Shards
from kernels.sparse.launch import pdl
from kernels.sparse_shards import kernel

if TYPE_CHECKING:
    from kernels.sparse_shards import Candidates, OwnPages

_COLUMNS = 256
"""Page-table entries that a program looks at together."""
_TOKENS = 128
"""Tokens whose bounds a program counts."""
_BLOCK = 512
"""Candidates that a program takes."""


def find_own_pages(page_RP: Tensor, out: OwnPages, shards: Shards) -> None:
    rows, pages = page_RP.shape
    if not rows:
        return
    kernel.find_own_pages[(rows,)](
        page_RP,
        *(out.local_RP, out.own_RP, out.column_RP, out.before_RP),
        pages,
        page_RP.stride(0),
        COLUMNS=_COLUMNS,
        SHARDS=shards.count,
        SHARD=shards.index,
        num_warps=4,
    )


def own_bounds(row_T: Tensor, bound_T: Tensor, pages: OwnPages, own_T: Tensor, first_T: Tensor) -> None:
    tokens = len(row_T)
    if not tokens:
        return
    kernel.own_bounds[(triton.cdiv(tokens, _TOKENS),)](
        row_T,
        bound_T,
        pages.local_RP,
        pages.before_RP,
        own_T,
        first_T.view(torch.uint8),
        tokens,
        *pages.local_RP.shape,
        TOKENS=_TOKENS,
        num_warps=4,
    )


def offer_candidates(
    index_TS: Tensor, score_TN: Tensor, row_T: Tensor, pages: OwnPages, part_TY: Tensor, *, dependent: bool
) -> None:
    tokens, selected = index_TS.shape
    if not tokens:
        return
    kernel.offer_candidates[(triton.cdiv(selected, _BLOCK), tokens)](
        index_TS,
        score_TN,
        row_T,
        pages.column_RP,
        part_TY,
        score_TN.stride(0),
        pages.column_RP.shape[1],
        **_common(selected, dependent),
    )


def order_candidates(candidates: Candidates, *, dependent: bool) -> None:
    tokens, shards, words = candidates.part_TDY.shape
    if not tokens:
        return
    selected = words // 2
    kernel.order_candidates[(triton.cdiv(selected, _BLOCK) * shards, tokens)](
        candidates.part_TDY,
        candidates.score_TX,
        candidates.position_TX,
        candidates.count_T,
        COLUMNS=candidates.score_TX.shape[1],
        SHARDS=shards,
        STEPS=selected.bit_length(),
        **_common(selected, dependent),
    )


def keep_selected(
    candidates: Candidates | None,
    selected_TS: Tensor,
    row_T: Tensor,
    pages: OwnPages,
    own_TS: Tensor,
    first: int,
    *,
    dependent: bool,
) -> None:
    tokens, selected = selected_TS.shape
    if not tokens:
        return
    indexed = candidates is not None
    kernel.keep_selected[(triton.cdiv(selected, _BLOCK), tokens)](
        candidates.index_TS if candidates is not None else selected_TS,
        candidates.position_TX if candidates is not None else selected_TS,
        selected_TS,
        row_T,
        pages.local_RP,
        own_TS,
        first,
        *pages.local_RP.shape,
        INDEXED=indexed,
        COLUMNS=candidates.position_TX.shape[1] if candidates is not None else 0,
        **_common(selected, dependent),
    )


def _common(selected: int, dependent: bool) -> dict[str, Any]:
    return {"SELECTED": selected, "BLOCK": _BLOCK, "DEPENDENT": dependent, "num_warps": 4, **pdl(dependent)}
