"""Drafts of DeepSeek V4 in blocks (DSpark, 2026): the newest token and noise tokens go through layers with a window
together, and see all of each other. So one pass makes as many drafts as a block has tokens.

What the block sees before itself, its context, is made of what the model has computed of those tokens: the means of its
residual streams behind some layers. A layer's entry of a token depends on nothing behind that token, and on no other
token but through the model. It lies in a ring of the row's slot.

Both passes are made of the parts that segments have, and read no number of the device on the host: they are part of a
decode step that is captured whole, and eager in a mixed step.

Shape legend: T tokens, R rows, K tokens of a block, N = R * K, D drafts of a step, E hidden features, F = E for each
layer that is read, M features of the Markov head, V vocabulary, Y rows of a head on this rank, J = E + M, O rope
features, C features of an entry, X slots and one, L tokens of a ring.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from kernels import compressed
from kernels.compressed import TokenRows
from kernels.rms_norm import AddNorm
from workers.cache.paged import PagedCache
from workers.cache.rings import RingSpec
from workers.memory.scratch import Scratch
from workers.models.attention.compressed_rows import LayerAttention, row_of_tokens, token_rows
from workers.models.batch import Batch
from workers.models.compressed_kernels import attend
from workers.models.compressed_layer import CompressedBuffers, CompressedDecoderLayer
from workers.models.config import CompressedLayer, Dspark
from workers.models.deepseek_v4_model import CompressedModel
from workers.models.deepseek_v4_weights import load_block
from workers.models.drafter import DraftedRows, Drafter
from workers.models.general import GeneralOps, dependent, tensor_of
from workers.models.head import load_head
from workers.models.streams import load_streams
from workers.weights.part import Part
from workers.weights.source import WeightSource
from workers.weights.weight import Weight


class DsparkDrafter(Drafter):
    """The layers `mtp.0` and up. Embedding and head are the model's. Logits of a draft get what the token before it
    adds to them, `w2 · w1[token]`, so drafts are chosen one after the other all the same."""

    estimates = True

    def __init__(self, source: WeightSource, model: CompressedModel) -> None:
        config, hidden, vocab = model.config, model.config.hidden_size, model.config.vocab_size
        assert config.dspark is not None
        self.model, self._eps = model, config.rms_norm_eps
        self.sizes: Dspark = config.dspark
        prefixes = [f"mtp.{stage}." for stage in range(self.sizes.stages)]
        first, last, rank = prefixes[0], prefixes[-1], self.sizes.markov_rank
        self.join_EF = source.matrix(Part(f"{first}main_proj.weight", hidden, len(self.sizes.layers) * hidden))
        self.context_norm_E = source.load(f"{first}main_norm.weight", hidden)
        kind = CompressedLayer(0)
        blocks = [load_block(source, config, prefix, kind, hashed=False) for prefix in prefixes]
        self.layers = [CompressedDecoderLayer(config, kind, block, model.rotation_PO) for block in blocks]
        end_streams = load_streams(source, f"{last}hc_head_", config, added=False)
        assert end_streams is not None
        self.end_streams = end_streams
        self.norm_E = source.load(f"{last}norm.weight", hidden)
        self.markov_VM = source.load(f"{last}markov_head.markov_w1.weight", vocab, rank)
        self.markov_YM = load_head(source, f"{last}markov_head.markov_w2.weight", vocab, rank)
        confidence_1J = source.load(f"{last}confidence_head.proj.weight", 1, hidden + rank, dtype=torch.float32)
        self.confidence_1J = Weight(confidence_1J)
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
        model, tokens, scratch = self.model, len(token_T), scratch or Scratch(token_T.device)
        hidden, rope, width = model.config.hidden_size, model.config.qk_rope_head_dim, model.config.cache_width
        ops = model.paths.of(batch, model.dtype, token_T.device)
        assert isinstance(ops, GeneralOps), "such a model has no other path"
        with scratch.scope():
            position_T = _own_positions(batch, scratch)
            kinds = token_rows(replace(batch, position_T=position_T), cache.out_of_bounds_count_1, scratch)
            rotation_TO = scratch.empty(tokens, rope, dtype=torch.float32)
            torch.index_select(model.rotation_PO, 0, position_T, out=rotation_TO)
            joined_TE = scratch.empty(tokens, hidden, dtype=model.dtype)
            context = ops.latent_linear(hidden_TE, self.join_EF, self.context_norm_E, self._eps, joined_TE, scratch)
            made_TC = scratch.empty(tokens, width, dtype=model.dtype)
            for layer, ring_XLC in zip(self.layers, self._rings(cache), strict=True):
                weights = layer.block.attention
                ops.linear(context, weights.kv_DE, made_TC, scratch)
                entry_TC = scratch.empty(tokens, width, dtype=ring_XLC.dtype)
                for rows, own in kinds:
                    self._store(made_TC[own], weights.kv_norm_D, rotation_TO[own], entry_TC[own], ring_XLC, rows)

    def _store(
        self, made_TC: Tensor, norm_C: Tensor, rotation_TO: Tensor, entry_TC: Tensor, ring_XLC: Tensor, rows: TokenRows
    ) -> None:
        """Make entries and keep them; nothing asks for queries."""
        made = made_TC.unsqueeze(1)[:, :0], made_TC, norm_C, rotation_TO, entry_TC, ring_XLC, rows
        compressed.rope_store(*made, window=self.model.compression.window, eps=self._eps)
        if not rows.width:
            compressed.keep_entries(entry_TC, ring_XLC, rows)

    @override
    def draft(
        self, hidden_RE: Tensor | None, rows: DraftedRows, drafts: int, cache: PagedCache, scratch: Scratch
    ) -> None:
        """One pass over a block of every row, then a choice for each draft."""
        if not drafts:
            return
        model, state, count = self.model, rows.state, len(rows.slot_R)
        # The last place of the slots' state is nobody's, whose slot is -1.
        place_R = torch.remainder(rows.slot_R, len(state.last_S), out=scratch.empty(count, dtype=torch.int64))
        token_R, start_R = (scratch.empty(count, dtype=torch.int64) for _ in range(2))
        torch.index_select(state.last_S, 0, place_R, out=token_R)
        torch.index_select(state.length_S, 0, place_R, out=start_R)
        x_DRE, normed_DRE = (
            scratch.empty(drafts, count, model.config.hidden_size, dtype=model.dtype) for _ in range(2)
        )
        with scratch.scope():
            x_RKE, normed_RKE = self.block(token_R, start_R, rows.slot_R, cache, scratch)
            x_DRE.copy_(x_RKE.transpose(0, 1)[:drafts])
            normed_DRE.copy_(normed_RKE.transpose(0, 1)[:drafts])
        logits_DRV = model.logits(normed_DRE.flatten(0, 1), scratch).view(drafts, count, -1)
        before_DRM = scratch.empty(drafts, count, self.sizes.markov_rank, dtype=self.markov_VM.dtype)
        for index in range(drafts):
            torch.index_select(self.markov_VM, 0, token_R, out=before_DRM[index])
            token_R = rows.choose(partial(self._logits, logits_DRV[index], before_DRM[index], scratch), index)
            rows.feed(token_R, index)
        if self.least_confidence:
            with scratch.scope():
                rows.verify(self._likely(x_DRE, before_DRM, scratch), drafts)

    def block(
        self, token_R: Tensor, start_R: Tensor, slot_R: Tensor, cache: PagedCache, scratch: Scratch
    ) -> tuple[Tensor, Tensor]:
        """What the logits of each of a block's tokens are made of: a sum of its streams, and the norm of that, both
        [R, K, E]. `token_R`: the rows' newest tokens, which have no entry yet; `start_R`: where they stand."""
        model, (rows, size) = self.model, (len(token_R), self.sizes.block)
        config, window, ops = model.config, model.compression.window, model.paths.decode
        sum_NE = scratch.empty(rows * size, config.hidden_size, dtype=model.dtype)
        heads = len(self.layers[0].block.attention.sink_H)
        buffers = CompressedBuffers.empty(config, heads, model.dtype, ops, rows * size, scratch, ended=True)
        buffers.token_T.fill_(self.sizes.noise_token)
        buffers.token_T.view(rows, size)[:, 0].copy_(token_R)
        place_K = torch.arange(size, out=scratch.empty(size, dtype=torch.int64))
        position_RK = scratch.empty(rows, size, dtype=torch.int64)
        torch.add(start_R.unsqueeze(1), place_K, out=position_RK)
        no_page_R1 = scratch.empty(rows, 1, dtype=torch.int32)
        where = position_RK.flatten(), row_of_tokens(rows, size, scratch), slot_R, no_page_R1
        of_block = TokenRows(*where, cache.out_of_bounds_count_1)
        # Experts compute nothing for rows of nobody, whose slot is -1.
        live_R = torch.add(slot_R, 1, out=scratch.empty(rows, dtype=torch.int64))
        embedded_NE = tensor_of(buffers.normed)
        compressed.begin(
            buffers.token_T,
            position_RK.flatten(),
            model.embedding_YE,
            (model.rotation_PO, model.compressed_rotation_PO),
            buffers.token_T,
            (buffers.rotation_TO, buffers.compressed_rotation_TO),
            embedded_NE,
            buffers.residual_TSE,
            buffers.streams,
            dependent=dependent(embedded_NE),
        )
        ops.add_norm(embedded_NE, self._norm(0, buffers), buffers.normed)
        for stage, (layer, ring_XLC) in enumerate(zip(self.layers, self._rings(cache), strict=True)):
            norm = self._norm(stage + 1, buffers)
            if stage + 1 == len(self.layers):
                norm = replace(norm, memory=replace(buffers.streams, read_TE=sum_NE))
            with scratch.scope():
                layer.project(buffers, scratch)
                self._attend(layer.attention, buffers, ring_XLC, of_block, window, scratch)
                layer.finish(buffers, norm, buffers.normed, live_R, scratch)
        return sum_NE.view(rows, size, -1), tensor_of(buffers.normed).view(rows, size, -1)

    def _attend(
        self,
        layer: LayerAttention,
        buffers: CompressedBuffers,
        ring_XLC: Tensor,
        rows: TokenRows,
        window: int,
        scratch: Scratch,
    ) -> None:
        """Every token of a block sees the same: the window of entries before the block, and the entries of the whole
        block, which nobody keeps."""
        weights, size, q_NHC = layer.weights, self.sizes.block, buffers.q_THD
        entry_NC = scratch.empty(*buffers.kv_TD.shape, dtype=ring_XLC.dtype)
        made = q_NHC, buffers.kv_TD, weights.kv_norm_D, buffers.rotation_TO, entry_NC, ring_XLC, rows
        compressed.rope_store(*made, window=window, eps=self._eps)
        attend(
            q_NHC,
            ring_XLC,
            entry_NC,
            None,
            None,
            weights.sink_H,
            buffers.rotation_TO,
            buffers.attended_THD,
            rows,
            scratch,
            window=window + size,
            ratio=0,
            block=size,
        )

    def _norm(self, stage: int, buffers: CompressedBuffers) -> AddNorm:
        """The norm that a layer reads; behind the last one that of the logits."""
        if stage == len(self.layers):
            return buffers.norm(self.norm_E, self._eps, self.end_streams)
        block = self.layers[stage].block
        return buffers.norm(block.attention_norm_E, self._eps, block.attention_streams)

    def _logits(self, logits_RV: Tensor, before_RM: Tensor, scratch: Scratch) -> Tensor:
        return self.model.logits(before_RM, scratch, self.markov_YM).add_(logits_RV)

    def _likely(self, x_DRE: Tensor, before_DRM: Tensor, scratch: Scratch) -> Tensor:
        """Drafts of each row that are accepted with at least the probability that is wanted, int64."""
        sure_DR = self.confidence(x_DRE, before_DRM, scratch)
        for index in range(1, len(sure_DR)):
            sure_DR[index].mul_(sure_DR[index - 1])
        # As integers at once: on a GPU a sum of others would be one of a copy.
        likely_DR = torch.ge(sure_DR, self.least_confidence, out=scratch.empty(*sure_DR.shape, dtype=torch.int64))
        return torch.sum(likely_DR, 0, out=scratch.empty(sure_DR.shape[1], dtype=torch.int64))

    def confidence(self, x_DRE: Tensor, before_DRM: Tensor, scratch: Scratch) -> Tensor:
        """Estimate of the probability that a draft is accepted if those before it in its block are, fp32 [D, R]. It is
        not calibrated, and was trained for rejection sampling, which accepts more. `x_DRE`: sums of streams of `block`.
        `before_DRM`: the first matrix of the Markov head, of the tokens before them."""
        (drafts, rows, hidden), features = x_DRE.shape, self.confidence_1J.shape[1]
        made_DR1 = scratch.empty(drafts, rows, 1, dtype=torch.float32)
        with scratch.scope():
            joined_DRJ = scratch.empty(drafts, rows, features, dtype=torch.float32)
            joined_DRJ[..., :hidden].copy_(x_DRE)
            joined_DRJ[..., hidden:].copy_(before_DRM)
            product = joined_DRJ.flatten(0, 1), self.confidence_1J, made_DR1.flatten(0, 1)
            self.model.paths.any.wide_linear(*product, scratch)
        return made_DR1.sigmoid_().squeeze(2)

    def _rings(self, cache: PagedCache) -> list[Tensor]:
        return cache.rings[-self.sizes.stages :]


def _own_positions(batch: Batch, scratch: Scratch) -> Tensor:
    """The positions before those of a batch, int64 [T]; of rows of nobody, which begin anywhere, at least 0."""
    position_T = scratch.empty(len(batch.position_T), dtype=torch.int64)
    return torch.sub(batch.position_T, batch.first, out=position_T).clamp_(min=0)
