"""Multi-token prediction (DeepSeek-V3, section 2.2): one layer that reads a token beside the hidden state of the
position before it, and leaves the hidden state that the next token is read beside. So its pass leads from each draft to
the next, as that of other drafters does (`ChainedDrafter`).

Shape legend: T tokens, R rows, N rows of logits, E hidden features, F = 2 E, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from kernels.rms_norm import rms_norm
from workers.cache.paged import PagedCache
from workers.memory.scratch import Scratch
from workers.models.batch import Batch
from workers.models.drafter import DraftedRows, Drafter
from workers.models.head import load_head
from workers.models.layer import DecoderLayer
from workers.models.model import Model
from workers.models.segments import Segments
from workers.weights.part import Part
from workers.weights.source import WeightSource
from workers.weights.weight import Weight


class ChainedDrafter(Drafter):
    """Base of drafters whose pass, `catch_up`, reads a token beside what the position before it has left, and leaves
    that which the next token is read beside: at first the model's, and then their own, which is of the same kind."""

    @abstractmethod
    def logits(self, hidden_NE: Tensor, scratch: Scratch | None = None) -> Tensor:
        """Logits of the token behind those that `catch_up` has made `hidden_NE` of, fp32 [N, V]."""

    @override
    def draft(
        self, hidden_RE: Tensor | None, rows: DraftedRows, drafts: int, cache: PagedCache, scratch: Scratch
    ) -> None:
        """A pass of one token per row leads from each draft to the next."""
        for index in range(drafts):
            assert hidden_RE is not None
            token_R = rows.choose(partial(self.logits, hidden_RE, scratch), index)
            batch = rows.feed(token_R, index)
            if index + 1 < drafts:
                hidden_RE = self.catch_up(token_R, hidden_RE, batch, cache, scratch)


class LayerDrafter(ChainedDrafter):
    """Base of drafters whose pass is one over layers like the model's, and which read its final hidden states."""

    model: Model
    head_YE: Weight
    """This rank's rows of its output head."""
    segments: Segments

    @override
    def catch_up(
        self, token_T: Tensor, hidden_TE: Tensor, batch: Batch, cache: PagedCache, scratch: Scratch | None = None
    ) -> Tensor:
        return self.segments.forward(token_T, hidden_TE, batch, cache, scratch or Scratch(token_T.device))

    @override
    def logits(self, hidden_NE: Tensor, scratch: Scratch | None = None) -> Tensor:
        return self.model.logits(hidden_NE, scratch, self.head_YE)


class Mtp(LayerDrafter):
    """The layer behind a model's last one. Its embedding and head are the model's, unless the checkpoint has others."""

    def __init__(self, source: WeightSource, model: Model, layer: DecoderLayer) -> None:
        """`layer`: of index `config.num_layers`."""
        config, hidden = model.config, model.config.hidden_size
        prefix = f"model.layers.{config.num_layers}."
        self.model, self.layer, self.eps = model, layer, config.rms_norm_eps
        self.embedding_norm_E = source.load(f"{prefix}enorm.weight", hidden)
        self.hidden_norm_E = source.load(f"{prefix}hnorm.weight", hidden)
        self.join_EF = source.matrix(Part(f"{prefix}eh_proj.weight", hidden, 2 * hidden))
        self.norm_E = source.load(f"{prefix}shared_head.norm.weight", hidden)
        self.embedding_YE, self.head_YE = model.embedding_YE, model.head_YE
        if not source.repeats(embedding := f"{prefix}embed_tokens.weight"):
            self.embedding_YE = source.load(embedding, config.vocab_size, hidden)
        if not source.repeats(head := f"{prefix}shared_head.head.weight"):
            self.head_YE = load_head(source, head, config.vocab_size, hidden)
        self.cache = layer.attention.caches
        if config.indexing is not None and config.indexing.shared_by_drafts:
            self.keeps = config.indexing.top_k
        self.segments = Segments(
            self._join,
            model.paths,
            [layer],
            self.norm_E,
            model.rotation_PO,
            config.rms_norm_eps,
            len(model.cache),
            query_scale_P=model.query_scale_P,
        )

    def _join(self, token_T: Tensor, hidden_TE: Tensor | None, scratch: Scratch) -> tuple[Tensor, None]:
        """Token-wise: embedding, then hidden state, each normed, side by side through one matrix."""
        assert hidden_TE is not None
        tokens, hidden = hidden_TE.shape
        joined_TE = scratch.empty(tokens, hidden, dtype=hidden_TE.dtype)
        with scratch.scope():
            embedded_TE = scratch.empty(tokens, hidden, dtype=hidden_TE.dtype)
            torch.index_select(self.embedding_YE, 0, token_T, out=embedded_TE)
            both_TF = scratch.empty(tokens, 2 * hidden, dtype=hidden_TE.dtype)
            rms_norm(embedded_TE, self.embedding_norm_E, both_TF[:, :hidden], eps=self.eps)
            rms_norm(hidden_TE, self.hidden_norm_E, both_TF[:, hidden:], eps=self.eps)
            self.model.paths.any.linear(both_TF, self.join_EF, joined_TE, scratch)
        return joined_TE, None
