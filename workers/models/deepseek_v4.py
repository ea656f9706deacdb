"""The forward pass of DeepSeek V4 in plain torch, for people, and for tests that compare whatever serves with it.

Everything is computed in fp32 from whatever weights and caches are stored. A pass takes chunks of any size of any
number of rows, and leaves in the caches what the next chunk needs: of each sequence a ring of its newest tokens'
entries and rings of its compressors' state, and on pages the compressed entries (`workers.models.deepseek_v4_parts`).

The sections named are those of the paper (DeepSeek-V4, 2026).

Shape legend: T tokens, E hidden features, A features of a query's latent, H heads of this rank, D features of an entry,
S entries that a row's tokens may attend to, N compressed entries among them, O rope features, J heads and I features of
an indexer, G groups of heads of this rank, X experts, K experts of a token, Y tokens of an expert, Z entries
that are selected, B vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, einsum

from workers.models.choices import Choices
from workers.models.config import Compression
from workers.models.deepseek_parts import linear, norm, sunk
from workers.models.deepseek_parts import swiglu as clamped_swiglu
from workers.models.deepseek_v4_model import CompressedModel
from workers.models.deepseek_v4_parts import (
    CompressedTokens,
    CompressorCaches,
    LayerCaches,
    MixedStreams,
    OwnTokens,
    back,
    complete,
    compress,
    rope_last,
)
from workers.models.deepseek_v4_weights import (
    CompressedAttention,
    CompressedBlock,
    CompressedExperts,
    CompressedIndexer,
)
from workers.models.layer_ops import Gated
from workers.weights.weight import Weight


def attention(
    model: CompressedModel,
    layer: CompressedAttention,
    x_TE: Tensor,
    at: CompressedTokens,
    caches: LayerCaches,
    turn_PO: Tensor,
    choices: Choices | None = None,
) -> Tensor:
    """A layer's attention (section 2.3), this rank's part of the sum over heads.

    One entry of a token is the key and the value of all heads. As rope has turned it, the output is turned back at the
    query's position: then what a value gives depends on its distance alone.
    """
    config, compression = model.config, model.compression
    eps, features, turn_TO = config.rms_norm_eps, config.cache_width, turn_PO[at.position_T]
    c_TA = norm(linear(x_TE, layer.q_down_AE), layer.q_norm_A, eps)
    q_THD = F.rms_norm(linear(c_TA, layer.q_up_QA).view(len(x_TE), -1, features), (features,), None, eps)
    q_THD = rope_last(q_THD, turn_TO.unsqueeze(1))
    entry_TD = rope_last(norm(linear(x_TE, layer.kv_DE), layer.kv_norm_D, eps), turn_TO)
    out_THD, selected = torch.empty_like(q_THD), None
    if layer.indexer is not None:
        assert caches.indexer is not None
        selected = _selected(model, layer.indexer, x_TE, c_TA, at, caches.indexer, turn_PO, choices)
    for own in at.rows:
        key_SD, seen_TS = _window(entry_TD[own.where], own, caches, compression)
        if layer.compressor is not None:
            assert caches.compressor is not None
            compress(x_TE[own.where], own, layer.compressor, caches.compressor, turn_PO, eps)
            seen_TN = complete(own, layer.compressor.ratio)
            if selected is not None:
                seen_TN = seen_TN & (selected[own.where].unsqueeze(2) == torch.arange(seen_TN.shape[1])).any(1)
            key_SD = torch.cat([key_SD, caches.compressor.entries.read(own.page_P, seen_TN.shape[1])])
            seen_TS = torch.cat([seen_TS, seen_TN], 1)
        score_HTS = features**-0.5 * einsum("thd,sd->hts", q_THD[own.where], key_SD)
        weight_HTS = sunk(score_HTS.masked_fill(~seen_TS, -torch.inf), layer.sink_H)
        # An entry that is not finite makes the weights of those so who see it. To all others it is nothing.
        out_THD[own.where] = einsum("hts,sd->thd", weight_HTS, key_SD.masked_fill(~key_SD.isfinite(), 0.0))
    out_THD = rope_last(out_THD, back(turn_TO).unsqueeze(1))
    return linear(grouped(out_THD, layer.out_FD, compression), layer.out_EF)


def _window(entry_TD: Tensor, own: OwnTokens, caches: LayerCaches, compression: Compression) -> tuple[Tensor, Tensor]:
    """Keep the entries of a row's tokens. The entries of the window in front of them and of themselves, [S, D], and
    which of them each token sees, bool [T, S]."""
    begin = max(min(own.first, own.start), own.start - compression.window + 1)  # padding has position 0
    past_SD = caches.window.read(own.slot, begin, own.start)
    caches.window.write(own, entry_TD)
    distance_TS = own.position_T.unsqueeze(1) - torch.arange(begin, own.end)
    # As they are read later, rounded to the cache's dtype.
    own_TD = entry_TD.to(caches.window.data_XLC.dtype).float()
    key_SD, seen_TS = torch.cat([past_SD, own_TD]), (distance_TS >= 0) & (distance_TS < compression.window)
    return key_SD, seen_TS & key_SD.isfinite().all(1) if own.first else seen_TS


def _selected(
    model: CompressedModel,
    indexer: CompressedIndexer,
    x_TE: Tensor,
    c_TA: Tensor,
    at: CompressedTokens,
    caches: CompressorCaches,
    turn_PO: Tensor,
    choices: Choices | None,
) -> Tensor:
    """The entries that are selected for each token of those that it may see, int32 [T, Z], rising, -1 where there is
    none: the best by the indexer's scores, of equal ones the first (section 2.3.1). An indexer compresses keys of its
    own. `choices` may put others in a choice's place."""
    compression, ratio = model.compression, indexer.compressor.ratio
    q_TJI = linear(c_TA, indexer.q_FA).view(len(c_TA), compression.index_heads, -1)
    q_TJI = rope_last(q_TJI, turn_PO[at.position_T].unsqueeze(1))
    weight_TJ = linear(x_TE, indexer.weight_JE) * (compression.index_heads * compression.index_features) ** -0.5
    selected_TZ = torch.full((len(x_TE), compression.top_k), -1, dtype=torch.int32)
    for own in at.rows:
        compress(x_TE[own.where], own, indexer.compressor, caches, turn_PO, model.config.rms_norm_eps)
        seen_TN = complete(own, ratio)
        key_NI = caches.entries.read(own.page_P, seen_TN.shape[1])
        match_TJN = einsum("tji,ni->tjn", q_TJI[own.where], key_NI).relu()
        score_TN = einsum("tj,tjn->tn", weight_TJ[own.where], match_TJN)
        order_TN = score_TN.masked_fill(~seen_TN, -torch.inf).argsort(dim=1, descending=True, stable=True)
        best_TZ = order_TN[:, : compression.top_k]
        none = seen_TN.shape[1]
        best_TZ = best_TZ.where(seen_TN.gather(1, best_TZ), none).sort(1).values
        selected_TZ[own.where, : best_TZ.shape[1]] = best_TZ.where(best_TZ < none, -1).int()
    if choices is not None:
        choices.select(selected_TZ, (at.position_T + 1) // ratio)
    return selected_TZ


def grouped(out_THD: Tensor, weight_FD: Weight, compression: Compression) -> Tensor:
    """The heads' output, projected in groups (section 2.3.1): each group's heads by rows of its own."""
    rows_GUD = weight_FD.dequantized(torch.float32).view(-1, compression.output_rank, weight_FD.shape[1])
    out_TGD = out_THD.reshape(len(out_THD), len(rows_GUD), -1)
    return einsum("tgd,gud->tgu", out_TGD, rows_GUD).flatten(1)


def gated(x_TE: Tensor, network: Gated, limit: float) -> Tensor:
    """down · (silu(min(gate, limit)) * clamp(up, -limit, limit)), this rank's part of it."""
    return linear(clamped_swiglu(linear(x_TE, network.gate_up_FE), limit), network.down_EI)


def experts(
    model: CompressedModel,
    layer: CompressedExperts,
    x_TE: Tensor,
    token_T: Tensor,
    choices: Choices | None = None,
) -> Tensor:
    """A layer's experts (section 2.1), this rank's part of their sum. In the first layers a table says which experts a
    token has, by its id; elsewhere those with the highest scores, to which a bias is added for this choice alone.
    `choices` may put others in a choice's place."""
    routing = model.config.routing
    assert routing is not None
    score_TX = F.softplus(linear(x_TE, layer.router_XE)).sqrt()
    if layer.bias_X is None:
        assert layer.expert_YK is not None
        id_TK = layer.expert_YK[token_T].long()
    else:
        id_TK = (score_TX + layer.bias_X).topk(routing.experts_per_token).indices
    weight_TK = score_TX.gather(1, id_TK)
    weight_TK = weight_TK / (weight_TK.sum(1, keepdim=True) + 1e-20) * routing.rule.scale
    if choices is not None:
        choices.settle(id_TK, weight_TK)
    out_TE = gated(x_TE, layer.shared, routing.limit)
    for expert in torch.unique(id_TK).tolist():
        own_Y, place_Y = (id_TK == expert).nonzero(as_tuple=True)
        network = Gated(layer.gate_up_XFE[expert], layer.down_XEI[expert])
        out_TE.index_add_(0, own_Y, weight_TK[own_Y, place_Y].unsqueeze(1) * gated(x_TE[own_Y], network, routing.limit))
    return out_TE


def through(
    model: CompressedModel,
    layer: CompressedBlock,
    h: MixedStreams,
    token_T: Tensor,
    at: CompressedTokens,
    caches: LayerCaches,
    choices: Choices | None = None,
) -> None:
    """Take the residual streams through a layer; writes its caches. All ranks together."""
    eps = model.config.rms_norm_eps
    turn_PO = model.rotation_PO if layer.attention.compressor is None else model.compressed_rotation_PO
    x_TE = norm(h.read(layer.attention_streams), layer.attention_norm_E, eps)
    u_TE = attention(model, layer.attention, x_TE, at, caches, turn_PO, choices)
    model.group.all_reduce(u_TE, u_TE)
    h.add(u_TE)
    x_TE = norm(h.read(layer.feed_forward_streams), layer.feed_forward_norm_E, eps)
    y_TE = experts(model, layer.experts, x_TE, token_T, choices)
    model.group.all_reduce(y_TE, y_TE)
    h.add(y_TE)


def streams(
    model: CompressedModel,
    token_T: Tensor,
    at: CompressedTokens,
    caches: list[LayerCaches],
    choices: Choices | None = None,
) -> MixedStreams:
    """The residual streams of every token behind the last layer; writes the caches. All ranks together."""
    config = model.config
    assert config.streams is not None
    x_TZE = model.embedding_YE[token_T].float().unsqueeze(1).repeat(1, config.streams.count, 1)
    h = MixedStreams(x_TZE, config.streams, config.rms_norm_eps)
    for layer, own in zip(model.blocks, caches, strict=True):
        through(model, layer, h, token_T, at, own, choices)
    return h


def hidden(model: CompressedModel, h: MixedStreams) -> Tensor:
    """Hidden state of every token behind the final norm, fp32 [T, E]."""
    return norm(h.end(model.streams), model.norm_E, model.config.rms_norm_eps)


def forward(
    model: CompressedModel,
    token_T: Tensor,
    at: CompressedTokens,
    caches: list[LayerCaches],
    choices: Choices | None = None,
) -> Tensor:
    """Logits after every token, fp32 [T, B]; writes the caches. All ranks together."""
    logit_TB = linear(hidden(model, streams(model, token_T, at, caches, choices)), model.head_YE)
    return model.group.gather_columns(logit_TB, torch.empty)[:, : model.config.vocab_size]
