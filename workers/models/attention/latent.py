"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): only a latent and one shared roped key are cached.

Decode rows attend in the absorbed form (`decode_rows`), prefill rows in the expanded form (`expanded`) or, in invariant
mode, in the absorbed form as well (`absorbed_chunks`).

`deepseek.attention` is all of this in the paper's order: `project` holds (1), (3), (6) to (8) and the write of the
entry, `attend` (2), (4), (5) and (10), `output` (11).

Shape legend: T tokens, E hidden features, H heads of this rank, N / O non-rope / rope features of a query, D = N + O,
L latent features, C = L + O cached features, V value features, A features of the query's latent, Q = H D (of gated
attention H (D + V)), F features of the first product, P pages (of `part_TPF`: parts of sums), K = 64 entries per page.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kernels.latent_entry import rope_cache
from kernels.own_entries import OwnEntries
from kernels.rms_norm import AddNorm
from kernels.runtime.dependent import launches_dependently
from kernels.sigmoid_mul import sigmoid_mul
from workers.cache.spec import CacheSpec, latent_spec
from workers.memory.scratch import Scratch
from workers.models.attention.absorbed_chunks import AbsorbedChunks, ChunkRows
from workers.models.attention.backend import Backend, Geometry, Heads
from workers.models.attention.decode_rows import DecodeMemory, DecodeRows, Entering, plan_rows
from workers.models.attention.expanded import ExpandedChunks, PrefillGeometry, expand
from workers.models.attention.indexer import Indexed
from workers.models.attention.shards import ShardedRows
from workers.models.batch import Batch
from workers.models.config import ModelConfig
from workers.models.layer_ops import LayerOps, N
from workers.models.rope import query_scale, softmax_scale
from workers.weights.part import Part, RopeRows, Shard
from workers.weights.source import WeightSource
from workers.weights.weight import Weight


@dataclass(frozen=True)
class MlaInputs:
    """Output of `project` for attention: memory that all layers of a pass may share."""

    down_TF: Tensor
    """Output of the first product, or parts of it, [T, P, F] in fp32; in models without a query latent its first
    columns are the queries."""
    q_THD: Tensor
    """Parts, [T, P, H, D], where `down_TF` is."""
    latent_TC: Tensor | None
    """Latents of the tokens. None in passes of decode rows alone, whose attention rotates and writes the cache itself:
    see `Entering`."""
    kv_THF: Tensor | None = None
    """Keys without their roped part, and values, of prefill rows; None where no row attends to such."""
    query_TQ: Tensor | None = None
    """Output of the query's second product, whose views are the queries, and behind each its head's gate; None in
    models without a query latent."""
    gate_THV: Tensor | None = None
    """Gates of the heads' output, where they have such."""
    indexed: Indexed | None = None
    """Input of an indexer's scores, where attention is sparse."""

    def unscored(self, *, keys: bool) -> MlaInputs:
        """Return the inputs of a pass in which nothing is scored; with `keys` the index keys of its tokens are made all
        the same."""
        indexed = self.indexed.keys_alone() if keys and self.indexed is not None else None
        return replace(self, indexed=indexed)


