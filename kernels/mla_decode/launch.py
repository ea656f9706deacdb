"""Launches the decode kernels into a workspace: plan once per step, then attend and merge once per layer.

Nothing here allocates device memory or waits for the device, so all of it may be captured into a CUDA graph.

`dependent` launches with programmatic dependent launch (compute capability 9.0 and above): the kernel may start while
the one before it in the stream still runs, and waits for its end where it matters. It is always safe. `early` lets
the attention go further and ask for cache entries before that wait. It is safe when the kernel launched before writes,
of all that attention reads, nothing but the query and the last `width` entries of each row, and itself lets its
successor start only after it has waited for its own predecessor.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.latent_entry import entry_of
from kernels.mla_decode import kernel
from kernels.mla_decode.records import Features, Overlap, Results, Split, Tile
from kernels.mla_decode.schedule import DecodeShape, DecodeTiling, Workspace
from kernels.mla_decode.strands import merge_strands
from kernels.own_entries import OwnEntries
from kernels.page import PAGE_TOKENS
from kernels.strands import FINEST, STRANDS


def schedule(
    length_R: Tensor, page_RP: Tensor, workspace: Workspace, *, first: int = 0, dependent: bool = False
) -> None:
    """Deal the rows' cache to the CTAs. Valid for every layer of a step: until a length or a page table changes.
    ValueError in invariant mode for a `first` behind the first piece: pieces are counted from the first page."""
    shape, tiling = workspace.shape, workspace.tiling
    if shape.invariant and first >= tiling.unit:
        raise ValueError(
            f"first = {first}: in invariant mode only entries of a row's first {tiling.unit} can be left out; plan "
            "without invariant mode, or leave out fewer"
        )
    ctas = 32 if shape.rows <= 128 else 8
    kernel.schedule_splits[(triton.cdiv(tiling.ctas, ctas),)](
        length_R,
        page_RP,
        workspace.metadata,
        shape.rows,
        tiling.ctas,
        first,
        page_RP.stride(0),
        tiling.short,
        tiling.parts(shape),
        SPLIT=_split(shape, tiling, False),
        LEAST=tiling.least,
        ROWS=max(16, triton.next_power_of_2(shape.rows)),
        CTAS=ctas,
        DEPENDENT=dependent,
        num_warps=4,
        **_options(dependent),
    )


def attend(
    q_RWHC: Tensor,
    cache_PKC: Tensor,
    page_RP: Tensor,
    length_R: Tensor,
    out_RWHL: Tensor,
    lse_RWH: Tensor,
    workspace: Workspace,
    *,
    scale: float,
    first: int = 0,
    dependent: bool = False,
    early: bool = False,
    own: OwnEntries | None = None,
) -> None:
    """Attention of one layer with the plan in the workspace: outputs of whole rows, pieces of the split ones. Launches
    one kernel, or two of which the plan says which works. `own`: see `mla_decode`."""
    shape, tiling = workspace.shape, workspace.tiling
    _check(q_RWHC, cache_PKC, page_RP, length_R, out_RWHL, lse_RWH, shape)
    seen = length_R if own is None else own.seen_RX
    pieces = Results(workspace.partial_SQL, workspace.partial_lse_SQ)
    # In invariant mode there are none but pieces, and the output may be of another dtype than they are.
    results = pieces if shape.invariant else Results(out_RWHL, lse_RWH), pieces
    where = (*results[0], *results[1], workspace.metadata)
    numbers = (
        scale * math.log2(math.e),
        first,
        page_RP.stride(0),
        shape.queries,
        shape.width - 1,
        shape.heads,
    )
    entry = entry_of(cache_PKC, shape.latent, shape.rope, q_RWHC.dtype)
    common: dict[str, Any] = {
        "SPLIT": _split(shape, tiling, own is not None),
        "num_warps": tiling.warps,
        **_options(dependent),
    }
    grid = (tiling.ctas * tiling.blocks(shape),)
    ways = tiling.ways()
    if own is not None and entry.fp8 and tiling.path == "wide":
        raise ValueError("Hopper's kernel for wide blocks of FP8 entries does not take a shard's own entries")
    if shape.invariant and entry.fp8 and tiling.path == "wide":
        raise ValueError("Hopper's kernel for wide blocks of FP8 entries has no invariant mode: plan with fp8_tiling")
    for way in ways:
        blocks_and_ctas = (way.blocks(shape), way.ctas)
        tile = Tile(queries=way.block, tokens=way.tile, latent=shape.latent)
        overlap = Overlap(
            stages=way.stages, dependent=dependent, early=early, either=tiling.blocks(shape) if len(ways) > 1 else 0
        )
        if way.path == "triton":
            kernel.attend[grid](
                q_RWHC,
                cache_PKC,
                page_RP,
                length_R,
                *results,
                workspace.metadata,
                seen,
                *numbers,
                *blocks_and_ctas,
                FEATURES=_features(shape, q_RWHC.dtype),
                ENTRY=entry,
                TILE=tile,
                DEPENDENT=dependent,
                num_stages=way.stages,
                **common,
            )
        elif way.path == "narrow":
            from kernels.mla_decode.narrow import attend_narrow

            attend_narrow[grid](
                q_RWHC,
                cache_PKC,
                *(page_RP, length_R, seen, *where),
                *numbers,
                *blocks_and_ctas,
                ENTRY=entry,
                TILE=tile,
                OVERLAP=overlap,
                **common,
            )
        elif way.path == "fp8":
            from kernels.mla_decode.fp8 import attend_fp8, fp8_boxes

            attend_fp8[grid](
                q_RWHC,
                *fp8_boxes(cache_PKC),
                *(page_RP, length_R, seen, *where),
                *numbers,
                ENTRY=entry,
                TILE_OF=tile,
                OVERLAP=overlap,
                **common,
            )
        elif way.path == "wide" and entry.fp8:
            from kernels.mla_decode.fp8 import fp8_boxes
            from kernels.mla_decode.wide import boxes
            from kernels.mla_decode.wide_fp8 import attend_wide_fp8

            attend_wide_fp8[grid](
                cache_PKC,
                *boxes(q_RWHC),
                fp8_boxes(cache_PKC)[1],
                *(page_RP, length_R, *where),
                *numbers,
                *blocks_and_ctas,
                ENTRY=entry,
                OVERLAP=overlap,
                **common,
            )
        else:
            from kernels.mla_decode.wide import attend_wide, boxes

            attend_wide[grid](
                cache_PKC,
                *boxes(q_RWHC),
                *boxes(cache_PKC),
                *(page_RP, length_R, seen, *where),
                *numbers,
                way.blocks(shape),
                OVERLAP=overlap,
                **common,
            )


def merge(out_RWHL: Tensor, lse_RWH: Tensor, workspace: Workspace, *, dependent: bool = False, shards: int = 1) -> None:
    """Add up the pieces of the split rows, and write the rows that have none. In invariant mode all rows have pieces.
    Where so many `shards` have parts of them (`kernels.strands`), a part is written then: fp32 outputs, and
    log-sum-exps to the base 2."""
    shape, tiling = workspace.shape, workspace.tiling
    if shape.invariant:
        columns = tiling.merge_columns
        merge_strands[(shape.rows, shape.queries, shape.latent // columns)](
            workspace.partial_SQL,
            workspace.partial_lse_SQ,
            workspace.metadata,
            out_RWHL,
            lse_RWH,
            shape.queries,
            tiling.ctas,
            LATENT=shape.latent,
            COLUMNS=columns,
            STRANDS=STRANDS // shards,
            LAST=shards == 1,
            FINEST=FINEST,
            DEPENDENT=dependent,
            # As the exchange between shards is compiled, which merges the same way.
            enable_fp_fusion=False,
            num_warps=tiling.merge_warps,
            **_options(dependent),
        )
        return
    most = min(shape.rows, tiling.ctas + 1)  # more can only be padded rows
    grid = (most, triton.cdiv(shape.queries, tiling.merge_queries), shape.latent // tiling.merge_columns)
    kernel.merge[grid](
        workspace.partial_SQL,
        workspace.partial_lse_SQ,
        workspace.metadata,
        out_RWHL,
        lse_RWH,
        shape.queries,
        tiling.ctas,
        LATENT=shape.latent,
        COLUMNS=tiling.merge_columns,
        PIECES=tiling.merge_pieces,
        QUERIES=tiling.merge_queries,
        DEPENDENT=dependent,
        num_warps=tiling.merge_warps,
        **_options(dependent),
    )


def _check(
    q_RWHC: Tensor,
    cache_PKC: Tensor,
    page_RP: Tensor,
    length_R: Tensor,
    out_RWHL: Tensor,
    lse_RWH: Tensor,
    shape: DecodeShape,
) -> None:
    """ValueError unless the tensors are what the kernels, which see only pointers, take them for."""
    vectors = (shape.rows, shape.width, shape.heads)
    dtype = q_RWHC.dtype
    if cache_PKC.dtype not in (dtype, torch.uint8):
        raise ValueError(f"a cache of {dtype}, or of FP8 entries as bytes, not of {cache_PKC.dtype}")
    size = entry_of(cache_PKC, shape.latent, shape.rope, dtype).size or shape.latent + shape.rope
    wanted = (
        ("q_RWHC", q_RWHC, (*vectors, shape.latent + shape.rope), dtype),
        ("cache_PKC", cache_PKC, (cache_PKC.shape[0], PAGE_TOKENS, size), cache_PKC.dtype),
        ("length_R", length_R, (shape.rows,), torch.int32),
        ("out_RWHL", out_RWHL, (*vectors, shape.latent), out_RWHL.dtype),
        ("lse_RWH", lse_RWH, vectors, torch.float32),
    )
    for name, tensor, sizes, dtype in wanted:
        if tensor.shape != sizes or tensor.dtype != dtype or not tensor.is_contiguous():
            got = f"{tuple(tensor.shape)} of {tensor.dtype}, strides {tensor.stride()}"
            raise ValueError(f"{name} must be contiguous, {sizes} of {dtype}, not {got}")
    if page_RP.shape != (shape.rows, shape.pages) or page_RP.dtype != torch.int32 or page_RP.stride(1) != 1:
        raise ValueError(f"page_RP must be int32 {(shape.rows, shape.pages)} with contiguous rows: {page_RP.shape}")


def _split(shape: DecodeShape, tiling: DecodeTiling, own: bool) -> Split:
    """Return how plan and attention count the rows' cache; to the plan a shard's `own` entries are as others."""
    single = STRANDS // shape.shards * FINEST if shape.invariant else 0
    return Split(unit=tiling.unit, page=PAGE_TOKENS, row_cost=tiling.row_cost, invariant=single, own=own)


def _features(shape: DecodeShape, dtype: torch.dtype) -> Features:
    """The portable kernel's features of vectors of `dtype`."""
    return Features(
        latent=shape.latent,
        latent_lanes=max(16, triton.next_power_of_2(shape.latent)),
        rope=shape.rope,
        rope_lanes=max(16, triton.next_power_of_2(shape.rope)),
        precision="ieee" if dtype == torch.float32 else "tf32",
    )


def _options(dependent: bool) -> dict[str, bool]:
    """The launch attribute exists on CUDA only, and the interpreter knows none."""
    return {"launch_pdl": True} if dependent else {}
