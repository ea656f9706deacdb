"""A model on one rank: layers of latent attention and mixtures of experts, on one paged cache of latents.

Shape legend: T tokens, E hidden features, O rope features, N rows of logits, Y vocabulary, P positions.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import torch
from torch import Tensor

from kernels.page import PAGE_TOKENS
from workers.cache.paged import PagedCache
from workers.cache.rings import RingSpec
from workers.cache.spec import CacheSpec
from workers.memory.scratch import Scratch
from workers.models.batch import Batch
from workers.models.config import ModelConfig
from workers.models.drafter import Drafter
from workers.models.execution_paths import ExecutionPaths
from workers.models.head import load_head
from workers.models.layer import DecoderLayer
from workers.models.rope import query_scale_table, rotation_table
from workers.models.segments import Segments
from workers.models.step_pass import StepPass
from workers.models.streams import load_streams
from workers.parallel.group import Group
from workers.weights.source import WeightSource
from workers.weights.weight import Weight


class Model:
    """A whole model on this rank. Tensors in and out are the same on every rank."""

    def __init__(
        self,
        source: WeightSource,
        config: ModelConfig,
        paths: ExecutionPaths,
        layer: Callable[[int], DecoderLayer],
        max_positions: int,
    ) -> None:
        """`layer` builds the layer of an index."""
        self.paths = paths
        self.config = config
        self.group: Group = paths.group
        self.max_positions = max_positions
        source.progress("embedding and output head")
        self.embedding_YE = source.load("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.head_YE = self._head(source)
        self.norm_E = source.load("model.norm.weight", config.hidden_size)
        streams = load_streams(source, "model.hc_head.hc_head_", config, added=False)
        self.layers: list[DecoderLayer] = []
        for index in range(config.num_layers):
            source.progress(f"layer {index + 1} of {config.num_layers}")
            self.layers.append(layer(index))
        self.cache: list[CacheSpec] = [spec for layer in self.layers for spec in layer.attention.caches]
        """Cache specs of its layers, in order."""
        self.rotation_PO = rotation_table(config.rope, config.qk_rope_head_dim, max_positions, source.device)
        self.query_scale_P = query_scale_table(config.query_scaling, max_positions, source.device)
        self.segments: StepPass = Segments(
            self._enter,
            paths,
            self.layers,
            self.norm_E,
            self.rotation_PO,
            config.rms_norm_eps,
            0,
            query_scale_P=self.query_scale_P,
            streams=streams,
        )
        self.streams = streams
        """Gates by which its end reads several residual streams; None where there is one."""
        self.drafter: Drafter | None = None
        """Proposes tokens to the model; None unless whoever builds the model sets it."""

    @property
    def caches(self) -> list[CacheSpec]:
        """Cache specs of all layers of the paged cache: the model's, then its drafter's."""
        return [*self.cache, *(() if self.drafter is None else self.drafter.cache)]

    def rings(self, width: int) -> list[RingSpec]:
        """Specs of what its layers keep of each slot, where a step feeds up to `width` tokens of a row; models of
        latent attention keep nothing there."""
        return []

    @property
    def snapshot_tokens(self) -> int:
        """Multiples of so many tokens at which pages and compressed entries end: there rings may be kept beside
        pages."""
        return PAGE_TOKENS

    def shallow(self) -> Model:
        """Return this model with a few of its layers: enough that it launches every kernel that the whole launches, for
        any batch. For warming up; the drafter stays."""
        kinds = [(type(layer.feed_forward), layer.attention.kind) for layer in self.layers]
        last = len(kinds) - 1
        few = copy(self)
        # One of each kind, then another of the last, so that one of them has a layer behind it.
        few.layers = [self.layers[i] for i in sorted({*(kinds.index(kind) for kind in kinds), last})]
        few.segments = self.segments.few(few)
        return few

    def _head(self, source: WeightSource) -> Weight:
        """Load this rank's rows of the output head, see `load_head`."""
        vocab, hidden = self.config.vocab_size, self.config.hidden_size
        if not self.config.tied_embeddings:
            dtype = source.lossless("lm_head.weight") if self.config.wide_head else source.dtype
            return load_head(source, "lm_head.weight", vocab, hidden, dtype)
        if source.mesh.heads.size == 1:
            return Weight(self.embedding_YE)
        share, rows = source.mesh.heads.padded_share(vocab)
        head_YE = source.zeros(share, hidden)
        source.settle()
        source.copy(head_YE[: rows.stop - rows.start], self.embedding_YE[rows])
        return Weight(head_YE)

    def aux_hidden(self, aux_hidden_TF: Tensor | None) -> tuple[tuple[int, Tensor], ...]:
        """`aux_hidden_TF`, [T, E for each of the drafter's auxiliary layers], by them."""
        if aux_hidden_TF is None or self.drafter is None:
            return ()
        parts = aux_hidden_TF.view(len(aux_hidden_TF), -1, self.config.hidden_size).unbind(1)
        return tuple(zip(self.drafter.aux_hidden_state_layers, parts, strict=True))

    def forward(
        self,
        token_T: Tensor,
        batch: Batch,
        cache: PagedCache,
        scratch: Scratch | None = None,
        aux_hidden_TF: Tensor | None = None,
    ) -> Tensor:
        """Hidden state of every token after the final norm, [T, E]; writes the tokens' latents to the cache, and, side
        by side to `aux_hidden_TF` if there is one, the auxiliary hidden states that the drafter reads.

        `token_T`: int64 ids below the vocabulary size. `batch.position_T` must lie below `max_positions`. All memory
        comes from `scratch` (here and below: fresh memory when there is none), except for the prefill rows' geometry.
        """
        scratch = scratch or Scratch(token_T.device)
        return self.segments.forward(token_T, None, batch, cache, scratch, self.aux_hidden(aux_hidden_TF))

    def logits(self, hidden_NE: Tensor, scratch: Scratch | None = None, head_YE: Weight | None = None) -> Tensor:
        """Logits of final-norm hidden states, fp32 [N, Y]. `head_YE`: this rank's rows of another head than its own."""
        scratch, head_YE = scratch or Scratch(hidden_NE.device), head_YE or self.head_YE
        part_NY = scratch.empty(hidden_NE.shape[0], head_YE.shape[0], dtype=torch.float32)
        with scratch.scope():
            self.paths.any.wide_linear(hidden_NE, head_YE, part_NY, scratch)
        return self.group.gather_columns(part_NY, scratch.empty)[:, : self.config.vocab_size]

    def _enter(self, token_T: Tensor, source_TE: Tensor | None, scratch: Scratch) -> tuple[Tensor, Tensor]:
        return self.embedding_YE, token_T
