"""The absorbed form over the paged cache, for decode rows: W_UK is applied to the query instead of the cache, W_UV to
the attended latent, so that all heads attend to the same cache entries (DeepSeek-V2, 2024, section 2.1). That is the
loop of `deepseek.attention`; in passes of decode rows alone also the lines (1), (3), (8) and the write of the entry.

Shape legend: T = R * W tokens, H heads of this rank, N / O non-rope / rope features of a query, D = N + O, L latent
features, C = L + O cached features, V value features, R rows, W width, P pages or parts of a sum, K = 64 entries per
page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor
from typing_extensions import override

from kernels.head_linear import absorb as absorb_roped
from kernels.head_linear import head_linear, merge_up, rope_absorb
from kernels.linear import MOST_STREAMED
from kernels.mla_decode import DecodeShape, launch, mla_decode, schedule_decode
from kernels.own_entries import own_entries
from kernels.runtime.dependent import launches_dependently
from workers.memory.scratch import Scratch
from workers.models.attention.backend import Backend, Heads
from workers.models.batch import DecodeBatch
from workers.parallel.group import Group

MOST_MERGED: Final = 16
"""Most query vectors, a token's on this rank each, whose pieces are merged and multiplied by W_UV in one launch:
`merge_up` merges them anew for every 16 of a head's output features, which pays while they are few."""


def plan_rows(
    heads: Heads,
    rows: DecodeBatch,
    width: int,
    first: int,
    empty: Callable[[int], Tensor],
    *,
    group: Group | None = None,
) -> DecodeBatch:
    """`rows` with a plan of which programs of a GPU read which of their entries, in memory of `empty` (bytes to uint8);
    on a CPU as they are. It holds for all layers of one shape. `group`: ranks that share out the cache, and attend with
    the heads of all of them to their `own` entries, which are found first."""
    shards = 1
    if group is not None and rows.own is not None:
        own_entries(rows.page_RP, rows.length_R, rows.own, group.mesh.shards, first=first)
        shards = group.mesh.cache.size
    if not rows.length_R.is_cuda:
        return rows
    shape = DecodeShape(
        *(rows.length_R.shape[0], width, shards * heads.count, heads.latent, heads.rope, rows.page_RP.shape[1]),
        invariant=heads.invariant,
        shards=shards if heads.invariant else 1,
    )
    own, dtype = rows.own, heads.norm_L.dtype
    if own is None:
        workspace = schedule_decode(shape, rows.length_R, rows.page_RP, dtype, empty, first=first, fp8=heads.fp8_cache)
    else:
        workspace = schedule_decode(shape, own.length_R, own.page_RP, dtype, empty, fp8=heads.fp8_cache, own=True)
    return replace(rows, workspace=workspace)


@dataclass(frozen=True)
class Entering:
    """Input of attention that ropes, norms and caches by itself. The queries and latents are neither roped nor normed,
    nor in the cache; both may be partial sums, [T, P, H, D] and [T, P, C]."""

    q_THD: Tensor
    kv_TC: Tensor
    rotation_PO: Tensor
    position_T: Tensor
    cache_slot_T: Tensor


@dataclass(frozen=True)
class DecodeMemory:
    """Absorbed queries, attended latents and log-sum-exps."""

    q_RWHC: Tensor
    attended_RWHL: Tensor
    lse_RWH: Tensor

    @staticmethod
    def of(heads: Heads, rows: int, width: int, scratch: Scratch) -> DecodeMemory:
        """Take memory for `rows` rows from `scratch`."""
        shape, dtype = (rows, width, heads.count), heads.norm_L.dtype
        return DecodeMemory(
            scratch.empty(*shape, heads.latent + heads.rope, dtype=dtype),
            scratch.empty(*shape, heads.latent, dtype=dtype),
            scratch.empty(*shape, dtype=torch.float32),
        )

    def first(self, rows: int) -> DecodeMemory:
        """The part of the first so many rows."""
        return DecodeMemory(self.q_RWHC[:rows], self.attended_RWHL[:rows], self.lse_RWH[:rows])


