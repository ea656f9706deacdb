"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): only a latent and one shared roped key are cached.

Decode rows use the absorbed form: W_UK is applied to the query instead of the cache and W_UV to the attended latent, so
every head attends to the same cache entries. Prefill rows use the expanded form, which costs fewer products when many
queries share the keys; in invariant mode they too use the absorbed form.

Shape legend: T tokens, E hidden features, H heads of this rank, N / O non-rope / rope features of a query, D = N + O,
L latent features, C = L + O cached features, V value features, A features of the query's latent, S cached entries,
R decode rows, W width, B prefill rows, P pages (of `part_TPF` and `part_TPE`: parts of sums), K = 64 entries a page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from kernels.dependent import launches_dependently
from kernels.gather_context import gather_context
from kernels.head_linear import merge_up, rope_absorb
from kernels.linear import MOST_STREAMED, linear
from kernels.merge_attention import merge_attention
from kernels.mla_decode import DecodeShape, launch, mla_decode, plan_decode
from kernels.mla_prefill import mla_prefill
from kernels.moe import AddNorm
from kernels.rms_norm import rms_norm
from kernels.rope_cache import rope_cache
from workers.memory.scratch import Scratch
from workers.models.absorbed import AbsorbedRows
from workers.models.batch import Batch, DecodeBatch
from workers.models.config import ModelConfig
from workers.models.prefill import PrefillAttending, PrefillGeometry, PrefillKeys
from workers.models.products import Products
from workers.models.rope import softmax_scale
from workers.weights.source import WeightSource

LATENT_NORM_EPS: Final = 1e-6
"""Of the norms inside attention; the published models do not take it from rms_norm_eps."""


@dataclass(frozen=True)
class Projected:
    """What `project` leaves for attention: memory that all layers of a pass may share."""

    down_TF: Tensor
    """Output of the first product, or parts of it, [T, P, F] in fp32; in models without a query latent its first
    columns are the queries."""
    q_THD: Tensor
    """Parts, [T, P, H, D], where `down_TF` is."""
    latent_TC: Tensor | None
    """None in passes of decode rows alone, whose attention rotates and writes the cache itself: see `Entering`."""
    kv_THF: Tensor | None = None
    """Keys without their roped part, and values, of prefill rows; None where no row attends to such."""

    @property
    def in_parts(self) -> bool:
        """Whether attention adds up what the product has left."""
        return self.down_TF.dim() == 3


@dataclass(frozen=True)
class Entering:
    """What attention reads where queries and latents come to it neither roped nor normed, nor are in the cache; both
    may be parts of sums, [T, P, H, D] and [T, P, C]."""

    q_THD: Tensor
    kv_TC: Tensor
    rotation_PO: Tensor
    position_T: Tensor
    cache_slot_T: Tensor


@dataclass(frozen=True)
class DecodeAttending:
    """Views of the decode rows' tokens, and memory, for the absorbed form."""

    rows: DecodeBatch
    first: int
    entering: Entering | None
    nope_THN: Tensor
    rope_THO: Tensor
    q_RWHC: Tensor
    absorbed_THL: Tensor
    """The first features of `q_RWHC`, and `roped_THO` its last."""
    roped_THO: Tensor
    attended_RWHL: Tensor
    lse_RWH: Tensor
    out_THV: Tensor


@dataclass(frozen=True)
class AbsorbedAttending:
    """Views of the prefill rows' tokens, and memory, for the absorbed form."""

    rows: AbsorbedRows
    q_THD: Tensor
    q_UHD: Tensor
    parts: tuple[DecodeAttending, ...]
    """One after the other, in the same memory."""
    workspace: Tensor
    out_UHV: Tensor
    out_THV: Tensor


@dataclass(frozen=True)
class Attending:
    """How the rows of one pass attend: made once, read by every layer of the same shape."""

    decode: DecodeAttending | None
    prefill: PrefillAttending | AbsorbedAttending | None


