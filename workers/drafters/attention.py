"""Attention of a draft layer: to keys and values of its own, or to latents. Both read F = 2 E features per token.

Shape legend: T tokens, E hidden features, F features that are read, H query heads and G key heads of this rank, D
features of a head, Q = (H + 2 G) D, O roped features, P pages of the cache (`rotation_PO`: positions), K = 64 entries
per page, C features of an entry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from kernels.grouped_attention import attend, rope_store, tiles
from workers.cache.spec import CacheSpec, LatentSpec
from workers.memory.scratch import Scratch, on_device
from workers.models.attention.latent import LatentAttention
from workers.models.batch import Batch
from workers.models.general import GeneralOps
from workers.parallel.group import Group
from workers.weights.part import Part, RopeRows, Shard
from workers.weights.source import WeightSource
from workers.weights.weight import Weight


class DraftAttention(ABC):
    """Attention of the rows of a pass, from the products that lead to it to what `out_EF` multiplies."""

    cache: CacheSpec
    out_EF: Weight
    """Columns of the output matrix that are this rank's."""

    @abstractmethod
    def __call__(
        self,
        ops: GeneralOps,
        x_TF: Tensor,
        rotation_PO: Tensor,
        batch: Batch,
        cache_PKC: Tensor,
        scratch: Scratch,
    ) -> Tensor:
        """[T, features of this rank's heads]; writes the tokens' entries to the cache."""


class DraftLatentAttention(DraftAttention):
    """Multi-head latent attention, as in the model's layers."""

    def __init__(self, attention: LatentAttention, group: Group | None) -> None:
        """`group`: see `Batch`."""
        self._attention, self._group = attention, group
        self.cache, self.out_EF = attention.cache, attention.out_EF

    @override
    def __call__(
        self,
        ops: GeneralOps,
        x_TF: Tensor,
        rotation_PO: Tensor,
        batch: Batch,
        cache_PKC: Tensor,
        scratch: Scratch,
    ) -> Tensor:
        attention, tokens = self._attention, x_TF.shape[0]
        attended_THV = attention.allocate_attended(tokens, scratch)
        projected = attention.allocate_projected(ops, tokens, scratch)
        rotation_TO = _rotations(rotation_PO, batch, scratch)
        attention.project(ops, x_TF, rotation_TO, batch.cache_slot_T, cache_PKC, projected, scratch)
        planned = attention.plan(replace(batch, group=self._group), scratch)
        geometry = attention.geometry(batch)
        backends = attention.backends(projected, attended_THV, planned, geometry, rotation_PO, scratch)
        attention.attend(backends, cache_PKC)
        return attended_THV.flatten(1)


@dataclass(frozen=True)
class KeyValueSpec(LatentSpec):
    """Keys, then values, of this rank's key heads, as they are: `width` features.

    Its pages are not shared out: ranks share the heads, so all of them together hold each key once as it is.
    """

    sharded: ClassVar[bool] = False


class GroupedAttention(DraftAttention):
    """Grouped-query attention; all features of a head are roped, in halves as stored, in pairs as kept."""

    def __init__(
        self, source: WeightSource, prefix: str, *, hidden: int, heads: int, key_heads: int, features: int
    ) -> None:
        ranks = source.mesh.heads.size
        self.heads, self.key_heads, self.features = heads // ranks, key_heads // ranks, features
        rope = RopeRows(features, features)
        parts = [
            Part(f"{prefix}{name}_proj.weight", count * features, 2 * hidden, shard=Shard(0, "heads"), rope=rows)
            for name, count, rows in (("q", heads, rope), ("k", key_heads, rope), ("v", key_heads, None))
        ]
        self.qkv_QF = source.matrix(*parts)
        self.out_EF = source.matrix(Part(f"{prefix}o_proj.weight", hidden, heads * features, shard=Shard(1, "heads")))
        self.cache = KeyValueSpec(2 * self.key_heads * features, source.dtype)

    @override
    def __call__(
        self,
        ops: GeneralOps,
        x_TF: Tensor,
        rotation_PO: Tensor,
        batch: Batch,
        cache_PKC: Tensor,
        scratch: Scratch,
    ) -> Tensor:
        tokens, layout, first = x_TF.shape[0], batch.layout, batch.first
        qkv_TQ = scratch.empty(tokens, self.qkv_QF.shape[0], dtype=x_TF.dtype)
        ops.linear(x_TF, self.qkv_QF, qkv_TQ, scratch)
        rope_store(qkv_TQ, _rotations(rotation_PO, batch, scratch), batch.cache_slot_T, cache_PKC, self.heads)
        q_THD = qkv_TQ.view(tokens, -1, self.features)[:, : self.heads]
        out_THD = scratch.empty(tokens, self.heads, self.features, dtype=x_TF.dtype)
        scale = self.features**-0.5
        if batch.decode is not None and layout.decode_rows:
            own = slice(0, layout.decode_tokens)
            rows = batch.decode
            attend(
                q_THD[own],
                cache_PKC,
                rows.page_RP,
                out_THD[own],
                first=first,
                scale=scale,
                length_R=rows.length_R,
                width=layout.width,
            )
        if batch.prefill is not None:
            found = tiles(batch.prefill.start, batch.prefill.count, layout.decode_tokens)
            tile_4N = on_device(list(zip(*found, strict=True)), torch.int32, x_TF.device)
            attend(q_THD, cache_PKC, batch.prefill.page_NP, out_THD, first=first, scale=scale, tile_4N=tile_4N)
        return out_THD.flatten(1)


def _rotations(rotation_PO: Tensor, batch: Batch, scratch: Scratch) -> Tensor:
    rotation_TO = scratch.empty(batch.position_T.shape[0], rotation_PO.shape[1], dtype=rotation_PO.dtype)
    return torch.index_select(rotation_PO, 0, batch.position_T, out=rotation_TO)
