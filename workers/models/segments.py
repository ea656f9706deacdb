"""A pass over layers, cut where attention stands: token-wise segments, and attention between them.

Segment 0 leads from tokens to the first layer's queries, segment i from the attention of layer i - 1 to the queries of
layer i, the last one to the final norm. A segment is a function of tensors: what it reads and writes is in
`PassTensors` and in the cache, it keeps nothing, and it needs to know of no row. So it can be captured for a number of
tokens and replayed for any step that has no more, whatever its rows are. Where the hidden states of few tokens are
wanted, the last segment runs for those alone (`gather`, then `end`).

The plain forward pass is `deepseek.forward`. A segment holds of its loop the end of one layer, from (11) of
`deepseek.attention` to (12), and of the next layer the first norm, and `deepseek.attention` down to (9).

Shape legend: T tokens, padding included, N tokens that are wanted, E hidden features, H heads of this rank, V value
features, O rope features, R rows, C cached features, P pages, K = 64 entries per page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from typing_extensions import override

from kernels.residual_streams import StreamGates, StreamMemory
from kernels.rms_norm import AddNorm
from kernels.runtime.repeat import Layers, Repeat
from workers.cache.paged import PagedCache
from workers.memory.scratch import Scratch
from workers.models.attention.backend import Backend
from workers.models.batch import Batch
from workers.models.execution_paths import ExecutionPaths
from workers.models.layer import DecoderLayer, PassBuffers, PassTensors
from workers.models.layer_ops import LayerOps
from workers.models.step_pass import StepPass


class Segments(StepPass):
    """The segments of one pass: the model's own layers, or a drafter's."""

    def __init__(
        self,
        enter: Callable[[Tensor, Tensor | None, Scratch], tuple[Tensor, Tensor | None]],
        paths: ExecutionPaths,
        layers: Sequence[DecoderLayer],
        norm_E: Tensor,
        rotation_PO: Tensor,
        eps: float,
        cache_layer: int,
        caches: Sequence[slice] | None = None,
        query_scale_P: Tensor | None = None,
        streams: StreamGates | None = None,
    ) -> None:
        """`enter` says what enters the residual stream, of `token_T` and `source_TE` of `PassTensors`: rows of a matrix
        by their indices, or without those a matrix of T rows. The caches of `layers` are those from `cache_layer` on,
        in their order, unless `caches` says which each has. `query_scale_P`: see `query_scale_table`. `streams`: by
        which the final norm reads several residual streams; None where there is one."""
        self.layers, self.paths = layers, paths
        self._enter, self._norm_E, self._eps, self._cache_layer = enter, norm_E, eps, cache_layer
        self._rotation_PO, self._query_scale_P, self._streams = rotation_PO, query_scale_P, streams
        ends = accumulate((len(layer.attention.caches) for layer in layers), initial=cache_layer)
        self._caches_of = caches or [slice(*bounds) for bounds in pairwise(ends)]
        self._layers_of: WeakKeyDictionary[PagedCache, tuple[list[Tensor], Layers]] = WeakKeyDictionary()
        """Of each cache that is still there: its tensors, and what `own_tensors` says of them."""
        self.short_chunks = layers[0].attention.short_chunks

    def of(self, layers: Sequence[DecoderLayer]) -> Segments:
        """The segments of a pass over some of these layers."""
        caches = [self._caches_of[next(i for i, own in enumerate(self.layers) if own is layer)] for layer in layers]
        where = self._rotation_PO, self._eps, self._cache_layer, caches, self._query_scale_P, self._streams
        return Segments(self._enter, self.paths, layers, self._norm_E, *where)

    @override
    def few(self, model: Any) -> Segments:
        return self.of(model.layers)

    @override
    def __len__(self) -> int:
        return len(self.layers) + 1

    @property
    @override
    def heads(self) -> int:
        return self.layers[0].attention.heads.count

    @override
    def buffers(self, tokens: int, scratch: Scratch, ops: LayerOps[Any] | None = None) -> PassBuffers[Any]:
        """Memory for passes of so many tokens on path; without one, on that for any pass."""
        attention, hidden, dtype = self.layers[0].attention, self._norm_E.shape[0], self._norm_E.dtype
        rotation_PO, ops = self._rotation_PO, ops or self.paths.any
        rotation_shape = tokens, rotation_PO.shape[1]
        return PassBuffers(
            ops=ops,
            normed=ops.allocate_normed(tokens, hidden, dtype, self._eps, scratch),
            residual_TE=self._residual(ops, tokens, scratch),
            rotation_TO=(
                scratch.empty(*rotation_shape, dtype=rotation_PO.dtype)
                if attention.rotates or not ops.decode_alone
                else None
            ),
            query_scale_T=None if self._query_scale_P is None else scratch.empty(tokens, dtype=torch.float32),
            projected=attention.allocate_projected(ops, tokens, scratch),
            attended_THV=attention.allocate_attended(tokens, scratch),
            streams=self._stream_memory(tokens, scratch),
        )

    def _residual(self, ops: LayerOps[Any], tokens: int, scratch: Scratch) -> Tensor:
        """Memory for the residual stream, or for several."""
        hidden, count = self._norm_E.shape[0], self._stream_count
        residual_TF = ops.allocate_residual(tokens, (count or 1) * hidden, self._norm_E.dtype, scratch)
        return residual_TF.view(tokens, count, hidden) if count else residual_TF

    def _stream_memory(self, tokens: int, scratch: Scratch) -> StreamMemory | None:
        if not (count := self._stream_count):
            return None
        return StreamMemory.empty(tokens, count, self._norm_E.shape[0], scratch.empty)

    @property
    def _stream_count(self) -> int:
        """Residual streams, where there are several; else 0."""
        return 0 if self._streams is None else self._streams.base_M.shape[0]

    @override
    def run(self, index: int, tensors: PassTensors, cache: PagedCache, scratch: Scratch) -> None:
        """Segment `index`, for whoever captures it."""
        buffers, norm = tensors.buffers, self._norm(index, tensors.buffers)
        with scratch.scope():
            if index == len(self.layers):
                self._end(buffers, norm, tensors.out_TE, tensors.live_R, scratch)
                return
            if index:
                self.layers[index - 1].finish(buffers, norm, buffers.normed, tensors.live_R, scratch)
            else:
                self._begin(tensors, norm, scratch)
        self._tap(index, tensors)
        ops, layer, x = buffers.ops, self.layers[index], buffers.normed
        with scratch.scope():
            if layer.attention_gate is not None:
                ops.gate(x, layer.attention_gate, scratch)
            where = buffers.rotation_TO, tensors.cache_slot_T, self._caches(index, cache)[0]
            layer.attention.project(ops, x, *where, buffers.projected, scratch, buffers.query_scale_T)

    def _norm(self, index: int, buffers: PassBuffers[Any]) -> AddNorm:
        """The norm that layer `index` reads; behind the last layer the final one."""
        norm_E, gates = self._norm_E, self._streams
        if index < len(self.layers):
            norm_E, gates = self.layers[index].attention_norm_E, self.layers[index].attention_streams
        return AddNorm(buffers.residual_TE, norm_E, self._eps, gates, buffers.streams)

    def _begin(self, tensors: PassTensors, norm: AddNorm, scratch: Scratch) -> None:
        """Fill the residual stream, and take the first norm of it."""
        buffers = tensors.buffers
        if buffers.rotation_TO is not None:
            torch.index_select(self._rotation_PO, 0, tensors.position_T, out=buffers.rotation_TO)
        if buffers.query_scale_T is not None:
            assert self._query_scale_P is not None
            torch.index_select(self._query_scale_P, 0, tensors.position_T, out=buffers.query_scale_T)
        entering = self._enter(tensors.token_T, tensors.source_TE, scratch)
        buffers.ops.enter(*entering, norm, buffers.normed)

    @staticmethod
    def _tap(index: int, tensors: PassTensors) -> None:
        for layer, aux_hidden_TE in tensors.aux_hidden:
            if layer == index:
                aux_hidden_TE.copy_(tensors.buffers.residual_TE)

    @override
    def over(self, buffers: PassBuffers[Any]) -> PassBuffers[Any]:
        """The same memory for this pass, of buffers for one whose layers are of the same shape, but may have several
        residual streams."""
        if buffers.streams is None or self._streams is not None:
            return buffers
        tokens, _, hidden = buffers.residual_TE.shape
        residual_TE = buffers.residual_TE.view(-1)[: tokens * hidden].view(tokens, hidden)
        return replace(buffers, residual_TE=residual_TE, streams=None)

    @override
    def buffers_to_end(self, tokens: int, scratch: Scratch) -> PassBuffers[Any]:
        """Memory for so many tokens that are wanted: what `end` reads, and no other buffers."""
        residual_NE = self._residual(self.paths.any, tokens, scratch)
        attention, buffers = self.layers[0].attention, self.buffers(0, scratch)
        attended_NHV, projected = attention.allocate_attended(tokens, scratch), buffers.projected
        if projected.gate_THV is not None:
            projected = replace(projected, gate_THV=attention.allocate_attended(tokens, scratch))
        buffers = replace(buffers, attended_THV=attended_NHV, projected=projected)
        return replace(buffers, residual_TE=residual_NE, streams=self._stream_memory(tokens, scratch))

    @override
    def gather(self, buffers: PassBuffers[Any], token_N: Tensor, buffers_N: PassBuffers[Any]) -> None:
        """Copy the input of `end` for the tokens `token_N` (int64), in a pass whose last attention has run."""
        for of_all, of_wanted in zip(buffers.finished, buffers_N.finished, strict=True):
            assert of_all.shape[1:] == of_wanted.shape[1:]
            torch.index_select(of_all, 0, token_N, out=of_wanted)

    @override
    def end(self, buffers_N: PassBuffers[Any], out_NE: Tensor, scratch: Scratch) -> None:
        """The last segment for the tokens that `buffers_N` holds, none of them padding."""
        with scratch.scope():
            self._end(buffers_N, self._norm(len(self.layers), buffers_N), out_NE, None, scratch)

    def _end(
        self, buffers: PassBuffers[Any], norm: AddNorm, out_TE: Tensor | None, live_R: Tensor | None, scratch: Scratch
    ) -> None:
        assert out_TE is not None  # else `gather` and `end` take this segment's place
        last = buffers.ops.last(buffers.normed, out_TE)
        self.layers[-1].finish(buffers, norm, last, live_R, scratch)
        buffers.ops.leave(norm, last, out_TE)

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
        """A whole pass, layer by layer, in memory of `scratch`: final hidden states [T, E]. `source_TE`, `aux_hidden`:
        see `PassTensors`. `ops`: without it those of the fastest path."""
        ops = ops or self.paths.of(batch, self._norm_E.dtype, self._norm_E.device)
        out_TE = scratch.empty(token_T.shape[0], self._norm_E.shape[0], dtype=self._norm_E.dtype)
        # Of a step of decode rows alone some may be padding: their lengths say which.
        live_R = batch.decode.length_R if batch.decode is not None and batch.prefill is None else None
        with scratch.scope():
            buffers = self.buffers(token_T.shape[0], scratch, ops)
            if batch.given_TS is not None or batch.dense:
                buffers = replace(buffers, projected=buffers.projected.unscored(keys=batch.dense))
            tensors = PassTensors(
                token_T, batch.position_T, batch.cache_slot_T, live_R, source_TE, out_TE, buffers, aux_hidden
            )
            caches = [self._caches(index, cache) for index in range(len(self.layers))]
            repeat, passed = self._repeat(batch, cache), (buffers, batch, cache, scratch, scratch)
            backends = self._backends(*passed) if batch.prefill is None else None
            first, *norms = [self._norm(index, buffers) for index in range(len(self))]
            x, out = buffers.normed, [buffers.normed] * len(self.layers)
            out[-1] = ops.last(x, out_TE)
            with scratch.scope():
                self._begin(tensors, first, scratch)
            for index, (layer, own, norm) in enumerate(zip(self.layers, caches, norms, strict=True)):
                if aux_hidden:
                    self._tap(index, tensors)
                # Each of the two token-wise parts has all of the scratch's free memory.
                with scratch.scope():
                    if layer.attention_gate is not None:
                        ops.gate(x, layer.attention_gate, scratch)
                    where = buffers.rotation_TO, batch.cache_slot_T, own[0]
                    layer.attention.project(ops, x, *where, buffers.projected, scratch, buffers.query_scale_T)
                if backends is None:
                    backends = self._backends(*passed)
                attend = partial(layer.attention.attend, backends, *own)
                attend() if repeat is None else repeat(index, attend)
                with scratch.scope():
                    layer.finish(buffers, norm, out[index], live_R, scratch)
            ops.leave(norms[-1], out[-1], out_TE)
        return out_TE

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
        """A whole pass, cut into segments, without the last one where `tensors` have no output. `segment` runs a
        segment of these tensors by its index, as `run` does or as a graph; attention of the rows of `batch`, whose
        tokens come first, runs between them. The plan of decode rows lives across segments, in `scratch`. Attention's
        other memory comes from `inner`, which is all the segments' while they run."""
        with scratch.scope():
            repeat, passed = self._repeat(batch, cache), (tensors.buffers, batch, cache, scratch, inner)
            backends = self._backends(*passed) if batch.prefill is None else None
            for index, layer in enumerate(self.layers):
                segment(index)
                if backends is None:
                    backends = self._backends(*passed)
                attend = partial(layer.attention.attend, backends, *self._caches(index, cache))
                attend() if repeat is None else repeat(index, attend)
            if tensors.out_TE is not None:
                segment(len(self.layers))

    def _backends(
        self, buffers: PassBuffers[Any], batch: Batch, cache: PagedCache, scratch: Scratch, inner: Scratch
    ) -> list[Backend]:
        """How the rows of a pass attend, in every layer. For decode rows alone it is found out before the first layer,
        so that their plan is launched in front. Where there are prefill rows it is when the first layer attends,
        because it takes the host a while, and the device has the first segment meanwhile. The plan comes from
        `scratch`, other memory from `inner`, which may be the same."""
        attention = self.layers[0].attention
        counted = replace(batch, out_of_bounds_count_1=cache.out_of_bounds_count_1, group=self.paths.group.sharing)
        planned = attention.plan(counted, scratch)
        if buffers.ops.choices is not None:
            planned = planned.noting(buffers.ops.choices)
        with nullcontext() if inner is scratch else inner.scope():
            where = buffers.projected, buffers.attended_THV, planned, attention.geometry(batch), self._rotation_PO
            return attention.backends(*where, inner)

    def _repeat(self, batch: Batch, cache: PagedCache) -> Repeat | None:
        """What repeats the first layer's launches of attention for the layers behind it; None on a CPU."""
        return Repeat(self.own_tensors(cache)) if batch.position_T.is_cuda else None

    def own_tensors(self, cache: PagedCache) -> Layers:
        """Return the tensors that each layer's attention has for itself; the cache is nearly always the one it was the
        last time."""
        tensors = cache.layers[self._caches_of[0].start : self._caches_of[-1].stop]
        before = self._layers_of.get(cache)
        # The cache alone says nothing: somebody may have given it other tensors.
        if before is None or len(tensors) != len(before[0]) or not all(map(is_, tensors, before[0])):
            own = [layer.attention.tensors(*self._caches(i, cache)) for i, layer in enumerate(self.layers)]
            before = self._layers_of[cache] = tensors, Layers(own)
        return before[1]

    def _caches(self, index: int, cache: PagedCache) -> list[Tensor]:
        return cache.layers[self._caches_of[index]]
