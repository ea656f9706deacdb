"""Attention of decode rows over the paged latent cache, in the absorbed form of multi-head latent attention.

Shape legend: R rows, W width, H heads, L latent features (kv_lora_rank), C = L + rope features, K = 64 entries per
page, P pages (of the cache, or of a row's page table), S entries, X = W * H.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from kernels.latent_entry import entries as latent_entries
from kernels.mla_decode import launch
from kernels.mla_decode.invariant import invariant_mla_decode
from kernels.mla_decode.schedule import DecodeShape, Workspace, hopper_tiling, portable_tiling
from kernels.own_entries import OwnEntries
from kernels.page import NULL_PAGE, PAGE_TOKENS
from kernels.runtime.hopper import is_hopper, multiprocessors

__all__ = ["DecodeShape", "Workspace", "mla_decode", "mla_decode_reference", "schedule_decode"]

GATHER_ELEMENTS: Final = 1 << 26
"""Cache elements gathered at once on a CPU; more rows than fit are taken in groups, so memory stays bounded."""


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
    dependent: bool = False,
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

    - `dependent`: programmatic dependent launch of the kernels that a workspace is planned for, see `launch`.

    A token that sees nothing gets output 0 and LSE -inf. What page-table entries at or past the length hold, and what
    cache entries outside the bounds hold (NaN included), does not matter.
    Source: DeepSeek-V2 (2024), section 2.1 and appendix C.
    """
    tensors = q_RWHC, cache_PKC, page_RP, length_R, out_RWHL, lse_RWH
    if own is not None and first:
        raise ValueError("a shard's own entries are attended to from `first_R` on, and not from another")
    if workspace is None:
        if invariant:
            invariant_mla_decode(*tensors, scale, first, own, shards)
        else:
            mla_decode_reference(*tensors, scale, first, own)
        return
    if workspace.shape.invariant != invariant:
        raise ValueError(f"the workspace was planned with invariant = {workspace.shape.invariant}")
    launch.attend(*tensors, workspace, scale=scale, first=first, own=own, dependent=dependent)
    launch.merge(out_RWHL, lse_RWH, workspace, shards=shards, dependent=dependent)


def mla_decode_reference(
    q_RWHC: Tensor,
    cache_PKC: Tensor,
    page_RP: Tensor,
    length_R: Tensor,
    out_RWHL: Tensor,
    lse_RWH: Tensor,
    scale: float,
    first: int,
    own: OwnEntries | None = None,
) -> None:
    """`mla_decode` in plain torch: gathers the latents of the live pages, then dense attention. It reads the longest
    length on the host, so it cannot be captured in a graph."""
    longest = int(length_R.max()) if length_R.numel() else 0
    if longest <= first:
        out_RWHL.zero_()
        lse_RWH.fill_(-torch.inf)
        return
    rows = q_RWHC.shape[0]
    step = max(1, GATHER_ELEMENTS // ((longest + -longest % PAGE_TOKENS) * q_RWHC.shape[-1]))
    ragged = rows > 1  # a row that is alone in the call is as long as the longest: nothing of it needs masking
    for start in range(0, rows, step):
        part = slice(start, start + step)
        _decode_rows(
            q_RWHC[part],
            cache_PKC,
            page_RP[part],
            length_R[part],
            out_RWHL[part],
            lse_RWH[part],
            longest,
            ragged,
            scale,
            first,
            None if own is None else (own.bound_RW[part], own.first_R[part]),
        )


def _decode_rows(
    q_RWHC: Tensor,
    cache_PKC: Tensor,
    page_RP: Tensor,
    length_R: Tensor,
    out_RWHL: Tensor,
    lse_RWH: Tensor,
    longest: int,
    ragged: bool,
    scale: float,
    first: int,
    own: tuple[Tensor, Tensor] | None,
) -> None:
    rows, width, heads, features = q_RWHC.shape
    latent, entries = out_RWHL.shape[-1], longest - first
    compute = torch.promote_types(q_RWHC.dtype, torch.float32)
    entry_S = torch.arange(first, longest, device=length_R.device)
    length_R1 = length_R.unsqueeze(1)

    # Table entries past the length are arbitrary, and so is what the cache holds past it: NaN times a zero probability
    # would still be NaN, hence both are replaced before they are used.
    begin_P = torch.arange(0, longest, PAGE_TOKENS, device=length_R.device)
    page_RP = page_RP[:, : len(begin_P)]
    if ragged:
        page_RP = torch.where(begin_P < length_R1, page_RP, NULL_PAGE)
    found_RSC = cache_PKC[page_RP].flatten(1, 2)[:, first:longest]  # a copy
    cache_RSC = latent_entries(found_RSC, latent, features - latent, q_RWHC.dtype).to(compute)
    if ragged:
        cache_RSC.masked_fill_((entry_S >= length_R1).unsqueeze(-1), 0.0)
    before_RS = None
    if own is not None:
        before_RS = entry_S < own[1].unsqueeze(1)
        cache_RSC.masked_fill_(before_RS.unsqueeze(-1), 0.0)

    q_RXC = q_RWHC.reshape(rows, width * heads, -1).to(compute)
    score_RXS = torch.bmm(q_RXC, cache_RSC.transpose(1, 2)).mul_(scale)
    score_RWHS = score_RXS.view(rows, width, heads, entries)
    if own is not None and before_RS is not None:
        unseen_RWS = (entry_S >= own[0].unsqueeze(-1)) | before_RS.unsqueeze(1)
        score_RWHS.masked_fill_(unseen_RWS.unsqueeze(2), -torch.inf)
    elif ragged or width > 1:
        back_W = torch.arange(width - 1, -1, -1, device=length_R.device)
        unseen_RWS = entry_S >= (length_R1 - back_W).unsqueeze(-1)
        score_RWHS.masked_fill_(unseen_RWS.unsqueeze(2), -torch.inf)
    lse_RWH.copy_(torch.logsumexp(score_RWHS, dim=-1))
    # A token that sees nothing has LSE -inf; a finite shift turns its weights into exp(-inf) = 0 instead of NaN.
    shift_RWH1 = lse_RWH.masked_fill(lse_RWH == -torch.inf, 0.0).unsqueeze(-1)
    weight_RXS = score_RWHS.sub_(shift_RWH1).exp_().view(rows, width * heads, entries)
    out_RWHL.copy_(torch.bmm(weight_RXS, cache_RSC[..., :latent]).view_as(out_RWHL))
