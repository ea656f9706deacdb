"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): only a latent and one shared roped key are cached.

Decode rows use the absorbed form: W_UK is applied to the query instead of the cache and W_UV to the attended latent, so
every head attends to the same cache entries. Prefill rows use the expanded form, which costs fewer products when many
queries share the keys.

Shape legend: T tokens, E hidden features, H heads of this rank, N / O non-rope / rope features of a query, D = N + O,
L latent features, C = L + O cached features, V value features, A features of the query's latent, S cached entries,
R decode rows, W width, B prefill rows, P pages, K = 64 entries a page.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from kernels.head_linear import head_linear
from kernels.linear import linear
from kernels.merge_attention import merge_attention
from kernels.mla_decode import DecodeShape, mla_decode, plan_decode
from kernels.mla_prefill import mla_prefill
from kernels.rms_norm import rms_norm
from kernels.rope_cache import rope_cache
from workers.batch import Batch, DecodeBatch
from workers.models.config import ModelConfig
from workers.models.prefill import ContextPiece, PrefillGeometry
from workers.models.rope import softmax_scale
from workers.scratch import Scratch
from workers.weights import WeightSource

LATENT_NORM_EPS: Final = 1e-6
"""Of the norms inside attention; the published models do not take it from rms_norm_eps."""


