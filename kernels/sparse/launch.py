"""Launches what comes before sparse attention: index keys, scores and selection. Allocates nothing and waits for
nothing, so it may be captured into a CUDA graph. Grids follow from the shapes of tensors alone.

`dependent` launches with programmatic dependent launch (compute capability 9.0 and above). It is safe where rows,
bounds and page tables were written before a plain launch; all else is read past L1.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from kernels.hopper import multiprocessors
from kernels.index_entry import features_of, is_fp8, parts
from kernels.page import PAGE_TOKENS
from kernels.sparse import scores, select
from kernels.sparse.scores import Indexer, TokenTile
from kernels.sparse.select import Cut
from kernels.sparse.workspace import LEVELS, SCORES, SelectWorkspace

_KEYS = 8
"""Keys a program writes."""
_COLUMNS = 256
"""(Token, head) pairs that a program scores at most, beside 64 keys."""
_WAVES = 4
"""Programs for every multiprocessor, where there are pages enough."""
_PAGES = 4
"""Pages that a program scores at least, if the context is as long as it may be."""
_LISTED = 512
"""Positions that a program lists at a time, where all are selected."""


def write_index_keys(key_TD: Tensor, slot_T: Tensor, index_PKE: Tensor, *, dependent: bool = False) -> None:
    """See `kernels.sparse.write_index_keys`."""
    tokens = key_TD.shape[0]
    if not tokens:
        return
    index, scale = _index(index_PKE)
    scores.write_keys[(triton.cdiv(tokens, _KEYS),)](
        key_TD,
        slot_T,
        index,
        scale,
        tokens,
        index_PKE.shape[0] * PAGE_TOKENS,
        KEY_STRIDE=key_TD.stride(0),
        INDEXER=_indexer(1, index_PKE),
        TOKENS=_KEYS,
        DEPENDENT=dependent,
        num_warps=2,
        **pdl(dependent),
    )


def index_scores(
    q_THD: Tensor,
    weight_TH: Tensor,
    index_PKE: Tensor,
    page_RP: Tensor,
    row_T: Tensor,
    bound_T: Tensor,
    score_TN: Tensor,
    fault_1: Tensor,
    *,
    width: int = 0,
    invariant: bool = False,
    dependent: bool = False,
) -> None:
    """See `kernels.sparse.index_scores`."""
    tokens, heads, _ = q_THD.shape
    if not tokens:
        return
    indexer = _indexer(heads, index_PKE)
    width = min(width or tokens, tokens)
    most = _COLUMNS if index_PKE.itemsize < 4 else _COLUMNS // 4
    tile = _tile(width, 1 if invariant else max(1, most // indexer.head_lanes))
    per_row = triton.cdiv(width, tile.tokens)
    tiles = triton.cdiv(tokens, width) * per_row
    pages = score_TN.shape[1] // PAGE_TOKENS
    wanted = triton.cdiv(_WAVES * multiprocessors(q_THD.device), tiles)
    index, scale = _index(index_PKE)
    columns = tile.lanes * indexer.head_lanes
    scores.score_pages[(max(1, min(wanted, triton.cdiv(pages, _PAGES))), tiles)](
        q_THD,
        weight_TH,
        index,
        scale,
        page_RP,
        row_T,
        bound_T,
        score_TN,
        fault_1,
        tokens,
        width,
        per_row,
        page_RP.shape[0],
        index_PKE.shape[0],
        score_TN.shape[1],
        page_RP.stride(0),
        score_TN.stride(0),
        INDEXER=indexer,
        TILE=tile,
        DEPENDENT=dependent,
        num_warps=4 if columns <= 128 and index_PKE.itemsize < 4 else 8,
        num_stages=4 if indexer.fp8 else 3 if index_PKE.itemsize == 2 else 2,
        **pdl(dependent),
    )


def select_positions(
    score_TN: Tensor,
    bound_T: Tensor,
    selected_TS: Tensor,
    fault_1: Tensor,
    workspace: SelectWorkspace,
    *,
    dependent: bool = False,
) -> None:
    """See `kernels.sparse.select_positions`."""
    tokens, selected = selected_TS.shape
    if not tokens:
        return
    if workspace.above.shape != (tokens, workspace.parts):
        raise ValueError(f"a workspace of {workspace.above.shape[0]} tokens serves no call of {tokens}")
    parts = workspace.parts
    cut = Cut(selected=selected, parts=parts, part_lanes=triton.next_power_of_2(parts), block=SCORES)
    numbers = (tokens, score_TN.shape[1], score_TN.stride(0) // 16)
    memory = (workspace.count, workspace.above, workspace.found)
    options: dict[str, Any] = {"CUT": cut, "DEPENDENT": dependent, **pdl(dependent)}
    for level in range(LEVELS):
        select.count_bytes[(parts, tokens)](score_TN, bound_T, *memory, *numbers, LEVEL=level, num_warps=4, **options)
    select.list_positions[(parts, tokens)](
        score_TN,
        bound_T,
        *memory,
        selected_TS,
        fault_1,
        *numbers,
        LANES=_LISTED,
        num_warps=8 if parts > 32 else 4,  # counts of all parts are held twice
        **options,
    )


def _indexer(heads: int, index_PKE: Tensor) -> Indexer:
    features, fp8 = features_of(index_PKE), is_fp8(index_PKE)
    return Indexer(
        heads=heads,
        head_lanes=max(16, triton.next_power_of_2(heads)),
        features=features,
        feature_lanes=max(32 if fp8 else 16, triton.next_power_of_2(features)),
        fp8=fp8,
        page=index_PKE.stride(0),
        scale_page=index_PKE.stride(0) // 4,
        precision="tf32x3" if index_PKE.dtype == torch.float32 else "tf32",
    )


def _index(index_PKE: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and scales; of plain entries the keys in the place of both."""
    return parts(index_PKE) if is_fp8(index_PKE) else (index_PKE, index_PKE)


def _tile(width: int, most: int) -> TokenTile:
    """As many of `width` tokens as fit, in about equal tiles."""
    tokens = triton.cdiv(width, triton.cdiv(width, most))
    return TokenTile(tokens=tokens, lanes=triton.next_power_of_2(tokens))


def pdl(dependent: bool) -> dict[str, bool]:
    """The launch attribute exists on CUDA only, and the interpreter knows none."""
    return {"launch_pdl": True} if dependent else {}
