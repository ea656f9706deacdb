"""Launches the kernels of sparse attention. Allocates nothing and waits for nothing, so it may be captured into a CUDA
graph. Grids follow from the shapes of tensors alone.

`dependent` launches with programmatic dependent launch (compute capability 9.0 and above). It is safe where rows,
bounds and page tables were written before a plain launch; all else is read past L1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.hopper import multiprocessors
from kernels.index_entry import features_of, is_fp8, parts
from kernels.latent_entry import GROUP, entry_of
from kernels.mla_decode import launch as dense
from kernels.mla_decode.records import Tile
from kernels.mla_decode.schedule import DecodeShape, Workspace
from kernels.page import PAGE_TOKENS, pages_for
from kernels.sparse import attention, gather, scores, select
from kernels.sparse.attention import Features, Shared
from kernels.sparse.scores import Indexer, TokenTile
from kernels.sparse.select import Cut
from kernels.sparse.workspace import (
    LEVELS,
    SCORES,
    InvariantWorkspace,
    SelectWorkspace,
    SparseWorkspace,
    invariant_tiling,
)

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
_MERGED = 256
"""Latent columns that a program merges."""


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
        **_options(dependent),
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
        **_options(dependent),
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
    options: dict[str, Any] = {"CUT": cut, "DEPENDENT": dependent, **_options(dependent)}
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


def sparse_decode(
    q_THC: Tensor,
    cache_PKC: Tensor,
    page_RP: Tensor,
    row_T: Tensor,
    selected_TS: Tensor,
    out_THL: Tensor,
    lse_TH: Tensor,
    fault_1: Tensor,
    workspace: SparseWorkspace,
    *,
    scale: float,
    dependent: bool = False,
) -> None:
    """See `kernels.sparse.sparse_decode`."""
    tokens, heads, features = q_THC.shape
    if not tokens:
        return
    latent, selected, tiling = out_THL.shape[2], selected_TS.shape[1], workspace.tiling
    parts = triton.cdiv(selected, tiling.part)
    partial, partial_lse = workspace.partial_GTHL, workspace.partial_lse_GTH
    if partial.shape[1:] != out_THL.shape or partial.shape[0] != (parts if parts > 1 else 0):
        raise ValueError(f"a workspace of {tuple(partial.shape)} serves no call of {tokens} tokens, {heads} heads")
    blocks = triton.cdiv(heads, tiling.block)
    if workspace.place_BTS.shape != (blocks, tokens, selected):
        raise ValueError(f"a workspace of {tuple(workspace.place_BTS.shape)} places serves no {selected} entries")
    options: dict[str, Any] = {"DEPENDENT": dependent, **_options(dependent)}
    attention.attend[(blocks * parts, tokens)](
        q_THC,
        cache_PKC,
        page_RP,
        row_T,
        selected_TS,
        out_THL,
        lse_TH,
        partial,
        partial_lse,
        workspace.place_BTS,
        fault_1,
        scale * math.log2(math.e),
        tokens,
        page_RP.shape[0],
        page_RP.shape[1],
        cache_PKC.shape[0],
        page_RP.stride(0),
        heads,
        blocks,
        FEATURES=_features(latent, features - latent, q_THC.dtype),
        ENTRY=entry_of(cache_PKC, latent, features - latent, q_THC.dtype),
        TILE=Tile(queries=tiling.block, tokens=tiling.tile),
        SHARED=Shared(selected=selected, part=tiling.part, part_lanes=triton.next_power_of_2(tiling.part), parts=parts),
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **options,
    )
    if parts > 1:
        attention.merge[(tokens * heads, triton.cdiv(latent, _MERGED))](
            partial,
            partial_lse,
            out_THL,
            lse_TH,
            tokens * heads,
            LATENT=latent,
            COLUMNS=min(_MERGED, triton.next_power_of_2(latent)),
            PARTS=parts,
            LANES=min(16, triton.next_power_of_2(parts)),
            num_warps=2,
            **options,
        )


def invariant_sparse_decode(
    q_THC: Tensor,
    cache_PKC: Tensor,
    page_RP: Tensor,
    row_T: Tensor,
    selected_TS: Tensor,
    out_THL: Tensor,
    lse_TH: Tensor,
    fault_1: Tensor,
    workspace: InvariantWorkspace,
    *,
    scale: float,
) -> None:
    """See `kernels.sparse.sparse_decode`: dense attention of some tokens at a time, each a row of its own entries."""
    heads, features, latent = *q_THC.shape[1:], out_THL.shape[2]
    group = max(1, len(workspace.length_T))
    for first in range(0, len(q_THC), group):
        part = slice(first, first + group)
        count = len(q_THC[part])
        own = (workspace.cache_PKE, workspace.page_TP[:count], workspace.length_T[:count])
        _gather(cache_PKC, page_RP, row_T[part], selected_TS[part], fault_1, *own)
        shape = DecodeShape(count, 1, heads, latent, features - latent, own[1].shape[1], invariant=True)
        tiling = invariant_tiling(shape, cache_PKC, q_THC.dtype)
        decode = Workspace.over(workspace.decode, shape, tiling, q_THC.dtype)
        q, out, lse = (x[part].unsqueeze(1) for x in (q_THC, out_THL, lse_TH))
        dense.plan(own[2], own[1], decode)
        dense.attend(q, *own, out, lse, decode, scale=scale)
        dense.merge(out, lse, decode)


def _gather(
    cache_PKC: Tensor,
    page_RP: Tensor,
    row_T: Tensor,
    selected_TS: Tensor,
    fault_1: Tensor,
    own_PKC: Tensor,
    own_TP: Tensor,
    length_T: Tensor,
) -> None:
    """Write each token's selected entries to pages of its own, and their table and number."""
    tokens, selected = selected_TS.shape
    if own_TP.shape[1] != pages_for(selected) or own_PKC.shape[2] != cache_PKC.shape[2]:
        raise ValueError(f"a workspace of {tuple(own_TP.shape)} pages serves no {selected} entries")
    word = torch.int32 if cache_PKC.shape[2] * cache_PKC.itemsize % 4 == 0 else torch.int16
    cache, own = cache_PKC.view(word), own_PKC.view(word)
    gather.gather[(own_TP.shape[1], tokens)](
        cache,
        page_RP,
        row_T,
        selected_TS,
        fault_1,
        own,
        own_TP,
        length_T,
        page_RP.shape[0],
        page_RP.shape[1],
        cache_PKC.shape[0],
        page_RP.stride(0),
        SELECTED=selected,
        LANES=triton.next_power_of_2(selected),
        WORDS=cache.shape[2],
        WORD_LANES=triton.next_power_of_2(cache.shape[2]),
        num_warps=8,
    )


def _features(latent: int, rope: int, dtype: torch.dtype) -> Features:
    pieces = latent // GROUP if latent % GROUP == 0 else 1
    return Features(
        latent=latent,
        pieces=pieces,
        piece=latent // pieces,
        lanes=max(16, triton.next_power_of_2(latent // pieces)),
        rope=rope,
        rope_lanes=max(16, triton.next_power_of_2(rope)),
        precision="ieee" if dtype == torch.float32 else "tf32",
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


def _options(dependent: bool) -> dict[str, bool]:
    """The launch attribute exists on CUDA only, and the interpreter knows none."""
    return {"launch_pdl": True} if dependent else {}