class LatentAttention:
    """One layer's attention; `project` and `output` are token-wise, `attend` stands between them."""

    def __init__(self, source: WeightSource, prefix: str, config: ModelConfig) -> None:
        self.heads = heads = config.num_heads // source.group.size
        self.nope, self.rope, self.value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.latent = config.kv_lora_rank
        self.scale = softmax_scale(config)
        hidden, query = config.hidden_size, heads * config.qk_head_dim

        # First columns: the query's latent or, in models without one, the query itself; then the cached features.
        first = query if config.q_lora_rank is None else config.q_lora_rank
        self.down_FE = source.empty(first + config.cache_width, hidden)
        source.fill(self.down_FE[first:], f"{prefix}kv_a_proj_with_mqa.weight")
        if config.q_lora_rank is None:
            self.q_norm_A = self.q_up_QA = None
            query_rows = self.down_FE[:first]
            source.fill(query_rows, f"{prefix}q_proj.weight", shard=0)
        else:
            source.fill(self.down_FE[:first], f"{prefix}q_a_proj.weight")
            self.q_norm_A = source.load(f"{prefix}q_a_layernorm.weight", first)
            query_rows = self.q_up_QA = source.empty(query, first)
            source.fill(query_rows, f"{prefix}q_b_proj.weight", shard=0)
        if not config.rope.interleaved:
            source.settle()
            _interleave(query_rows.view(heads, config.qk_head_dim, -1)[:, self.nope :])
            _interleave(self.down_FE[first + self.latent :].unsqueeze(0))

        self.kv_norm_L = source.load(f"{prefix}kv_a_layernorm.weight", self.latent)
        kv_up = source.empty(heads * (self.nope + self.value), self.latent)
        source.fill(kv_up, f"{prefix}kv_b_proj.weight", shard=0)
        self.kv_up_HFL = kv_up.view(heads, self.nope + self.value, self.latent)
        self.out_EF = source.empty(hidden, heads * self.value)
        source.fill(self.out_EF, f"{prefix}o_proj.weight", shard=1)

    def planned(self, batch: Batch, scratch: Scratch) -> Batch:
        """`batch` with its decode rows dealt out, for this layer and all that are shaped like it."""
        rows = batch.decode
        if rows is None or not batch.layout.decode_rows or not rows.length_R.is_cuda:
            return batch
        shape = DecodeShape(
            batch.layout.decode_rows, batch.layout.width, self.heads, self.latent, self.rope, rows.page_RP.shape[1]
        )
        workspace = plan_decode(
            shape,
            rows.length_R,
            rows.page_RP,
            self.kv_norm_L.dtype,
            lambda size: scratch.empty(size, dtype=torch.uint8),
            first=batch.first,
        )
        return replace(batch, decode=replace(rows, workspace=workspace))

    def project(
        self, x_TE: Tensor, rotation_TO: Tensor, cache_slot_T: Tensor, cache_PKC: Tensor, scratch: Scratch
    ) -> tuple[Tensor, Tensor]:
        """Token-wise: queries [T, H, D] and latents [T, C], both roped; the latents are also written to the cache."""
        tokens, dtype = x_TE.shape[0], x_TE.dtype
        down_TF = scratch.empty(tokens, self.down_FE.shape[0], dtype=dtype)
        linear(x_TE, self.down_FE, down_TF)
        width = self.latent + self.rope
        query_T, kv_TC = down_TF[:, :-width], down_TF[:, -width:]
        if self.q_norm_A is not None and self.q_up_QA is not None:
            query_TA = scratch.empty(tokens, self.q_norm_A.shape[0], dtype=dtype)
            rms_norm(query_T, self.q_norm_A, query_TA, eps=LATENT_NORM_EPS)
            query_T = scratch.empty(tokens, self.q_up_QA.shape[0], dtype=dtype)
            linear(query_TA, self.q_up_QA, query_T)
        q_THD = query_T.view(tokens, self.heads, self.nope + self.rope)
        latent_TC = scratch.empty(tokens, width, dtype=dtype)
        rope_cache(
            q_THD[..., self.nope :],
            kv_TC,
            self.kv_norm_L,
            rotation_TO,
            cache_slot_T,
            latent_TC,
            cache_PKC,
            eps=LATENT_NORM_EPS,
        )
        return q_THD, latent_TC

    def attend(
        self,
        q_THD: Tensor,
        latent_TC: Tensor,
        batch: Batch,
        geometry: PrefillGeometry | None,
        cache_PKC: Tensor,
        scratch: Scratch,
    ) -> Tensor:
        """Attention of all rows, [T, H, V]: decode rows first, then prefill rows."""
        split = batch.layout.decode_tokens
        out_THV = scratch.empty(q_THD.shape[0], self.heads, self.value, dtype=q_THD.dtype)
        if batch.decode is not None:
            width, first = batch.layout.width, batch.first
            self.decode(q_THD[:split], batch.decode, width, first, cache_PKC, out_THV[:split], scratch)
        if geometry is not None:
            self.prefill(q_THD[split:], latent_TC[split:], geometry, cache_PKC, out_THV[split:], scratch)
        return out_THV

    def decode(
        self,
        q_THD: Tensor,
        rows: DecodeBatch,
        width: int,
        first: int,
        cache_PKC: Tensor,
        out_THV: Tensor,
        scratch: Scratch,
    ) -> None:
        """Absorbed form over the paged cache, T = R * W."""
        tokens, heads, latent, dtype = q_THD.shape[0], self.heads, self.latent, q_THD.dtype
        shape = (tokens // width, width, heads)
        q_THC = scratch.empty(tokens, heads, latent + self.rope, dtype=dtype)
        head_linear(q_THD[..., : self.nope], self.kv_up_HFL[:, : self.nope], q_THC[..., :latent])
        q_THC[..., latent:].copy_(q_THD[..., self.nope :])
        attended_THL = scratch.empty(tokens, heads, latent, dtype=dtype)
        lse_TH = scratch.empty(tokens, heads, dtype=torch.float32)
        mla_decode(
            q_THC.view(*shape, -1),
            cache_PKC,
            rows.page_RP,
            rows.length_R,
            attended_THL.view(*shape, -1),
            lse_TH.view(shape),
            scale=self.scale,
            first=first,
            workspace=rows.workspace,
        )
        head_linear(attended_THL, self.kv_up_HFL[:, self.nope :].transpose(1, 2), out_THV)

    def prefill(
        self,
        q_THD: Tensor,
        latent_TC: Tensor,
        geometry: PrefillGeometry,
        cache_PKC: Tensor,
        out_THV: Tensor,
        scratch: Scratch,
    ) -> None:
        """Expanded form, the chunk's own tokens causally, then cached context piece by piece."""
        shape = out_THV.shape
        own = ContextPiece(geometry.cu_q_B1, geometry.cu_q_B1, geometry.max_q)
        lse_TH = scratch.empty(*shape[:2], dtype=torch.float32)
        if not geometry.pieces:
            self._attend_expanded(q_THD, latent_TC, geometry, own, True, out_THV, lse_TH, scratch)
            return
        # Partial results stay in fp32 until the last merge.
        sum_THV, piece_THV = (scratch.empty(*shape, dtype=torch.float32) for _ in range(2))
        piece_lse_TH = scratch.empty(*shape[:2], dtype=torch.float32)
        self._attend_expanded(q_THD, latent_TC, geometry, own, True, sum_THV, lse_TH, scratch)
        cache_SC = cache_PKC.view(-1, cache_PKC.shape[-1])
        for piece in geometry.pieces:
            with scratch.scope():
                context_SC = scratch.empty(piece.slot_S.shape[0], cache_SC.shape[1], dtype=cache_SC.dtype)
                torch.index_select(cache_SC, 0, piece.slot_S, out=context_SC)
                self._attend_expanded(q_THD, context_SC, geometry, piece, False, piece_THV, piece_lse_TH, scratch)
            into_THV = out_THV if piece is geometry.pieces[-1] else sum_THV
            merge_attention(sum_THV, lse_TH, piece_THV, piece_lse_TH, into_THV, lse_TH)

    def _attend_expanded(
        self,
        q_THD: Tensor,
        latent_SC: Tensor,
        geometry: PrefillGeometry,
        keys: ContextPiece,
        causal: bool,
        out_THV: Tensor,
        lse_TH: Tensor,
        scratch: Scratch,
    ) -> None:
        with scratch.scope():
            kv_SF = scratch.empty(latent_SC.shape[0], self.heads * (self.nope + self.value), dtype=latent_SC.dtype)
            linear(latent_SC[:, : self.latent], self.kv_up_HFL.flatten(0, 1), kv_SF)
            kv_SHF = kv_SF.view(-1, self.heads, self.nope + self.value)
            mla_prefill(
                q_THD,
                kv_SHF[..., : self.nope],
                latent_SC[:, self.latent :],
                kv_SHF[..., self.nope :],
                geometry.cu_q_B1,
                keys.cu_k_B1,
                out_THV,
                lse_TH,
                scale=self.scale,
                causal=causal,
                max_q=geometry.max_q,
                max_k=keys.max_k,
            )

    def output(self, attended_THV: Tensor, out_TE: Tensor) -> None:
        """Token-wise: this rank's part of the sum."""
        linear(attended_THV.flatten(1), self.out_EF, out_TE)


def _interleave(rows_HOE: Tensor) -> None:
    """Reorder rope rows from pairs (i, i + half) to pairs (2i, 2i + 1), in place: products of q and k do not change."""
    half = rows_HOE.shape[1] // 2
    first_HIE, second_HIE = rows_HOE[:, :half], rows_HOE[:, half:]
    rows_HOE.copy_(torch.stack([first_HIE, second_HIE], dim=2).flatten(1, 2))
