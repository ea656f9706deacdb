"""The pass of DeepSeek V4 over the tokens of a step, cut where attention stands, as `segments` cuts that of others.

Segment 0 leads from tokens to what the first layer's attention reads, segment i from the attention of layer i - 1 to
what that of layer i reads, segment L, of L layers, to the norm of the sum of the streams behind the last one. A drafter
may read the streams behind the last layer of all tokens: then segment L runs for all of them, and one behind it, L + 1,
hands on the norm.

The plain forward pass is `deepseek_v4.forward`.

Shape legend: T tokens, padding included, N tokens that are wanted, E hidden features, S residual streams, H heads of
this rank, D features of an entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from typing_extensions import override

from kernels import compressed
from kernels.rms_norm import AddNorm
from kernels.runtime.repeat import Layers, Repeat
from workers.cache.paged import PagedCache
from workers.memory.scratch import Scratch
from workers.models.attention.compressed_rows import CompressedRows, live_tokens, rows_of_pass
from workers.models.batch import Batch
from workers.models.compressed_layer import CompressedBuffers, CompressedDecoderLayer, shallow_layers
from workers.models.config import CompressedLayer
from workers.models.deepseek_v4_model import CompressedModel
from workers.models.deepseek_v4_parts import LayerCaches
from workers.models.general import GeneralOps, dependent, tensor_of
from workers.models.layer import PassTensors
from workers.models.layer_ops import LayerOps
from workers.models.step_pass import StepPass


class CompressedPass(StepPass):
    """The segments of a pass over the layers of a model, or over some of them."""

    short_chunks = (2, 3, 4, 8)
    """Attention lets more programs share a token the fewer tokens there are, twice as many at a time. The indexer
    scores tokens in equal tiles of up to four: of three where a chunk has 3, 5, 6 or 9 tokens."""

    def __init__(self, model: CompressedModel, indices: Sequence[int] | None = None) -> None:
        """`indices`: of the layers; all without them."""
        self.model = model
        self._indices = range(len(model.blocks)) if indices is None else indices
        self.layers = [self._layer(index) for index in self._indices]
        kinds = [layer.kind for layer in self.layers]
        self._places = [(kind, kinds[:index].count(kind)) for index, kind in enumerate(kinds)]
        """The kind of each layer, and how many of that kind come before it."""
        self._layers_of: WeakKeyDictionary[PagedCache, tuple[list[Tensor], dict[CompressedLayer, Layers]]] = (
            WeakKeyDictionary()
        )
        """Of each cache that is still there: its tensors, and what `own_tensors` says of them."""

    def _layer(self, index: int) -> CompressedDecoderLayer:
        model = self.model
        kind = model.compression.layers[index]
        rotation_YO = model.compressed_rotation_PO if kind.ratio else model.rotation_PO
        return CompressedDecoderLayer(model.config, kind, model.blocks[index], rotation_YO)

    @override
    def few(self, model: Any) -> CompressedPass:
        return CompressedPass(model, shallow_layers(self.layers))

    @property
    def _ends_for_all(self) -> bool:
        """Whether a drafter reads the streams behind the last layer."""
        drafter = self.model.drafter
        return drafter is not None and self.model.config.num_layers in drafter.aux_hidden_state_layers

    @override
    def __len__(self) -> int:
        return len(self.layers) + 1 + self._ends_for_all

    @property
    @override
    def heads(self) -> int:
        return len(self.layers[0].block.attention.sink_H)

    @override
    def buffers(self, tokens: int, scratch: Scratch, ops: LayerOps[Any] | None = None) -> CompressedBuffers:
        ops = ops or self.model.paths.any
        assert isinstance(ops, GeneralOps), "such a model has no other path"
        model, ended = self.model, self._ends_for_all
        return CompressedBuffers.empty(model.config, self.heads, model.dtype, ops, tokens, scratch, ended=ended)

    @override
    def over(self, buffers: Any) -> Any:
        raise NotImplementedError("no pass comes before a model's")

    @override
    def run(self, index: int, tensors: PassTensors, cache: PagedCache, scratch: Scratch) -> None:
        buffers, layers = _buffers(tensors), self.layers
        if index > len(layers):
            assert tensors.out_TE is not None
            tensors.out_TE.copy_(tensor_of(buffers.normed))
            return
        norm, out = self._norm(index, buffers), buffers.normed
        with scratch.scope():
            if index == 0:
                self._begin(tensors, buffers, norm)
            else:
                if index == len(layers) and not buffers.ended:
                    assert tensors.out_TE is not None  # else `gather` and `end` take this segment's place
                    out = tensors.out_TE
                layers[index - 1].finish(buffers, norm, out, tensors.live_R, scratch)
        self._tap(index, tensors, buffers)
        if index < len(layers):
            with scratch.scope():
                layers[index].project(buffers, scratch)

    def _begin(self, tensors: PassTensors, buffers: CompressedBuffers, norm: AddNorm) -> None:
        """Look up what tokens and positions say, and fill the streams."""
        model, embedded_TE = self.model, tensor_of(buffers.normed)
        compressed.begin(
            tensors.token_T,
            tensors.position_T,
            model.embedding_YE,
            (model.rotation_PO, model.compressed_rotation_PO),
            buffers.token_T,
            (buffers.rotation_TO, buffers.compressed_rotation_TO),
            embedded_TE,
            buffers.residual_TSE,
            buffers.streams,
            dependent=dependent(embedded_TE),
        )
        buffers.ops.add_norm(embedded_TE, norm, buffers.normed)

    def _norm(self, index: int, buffers: CompressedBuffers) -> AddNorm:
        """The norm that layer `index` reads; behind the last layer the final one."""
        model = self.model
        if index == len(self.layers):
            return buffers.norm(model.norm_E, model.config.rms_norm_eps, model.streams)
        block = self.layers[index].block
        return buffers.norm(block.attention_norm_E, model.config.rms_norm_eps, block.attention_streams)

    def _tap(self, index: int, tensors: PassTensors, buffers: CompressedBuffers) -> None:
        """Copy the streams that enter a layer, or leave the last one, for a drafter that names it: their mean, or one
        after the other where it names it once for each."""
        layer = self._indices[index] if index < len(self.layers) else self.model.config.num_layers
        own = [own_TE for number, own_TE in tensors.aux_hidden if number == layer]
        if len(own) == 1:
            torch.mean(buffers.residual_TSE, 1, out=own[0])
        for stream, own_TE in enumerate(own if len(own) > 1 else ()):
            own_TE.copy_(buffers.residual_TSE[:, stream])

    @override
    def run_pass(
        self,
        tensors: PassTensors,
        batch: Batch,
        cache: PagedCache,
        scratch: Scratch,
        segment: Callable[[int], None],
        inner: Scratch,
    ) -> None:
        buffers, caches = _buffers(tensors), self._caches(cache)
        with scratch.scope():
            rows, repeats = self._rows(batch, cache, buffers, scratch), self._repeats(batch, cache, buffers, inner)
            for index, layer in enumerate(self.layers):
                segment(index)
                call = partial(attend, layer, rows, buffers, caches[index], inner)
                if repeats is None:
                    call()
                else:
                    kind, place = self._places[index]
                    repeats[kind](place, call)
            for index in range(len(self.layers), len(self) - (tensors.out_TE is None)):
                segment(index)

    def _repeats(
        self, batch: Batch, cache: PagedCache, buffers: CompressedBuffers, inner: Scratch
    ) -> dict[CompressedLayer, Repeat] | None:
        """What repeats the launches of the first layer of each kind for the others. None where nothing does: on a CPU,
        where each layer's attention gets memory of its own, and where selections are handed on, which is no launch."""
        if not batch.position_T.is_cuda or not inner.fixed or buffers.ops.choices is not None:
            return None
        return {kind: Repeat(layers) for kind, layers in self.own_tensors(cache).items()}

    def own_tensors(self, cache: PagedCache) -> dict[CompressedLayer, Layers]:
        """Return the tensors that attention of each layer has for itself, of the layers of each kind in their order;
        the cache is nearly always the one it was the last time."""
        tensors = [*cache.layers, *cache.rings]
        before = self._layers_of.get(cache)
        # The cache alone says nothing: somebody may have given it other tensors.
        if before is None or len(tensors) != len(before[0]) or not all(map(is_, tensors, before[0])):
            own: dict[CompressedLayer, list[list[Tensor]]] = {}
            for layer, caches in zip(self.layers, self._caches(cache), strict=True):
                own.setdefault(layer.kind, []).append(layer.attention.tensors(caches))
            before = self._layers_of[cache] = tensors, {kind: Layers(of_kind) for kind, of_kind in own.items()}
        return before[1]

    def _rows(
        self, batch: Batch, cache: PagedCache, buffers: CompressedBuffers, scratch: Scratch
    ) -> list[CompressedRows]:
        where = self.model.compression, self.model.config.rms_norm_eps
        return rows_of_pass(batch, *where, buffers.ops.choices, cache.out_of_bounds_count_1, scratch)

    def _caches(self, cache: PagedCache) -> list[LayerCaches]:
        caches = self.model.caches_of(cache)
        return [caches[index] for index in self._indices]

    @override
    def buffers_to_end(self, tokens: int, scratch: Scratch) -> CompressedBuffers:
        return self.buffers(0, scratch).to_finish(tokens, scratch)

    @override
    def gather(self, buffers: CompressedBuffers, token_N: Tensor, buffers_N: CompressedBuffers) -> None:
        for of_all, of_wanted in zip(buffers.finished, buffers_N.finished, strict=True):
            torch.index_select(of_all, 0, token_N, out=of_wanted)

    @override
    def end(self, buffers_N: CompressedBuffers, out_NE: Tensor, scratch: Scratch) -> None:
        if buffers_N.ended:
            out_NE.copy_(tensor_of(buffers_N.normed))
            return
        with scratch.scope():
            self.layers[-1].finish(buffers_N, self._norm(len(self.layers), buffers_N), out_NE, None, scratch)

    @override
    def forward(
        self,
        token_T: Tensor,
        source_TE: Tensor | None,
        batch: Batch,
        cache: PagedCache,
        scratch: Scratch,
        aux_hidden: tuple[tuple[int, Tensor], ...] = (),
        ops: LayerOps[Any] | None = None,
    ) -> Tensor:
        model = self.model
        ops = ops or model.paths.of(batch, model.dtype, token_T.device)
        out_TE = scratch.empty(len(token_T), model.config.hidden_size, dtype=model.dtype)
        with scratch.scope():
            # Of a step of decode rows alone some may be padding.
            live_R = live_tokens(batch, scratch)
            buffers: Any = self.buffers(len(token_T), scratch, ops)
            inputs = token_T, batch.position_T, batch.cache_slot_T, live_R, source_TE
            tensors = PassTensors(*inputs, out_TE, buffers, aux_hidden)
            self.run_pass(
                tensors, batch, cache, scratch, lambda index: self.run(index, tensors, cache, scratch), scratch
            )
        return out_TE


def attend(
    layer: CompressedDecoderLayer,
    rows: Sequence[CompressedRows],
    buffers: CompressedBuffers,
    caches: LayerCaches,
    scratch: Scratch,
) -> None:
    """Attention of a layer, of all rows of a pass."""
    inputs = layer.inputs(buffers)
    for own in rows:
        own.attend(layer.attention, inputs, caches, buffers.attended_THD, scratch)


def _buffers(tensors: PassTensors) -> CompressedBuffers:
    buffers: Any = tensors.buffers
    assert isinstance(buffers, CompressedBuffers)
    return buffers
