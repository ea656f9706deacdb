"""Drafts of DeepSeek V4 in blocks (DSpark, 2026): the newest token and noise tokens go through layers with a window
together, and see all of each other. So one pass makes as many drafts as a block has tokens.

What the block sees before itself, its context, is made of what the model has computed of those tokens: the means of its
residual streams behind some layers. A layer's entry of a token depends on nothing behind that token, and on no other
token but through the model. It lies in a ring of the row's slot.

It runs in plain torch on a CPU: nothing captures it yet. The pass of a block reads no number of the
device on the host, but for the experts that are chosen.

Shape legend: T tokens, R rows, K tokens of a block, N = R * K, E hidden features, F = E for each layer that is read, Z
residual streams, C window, S = C + K entries that a block sees, H heads of this rank, D features of an entry, L tokens
of a ring, X slots, M features of the Markov head, V vocabulary, Y rows of a head on this rank, J = E + M.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, einsum
from typing_extensions import override

from workers.cache.paged import PagedCache
from workers.cache.rings import NULL_SLOT, RingSpec
from workers.memory.scratch import Scratch
from workers.models.batch import Batch
from workers.models.config import CompressedLayer, Dspark
from workers.models.deepseek_parts import linear, norm, sunk
from workers.models.deepseek_v4 import experts, grouped
from workers.models.deepseek_v4_model import CompressedModel
from workers.models.deepseek_v4_parts import CompressedTokens, MixedStreams, OwnTokens, Ring, back, rope_last
from workers.models.deepseek_v4_weights import CompressedAttention, load_block
from workers.models.drafter import DraftedRows, Drafter
from workers.models.head import load_head
from workers.models.streams import load_streams
from workers.weights.part import Part
from workers.weights.source import WeightSource


class DsparkDrafter(Drafter):
    """The layers `mtp.0` and up. Embedding and head are the model's. Logits of a draft get what the token before it
    adds to them, `w2 · w1[token]`, so drafts are chosen one after the other all the same."""

    estimates = True

    def __init__(self, source: WeightSource, model: CompressedModel) -> None:
        config, hidden, vocab = model.config, model.config.hidden_size, model.config.vocab_size
        assert config.streams is not None
        assert config.dspark is not None
        self.model, self._streams = model, config.streams
        self.sizes: Dspark = config.dspark
        prefixes = [f"mtp.{stage}." for stage in range(self.sizes.stages)]
        first, last, rank = prefixes[0], prefixes[-1], self.sizes.markov_rank
        self.join_EF = source.matrix(Part(f"{first}main_proj.weight", hidden, len(self.sizes.layers) * hidden))
        self.context_norm_E = source.load(f"{first}main_norm.weight", hidden)
        window = CompressedLayer(0)
        self.blocks = [load_block(source, config, prefix, window, hashed=False) for prefix in prefixes]
        end_streams = load_streams(source, f"{last}hc_head_", config, added=False)
        assert end_streams is not None
        self.end_streams = end_streams
        self.norm_E = source.load(f"{last}norm.weight", hidden)
        self.markov_VM = source.load(f"{last}markov_head.markov_w1.weight", vocab, rank)
        self.markov_YM = load_head(source, f"{last}markov_head.markov_w2.weight", vocab, rank)
        self.confidence_1J = source.load(f"{last}confidence_head.proj.weight", 1, hidden + rank, dtype=torch.float32)
        self.aux_hidden_state_layers = tuple(layer + 1 for layer in self.sizes.layers)
        self.most_drafts = self.sizes.block

    @override
    @property
    def follows(self) -> bool:
        return True

    @override
    def rings(self, width: int) -> list[RingSpec]:
        """Those of the layers' windows, with room for the tokens of a step beside what its first token needs."""
        window = self.model.compression.window
        sizes = window + width - 1, self.model.config.cache_width, self.model.dtype
        return [RingSpec(*sizes, needed=window, kept=window - 1)] * self.sizes.stages

    @override
    def catch_up(
        self, token_T: Tensor, hidden_TE: Tensor, batch: Batch, cache: PagedCache, scratch: Scratch | None = None
    ) -> None:
        """Write the entries of the positions before the batch's, whose streams' means are `hidden_TE`, [T, F]. The
        tokens themselves are of no use here."""
        model, eps = self.model, self.model.config.rms_norm_eps
        x_TE = norm(linear(hidden_TE.float(), self.join_EF), self.context_norm_E, eps)
        rows = [_before(own, batch.first) for own in _rows_of(batch).rows]
        turn_TO = model.rotation_PO[torch.cat([own.position_T for own in rows])]
        for block, ring_XLD in zip(self.blocks, self._rings(cache), strict=True):
            entry_TD = _entries(block.attention, x_TE, turn_TO, eps)
            for own in rows:
                Ring(ring_XLD).write(own, entry_TD[own.where])

    @override
    def draft(
        self, hidden_RE: Tensor | None, rows: DraftedRows, drafts: int, cache: PagedCache, scratch: Scratch
    ) -> None:
        """One pass over a block of every row, then a choice for each draft."""
        if not drafts:
            return
        token_R, sure_R = rows.state.last_S[rows.slot_R], torch.ones(len(rows.slot_R), device=rows.slot_R.device)
        x_RKE = self.block(token_R, rows, cache)[:, :drafts]
        normed_RKE = norm(x_RKE, self.norm_E, self.model.config.rms_norm_eps).to(self.model.dtype)
        logits_RKV = self.model.logits(normed_RKE.flatten(0, 1)).view(*x_RKE.shape[:2], -1)
        likely_R = torch.zeros_like(rows.slot_R)
        for index in range(drafts):
            before_RM = self.markov_VM[token_R]
            sure_R = sure_R * self.confidence(x_RKE[:, index], before_RM)
            likely_R += sure_R >= self.least_confidence
            token_R = rows.choose(partial(self._logits, logits_RKV[:, index], before_RM), index)
            rows.feed(token_R, index)
        if self.least_confidence:
            rows.verify(likely_R, drafts)

    def block(self, token_R: Tensor, rows: DraftedRows, cache: PagedCache) -> Tensor:
        """What the logits of each of a block's tokens are made of, before their norm, fp32 [R, K, E]. `token_R`: the
        rows' newest tokens, which have no entry yet."""
        model, eps, size = self.model, self.model.config.rms_norm_eps, self.sizes.block
        start_R = rows.state.length_S[rows.slot_R]
        position_RK = start_R.unsqueeze(1) + torch.arange(size, device=start_R.device)
        token_RK = torch.full_like(position_RK, self.sizes.noise_token)
        token_RK[:, 0] = token_R
        h = MixedStreams(
            model.embedding_YE[token_RK.flatten()].float().unsqueeze(1).repeat(1, self._streams.count, 1),
            self._streams,
            eps,
        )
        window = _Window(rows.slot_R, start_R, model.compression.window)
        for block, ring_XLD in zip(self.blocks, self._rings(cache), strict=True):
            x_NE = norm(h.read(block.attention_streams), block.attention_norm_E, eps)
            u_NE = self._attended(block.attention, x_NE, position_RK, window, ring_XLD)
            model.group.all_reduce(u_NE, u_NE)
            h.add(u_NE)
            x_NE = norm(h.read(block.feed_forward_streams), block.feed_forward_norm_E, eps)
            y_NE = experts(model, block.experts, x_NE, token_RK.flatten())
            model.group.all_reduce(y_NE, y_NE)
            h.add(y_NE)
        return h.end(self.end_streams).view(len(token_R), size, -1)

    def confidence(self, x_RE: Tensor, before_RM: Tensor) -> Tensor:
        """Estimate of the probability that a draft is accepted if those before it in its block are, fp32 [R]. It is
        not calibrated, and was trained for rejection sampling, which accepts more. `x_RE`: of `block`.
        `before_RM`: the first matrix of the Markov head, of the tokens before it."""
        return F.linear(torch.cat([x_RE, before_RM.float()], 1), self.confidence_1J).sigmoid().squeeze(1)

    def _logits(self, logits_RV: Tensor, before_RM: Tensor) -> Tensor:
        return logits_RV + self.model.logits(before_RM, head_YE=self.markov_YM)

    def _rings(self, cache: PagedCache) -> list[Tensor]:
        return cache.rings[-self.sizes.stages :]

    def _attended(
        self, layer: CompressedAttention, x_NE: Tensor, position_RK: Tensor, window: _Window, ring_XLD: Tensor
    ) -> Tensor:
        """A layer's attention, this rank's part of the sum over heads, [N, E]. Every token of a block sees the same:
        the window of entries before the block, and the entries of the whole block, which nobody keeps."""
        config, (rows, size) = self.model.config, position_RK.shape
        eps, features = config.rms_norm_eps, config.cache_width
        turn_NO = self.model.rotation_PO[position_RK.flatten()]
        c_NA = norm(linear(x_NE, layer.q_down_AE), layer.q_norm_A, eps)
        q_NHD = F.rms_norm(linear(c_NA, layer.q_up_QA).view(len(x_NE), -1, features), (features,), None, eps)
        q_RKHD = rope_last(q_NHD, turn_NO.unsqueeze(1)).view(rows, size, -1, features)
        own_RKD = _entries(layer, x_NE, turn_NO, eps).view(rows, size, features)
        key_RSD = torch.cat([window.read(ring_XLD), own_RKD], 1)
        score_RHKS = features**-0.5 * einsum("rkhd,rsd->rhks", q_RKHD, key_RSD)
        unseen_RS = F.pad(~window.seen_RC, (0, size), value=False)
        score_RHKS = score_RHKS.masked_fill(unseen_RS[:, None, None], -torch.inf)
        heads = score_RHKS.shape[1]
        weight_RHKS = sunk(score_RHKS.transpose(0, 1).reshape(heads, rows * size, -1), layer.sink_H)
        weight_RHKS = weight_RHKS.view(heads, rows, size, -1).transpose(0, 1)
        out_NHD = einsum("rhks,rsd->rkhd", weight_RHKS, key_RSD).reshape(rows * size, heads, features)
        out_NHD = rope_last(out_NHD, back(turn_NO).unsqueeze(1))
        return linear(grouped(out_NHD, layer.out_FD, self.model.compression), layer.out_EF)


