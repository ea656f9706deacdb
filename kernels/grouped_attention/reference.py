"""Grouped-query attention over a paged cache in plain torch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kernels.page import PAGE_TOKENS


def rope_store(qkv_TF: Tensor, rotation_TO: Tensor, cache_slot_T: Tensor, cache_PKC: Tensor, heads: int) -> None:
    """See the launcher."""
    tokens, features = rotation_TO.shape
    compute = torch.promote_types(qkv_TF.dtype, torch.float32)
    qkv_THD = qkv_TF.view(tokens, -1, features)
    roped = heads + cache_PKC.shape[-1] // (2 * features)
    turn_T1I = torch.view_as_complex(rotation_TO.to(compute).reshape(tokens, 1, -1, 2))
    pair_THI = torch.view_as_complex(qkv_THD[:, :roped].to(compute).reshape(tokens, roped, -1, 2))
    qkv_THD[:, :roped] = torch.view_as_real(pair_THI * turn_T1I).flatten(-2).to(qkv_TF.dtype)
    cache_PKC.view(-1, cache_PKC.shape[-1])[cache_slot_T] = qkv_THD[:, heads:].flatten(1)


def attend(
    q_THD: Tensor,
    cache_PKC: Tensor,
    page_RP: Tensor,
    out_THD: Tensor,
    tiles: Iterable[tuple[int, ...]],
    first: int,
    scale: float,
) -> None:
    """See the launcher. `tiles`: of every tile its first token, its tokens, its row and its length."""
    features, width = q_THD.shape[-1], cache_PKC.shape[-1]
    key_heads = width // (2 * features)
    compute = torch.promote_types(q_THD.dtype, torch.float32)
    for begin, count, row, length in tiles:
        own = slice(begin, begin + count)
        out_THD[own] = 0
        if length <= first:
            continue
        pages = page_RP[row, : -(-length // PAGE_TOKENS)].to(torch.int64)
        entry_SGD = cache_PKC[pages].flatten(0, 1)[first:length].view(-1, 2 * key_heads, features).to(compute)
        key_SGD, value_SGD = entry_SGD[:, :key_heads], entry_SGD[:, key_heads:]
        q_NGHD = q_THD[own].to(compute).view(count, key_heads, -1, features)
        score_GHNS = torch.einsum("nghd,sgd->ghns", q_NGHD, key_SGD) * scale
        bound_N1 = torch.arange(length - count + 1, length + 1, device=q_THD.device).unsqueeze(1)
        seen_NS = torch.arange(first, length, device=q_THD.device) < bound_N1
        weight_GHNS = score_GHNS.masked_fill(~seen_NS, -torch.inf).softmax(-1).nan_to_num(0.0)
        out_THD[own] = torch.einsum("ghns,sgd->nghd", weight_GHNS, value_SGD).flatten(1, 2).to(out_THD.dtype)
