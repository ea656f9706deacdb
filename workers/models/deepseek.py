"""The whole forward pass in plain torch, in the order of the paper: a model one can read, and that runs.

It takes the `Model` that serves and computes in fp32 on a CPU, whatever weights are stored in. Tests compare it with
transformers, and the self-test compares what serves with it. Numbers in comments are those of the equations of
DeepSeek-V3 (arXiv:2412.19437), section 2.1. What sparse attention selects is in `workers.models.deepseek_sparse`.

Shape legend: T tokens, E hidden features, F output features, H heads of this rank, N / O features without / with rope,
D = N + O, V value features, L latent features, C = L + O, S entries of a row, P pages of 64 entries (K), X experts, G
groups of them, K experts of a token, Y tokens of an expert, Z positions that an indexer selects, B vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, einsum

from kernels import latent_entry
from workers.cache.paged import PagedCache
from workers.models.attention.latent import LatentAttention
from workers.models.attention.sparse import SparseAttention
from workers.models.choices import Choices
from workers.models.deepseek_parts import PagedTokens, Residual, both, by_head, linear, norm, opened, rope, sunk, swiglu
from workers.models.deepseek_sparse import select
from workers.models.feed_forward import DenseFeedForward, MixtureOfExperts
from workers.models.layer_ops import Gated, Mixture
from workers.models.model import Model


def attention(
    layer: LatentAttention,
    x_TE: Tensor,
    turn_TO: Tensor,
    at: PagedTokens,
    cache_PKC: Tensor,
    selected_TZ: Tensor | None,
) -> Tensor:
    """Multi-head latent attention, this rank's part of it: writes the tokens' entries, then attends to those that each
    token sees, or of these to the selected ones."""
    heads, dtype = layer.heads, layer.heads.norm_L.dtype
    q_TF, c_TL, k_TO = linear(x_TE, layer.down_FE).tensor_split([-heads.latent - heads.rope, -heads.rope], 1)
    entry_TC = torch.cat([norm(c_TL, heads.norm_L, heads.norm_eps), rope(k_TO, turn_TO)], 1)  # (1), (3)
    latent_entry.write(entry_TC.to(dtype), heads.latent, at.slot_T, cache_PKC)
    if layer.q_norm_A is not None and layer.q_up_QA is not None:  # else q = W^Q h
        q_TF = linear(both(norm(q_TF, layer.q_norm_A, heads.norm_eps), q_TF, layer), layer.q_up_QA)  # (6)
    q_THN, q_THO, gate_THV = by_head(q_TF, x_TE, layer)  # (7); gates in A.X K2 and Hy4 alone
    q_THD = torch.cat([q_THN, rope(q_THO, turn_TO.unsqueeze(1))], 2)  # (8), (9)
    q_THD *= layer.query_scale(at.position_T).view(-1, 1, 1)  # 1, except in Mistral Small 4
    out_THV = x_TE.new_empty(len(x_TE), heads.count, heads.value)
    for own_T, found_SC, seen_TS in at.contexts(cache_PKC):
        entry_SC = latent_entry.entries(found_SC, heads.latent, heads.rope, dtype).float()
        kv_SHF = einsum("sl,hfl->shf", entry_SC[:, : heads.latent], heads.up_HFL.float())
        k_SHN, v_SHV = kv_SHF.tensor_split([heads.nope], 2)  # (2), (5)
        k_SHO = entry_SC[:, None, heads.latent :].expand(-1, heads.count, -1)
        k_SHD = torch.cat([k_SHN, k_SHO], 2)  # (4)
        score_HTS = heads.scale * einsum("thd,shd->hts", q_THD[own_T], k_SHD)
        if selected_TZ is not None:
            seen_TS &= (selected_TZ[own_T].unsqueeze(2) == torch.arange(len(entry_SC))).any(1)
        weight_HTS = sunk(score_HTS.masked_fill(~seen_TS, -torch.inf), heads.sink_H)
        out_THV[own_T] = einsum("hts,shv->thv", weight_HTS, v_SHV)  # (10)
    return linear(opened(out_THV, gate_THV).flatten(1), layer.out_EF)  # (11)


def gated(x_TE: Tensor, network: Gated | DenseFeedForward, limit: float = 0.0) -> Tensor:
    """FFN: down · (silu(gate · x) * (up · x)), this rank's part of it."""
    return linear(swiglu(linear(x_TE, network.gate_up_FE), limit), network.down_EI)


