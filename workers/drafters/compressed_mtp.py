"""Multi-token prediction of DeepSeek V4: one layer that reads a token beside the residual streams of the position
before it. Its attention has a window alone, in rings of slots.

Its layer is made of the two halves that the model's layers have in segments, one behind the other: a pass over it is
part of a decode step that is captured whole, and eager in a mixed step.

Shape legend: T tokens, R rows, E hidden features, Z residual streams, F = Z * E, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from kernels.rms_norm import AddNorm, rms_norm
from workers.cache.paged import PagedCache
from workers.cache.rings import RingSpec
from workers.drafters.mtp import ChainedDrafter
from workers.memory.scratch import Scratch
from workers.models.attention.compressed_rows import rows_of_pass
from workers.models.batch import Batch
from workers.models.compressed_layer import CompressedBuffers, CompressedDecoderLayer
from workers.models.compressed_pass import attend
from workers.models.config import CompressedLayer
from workers.models.deepseek_v4_model import CompressedModel
from workers.models.deepseek_v4_parts import LayerCaches, Ring
from workers.models.deepseek_v4_weights import load_block
from workers.models.general import GeneralOps, tensor_of
from workers.models.streams import load_streams
from workers.weights.part import Part
from workers.weights.source import WeightSource

PREFIX = "mtp.0."
"""Beginning of the names of its tensors."""


class CompressedMtp(ChainedDrafter):
    """The layer `mtp.0`. Its embedding and head are the model's; the sum that its head reads of the streams has weights
    of its own, and so has the norm behind that."""

    def __init__(self, source: WeightSource, model: CompressedModel) -> None:
        config, hidden = model.config, model.config.hidden_size
        assert config.streams is not None
        self.model, self._count = model, config.streams.count
        self.embedding_norm_E = source.load(f"{PREFIX}enorm.weight", hidden)
        self.hidden_norm_E = source.load(f"{PREFIX}hnorm.weight", hidden)
        self.from_embedding_EE = source.matrix(Part(f"{PREFIX}e_proj.weight", hidden, hidden))
        self.from_hidden_EE = source.matrix(Part(f"{PREFIX}h_proj.weight", hidden, hidden))
        kind = CompressedLayer(0)
        block = load_block(source, config, PREFIX, kind, hashed=False)
        self.layer = CompressedDecoderLayer(config, kind, block, model.rotation_PO)
        end_streams = load_streams(source, f"{PREFIX}hc_head_", config, added=False)
        assert end_streams is not None
        self.end_streams = end_streams
        self.norm_E = source.load(f"{PREFIX}norm.weight", hidden)
        self._unmixed_ZZ = torch.eye(self._count, dtype=torch.float32, device=source.device)
        self.aux_hidden_state_layers = (config.num_layers,) * self._count

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

    @override
    def catch_up(
        self, token_T: Tensor, hidden_TE: Tensor, batch: Batch, cache: PagedCache, scratch: Scratch | None = None
    ) -> Tensor:
        """The residual streams of every token behind the layer, one after the other, and behind them the norm of their
        sum, [T, F + E]. Token i stands one position after the one whose streams behind the model's last layer, or
        behind this one, are the first F numbers of row i of `hidden_TE`; writes the tokens' entries."""
        model, tokens, scratch = self.model, len(token_T), scratch or Scratch(token_T.device)
        config, hidden = model.config, model.config.hidden_size
        ops = model.paths.of(batch, model.dtype, token_T.device)
        assert isinstance(ops, GeneralOps), "such a model has no other path"
        out_TX = scratch.empty(tokens, (self._count + 1) * hidden, dtype=model.dtype)
        # Of rows that decode some may be padding: their lengths say which.
        live_R = batch.decode.length_R if batch.decode is not None and batch.prefill is None else None
        with scratch.scope():
            heads = len(self.layer.block.attention.sink_H)
            buffers = CompressedBuffers.empty(config, heads, model.dtype, ops, tokens, scratch, ended=True)
            where = model.compression, config.rms_norm_eps
            rows = rows_of_pass(batch, *where, ops.choices, cache.out_of_bounds_count_1, scratch)
            buffers.token_T.copy_(token_T)
            torch.index_select(model.rotation_PO, 0, batch.position_T, out=buffers.rotation_TO)
            with scratch.scope():
                self._enter(token_T, hidden_TE, buffers, scratch)
                self.layer.project(buffers, scratch)
            attend(self.layer, rows, buffers, LayerCaches(Ring(cache.rings[-1])), scratch)
            with scratch.scope():
                norm = buffers.norm(self.norm_E, config.rms_norm_eps, self.end_streams)
                self.layer.finish(buffers, norm, buffers.normed, live_R, scratch)
            out_TX[:, :-hidden].copy_(buffers.residual_TSE.flatten(1))
            out_TX[:, -hidden:].copy_(tensor_of(buffers.normed))
        return out_TX

    def _enter(self, token_T: Tensor, hidden_TF: Tensor, buffers: CompressedBuffers, scratch: Scratch) -> None:
        """Fill the streams, each of which adds to a product of its own that of the token's embedding, and take the
        first norm of their sum."""
        model, ops, tokens = self.model, buffers.ops, len(token_T)
        hidden, eps, dtype = model.config.hidden_size, model.config.rms_norm_eps, model.dtype
        normed_TE = scratch.empty(tokens, hidden, dtype=dtype)
        torch.index_select(model.embedding_YE, 0, token_T, out=normed_TE)
        rms_norm(normed_TE, self.embedding_norm_E, normed_TE, eps=eps)
        of_token_TE = scratch.empty(tokens, hidden, dtype=dtype)
        ops.linear(normed_TE, self.from_embedding_EE, of_token_TE, scratch)
        normed_TZE = scratch.empty(tokens, self._count, hidden, dtype=dtype)
        for stream in range(self._count):
            own_TE = hidden_TF[:, stream * hidden : (stream + 1) * hidden]
            rms_norm(own_TE, self.hidden_norm_E, normed_TZE[:, stream], eps=eps)
        stream_TZE = buffers.residual_TSE
        ops.linear(normed_TZE.flatten(0, 1), self.from_hidden_EE, stream_TZE.flatten(0, 1), scratch)
        stream_TZE.add_(of_token_TE.unsqueeze(1))
        block, memory = self.layer.block, buffers.streams
        assert memory.mix_TSS is not None
        memory.open_TS.zero_()  # nothing is added to the streams, and nothing has mixed them
        memory.mix_TSS.copy_(self._unmixed_ZZ)
        norm: AddNorm = buffers.norm(block.attention_norm_E, eps, block.attention_streams)
        ops.add_norm(of_token_TE, norm, buffers.normed)

    @override
    def logits(self, hidden_NE: Tensor, scratch: Scratch | None = None) -> Tensor:
        hidden = self.model.config.hidden_size
        return self.model.logits(hidden_NE[:, -hidden:], scratch)
