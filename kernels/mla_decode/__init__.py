"""Attention of decode rows over the paged latent cache, in the absorbed form of multi-head latent attention.

Shape legend: R rows, W width, H heads, L latent features (kv_lora_rank), C = L + rope features, K = 64 entries per
page, P pages (of the cache, or of a row's page table).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.mla_decode import launch, reference
from kernels.mla_decode.schedule import INVARIANT_SPLIT, DecodeShape, Workspace, hopper_tiling, portable_tiling
from kernels.own_entries import OwnEntries
from kernels.runtime.hopper import is_hopper, multiprocessors

__all__ = ["INVARIANT_SPLIT", "DecodeShape", "Workspace", "mla_decode", "schedule_decode"]


def schedule_decode(
    shape: DecodeShape,
    length_R: Tensor,
    page_RP: Tensor,
    dtype: torch.dtype,
    empty: Callable[[int], Tensor],
    *,
    first: int = 0,
    fp8: bool = False,
    own: bool = False,
) -> Workspace | None:
    """Deal the rows' cache to the GPU's multiprocessors, from the lengths on the device: once for all layers of a pass.

    `dtype` is the queries', `fp8` says whether the cache has FP8 entries, and `own` whether the rows are a shard's own
    entries (`kernels.own_entries`). `empty` gives a uint8 tensor of so many bytes, which must live as long as the
    workspace is used. None where there is nothing to plan, on a CPU.
    """
    if not length_R.is_cuda:
        return None
    device = length_R.device
    choose = hopper_tiling if is_hopper(device) and dtype == torch.bfloat16 else portable_tiling
    tiling = choose(shape, multiprocessors(device), fp8=fp8, own=own)
    workspace = Workspace.over(empty(Workspace.bytes(shape, tiling, dtype)), shape, tiling, dtype)
    launch.schedule(length_R, page_RP, workspace, first=first)
    return workspace


def mla_decode(
    q_RWHC: Tensor,
    cache_PKC: Tensor,
    page_RP: Tensor,
    length_R: Tensor,
    out_RWHL: Tensor,
    lse_RWH: Tensor,
    *,
    scale: float,
    first: int = 0,
    workspace: Workspace | None = None,
    invariant: bool = False,
    own: OwnEntries | None = None,
    shards: int = 1,
) -> None:
    """out = softmax(scale * q · cache) · cache[..., :L], every head reading the same latent cache.

    - `q_RWHC`: query with W_UK absorbed into its first L features, the roped part after them.
    - `cache_PKC`: one layer's cache, in the dtype of the query, or FP8 entries as bytes (`kernels.latent_entry`).
      Entry i of a row lies at [page_RP[row, i // 64], i % 64]. Its value is its first L features
      (L = `out_RWHL`.shape[-1]).
    - `page_RP`, `length_R`: int32 on the device. Token j of a row sees entries first <= i < length - (W - 1 - j), so
      drafts do not see the drafts after them. Length 0 marks a padded row.
    - `workspace`: of `schedule_decode` for the same lengths and tables; without one plain torch computes, and waits for
      the device.
    - `invariant`: a token's result is bitwise the same in any call. A workspace is planned for it, or not.
    - `own`: this shard's part of the rows, where ranks share out the cache. `page_RP` and `length_R` are those of this
      part, of which token j of a row sees the entries first_R <= i < bound_RW[row, j]; `first` is 0. ValueError for one
      of Hopper's workspaces for wide blocks of FP8 entries, which are not planned for it. In invariant mode the pieces
      of the rows go round so many `shards`, and the result is a part (`kernels.strands`): its outputs are in fp32, and
      its log-sum-exps to the base 2.
    - `out_RWHL`: dtype of the caller's choice; `lse_RWH`: fp32, natural logarithm of the sum of exp(scale * q · k).

    A token that sees nothing gets output 0 and LSE -inf. What page-table entries at or past the length hold, and what
    cache entries outside the bounds hold (NaN included), does not matter.
    Source: DeepSeek-V2 (2024), section 2.1 and appendix C.
    """
    tensors = q_RWHC, cache_PKC, page_RP, length_R, out_RWHL, lse_RWH
    if own is not None and first:
        raise ValueError("a shard's own entries are attended to from `first_R` on, and not from another")
    if workspace is None:
        if invariant:
            reference.invariant_mla_decode(*tensors, scale, first, own, shards)
        else:
            reference.mla_decode(*tensors, scale, first, own)
        return
    if workspace.shape.invariant != invariant:
        raise ValueError(f"the workspace was planned with invariant = {workspace.shape.invariant}")
    launch.attend(*tensors, workspace, scale=scale, first=first, own=own)
    launch.merge(out_RWHL, lse_RWH, workspace, shards=shards)
