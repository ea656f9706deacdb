"""The lightning indexer of sparse attention in plain torch, for `workers.models.deepseek`: which positions each token
attends to.

Numbers are those of the equations of DeepSeek-V3.2 (arXiv:2512.02556), section 2.1.

Shape legend: T tokens, E hidden features, A features of a query's latent, O rope features, J heads and I features of
the indexer, P pages, K = 64 entries per page, S entries of a row, Z positions that are selected.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, einsum

from workers.models.attention.indexer import Indexer
from workers.models.attention.sparse import SparseAttention
from workers.models.choices import Choices
from workers.models.deepseek_parts import PagedTokens, linear, norm, rope


def select(
    layer: SparseAttention,
    indexer: Indexer,
    x_TE: Tensor,
    turn_TO: Tensor,
    at: PagedTokens,
    cache_PKI: Tensor,
    choices: Choices | None,
) -> Tensor:
    """Write the tokens' keys; then the positions, int32 [T, Z], best first, -1 where a token sees fewer.

    `turn_TO`: see `rope`. ValueError for a cache of INT8 keys, which this file does not read.
    """
    if cache_PKI.dtype == torch.uint8:
        raise ValueError("the readable forward pass reads plain index keys alone: load the model without fp8_cache")
    assert layer.q_norm_A is not None
    c_TA = norm(
        linear(x_TE, layer.down_FE)[:, : len(layer.q_norm_A)], layer.q_norm_A, layer.heads.norm_eps
    )  # (6) of V3
    k_TI, w_TJ = linear(x_TE, indexer.both_XE).tensor_split([cache_PKI.shape[2]], 1)
    k_TI = F.layer_norm(k_TI, k_TI.shape[1:], indexer.norm_I, indexer.bias_I, indexer.norm_eps)
    k_TI = _rope_first(k_TI, turn_TO)
    q_TJI = _rope_first(linear(c_TA, indexer.q_FA).view(len(c_TA), -1, k_TI.shape[1]), turn_TO.unsqueeze(1))
    cache_PKI.flatten(0, 1)[at.slot_T] = k_TI.to(cache_PKI.dtype)
    selected_TZ = torch.full((len(x_TE), layer.indexing.top_k), -1, dtype=torch.int32)
    for own_T, found_SI, seen_TS in at.contexts(cache_PKI):
        match_TJS = einsum("tji,si->tjs", q_TJI[own_T], found_SI.float()).relu()
        score_TS = indexer.scale * einsum("tj,tjs->ts", w_TJ[own_T], match_TJS)  # (1)
        order_TS = score_TS.masked_fill(~seen_TS, -torch.inf).argsort(dim=1, descending=True, stable=True)
        best_TZ = order_TS[:, : layer.indexing.top_k]  # (2)
        best_TZ = best_TZ.where(seen_TS.gather(1, best_TZ), -1)
        selected_TZ[own_T, : best_TZ.shape[1]] = best_TZ.int()
    if choices is not None:
        choices.select(selected_TZ, at.position_T + 1)
    return selected_TZ


def _rope_first(x_TI: Tensor, turn_TO: Tensor) -> Tensor:
    """Rope of the first O features."""
    roped = turn_TO.shape[-1]
    return torch.cat([rope(x_TI[..., :roped], turn_TO), x_TI[..., roped:]], -1)
