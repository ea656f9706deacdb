"""EAGLE (Li et al., 2024, arXiv:2401.15077), as Mistral publishes it: one matrix joins a token's embedding and the
model's final hidden state of the position before it, and layers like the model's follow, with a norm behind them. The
next draft reads the normed output in place of the model's hidden state.

Shape legend: T tokens, E hidden features, F = 2 E.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from workers.drafters.mtp import LayerDrafter
from workers.memory.scratch import Scratch
from workers.models.config import ModelConfig, QueryScaling
from workers.models.layer import DecoderLayer
from workers.models.model import Model
from workers.models.rope import query_scale_table, rotation_table
from workers.models.segments import Segments
from workers.weights.part import Part
from workers.weights.source import WeightSource

EAGLE_JOIN: Final = "eagle_linear."
"""Beginning of the names of the matrix that joins the two, and of its scales; no model has one."""


class Eagle(LayerDrafter):
    """The layers of a draft model of its own. Its embedding and output head are the model's."""

    def __init__(
        self, source: WeightSource, model: Model, config: ModelConfig, layer: Callable[[int], DecoderLayer]
    ) -> None:
        """`config`: of its layers, whose attention has the sizes of the model's. `layer` builds the one of an index."""
        hidden, device = model.config.hidden_size, source.device
        self.model, self.head_YE = model, model.head_YE
        self.join_EF = source.matrix(Part(f"{EAGLE_JOIN}weight", hidden, 2 * hidden))
        norm_E = source.load("model.norm.weight", hidden)
        layers = [layer(index) for index in range(config.num_layers)]
        self.cache = [spec for layer in layers for spec in layer.attention.caches]
        rotation_PO = rotation_table(config.rope, config.qk_rope_head_dim, model.max_positions, device)
        # An entry pairs a token with the hidden state before it, and such a model is trained with the position of
        # that. Rope does not care, for all entries stand one further; queries that are scaled by position do.
        scaling = config.query_scaling
        if scaling is None and model.query_scale_P is not None:
            scaling = QueryScaling(0.0, model.max_positions)  # buffers are the model's, so factors there are: of 1
        query_scale_P = query_scale_table(scaling, model.max_positions, device, ahead=1)
        self.position_numbers = rotation_PO.shape[1] + (query_scale_P is not None)
        paths = model.paths.beside(config, source.formats)
        where = norm_E, rotation_PO, config.rms_norm_eps, len(model.cache)
        self.segments = Segments(self._join, paths, layers, *where, query_scale_P=query_scale_P)

    def _join(self, token_T: Tensor, hidden_TE: Tensor | None, scratch: Scratch) -> tuple[Tensor, None]:
        """Token-wise: embedding, then hidden state, side by side through one matrix."""
        assert hidden_TE is not None
        tokens, hidden = hidden_TE.shape
        joined_TE = scratch.empty(tokens, hidden, dtype=hidden_TE.dtype)
        with scratch.scope():
            embedded_TE = scratch.empty(tokens, hidden, dtype=hidden_TE.dtype)
            torch.index_select(self.model.embedding_YE, 0, token_T, out=embedded_TE)
            both_TF = scratch.empty(tokens, 2 * hidden, dtype=hidden_TE.dtype)
            both_TF[:, :hidden].copy_(embedded_TE)
            both_TF[:, hidden:].copy_(hidden_TE)
            self.model.paths.any.linear(both_TF, self.join_EF, joined_TE, scratch)
        return joined_TE, None