def absorb(
    heads: Heads, q_THD: Tensor, entering: Entering | None, q_THC: Tensor, cache_PKC: Tensor, *, dependent: bool
) -> None:
    """Queries for latents, of roped queries; or of those that are `entering`, whose latents are written, too.
    `dependent`: whether what comes behind is launched dependently."""
    if entering is None and (dependent or heads.invariant):
        absorb_roped(q_THD, heads.key_HNL, q_THC, invariant=heads.invariant, dependent=dependent)
        return
    if entering is None:
        absorbed_THL = q_THC[..., : heads.latent]
        head_linear(q_THD[..., : heads.nope], heads.key_HNL, absorbed_THL)
        q_THC[..., heads.latent :].copy_(q_THD[..., heads.nope :])
        return
    rope_absorb(
        entering.q_THD,
        entering.kv_TC,
        heads.key_HNL,
        heads.norm_L,
        entering.rotation_PO,
        entering.position_T,
        entering.cache_slot_T,
        q_THC,
        cache_PKC,
        eps=heads.norm_eps,
        dependent=dependent,
    )


@dataclass(frozen=True)
class DecodeRows(Backend):
    """Rows of as many tokens each."""

    rows: DecodeBatch
    """Planned."""
    first: int
    q_THD: Tensor
    """Roped, unless they are `entering`."""
    entering: Entering | None
    memory: DecodeMemory
    out_THV: Tensor

    @override
    def attend(self, heads: Heads, cache_PKC: Tensor) -> None:
        memory, entering, workspace = self.memory, self.entering, self.rows.workspace
        attended_THL, invariant = memory.attended_RWHL.flatten(0, 1), heads.invariant
        # Where attention begins with a kernel of ours, that one lets the next start as `early` asks; in invariant mode
        # it does not.
        ours = entering is not None or workspace is not None
        dependent = ours and launches_dependently(cache_PKC.device)
        absorb(heads, self.q_THD, entering, memory.q_RWHC.flatten(0, 1), cache_PKC, dependent=dependent)
        tokens, value_HLV = attended_THL.shape[0], heads.value_HVL.transpose(1, 2)
        tensors = (
            *(memory.q_RWHC, cache_PKC, self.rows.page_RP, self.rows.length_R),
            *(memory.attended_RWHL, memory.lse_RWH),
        )
        if workspace is None or invariant:
            mla_decode(
                *tensors,
                scale=heads.scale,
                first=self.first,
                workspace=workspace,
                invariant=invariant,
                dependent=dependent,
            )
            head_linear(attended_THL, value_HLV, self.out_THV, invariant=invariant, dependent=dependent)
            if heads.sink_H is not None:
                heads.add_sinks(self.out_THV, memory.lse_RWH.flatten(0, 1))
            return
        launch.attend(*tensors, workspace, scale=heads.scale, first=self.first, dependent=dependent, early=dependent)
        # For so few tokens tensor cores merge in bf16 alone: of fp32 they would round the inputs.
        few_merged = tokens * heads.count <= MOST_MERGED and attended_THL.dtype == torch.bfloat16
        # What merges and multiplies at once leaves no log-sum-exp, which sinks are added by.
        if (tokens <= MOST_STREAMED and not few_merged) or heads.sink_H is not None:
            launch.merge(memory.attended_RWHL, memory.lse_RWH, workspace, dependent=dependent)
            head_linear(attended_THL, value_HLV, self.out_THV, dependent=dependent)
            if heads.sink_H is not None:
                heads.add_sinks(self.out_THV, memory.lse_RWH.flatten(0, 1))
        else:
            merge_up(memory.attended_RWHL, workspace, heads.value_HVL, self.out_THV, dependent=dependent)