class LatentAttention:
    """One layer's attention; `project` and `output` are token-wise, `attend` stands between them."""

    short_chunks: Collection[int] = ()
    """Tokens of chunks so short that no other does as one for each of its kernels, where there are such."""
    rotates = False
    """Whether `project` needs the rotations in passes of decode rows alone, too."""

    def __init__(
        self,
        source: WeightSource,
        prefix: str,
        config: ModelConfig,
        *,
        invariant: bool,
        fp8_cache: bool = False,
        inputs: int | None = None,
    ) -> None:
        """`inputs`: features that a token has, where they are not as many as it leaves with, `config.hidden_size`."""
        count, hidden = config.num_heads // source.mesh.heads.size, inputs or config.hidden_size
        nope, value, latent = config.qk_nope_head_dim, config.v_head_dim, config.kv_lora_rank

        # First columns: the query's latent or, in models without one, the query itself; then the cached features.
        first = count * config.qk_head_dim if config.q_lora_rank is None else config.q_lora_rank
        rotated = None if config.rope.interleaved else config.qk_rope_head_dim
        query_rope = RopeRows(config.qk_head_dim, rotated) if rotated else None
        down_rope = RopeRows(config.cache_width, rotated) if rotated else None
        down = Part(f"{prefix}kv_a_proj_with_mqa.weight", config.cache_width, hidden, rope=down_rope)
        self.gated = config.output_gate == "query"
        """Whether queries come with gates of the output (`ModelConfig.output_gate`). Then each head's rows of the
        query's second matrix are followed by those of its gate, which stay there: blocks with one scale reach over
        both."""
        rows = config.num_heads * (config.qk_head_dim + (value if self.gated else 0))
        if config.q_lora_rank is None:
            self.q_norm_A = self.q_up_QA = None
            query = Part(f"{prefix}q_proj.weight", rows, hidden, shard=Shard(0, "heads"), rope=query_rope)
        else:
            query = Part(f"{prefix}q_a_proj.weight", first, hidden)
            self.q_norm_A = source.load(f"{prefix}q_a_layernorm.weight", first)
            columns = 2 * first if self.gated else first
            self.q_up_QA = source.matrix(
                Part(f"{prefix}q_b_proj.weight", rows, columns, shard=Shard(0, "heads"), rope=query_rope)
            )
        self.down_FE = source.matrix(query, down)
        self.gate_FE: Weight | None = None
        """Product that makes gates of the output by itself, of the layer's input."""
        if config.output_gate == "input":
            gate = Part(f"{prefix}linear_gate.weight", config.num_heads * value, hidden, shard=Shard(0, "heads"))
            self.gate_FE = source.matrix(gate)
        self.query_scale = partial(query_scale, config.query_scaling)
        """Computes the factors of the queries at some positions. Whoever runs `project` hands them to it."""

        norm_L = source.load(f"{prefix}kv_a_layernorm.weight", latent)
        # Its heads are taken apart, and its keys' half is used transposed: no stored format can be multiplied so.
        up = source.plain(
            Part(f"{prefix}kv_b_proj.weight", config.num_heads * (nope + value), latent, shard=Shard(0, "heads"))
        )
        self.heads = Heads(
            count=count,
            nope=nope,
            rope=config.qk_rope_head_dim,
            value=value,
            latent=latent,
            scale=softmax_scale(config),
            up_HFL=up.view(count, nope + value, latent),
            norm_L=norm_L,
            invariant=invariant,
            fp8_cache=fp8_cache,
            norm_eps=config.latent_norm_eps,
            sink_H=_sinks(source, prefix, config) if config.sinks else None,
        )
        self.cache: CacheSpec = latent_spec(latent, config.qk_rope_head_dim, source.dtype, fp8=fp8_cache)
        """Spec of the latent cache."""
        self.shards = source.mesh.cache.size
        """Ranks that share out the cache."""
        self.expands = not invariant
        """Whether prefill rows attend to keys and values that are expanded from latents."""
        self.out_EF = source.matrix(
            Part(f"{prefix}o_proj.weight", config.hidden_size, config.num_heads * value, shard=Shard(1, "heads"))
        )

    @property
    def caches(self) -> Sequence[CacheSpec]:
        """Cache specs of the layer, that of latents first."""
        return (self.cache,)

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for layers that launch the same kernels."""
        return (type(self),)

    def plan(self, batch: Batch, scratch: Scratch) -> Batch:
        """`batch` with its decode rows planned, for this layer and all that are shaped like it."""
        rows = batch.decode
        if rows is None or not batch.layout.decode_rows:
            return batch
        width, first = batch.layout.width, batch.first
        if batch.group is not None:
            own = OwnEntries.allocate(rows.page_RP.shape[0], width, rows.page_RP.shape[1], scratch.empty)
            rows = replace(rows, own=own)
        planned = plan_rows(
            self.heads, rows, width, first, lambda size: scratch.empty(size, dtype=torch.uint8), group=batch.group
        )
        return replace(batch, decode=planned)

    def geometry(self, batch: Batch) -> Geometry | None:
        """Return the positions of the prefill rows, for all layers; None where there are no such rows. In invariant
        mode they are computed as decode rows are."""
        prefill = batch.prefill
        if prefill is None or not prefill.count:
            return None
        if self.heads.invariant:
            return ChunkRows.of(prefill, self.shards * self.heads.count, self.shards)
        return PrefillGeometry.of(prefill, batch.first)

    def largest_geometries(self, tokens: int, rows: int, pages: int, device: torch.device) -> Sequence[Geometry]:
        """Return geometries of this number of tokens, rows and pages per row, of which one needs as much memory as
        any."""
        if self.heads.invariant:
            return ChunkRows.largest(tokens, rows, pages, self.shards * self.heads.count, device, self.shards)
        return [PrefillGeometry.largest(tokens, rows, device)]

    def allocate_projected(self, ops: LayerOps[N], tokens: int, scratch: Scratch) -> MlaInputs:
        """Memory for `project`."""
        heads = self.heads
        dtype, width = heads.norm_L.dtype, heads.latent + heads.rope
        parts = ops.parts(tokens, self.down_FE) if self.q_up_QA is None else 0
        if parts:
            part_TPF = scratch.empty(tokens, parts, self.down_FE.shape[0], dtype=torch.float32)
            q_TPHD = part_TPF[..., :-width].view(tokens, parts, heads.count, heads.nope + heads.rope)
            return MlaInputs(part_TPF, q_TPHD, None)
        down_TF = scratch.empty(tokens, self.down_FE.shape[0], dtype=dtype)
        query_TQ, made_TQ, features = None, down_TF[:, :-width], heads.nope + heads.rope
        if self.q_up_QA is not None:
            query_TQ = made_TQ = scratch.empty(tokens, self.q_up_QA.shape[0], dtype=dtype)
        made_THF = made_TQ.view(tokens, heads.count, features + (heads.value if self.gated else 0))
        gate_THV = made_THF[..., features:] if self.gated else None
        if self.gate_FE is not None:
            gate_THV = self.allocate_attended(tokens, scratch)
        inputs = MlaInputs(down_TF, made_THF[..., :features], None, query_TQ=query_TQ, gate_THV=gate_THV)
        if ops.decode_alone:
            return inputs
        latent_TC, kv_THF = scratch.empty(tokens, width, dtype=dtype), None
        if self.expands:
            kv_THF = scratch.empty(tokens, heads.count, heads.nope + heads.value, dtype=dtype)
        return replace(inputs, latent_TC=latent_TC, kv_THF=kv_THF)

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
        """Token-wise: queries [T, H, D] and latents [T, C], both roped; the latents are also written to the cache, and
        expanded to keys and values. In passes of decode rows alone the products alone, and attention does the rest.
        Returns the query's latent, normed, where there is one. `query_scale_T`: see `PassBuffers`; the factor is
        applied to that latent, of which the whole query is linear, so that no kernel behind needs to know of it."""
        heads, latent = self.heads, None
        if self.q_norm_A is None or self.q_up_QA is None:
            ops.linear(x, self.down_FE, out.down_TF, scratch)
        else:
            into = out.down_TF, scratch, query_scale_T
            latent = ops.latent_linear(x, self.down_FE, self.q_norm_A, heads.norm_eps, *into)
            assert out.query_TQ is not None
            read = ops.beside(latent, out.down_TF[:, : len(self.q_norm_A)], scratch) if self.gated else latent
            ops.linear(read, self.q_up_QA, out.query_TQ, scratch)
        if self.gate_FE is not None:
            assert out.gate_THV is not None
            ops.linear(x, self.gate_FE, out.gate_THV.flatten(1), scratch)
        if rotation_TO is None or out.latent_TC is None:
            return latent
        rope_cache(
            out.q_THD[..., heads.nope :],
            out.down_TF[:, -heads.latent - heads.rope :],
            heads.norm_L,
            rotation_TO,
            cache_slot_T,
            out.latent_TC,
            cache_PKC,
            eps=heads.norm_eps,
        )
        if out.kv_THF is not None:
            expand(heads, out.latent_TC[:, : heads.latent], out.kv_THF.flatten(1))
        return latent

    def allocate_attended(self, tokens: int, scratch: Scratch) -> Tensor:
        """Memory for the output of `attend`, [T, H, V]."""
        heads = self.heads
        return scratch.empty(tokens, heads.count, heads.value, dtype=heads.norm_L.dtype)

    def backends(
        self,
        projected: MlaInputs,
        out_THV: Tensor,
        batch: Batch,
        geometry: Geometry | None,
        rotation_PO: Tensor,
        scratch: Scratch,
    ) -> list[Backend]:
        """Make the backends of a pass, one per kind of rows, for this layer and all that have its shape: views, and
        memory that they write before they read.

        `batch` is planned. Decode rows come first, then prefill rows; tokens past the layout's are padding, and neither
        read nor written. `rotation_PO`: see `rotation_table`.
        """
        split, end, heads = batch.layout.decode_tokens, batch.layout.tokens, self.heads
        found: list[Backend] = []
        if batch.decode is not None:
            entering = None
            if projected.latent_TC is None:
                kv_TC = projected.down_TF[..., -heads.latent - heads.rope :]
                entering = Entering(projected.q_THD, kv_TC, rotation_PO, batch.position_T, batch.cache_slot_T)
            q_THD = projected.q_THD[:split]
            if batch.group is not None and batch.decode.own is not None:
                into = q_THD, entering, out_THV[:split], scratch
                found.append(ShardedRows.of(heads, batch.group, batch.decode, *into))
            else:
                memory = DecodeMemory.of(heads, batch.layout.decode_rows, batch.layout.width, scratch)
                found.append(DecodeRows(batch.decode, batch.first, q_THD, entering, memory, out_THV[:split]))
        if geometry is not None:
            assert projected.latent_TC is not None  # a pass of decode rows alone has no prefill rows
            own = slice(split, end)
            q_THD, own_THV = projected.q_THD[own], out_THV[own]
            if isinstance(geometry, ChunkRows):
                found.append(AbsorbedChunks.of(heads, q_THD, own_THV, geometry, batch.first, scratch, batch.group))
            else:
                assert isinstance(geometry, PrefillGeometry)
                assert projected.kv_THF is not None
                kv = projected.latent_TC[own], projected.kv_THF[own]
                found.append(ExpandedChunks.of(q_THD, *kv, own_THV, geometry, heads.nope, scratch, batch.group))
        return found

    def tensors(self, *caches: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors that only this layer's `attend` reads or writes; all others are in the backends."""
        return self.heads.tensors(caches[0])

    def attend(self, backends: Sequence[Backend], *caches: Tensor) -> None:
        """Attention of all rows into the output that `backends` were made for. `caches`: of `self.caches`."""
        for backend in backends:
            backend.attend(self.heads, caches[0])

    def output(
        self,
        ops: LayerOps[N],
        attended_THV: Tensor,
        norm: AddNorm,
        out: N,
        scratch: Scratch,
        gate_THV: Tensor | None = None,
    ) -> None:
        """Token-wise: residual += the output, summed over ranks; `out` = its norm. `gate_THV`: gates of `attended_THV`,
        which are applied in place."""
        if gate_THV is not None:
            dependent = launches_dependently(attended_THV.device)
            sigmoid_mul(attended_THV, gate_THV, attended_THV, dependent=dependent)
        ops.add(attended_THV.flatten(1), self.out_EF, norm, out, scratch)


def _sinks(source: WeightSource, prefix: str, config: ModelConfig) -> Tensor:
    """Load the logits of this rank's heads, fp32."""
    own = source.mesh.heads.share(config.num_heads, "num_attention_heads")
    sink_H = source.empty(own.stop - own.start, dtype=torch.float32)
    source.fill_part(sink_H, f"{prefix}learnable_sink_param", (config.num_heads,), (own,))
    return sink_H