class LatentAttention:
    """One layer's attention; `project` and `output` are token-wise, `attend` stands between them."""

    def __init__(self, source: WeightSource, products: Products, prefix: str, config: ModelConfig) -> None:
        self.products = products
        self.heads = heads = config.num_heads // source.group.size
        self.nope, self.rope, self.value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.latent = config.kv_lora_rank
        self.scale = softmax_scale(config)
        hidden, query = config.hidden_size, heads * config.qk_head_dim

        # First columns: the query's latent or, in models without one, the query itself; then the cached features.
        first = query if config.q_lora_rank is None else config.q_lora_rank
        self.down_FE = source.weight(first + config.cache_width, hidden)
        source.fill(self.down_FE[first:], f"{prefix}kv_a_proj_with_mqa.weight")
        if config.q_lora_rank is None:
            self.q_norm_A = self.q_up_QA = None
            query_rows = self.down_FE[:first]
            source.fill(query_rows, f"{prefix}q_proj.weight", shard=0)
        else:
            source.fill(self.down_FE[:first], f"{prefix}q_a_proj.weight")
            self.q_norm_A = source.load(f"{prefix}q_a_layernorm.weight", first)
            query_rows = self.q_up_QA = source.weight(query, first)
            source.fill(query_rows, f"{prefix}q_b_proj.weight", shard=0)
        if not config.rope.interleaved:
            source.settle()
            _interleave(query_rows.plain.view(heads, config.qk_head_dim, -1)[:, self.nope :])
            _interleave(self.down_FE[first + self.latent :].plain.unsqueeze(0))

        self.kv_norm_L = source.load(f"{prefix}kv_a_layernorm.weight", self.latent)
        kv_up = source.empty(heads * (self.nope + self.value), self.latent)
        source.fill(kv_up, f"{prefix}kv_b_proj.weight", shard=0)
        self.kv_up_HFL = kv_up.view(heads, self.nope + self.value, self.latent)
        self.out_EF = source.weight(hidden, heads * self.value)
        source.fill(self.out_EF, f"{prefix}o_proj.weight", shard=1)

    def planned(self, batch: Batch, scratch: Scratch) -> Batch:
        """`batch` with its decode rows dealt out, for this layer and all that are shaped like it."""
        rows = batch.decode
        if rows is None or not batch.layout.decode_rows:
            return batch
        width, first = batch.layout.width, batch.first
        dealt = self._dealt(rows, width, first, lambda size: scratch.empty(size, dtype=torch.uint8))
        return replace(batch, decode=dealt)

    def _dealt(self, rows: DecodeBatch, width: int, first: int, empty: Callable[[int], Tensor]) -> DecodeBatch:
        if not rows.length_R.is_cuda:
            return rows
        shape = DecodeShape(
            *(rows.length_R.shape[0], width, self.heads, self.latent, self.rope, rows.page_RP.shape[1]),
            invariant=self.products.invariant,
        )
        workspace = plan_decode(shape, rows.length_R, rows.page_RP, self.kv_norm_L.dtype, empty, first=first)
        return replace(rows, workspace=workspace)

    def geometry(self, batch: Batch) -> PrefillGeometry | AbsorbedRows | None:
        """Where the prefill rows lie, for all layers; in invariant mode they take the way of decode rows."""
        if self.products.invariant:
            return AbsorbedRows.of(batch, self.heads)
        return PrefillGeometry.of(batch)

    def largest_geometries(
        self, tokens: int, rows: int, pages: int, device: torch.device
    ) -> Sequence[PrefillGeometry | AbsorbedRows]:
        """Some of so many tokens, rows and pages a row, of which one needs as much memory as any."""
        if self.products.invariant:
            return AbsorbedRows.largest(tokens, rows, pages, self.heads, device)
        return [PrefillGeometry.largest(tokens, rows, device)]

    def projected(self, tokens: int, scratch: Scratch, *, decode_alone: bool = False) -> Projected:
        """Memory for `project`; `decode_alone`: in a pass of decode rows alone."""
        dtype, width = self.kv_norm_L.dtype, self.latent + self.rope
        parts = self.products.parts(tokens, self.down_FE) if decode_alone and self.q_up_QA is None else 0
        if parts:
            part_TPF = scratch.empty(tokens, parts, self.down_FE.shape[0], dtype=torch.float32)
            q_TPHD = part_TPF[..., :-width].view(tokens, parts, self.heads, self.nope + self.rope)
            return Projected(part_TPF, q_TPHD, None)
        down_TF = scratch.empty(tokens, self.down_FE.shape[0], dtype=dtype)
        query_TQ = down_TF[:, :-width]
        if self.q_up_QA is not None:
            query_TQ = scratch.empty(tokens, self.q_up_QA.shape[0], dtype=dtype)
        q_THD = query_TQ.view(tokens, self.heads, self.nope + self.rope)
        if decode_alone:
            return Projected(down_TF, q_THD, None)
        latent_TC = scratch.empty(tokens, width, dtype=dtype)
        if self.products.invariant:
            return Projected(down_TF, q_THD, latent_TC)
        kv_THF = scratch.empty(tokens, self.heads, self.nope + self.value, dtype=dtype)
        return Projected(down_TF, q_THD, latent_TC, kv_THF)

    def project(
        self,
        x_TE: Tensor,
        rotation_TO: Tensor | None,
        cache_slot_T: Tensor,
        cache_PKC: Tensor,
        out: Projected,
        scratch: Scratch,
    ) -> None:
        """Token-wise: queries [T, H, D] and latents [T, C], both roped; the latents are also written to the cache, and
        expanded to keys and values. In passes of decode rows alone the products alone, and attention does the rest."""
        down_TF, q_THD = out.down_TF, out.q_THD
        if out.in_parts:
            self.products.part_linear(x_TE, self.down_FE, down_TF)
            return
        self.products.linear(x_TE, self.down_FE, down_TF)
        width = self.latent + self.rope
        if self.q_norm_A is not None and self.q_up_QA is not None:
            query_TA = scratch.empty(x_TE.shape[0], self.q_norm_A.shape[0], dtype=x_TE.dtype)
            rms_norm(down_TF[:, :-width], self.q_norm_A, query_TA, eps=LATENT_NORM_EPS)
            self.products.linear(query_TA, self.q_up_QA, q_THD.flatten(1))
        if rotation_TO is None or out.latent_TC is None:
            return
        rope_cache(
            q_THD[..., self.nope :],
            down_TF[:, -width:],
            self.kv_norm_L,
            rotation_TO,
            cache_slot_T,
            out.latent_TC,
            cache_PKC,
            eps=LATENT_NORM_EPS,
        )
        if out.kv_THF is not None:
            self._expand(out.latent_TC[:, : self.latent], out.kv_THF.flatten(1))

    def _expand(self, latent_SL: Tensor, kv_SF: Tensor) -> None:
        """Keys without their roped part, and values, of all heads."""
        linear(latent_SL, self.kv_up_HFL.flatten(0, 1), kv_SF)

    def attended(self, tokens: int, scratch: Scratch) -> Tensor:
        """Memory for the output of `attend`, [T, H, V]."""
        return scratch.empty(tokens, self.heads, self.value, dtype=self.kv_norm_L.dtype)

    def attending(
        self,
        projected: Projected,
        out_THV: Tensor,
        batch: Batch,
        geometry: PrefillGeometry | AbsorbedRows | None,
        rotation_PO: Tensor,
        scratch: Scratch,
    ) -> Attending:
        """What attention of the layers of a pass shares: views, and memory that `attend` writes before it reads.

        `batch` is planned. Decode rows come first, then prefill rows; tokens past the layout's are padding, and neither
        read nor written. `rotation_PO`: see `rotation_table`.
        """
        split, end = batch.layout.decode_tokens, batch.layout.tokens
        decode: DecodeAttending | None = None
        prefill: PrefillAttending | AbsorbedAttending | None = None
        if batch.decode is not None:
            memory = self._decode_memory(batch.layout.decode_rows, batch.layout.width, scratch)
            entering = None
            if projected.latent_TC is None:
                kv_TC = projected.down_TF[..., -self.latent - self.rope :]
                entering = Entering(projected.q_THD, kv_TC, rotation_PO, batch.position_T, batch.cache_slot_T)
            decode = self._attending_decode(
                projected.q_THD[:split], out_THV[:split], batch.decode, batch.first, *memory, entering=entering
            )
        if geometry is not None:
            assert projected.latent_TC is not None  # a pass of decode rows alone has no prefill rows
            own = slice(split, end)
            if isinstance(geometry, AbsorbedRows):
                tensors = projected.q_THD[own], out_THV[own]
                prefill = self._attending_absorbed(*tensors, geometry, batch.first, scratch)
            else:
                assert projected.kv_THF is not None
                kv = projected.latent_TC[own], projected.kv_THF[own]
                prefill = PrefillAttending.of(projected.q_THD[own], *kv, out_THV[own], geometry, self.nope, scratch)
        return Attending(decode, prefill)

    def _decode_memory(self, rows: int, width: int, scratch: Scratch) -> tuple[Tensor, Tensor, Tensor]:
        """Absorbed queries, attended latents and log-sum-exps of so many rows."""
        shape, dtype = (rows, width, self.heads), self.kv_norm_L.dtype
        return (
            scratch.empty(*shape, self.latent + self.rope, dtype=dtype),
            scratch.empty(*shape, self.latent, dtype=dtype),
            scratch.empty(*shape, dtype=torch.float32),
        )

    def _attending_decode(
        self,
        q_THD: Tensor,
        out_THV: Tensor,
        rows: DecodeBatch,
        first: int,
        q_RWHC: Tensor,
        attended_RWHL: Tensor,
        lse_RWH: Tensor,
        *,
        entering: Entering | None,
    ) -> DecodeAttending:
        q_THC = q_RWHC.flatten(0, 1)
        return DecodeAttending(
            rows=rows,
            first=first,
            entering=entering,
            nope_THN=q_THD[..., : self.nope],
            rope_THO=q_THD[..., self.nope :],
            q_RWHC=q_RWHC,
            absorbed_THL=q_THC[..., : self.latent],
            roped_THO=q_THC[..., self.latent :],
            attended_RWHL=attended_RWHL,
            lse_RWH=lse_RWH,
            out_THV=out_THV,
        )

    def _attending_absorbed(
        self, q_THD: Tensor, out_THV: Tensor, rows: AbsorbedRows, first: int, scratch: Scratch
    ) -> AbsorbedAttending:
        queries = rows.token_U.shape[0]
        q_UHD = scratch.empty(queries, *q_THD.shape[1:], dtype=q_THD.dtype)
        out_UHV = scratch.empty(queries, *out_THV.shape[1:], dtype=out_THV.dtype)
        parts = rows.parts()
        _, largest = parts[0]
        memory = self._decode_memory(largest.length_R.shape[0], rows.width, scratch)
        workspace = scratch.empty(0, dtype=torch.uint8)

        def reserve(size: int) -> Tensor:
            nonlocal workspace
            workspace = scratch.empty(size, dtype=torch.uint8)
            return workspace

        self._dealt(largest, rows.width, first, reserve)
        attending = tuple(
            self._attending_decode(
                q_UHD[part], out_UHV[part], some, first, *(x[: some.length_R.shape[0]] for x in memory), entering=None
            )
            for part, some in parts
        )
        return AbsorbedAttending(rows, q_THD, q_UHD, attending, workspace, out_UHV, out_THV)

    def tensors(self, cache_PKC: Tensor) -> tuple[Tensor, ...]:
        """What `attend` reads or writes of this layer alone; all else is in its `attending`."""
        return cache_PKC, self.kv_up_HFL, self.kv_norm_L

    def attend(self, attending: Attending, cache_PKC: Tensor) -> None:
        """Attention of all rows into the output that `attending` was made for."""
        if attending.decode is not None:
            self.decode(attending.decode, cache_PKC)
        if isinstance(attending.prefill, AbsorbedAttending):
            self.prefill_absorbed(attending.prefill, cache_PKC)
        elif attending.prefill is not None:
            self.prefill(attending.prefill, cache_PKC)

    def decode(self, rows: DecodeAttending, cache_PKC: Tensor) -> None:
        """Absorbed form over the paged cache, T = R * W."""
        key_HNL, value_HVL = self.kv_up_HFL[:, : self.nope], self.kv_up_HFL[:, self.nope :]
        entering = rows.entering
        # Where attention begins with a kernel of ours, that one lets the next start as `early` asks.
        dependent = entering is not None and launches_dependently(cache_PKC.device)
        if entering is None:
            self.products.head_linear(rows.nope_THN, key_HNL, rows.absorbed_THL)
            rows.roped_THO.copy_(rows.rope_THO)
        else:
            rope_absorb(
                entering.q_THD,
                entering.kv_TC,
                key_HNL,
                self.kv_norm_L,
                entering.rotation_PO,
                entering.position_T,
                entering.cache_slot_T,
                rows.q_RWHC.flatten(0, 1),
                cache_PKC,
                eps=LATENT_NORM_EPS,
                dependent=dependent,
            )
        attended_THL, workspace = rows.attended_RWHL.flatten(0, 1), rows.rows.workspace
        tensors = (rows.q_RWHC, cache_PKC, rows.rows.page_RP, rows.rows.length_R, rows.attended_RWHL, rows.lse_RWH)
        if workspace is None or self.products.invariant or attended_THL.shape[0] <= MOST_STREAMED:
            invariant = self.products.invariant
            mla_decode(*tensors, scale=self.scale, first=rows.first, workspace=workspace, invariant=invariant)
            self.products.head_linear(attended_THL, value_HVL.transpose(1, 2), rows.out_THV)
            return
        launch.attend(*tensors, workspace, scale=self.scale, first=rows.first, dependent=dependent, early=dependent)
        merge_up(rows.attended_RWHL, workspace, value_HVL, rows.out_THV, dependent=dependent)

    def prefill_absorbed(self, rows: AbsorbedAttending, cache_PKC: Tensor) -> None:
        """Absorbed form: some neighbouring tokens of a chunk are a decode row."""
        torch.index_select(rows.q_THD, 0, rows.rows.token_U, out=rows.q_UHD)
        for part in rows.parts:
            # One workspace for all parts, so each is dealt out when its turn comes.
            dealt = self._dealt(part.rows, rows.rows.width, part.first, lambda size: rows.workspace)
            self.decode(replace(part, rows=dealt), cache_PKC)
        torch.index_select(rows.out_UHV, 0, rows.rows.place_T, out=rows.out_THV)

    def prefill(self, rows: PrefillAttending, cache_PKC: Tensor) -> None:
        """Expanded form, the chunk's own tokens causally, then cached context piece by piece."""
        own, context = rows.own, rows.context
        self._attend_expanded(rows, own, causal=True)
        for piece in context:
            keys = piece.keys
            gather_context(cache_PKC, rows.geometry.page_BP, keys.cu_k_B1, piece.source_SC, begin=piece.begin)
            self._expand(piece.latent_XL, piece.kv_XF)
            self._attend_expanded(rows, keys, causal=False)
            into_THV = rows.out_THV if piece is context[-1] else own.out_THV
            merge_attention(own.out_THV, own.lse_TH, keys.out_THV, keys.lse_TH, into_THV, own.lse_TH)

    def _attend_expanded(self, rows: PrefillAttending, keys: PrefillKeys, *, causal: bool) -> None:
        mla_prefill(
            rows.q_THD,
            keys.key_SHN,
            keys.key_SO,
            keys.value_SHV,
            rows.geometry.cu_q_B1,
            keys.cu_k_B1,
            keys.out_THV,
            keys.lse_TH,
            scale=self.scale,
            causal=causal,
            max_q=rows.geometry.max_q,
            max_k=keys.max_k,
        )

    def output(
        self, attended_THV: Tensor, norm: AddNorm, out_TE: Tensor, scratch: Scratch, *, decode_alone: bool = False
    ) -> None:
        """Token-wise: residual += the output, summed over ranks; out = rms_norm(residual). `decode_alone`: in a pass of
        decode rows alone."""
        tokens = out_TE.shape[0]
        parts = self.products.parts(tokens, self.out_EF) if decode_alone else 0
        if parts:
            with scratch.scope():
                part_TPE = scratch.empty(tokens, parts, out_TE.shape[1], dtype=torch.float32)
                self.products.part_linear(attended_THV.flatten(1), self.out_EF, part_TPE)
                self.products.add_norm(part_TPE, norm, out_TE)
        else:
            self.products.summed(attended_THV.flatten(1), self.out_EF, out_TE, scratch)
            self.products.add_norm(out_TE, norm, out_TE)


def _interleave(rows_HOE: Tensor) -> None:
    """Reorder rope rows from pairs (i, i + half) to pairs (2i, 2i + 1), in place: products of q and k do not change."""
    half = rows_HOE.shape[1] // 2
    first_HIE, second_HIE = rows_HOE[:, :half], rows_HOE[:, half:]
    rows_HOE.copy_(torch.stack([first_HIE, second_HIE], dim=2).flatten(1, 2))
