"""EAGLE-3 (Li et al., 2025, arXiv:2503.01840): a layer that reads a token beside hidden states of three layers of the
model at the position before it, then beside its own.

Its vocabulary may be a part of the model's. Its logits are brought to the model's ids, -inf at the others, before
anything is chosen: so the noise that it shares with the model, and penalties, biases and the like, mean the same ids.

Shape legend: T tokens, R rows, N rows of logits, E hidden features, F = 3 E auxiliary ones, B = 2 E, V vocabulary, D
draft vocabulary (of this rank where it is loaded), Y rows of the embedding, P positions, O roped features.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from kernels.rms_norm import AddNorm, rms_norm
from workers.cache.paged import PagedCache
from workers.drafters.attention import DraftAttention
from workers.memory.scratch import Scratch
from workers.models.batch import Batch
from workers.models.drafter import DraftedRows, Drafter
from workers.models.feed_forward import DenseFeedForward
from workers.models.head import load_head
from workers.models.model import Model
from workers.weights.part import Part
from workers.weights.source import WeightSource


@dataclass(frozen=True)
class Eagle3Sizes:
    """Sizes and choices of one draft layer, attention aside."""

    intermediate: int
    draft_vocab: int
    eps: float
    aux_hidden_state_layers: tuple[int, ...]
    norm_before_residual: bool
    """Whether the residual stream begins with the normed hidden state."""
    aux_hidden_norms: bool
    """Whether each of the auxiliary hidden states is normed on its own before they are joined, as EAGLE-3.1 does."""
    norm_output: bool
    """Whether the next draft reads the normed residual stream, as EAGLE-3.1's does."""
    own_embedding: bool
    """Whether the files have one; else it is the model's."""


