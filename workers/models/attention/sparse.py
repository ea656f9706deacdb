"""Sparse attention (DeepSeek-V3.2, 2025, section 2.1): latent attention whose queries attend to the tokens alone that
an indexer chooses. `deepseek_sparse.select` is that choice in plain torch.

The token-wise side also leaves what the indexer scores with. Attention then has four parts: index keys of all rows are
written, every cached token that a query sees is scored, the best are selected, and the query attends to these in the
absorbed form. Tokens take these parts one by one, whatever row they belong to, so decode rows of any width and chunks
of prompts do so, too. Nothing branches where a context is short: of so few tokens all are selected. Only a pass of
decode rows alone may be told that all of them are so short (`Batch.dense`), and attends densely then (`short_rows`).

Ranks that share out the cache score and select by shards, and attend with the heads of all to what they have
(`sparse_shards`).

What was selected lives from one layer to the next, because layers without an indexer attend to it as well. It may live
on in memory of the caller's, whose next passes then attend to it without an indexer (`Batch.kept_TS`, `given_TS`).

Shape legend: T tokens, H heads of this rank, V value features, C cached features, O rope features, R rows, P pages (of
`rotation_PO`: positions), K = 64 entries per page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from kernels.page import PAGE_TOKENS, pages_for
from workers.cache.spec import CacheSpec
from workers.memory.scratch import Scratch
from workers.models.attention.backend import Backend, Geometry
from workers.models.attention.decode_rows import DecodeRows, Entering
from workers.models.attention.indexer import Indexed, Indexer
from workers.models.attention.latent import LatentAttention, MlaInputs
from workers.models.attention.shards import ShardedRows
from workers.models.attention.short_rows import ShortRows
from workers.models.attention.sparse_entries import SharedEntries
from workers.models.attention.sparse_rows import SparseGeometry, SparseRows, selection, spare
from workers.models.attention.sparse_shards import heads_of_all
from workers.models.attention.widened import Widening, may_widen
from workers.models.batch import Batch
from workers.models.config import ModelConfig
from workers.models.layer_ops import LayerOps, N
from workers.weights.source import WeightSource


class SparseAttention(LatentAttention):
    """One layer's. A layer without an indexer attends to what was selected in the last layer before it that has one."""

    short_chunks = range(1, 17)
    """Lengths of chunks for which sparse attention has kernels of their own. The number of a chunk's tokens that share
    what is read is compiled in, and so is the number of parts into which their entries are divided."""
    rotates = True

    def __init__(
        self,
        source: WeightSource,
        prefix: str,
        config: ModelConfig,
        *,
        shared: bool,
        invariant: bool,
        fp8_cache: bool = False,
    ) -> None:
        """`shared`: whether it has no indexer."""
        super().__init__(source, prefix, config, invariant=invariant, fp8_cache=fp8_cache)
        assert config.indexing is not None
        assert config.q_lora_rank is not None
        self.indexing = config.indexing
        self.expands = False
        if self.shards > 1 and config.indexing.top_k % 2:
            raise ValueError(
                f"index_topk = {config.indexing.top_k}, of which ranks that share out a cache exchange an even number: "
                "give cache_shards = 1"
            )
        self.indexer: Indexer | None = None
        if not shared:
            sizes = {
                "hidden": config.hidden_size,
                "query_latent": config.q_lora_rank,
                "rope": config.qk_rope_head_dim,
            }
            self.indexer = Indexer(source, f"{prefix}indexer.", config.indexing, **sizes, int8=fp8_cache)

    @override
    @property
    def caches(self) -> Sequence[CacheSpec]:
        """Latents, then index keys where it has an indexer."""
        return (self.cache,) if self.indexer is None else (self.cache, self.indexer.cache)

    @override
    @property
    def kind(self) -> tuple[object, ...]:
        return type(self), self.indexer is None

    @override
    def plan(self, batch: Batch, scratch: Scratch) -> Batch:
        """`batch` with room for the selection, for this layer and those behind it. A dense one is planned as that of
        `LatentAttention` is, for rows of so few pages."""
        if batch.dense and (rows := batch.decode) is not None:
            page_RP = rows.page_RP[:, : pages_for(self.indexing.top_k)]
            return super().plan(replace(batch, decode=replace(rows, page_RP=page_RP)), scratch)
        return replace(batch, selection=selection(batch, self.indexing.top_k, scratch))

    @override
    def geometry(self, batch: Batch) -> SparseGeometry | None:
        prefill = batch.prefill
        if prefill is None or not prefill.count:
            return None
        longest = max(start + count for start, count in zip(prefill.start, prefill.count, strict=True))
        widening = Widening.of(prefill) if self._may_widen(prefill.page_NP.device) else None
        return SparseGeometry(prefill.page_NP[:, : pages_for(longest)], widening)

    @override
    def largest_geometries(self, tokens: int, rows: int, pages: int, device: torch.device) -> Sequence[Geometry]:
        widening = Widening.largest(tokens, rows, pages, device) if self._may_widen(device) else None
        return [SparseGeometry(torch.zeros(rows, pages, dtype=torch.int32, device=device), widening, largest=True)]

    def _may_widen(self, device: torch.device) -> bool:
        """Whether chunks may have their context widened, which they do not where ranks have parts of it."""
        return self.shards == 1 and may_widen(self.heads, device)

    @override
    def allocate_projected(self, ops: LayerOps[N], tokens: int, scratch: Scratch) -> MlaInputs:
        projected = super().allocate_projected(ops, tokens, scratch)
        dtype, int8 = self.heads.norm_L.dtype, self.heads.fp8_cache
        return replace(projected, indexed=Indexed.empty(self.indexing, tokens, dtype, scratch, int8=int8))

    @override
    def project(
        self,
        ops: LayerOps[N],
        x: N,
        rotation_TO: Tensor | None,
        cache_slot_T: Tensor,
        cache_PKC: Tensor,
        out: MlaInputs,
        scratch: Scratch,
        query_scale_T: Tensor | None = None,
    ) -> N | None:
        """Compute queries and entries, and the indexer's queries, keys and weights."""
        latent = super().project(ops, x, rotation_TO, cache_slot_T, cache_PKC, out, scratch, query_scale_T)
        if self.indexer is not None and out.indexed is not None:
            assert latent is not None
            assert rotation_TO is not None
            self.indexer.project(ops, x, latent, rotation_TO, out.indexed, scratch)
        return latent

    @override
    def backends(
        self,
        projected: MlaInputs,
        out_THV: Tensor,
        batch: Batch,
        geometry: Geometry | None,
        rotation_PO: Tensor,
        scratch: Scratch,
    ) -> list[Backend]:
        if batch.dense:
            assert projected.indexed is not None
            dense = super().backends(projected, out_THV, batch, None, rotation_PO, scratch)
            rows = [backend for backend in dense if isinstance(backend, DecodeRows | ShardedRows)]
            return [ShortRows(own, projected.indexed.key_TI, batch.cache_slot_T) for own in rows]
        split, end, heads = batch.layout.decode_tokens, batch.layout.tokens, self.heads
        assert batch.selection is not None
        indexed = None if batch.selection.given else projected.indexed
        kinds: list[tuple[slice, Tensor, int, Widening | None]] = []
        if batch.decode is not None and split:
            kinds.append((slice(0, split), batch.decode.page_RP, batch.layout.width, None))
        if isinstance(geometry, SparseGeometry):
            kinds.append((slice(split, end), geometry.page_NP, 0, geometry.widening))
        found: list[Backend] = []
        for own, page_RP, width, widening in kinds:
            entering = None
            if projected.latent_TC is None:
                kv_TC = projected.down_TF[..., -heads.latent - heads.rope :]
                entering = Entering(projected.q_THD, kv_TC, rotation_PO, batch.position_T, batch.cache_slot_T)
            sparse = SparseRows.of(
                heads,
                batch.selection.of(own),
                None if indexed is None else indexed.of(own),
                batch.cache_slot_T[own],
                page_RP,
                projected.q_THD[own],
                entering,
                out_THV[own],
                scratch,
                first=batch.first,
                width=width,
                widening=widening,
                group=batch.group,
            )
            found.append(sparse)
        if isinstance(geometry, SparseGeometry) and geometry.largest:
            self._reserve(batch, geometry, scratch)
        return found

    def _reserve(self, batch: Batch, geometry: SparseGeometry, scratch: Scratch) -> None:
        """Take the memory that other tokens, no more than those of `batch`, may need beside theirs."""
        layout, scores = batch.layout, geometry.page_NP.shape[1] * PAGE_TOKENS
        decode, prefill = layout.decode_tokens, layout.tokens - layout.decode_tokens
        sizes = decode, layout.width, prefill, scores, self.indexing.top_k, batch.position_T.device
        shards = 1 if batch.group is None else batch.group.mesh.cache.size
        scratch.empty(spare(heads_of_all(self.heads, shards), *sizes, shards), dtype=torch.uint8)
        if batch.group is not None and self.heads.invariant:
            # Where as many tokens are of decode rows as of others, both kinds take as much as one can.
            where = self.indexing.top_k, batch.position_T.device, scratch
            SharedEntries.of(batch.group, self.heads, layout.tokens, *where)

    @override
    def tensors(self, *caches: Tensor) -> tuple[Tensor, ...]:
        return (*super().tensors(*caches), *caches[1:])

    @override
    def attend(self, backends: Sequence[Backend], *caches: Tensor) -> None:
        """Every key of the step is in the cache before the first is scored."""
        for backend in backends:
            if isinstance(backend, ShortRows):
                # Keys first: dense attention reads early, which it may directly behind what absorbs its queries alone.
                if self.indexer is not None:
                    backend.write(caches[1])
                backend.attend(self.heads, caches[0])
        rows = [backend for backend in backends if isinstance(backend, SparseRows)]
        for own in rows:
            own.enter(self.heads, caches[0])
        if self.indexer is not None and not any(own.selection.given for own in rows):
            for own in rows:
                own.write(caches[1])
            for own in rows:
                own.select(caches[1], invariant=self.heads.invariant)
        for own in rows:
            own.attend(self.heads, caches[0])
