"""Launches sparse attention, and dense attention in its place in invariant mode. As `launch`."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.latent_entry import GROUP, entry_of
from kernels.mla_decode import launch as dense
from kernels.mla_decode.records import Overlap, Split, Tile
from kernels.mla_decode.schedule import DecodeShape, Workspace
from kernels.page import PAGE_TOKENS, pages_for
from kernels.sparse import attention, gather, places
from kernels.sparse.attention import Features, Shared
from kernels.sparse.launch import pdl
from kernels.sparse.workspace import InvariantWorkspace, SparseWorkspace, invariant_tiling

_MERGED = 256
"""Latent columns that a program merges."""
_MERGED_OF_FEW = 64
"""Parts that are merged at a time for few query vectors, which have many parts."""
_FEW_VECTORS = 512
_HOPPER_ROPE = 64
"""Roped features of Hopper's own kernels."""


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
    tokens, heads, features = q_THC.shape
    if not tokens:
        return
    latent, selected, tiling = out_THL.shape[2], selected_TS.shape[1], workspace.tiling
    parts = triton.cdiv(selected, tiling.part)
    partial, partial_lse = workspace.partial_GTHL, workspace.partial_lse_GTH
    if partial.shape[1:] != out_THL.shape or partial.shape[0] != (parts if parts > 1 else 0):
        raise ValueError(f"a workspace of {tuple(partial.shape)} serves no call of {tokens} tokens, {heads} heads")
    blocks = triton.cdiv(heads, tiling.block) if tiling.path == "triton" else 1
    if workspace.place_BTS.shape != (blocks, tokens, selected):
        raise ValueError(f"a workspace of {tuple(workspace.place_BTS.shape)} places serves no {selected} entries")
    options: dict[str, Any] = {"DEPENDENT": dependent, **pdl(dependent)}
    if tiling.path != "triton":
        tensors = (q_THC, cache_PKC, page_RP, row_T, selected_TS, out_THL, lse_TH, fault_1)
        _attend_on_hopper(*tensors, workspace, scale, dependent)
        if parts > 1:
            _merge(out_THL, lse_TH, workspace, **options)
        return
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
        TILE=Tile(queries=tiling.block, tokens=tiling.tile, latent=latent),
        SHARED=Shared(selected=selected, part=tiling.part, part_lanes=triton.next_power_of_2(tiling.part), parts=parts),
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **options,
    )
    if parts > 1:
        _merge(out_THL, lse_TH, workspace, **options)


def _merge(out_THL: Tensor, lse_TH: Tensor, workspace: SparseWorkspace, **options: Any) -> None:
    """Add up the parts of all tokens."""
    tokens, heads, latent = out_THL.shape
    parts = len(workspace.partial_GTHL)
    columns = min(_MERGED if tokens * heads > _FEW_VECTORS else _MERGED_OF_FEW, triton.next_power_of_2(latent))
    attention.merge[(tokens * heads, triton.cdiv(latent, columns))](
        workspace.partial_GTHL,
        workspace.partial_lse_GTH,
        workspace.pieces_T,
        out_THL,
        lse_TH,
        tokens * heads,
        heads,
        LATENT=latent,
        COLUMNS=columns,
        PARTS=parts,
        LANES=min(32, triton.next_power_of_2(parts)),
        COUNTED=workspace.tiling.path != "triton",
        num_warps=2,
        **options,
    )


def _attend_on_hopper(
    q_THC: Tensor,
    cache_PKC: Tensor,
    page_RP: Tensor,
    row_T: Tensor,
    selected_TS: Tensor,
    out_THL: Tensor,
    lse_TH: Tensor,
    fault_1: Tensor,
    workspace: SparseWorkspace,
    scale: float,
    dependent: bool,
) -> None:
    """Find the entries, then attend to them: tokens that one program has are done then."""
    tokens, heads, features = q_THC.shape
    selected, tiling = selected_TS.shape[1], workspace.tiling
    parts = triton.cdiv(selected, tiling.part)
    if features - out_THL.shape[2] != _HOPPER_ROPE or out_THL.dtype != torch.bfloat16:
        raise ValueError("on Hopper, attention over 512 latent features takes 64 roped ones, and results in bfloat16")
    places.find_places[(tokens,)](
        selected_TS,
        page_RP,
        row_T,
        out_THL,
        lse_TH,
        workspace.place_BTS,
        workspace.length_T,
        workspace.pieces_T,
        workspace.metadata,
        fault_1,
        tokens,
        *page_RP.shape,
        cache_PKC.shape[0],
        page_RP.stride(0),
        out_THL[0].numel(),
        heads,
        SELECTED=selected,
        LANES=triton.next_power_of_2(selected),
        PARTS=parts,
        PART_LANES=triton.next_power_of_2(parts),
        ZEROS=1024,
        DEPENDENT=dependent,
        num_warps=8,
        **pdl(dependent),
    )
    told = (workspace.place_BTS, workspace.length_T, out_THL, lse_TH)
    memory = (workspace.partial_GTHL, workspace.partial_lse_GTH, workspace.metadata)
    blocks = triton.cdiv(heads, tiling.block)
    common: dict[str, Any] = {
        "SELECTED": selected,
        "SPLIT": Split(unit=PAGE_TOKENS, page=PAGE_TOKENS, row_cost=0, invariant=0, own=False),
        "OVERLAP": Overlap(stages=tiling.stages, dependent=dependent, early=False, either=False),
        "num_warps": tiling.warps,
        **pdl(dependent),
    }
    numbers = (scale * math.log2(math.e), heads, blocks)
    grid = (blocks * parts * tokens,)
    if tiling.path == "fp8":
        from kernels.sparse.selected_fp8 import attend_selected_fp8

        tile = Tile(queries=tiling.block, tokens=tiling.tile, latent=out_THL.shape[2])
        entry = entry_of(cache_PKC, out_THL.shape[2], _HOPPER_ROPE, q_THC.dtype)
        attend_selected_fp8[grid](q_THC, cache_PKC, *told, *memory, *numbers, ENTRY=entry, TILE_OF=tile, **common)
    elif cache_PKC.dtype == torch.uint8:
        from kernels.mla_decode.wide import boxes
        from kernels.sparse.selected_wide_fp8 import attend_selected_wide_fp8

        entry = entry_of(cache_PKC, out_THL.shape[2], _HOPPER_ROPE, q_THC.dtype)
        attend_selected_wide_fp8[grid](*boxes(q_THC), cache_PKC, *told, *memory, *numbers, ENTRY=entry, **common)
    else:
        from kernels.mla_decode.wide import boxes
        from kernels.sparse.selected_wide import attend_selected

        attend_selected[grid](*boxes(q_THC), cache_PKC, *told, *memory, *numbers, **common)


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
    """Launch `sparse_decode` in invariant mode: dense attention of some tokens at a time, each a row of its own
    entries."""
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
        dense.schedule(own[2], own[1], decode)
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