def experts(x_TE: Tensor, mixture: Mixture, choices: Choices | None) -> Tensor:
    """DeepSeekMoE: this rank's part of the sums over experts in (12). `choices` may put others in a choice's place."""
    rule, bias_X = mixture.routing.rule, mixture.bias_X
    logit_TX = linear(x_TE, mixture.router_XE)
    score_TX = logit_TX.softmax(1) if rule.scoring == "softmax" else logit_TX.sigmoid()  # (15); V2 has softmax
    choice_TGX = (score_TX if bias_X is None else score_TX + bias_X).view(len(x_TE), rule.groups, -1)
    if rule.groups > 1:  # experts of the best groups alone
        best_TG = choice_TGX.topk(1 if bias_X is None else 2).values.sum(2).topk(rule.top_groups).indices
        closed_TG1 = torch.ones_like(choice_TGX[..., :1], dtype=torch.bool).scatter(1, best_TG.unsqueeze(2), False)
        choice_TGX = choice_TGX.masked_fill(closed_TG1, 0.0 if rule.closed_at_zero else -torch.inf)
    id_TK = choice_TGX.flatten(1).topk(mixture.routing.experts_per_token).indices  # (16)
    gate_TK = score_TX.gather(1, id_TK)
    gate_TK *= rule.scale / (gate_TK.sum(1, keepdim=True) + 1e-20 if rule.normalize else 1.0)  # (13)
    if choices is not None:
        choices.settle(id_TK, gate_TK)
    gate_TX = torch.zeros_like(score_TX).scatter(1, id_TK, gate_TK)  # (14)
    gate_TX = F.pad(gate_TX, (0, mixture.routing.shared_experts), value=1.0)  # shared ones lie behind the others
    out_TE = torch.zeros_like(x_TE) if mixture.shared is None else gated(x_TE, mixture.shared)
    for expert in gate_TX.any(0).nonzero().flatten().tolist():
        own_Y = gate_TX[:, expert].nonzero().flatten()
        network = Gated(mixture.gate_up_XFE[expert], mixture.down_XEI[expert])
        out_TE[own_Y] += gate_TX[own_Y, expert].unsqueeze(1) * gated(x_TE[own_Y], network, mixture.routing.limit)
    return out_TE


def forward(
    model: Model, token_T: Tensor, at: PagedTokens, cache: PagedCache, choices: Choices | None = None
) -> Tensor:
    """Logits after every token, fp32 [T, B]; writes the tokens' entries to the cache. All ranks together."""
    eps, caches, selected_TZ = model.config.rms_norm_eps, iter(cache.layers), None
    turn_TO, h = model.rotation_PO[at.position_T], Residual(model.embedding_YE[token_T].float(), model.config.streams)
    for layer in model.layers:
        own = [next(caches) for _ in layer.attention.caches]
        x_TE = norm(h.read(layer.attention_streams), layer.attention_norm_E, eps, layer.attention_gate)
        if isinstance(layer.attention, SparseAttention) and layer.attention.indexer is not None:
            selected_TZ = select(layer.attention, layer.attention.indexer, x_TE, turn_TO, at, own[1], choices)
        u_TE = attention(layer.attention, x_TE, turn_TO, at, own[0], selected_TZ)
        model.group.all_reduce(u_TE, u_TE)
        h.add(u_TE)
        x_TE, feed_forward = h.read(layer.feed_forward_streams), layer.feed_forward
        x_TE = norm(x_TE, layer.feed_forward_norm_E, eps, layer.feed_forward_gate)
        if isinstance(feed_forward, DenseFeedForward):
            y_TE = gated(x_TE, feed_forward)
        else:
            y_TE = experts(x_TE, feed_forward.mixture, choices)
        model.group.all_reduce(y_TE, y_TE)
        if isinstance(feed_forward, MixtureOfExperts) and feed_forward.mixture.norm_E is not None:  # A.X K1
            y_TE = norm(y_TE, feed_forward.mixture.norm_E, eps)
        h.add(y_TE)  # (12)
    logit_TB = linear(norm(h.read(model.streams), model.norm_E, eps), model.head_YE)
    return model.group.gather_columns(logit_TB, torch.empty)[:, : model.config.vocab_size]