class Eagle3(Drafter):
    """The layer of a draft model of its own. What it hands on from draft to draft is its residual stream, which
    `logits` norms unless that is done already, with `norm_output`."""

    def __init__(
        self,
        source: WeightSource,
        model: Model,
        sizes: Eagle3Sizes,
        attention: DraftAttention,
        rotation_PO: Tensor,
        target_id_D: Tensor | None,
    ) -> None:
        """`target_id_D`: the model's id of each of the draft vocabulary's, int64; None: they are the same."""
        hidden = model.config.hidden_size
        self.model, self.sizes, self.attention, self.rotation_PO = model, sizes, attention, rotation_PO
        self.aux_hidden_state_layers, self.cache = sizes.aux_hidden_state_layers, [attention.cache]
        self.position_numbers = rotation_PO.shape[1]
        self.join_EF = source.matrix(Part("fc.weight", hidden, len(sizes.aux_hidden_state_layers) * hidden))
        self.aux_hidden_norms = [
            source.load(f"fc_norm.{index}.weight", hidden)
            for index in range(len(sizes.aux_hidden_state_layers) if sizes.aux_hidden_norms else 0)
        ]
        self.embedding_YE = model.embedding_YE
        if sizes.own_embedding:
            self.embedding_YE = source.load("embed_tokens.weight", model.config.vocab_size, hidden)
        self.embedding_norm_E = source.load("midlayer.input_layernorm.weight", hidden)
        self.hidden_norm_E = source.load("midlayer.hidden_norm.weight", hidden)
        self.feed_forward_norm_E = source.load("midlayer.post_attention_layernorm.weight", hidden)
        self.feed_forward = DenseFeedForward(source, "midlayer.mlp.", hidden, sizes.intermediate)
        self.norm_E = source.load("norm.weight", hidden)
        self.head_DE = load_head(source, "lm_head.weight", sizes.draft_vocab, hidden)
        self.target_id_D = target_id_D

    @override
    def catch_up(
        self, token_T: Tensor, hidden_TE: Tensor, batch: Batch, cache: PagedCache, scratch: Scratch | None = None
    ) -> Tensor:
        """`hidden_TE` has the auxiliary hidden states, [T, F]."""
        scratch = scratch or Scratch(token_T.device)
        out_TE = scratch.empty(token_T.shape[0], self.norm_E.shape[0], dtype=self.norm_E.dtype)
        with scratch.scope():
            joined_TE = scratch.empty(*out_TE.shape, dtype=out_TE.dtype)
            if self.aux_hidden_norms:
                aux_hidden_TF, hidden_TF = hidden_TE, scratch.empty(*hidden_TE.shape, dtype=hidden_TE.dtype)
                for index, norm_E in enumerate(self.aux_hidden_norms):
                    part = slice(index * norm_E.shape[0], (index + 1) * norm_E.shape[0])
                    rms_norm(aux_hidden_TF[:, part], norm_E, hidden_TF[:, part], eps=self.sizes.eps)
                hidden_TE = hidden_TF
            self.model.paths.any.linear(hidden_TE, self.join_EF, joined_TE, scratch)
            self._pass(token_T, joined_TE, out_TE, batch, cache, scratch)
        return out_TE

    @override
    def draft(
        self, hidden_RE: Tensor | None, rows: DraftedRows, drafts: int, cache: PagedCache, scratch: Scratch
    ) -> None:
        """A pass of one token per row leads from each draft to the next."""
        assert hidden_RE is not None
        for index in range(drafts):
            token_R = rows.choose(partial(self.logits, hidden_RE, scratch), index)
            batch = rows.feed(token_R, index)
            if index + 1 < drafts:
                next_RE = scratch.empty(*hidden_RE.shape, dtype=hidden_RE.dtype)
                self._pass(token_R, hidden_RE, next_RE, batch, cache, scratch)
                hidden_RE = next_RE

    def logits(self, hidden_NE: Tensor, scratch: Scratch | None = None) -> Tensor:
        """Compute the logits of the tokens after those that `catch_up` got, by the model's ids, fp32 [N, V]."""
        scratch = scratch or Scratch(hidden_NE.device)
        rows, share = hidden_NE.shape[0], self.head_DE.shape[0]
        out_NV = scratch.empty(rows, self.model.config.vocab_size, dtype=torch.float32)
        with scratch.scope():
            normed_NE = hidden_NE
            if not self.sizes.norm_output:
                normed_NE = scratch.empty(*hidden_NE.shape, dtype=hidden_NE.dtype)
                rms_norm(hidden_NE, self.norm_E, normed_NE, eps=self.sizes.eps)
            logits_ND = scratch.empty(rows, share, dtype=torch.float32)
            self.model.paths.any.linear(normed_NE, self.head_DE, logits_ND, scratch)
            logits_ND = self.model.group.gather_columns(logits_ND, scratch.empty)[:, : self.sizes.draft_vocab]
            if self.target_id_D is None:
                out_NV.copy_(logits_ND)
            else:
                out_NV.fill_(-torch.inf).index_copy_(1, self.target_id_D, logits_ND)
        return out_NV

    def _pass(
        self, token_T: Tensor, hidden_TE: Tensor, out_TE: Tensor, batch: Batch, cache: PagedCache, scratch: Scratch
    ) -> None:
        """The layer: embedding and hidden state, each normed, side by side into attention; then the feed-forward part.
        `out_TE` becomes the residual stream behind both, normed where the next draft reads it so."""
        ops, eps, (tokens, hidden) = self.model.paths.any, self.sizes.eps, hidden_TE.shape
        with scratch.scope():
            x_TE = scratch.empty(tokens, hidden, dtype=hidden_TE.dtype)
            both_TB = scratch.empty(tokens, 2 * hidden, dtype=hidden_TE.dtype)
            torch.index_select(self.embedding_YE, 0, token_T, out=x_TE)
            rms_norm(x_TE, self.embedding_norm_E, both_TB[:, :hidden], eps=eps)
            rms_norm(hidden_TE, self.hidden_norm_E, both_TB[:, hidden:], eps=eps)
            out_TE.copy_(both_TB[:, hidden:] if self.sizes.norm_before_residual else hidden_TE)
            cache_PKC = cache.layers[len(self.model.cache)]
            with scratch.scope():
                attended_TF = self.attention(ops, both_TB, self.rotation_PO, batch, cache_PKC, scratch)
                ops.add(
                    attended_TF, self.attention.out_EF, AddNorm(out_TE, self.feed_forward_norm_E, eps), x_TE, scratch
                )
            normed_TE = scratch.empty(tokens, hidden, dtype=hidden_TE.dtype)
            norm, weights = AddNorm(out_TE, self.norm_E, eps), (self.feed_forward.gate_up_FE, self.feed_forward.down_EI)
            ops.add_gated(x_TE, *weights, norm, normed_TE, scratch)
            if self.sizes.norm_output:
                out_TE.copy_(normed_TE)
