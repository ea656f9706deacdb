"""A model on one rank: layers of latent attention and mixtures of experts, on one paged cache of latents.

Shape legend: T tokens, E hidden features, O rope features, N rows of logits, Y vocabulary, P positions.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from kernels.dependent import launches_dependently
from workers.cache.latent import LatentCache
from workers.memory.scratch import Scratch
from workers.models.batch import Batch
from workers.models.config import ModelConfig
from workers.models.decode_path import DecodePath
from workers.models.flow import PassTensors
from workers.models.layer import DecoderLayer, DraftLayer
from workers.models.products import InvariantProducts, Products
from workers.models.registry import FAMILIES
from workers.models.rope import rotation_table
from workers.models.segments import Segments
from workers.parallel.group import TensorParallel
from workers.weights.source import WeightSource
from workers.weights.weight import Weight


class Model:
    """A whole model on this rank. Tensors in and out are the same on every rank."""

    def __init__(
        self,
        source: WeightSource,
        config: ModelConfig,
        *,
        draft_layer: bool,
        max_positions: int,
        invariant: bool = False,
    ) -> None:
        group = source.group
        self.products = products = (InvariantProducts if invariant else Products)(group)
        self.config = config
        self.group: TensorParallel = group
        self.has_draft_layer = draft_layer
        self.cache_width = config.cache_width
        self.max_positions = max_positions
        source.progress("embedding and output head")
        self.embedding_YE = source.load("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.head_YE = self._load_head(source)
        self.norm_E = source.load("model.norm.weight", config.hidden_size)
        family = FAMILIES[config.model_type]
        self.layers: list[DecoderLayer] = []
        for index in range(config.num_layers):
            source.progress(f"layer {index + 1} of {config.num_layers}")
            self.layers.append(family.layer(source, products, config, index))
        self.draft_layer = None
        if draft_layer:
            source.progress("draft layer")
            layer = family.layer(source, products, config, config.num_layers)
            self.draft_layer = DraftLayer(source, products, config, layer)
        self.rotation_PO = rotation_table(config.rope, config.qk_rope_head_dim, max_positions, source.device)
        self.segments = Segments(self._enter, self.layers, self.norm_E, self.rotation_PO, config.rms_norm_eps, 0)
        self.draft_segments = None
        if self.draft_layer is not None:
            self.draft_segments = Segments(
                self._enter_draft,
                [self.draft_layer.layer],
                self.draft_layer.norm_E,
                self.rotation_PO,
                config.rms_norm_eps,
                config.num_layers,
            )

    def shallow(self) -> Model:
        """This model with a few of its layers: enough that it launches every kernel that the whole launches, for any
        batch. For warming up; the draft layer stays."""
        kinds = [type(layer.feed_forward) for layer in self.layers]
        last = len(kinds) - 1
        few = copy(self)
        # One of each kind, then another of the last, so that one of them has a layer behind it.
        few.layers = [self.layers[i] for i in sorted({*(kinds.index(kind) for kind in kinds), last})]
        few.segments = self.segments.of(few.layers)
        return few

    @property
    def cache_layers(self) -> int:
        """Layers of latent cache: the model's, then the draft layer's."""
        return self.config.num_layers + int(self.has_draft_layer)

    def _load_head(self, source: WeightSource) -> Weight:
        """This rank's rows of the output head; the last ranks' are padded where the vocabulary does not divide."""
        vocab, group = self.config.vocab_size, self.group
        share = -(-vocab // group.size)
        begin = min(group.rank * share, vocab)
        rows = slice(begin, min(begin + share, vocab))
        if self.config.tied_embeddings and group.size == 1:
            return Weight(self.embedding_YE)
        head_YE = source.empty(share, self.config.hidden_size).zero_()
        own_YE = head_YE[: rows.stop - rows.start]
        if self.config.tied_embeddings:
            source.settle()
            own_YE.copy_(self.embedding_YE[rows])
        else:
            source.fill_part(own_YE, "lm_head.weight", (vocab, self.config.hidden_size), (rows, slice(None)))
        return Weight(head_YE)

    def forward(self, token_T: Tensor, batch: Batch, cache: LatentCache, scratch: Scratch | None = None) -> Tensor:
        """Hidden state of every token after the final norm, [T, E]; writes the tokens' latents to the cache.

        `token_T`: int64 ids below the vocabulary size. `batch.position_T` must lie below `max_positions`. All memory
        comes from `scratch` (here and below: fresh memory when there is none), except for the prefill rows' geometry.
        """
        scratch, path = scratch or Scratch(token_T.device), DecodePath(self)
        if path.takes(batch):
            return path.forward(token_T, batch, cache, scratch)
        return self._pass(self.segments, token_T, None, batch, cache, scratch)

    def logits(self, hidden_NE: Tensor, scratch: Scratch | None = None) -> Tensor:
        """Logits of final-norm hidden states, fp32 [N, Y]."""
        scratch = scratch or Scratch(hidden_NE.device)
        rows, share, ranks = hidden_NE.shape[0], self.head_YE.shape[0], self.group.size
        part_NY = scratch.empty(rows, share, dtype=torch.float32)
        self.products.linear(hidden_NE, self.head_YE, part_NY, dependent=launches_dependently(hidden_NE.device))
        if ranks == 1:
            return part_NY
        parts_GNY = self.group.all_gather(part_NY, scratch.empty(ranks, rows, share, dtype=torch.float32))
        logits_NY = scratch.empty(rows, ranks * share, dtype=torch.float32)
        logits_NY.view(rows, ranks, share).copy_(parts_GNY.transpose(0, 1))
        return logits_NY[:, : self.config.vocab_size]

    def draft(
        self,
        token_T: Tensor,
        hidden_TE: Tensor,
        batch: Batch,
        cache: LatentCache,
        scratch: Scratch | None = None,
    ) -> Tensor:
        """Hidden states of the draft layer, [T, E]: to take `draft_logits` of, and to feed back for the next draft.

        Token i of `token_T` stands one position after the one whose hidden state (of `forward`, or of this method) is
        row i of `hidden_TE`. `batch` has that later position's cache index, and `first` = 1: entry 0 does not exist.
        """
        if self.draft_segments is None:
            raise ValueError("this model has no draft layer")
        scratch, path = scratch or Scratch(token_T.device), DecodePath(self)
        if path.takes(batch):
            return path.draft(token_T, hidden_TE, batch, cache, scratch)
        return self._pass(self.draft_segments, token_T, hidden_TE, batch, cache, scratch)

    def _pass(
        self,
        segments: Segments,
        token_T: Tensor,
        source_TE: Tensor | None,
        batch: Batch,
        cache: LatentCache,
        scratch: Scratch,
    ) -> Tensor:
        out_TE = self._hidden(token_T.shape[0], scratch)
        decode_alone = batch.decode is not None and batch.prefill is None
        # Of a step of decode rows alone some may be padding: their lengths say which.
        live_R = batch.decode.length_R if batch.decode is not None and decode_alone else None
        with scratch.scope():
            # In invariant mode queries are absorbed in the same way in every pass.
            decode_alone = decode_alone and not self.products.invariant
            flow = segments.flow(token_T.shape[0], scratch, decode_alone=decode_alone)
            tensors = PassTensors(token_T, batch.position_T, batch.cache_slot_T, live_R, source_TE, out_TE, flow)
            segments.run_pass(tensors, batch, cache, scratch)
        return out_TE

    def _enter(self, tensors: PassTensors, scratch: Scratch) -> None:
        torch.index_select(self.embedding_YE, 0, tensors.token_T, out=tensors.flow.normed_TE)

    def _enter_draft(self, tensors: PassTensors, scratch: Scratch) -> None:
        assert self.draft_layer is not None
        assert tensors.source_TE is not None
        embedded_TE = self._hidden(tensors.token_T.shape[0], scratch)
        torch.index_select(self.embedding_YE, 0, tensors.token_T, out=embedded_TE)
        self.draft_layer.join(embedded_TE, tensors.source_TE, tensors.flow.normed_TE, scratch)

    def draft_logits(self, hidden_NE: Tensor, scratch: Scratch | None = None) -> Tensor:
        """Logits of the draft layer's hidden states, fp32 [N, Y]."""
        return self.logits(hidden_NE, scratch)

    def _hidden(self, tokens: int, scratch: Scratch) -> Tensor:
        return scratch.empty(tokens, self.config.hidden_size, dtype=self.embedding_YE.dtype)
