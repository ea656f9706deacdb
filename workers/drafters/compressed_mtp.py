"""Multi-token prediction of DeepSeek V4: one layer that reads a token beside the residual streams of the position
before it. Its attention has a window alone, in rings of slots.

It runs in plain torch on a CPU, as its model does: nothing captures it yet.

Shape legend: T tokens, R rows, E hidden features, Z residual streams, F = Z * E, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from workers.cache.paged import PagedCache
from workers.cache.rings import NULL_SLOT, RingSpec
from workers.memory.scratch import Scratch
from workers.models.batch import Batch
from workers.models.config import CompressedLayer
from workers.models.deepseek_parts import linear, norm
from workers.models.deepseek_v4 import through
from workers.models.deepseek_v4_model import CompressedModel
from workers.models.deepseek_v4_parts import CompressedTokens, LayerCaches, MixedStreams, Ring
from workers.models.deepseek_v4_weights import load_block
from workers.models.drafter import DraftedRows, Drafter
from workers.models.streams import load_streams
from workers.weights.part import Part
from workers.weights.source import WeightSource

PREFIX = "mtp.0."
"""Beginning of the names of its tensors."""


class CompressedMtp(Drafter):
    """The layer `mtp.0`. Its embedding and head are the model's; the sum that its head reads of the streams has weights
    of its own, and so has the norm behind that."""

    def __init__(self, source: WeightSource, model: CompressedModel) -> None:
        config, hidden = model.config, model.config.hidden_size
        assert config.streams is not None
        self.model, self._streams = model, config.streams
        self.embedding_norm_E = source.load(f"{PREFIX}enorm.weight", hidden)
        self.hidden_norm_E = source.load(f"{PREFIX}hnorm.weight", hidden)
        self.from_embedding_EE = source.matrix(Part(f"{PREFIX}e_proj.weight", hidden, hidden))
        self.from_hidden_EE = source.matrix(Part(f"{PREFIX}h_proj.weight", hidden, hidden))
        self.block = load_block(source, config, PREFIX, CompressedLayer(0), hashed=False)
        end_streams = load_streams(source, f"{PREFIX}hc_head_", config, added=False)
        assert end_streams is not None
        self.end_streams = end_streams
        self.norm_E = source.load(f"{PREFIX}norm.weight", hidden)
        self.aux_hidden_state_layers = (config.num_layers,) * config.streams.count

    @override
    @property
    def follows(self) -> bool:
        return True

    @override
    def rings(self, width: int) -> list[RingSpec]:
        """That of its window, with room for the tokens of a step and for drafts behind them."""
        window = self.model.compression.window
        width_bytes = window + 2 * width, self.model.config.cache_width, self.model.dtype
        return [RingSpec(*width_bytes, needed=window, kept=window - 1, ahead=True)]

    def streams(self, token_T: Tensor, hidden_TF: Tensor, batch: Batch, cache: PagedCache) -> MixedStreams:
        """The residual streams of every token behind the layer. Token i stands one position after the one whose streams
        behind the model's last layer, or behind this one, are row i of `hidden_TF`; writes the tokens' entries."""
        config, eps = self.model.config, self.model.config.rms_norm_eps
        e_TE = norm(self.model.embedding_YE[token_T].float(), self.embedding_norm_E, eps)
        x_TZE = norm(hidden_TF.float().view(len(token_T), -1, config.hidden_size), self.hidden_norm_E, eps)
        x_TZE = linear(e_TE, self.from_embedding_EE).unsqueeze(1) + linear(x_TZE, self.from_hidden_EE)
        h = MixedStreams(x_TZE, self._streams, eps)
        through(self.model, self.block, h, token_T, rows_of(batch), LayerCaches(Ring(cache.rings[-1])))
        return h

    @override
    def catch_up(
        self, token_T: Tensor, hidden_TE: Tensor, batch: Batch, cache: PagedCache, scratch: Scratch | None = None
    ) -> Tensor:
        """Streams side by side, [T, F]."""
        return self.streams(token_T, hidden_TE, batch, cache).h_TZE.flatten(1)

    def logits(self, hidden_RF: Tensor, scratch: Scratch | None = None) -> Tensor:
        """Logits of the token behind those whose streams behind this layer are `hidden_RF`, fp32 [R, V]."""
        config = self.model.config
        h = MixedStreams(hidden_RF.view(len(hidden_RF), -1, config.hidden_size), self._streams, config.rms_norm_eps)
        hidden_RE = norm(h.end(self.end_streams), self.norm_E, config.rms_norm_eps)
        return self.model.logits(hidden_RE.to(self.model.dtype), scratch)

    @override
    def draft(
        self, hidden_RE: Tensor | None, rows: DraftedRows, drafts: int, cache: PagedCache, scratch: Scratch
    ) -> None:
        """A pass of one token per row leads from each draft to the next; it reads the streams of the one before."""
        hidden_RF = hidden_RE
        assert hidden_RF is not None
        for index in range(drafts):
            token_R = rows.choose(partial(self.logits, hidden_RF, scratch), index)
            batch = rows.feed(token_R, index)
            if index + 1 < drafts:
                hidden_RF = self.catch_up(token_R, hidden_RF, batch, cache)


def rows_of(batch: Batch) -> CompressedTokens:
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