class _Window:
    """The entries before the blocks of rows, as far as there are any."""

    def __init__(self, slot_R: Tensor, start_R: Tensor, window: int) -> None:
        """`start_R`: positions of the blocks' first tokens."""
        self._place_R1 = slot_R.unsqueeze(1) + 1 + NULL_SLOT
        self._position_RC = start_R.unsqueeze(1) + torch.arange(-window, 0, device=start_R.device)
        self.seen_RC = self._position_RC >= 0

    def read(self, ring_XLD: Tensor) -> Tensor:
        """What a ring has of them, [R, C, D] in fp32; zeros where there is no such entry."""
        entry_RCD = ring_XLD[self._place_R1, self._position_RC % ring_XLD.shape[1]].float()
        return entry_RCD.masked_fill(~self.seen_RC.unsqueeze(2), 0.0)


def _entries(layer: CompressedAttention, x_TE: Tensor, turn_TO: Tensor, eps: float) -> Tensor:
    """A layer's entries of tokens, fp32 [T, D]."""
    return rope_last(norm(linear(x_TE, layer.kv_DE), layer.kv_norm_D, eps), turn_TO)


def _before(own: OwnTokens, first: int) -> OwnTokens:
    """The positions before a row's; those of nobody's row, which has the null slot, begin at 0."""
    return OwnTokens(own.where, max(0, own.start - first), own.count, own.slot, own.page_P)


def _rows_of(batch: Batch) -> CompressedTokens:
    """The rows of a batch: decode rows, then prefill rows. Rows of nobody have the null slot and the null page."""
    start: list[int] = []
    count: list[int] = []
    slot: list[int] = []
    tables = []
    if (decode := batch.decode) is not None:
        assert decode.slot_R is not None, "rows of such a model have slots"
        rows, width = len(decode.length_R), batch.layout.width
        start += batch.position_T[: rows * width : width].tolist()
        count += [width] * rows
        slot += decode.slot_R.tolist()
        tables.append(decode.page_RP)
    if (prefill := batch.prefill) is not None:
        assert len(prefill.slot) == len(prefill.start), "rows of such a model have slots"
        start += prefill.start
        count += prefill.count
        slot += prefill.slot
        tables.append(prefill.page_NP)
    places = tuple(own + 1 + NULL_SLOT for own in slot)
    return CompressedTokens(tuple(start), tuple(count), places, torch.cat(tables), batch.first)
