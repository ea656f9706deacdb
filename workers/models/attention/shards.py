"""Attention where ranks share out the pages of one latent cache (`kernels.page.Shards`): each rank attends with the
heads of all of them to the entries that it has, and the results are merged by log-sum-exp.

All ranks exchange in every layer, whatever they have of a row: a rank without an entry of it sends output 0 and
log-sum-exp -inf. What a step feeds is in the cache of its owner before anybody attends.

Shape legend: D shards, T tokens, R rows, W width, H heads of this rank, X = D H, L latent features, C = L + rope
features, V value features, B prefill rows, P pages (of the cache, or of a row's page table), K = 64 entries per page, S
entries of cached context.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from kernels.decode_state import own_pages
from kernels.gather_context import gather_context
from kernels.head_linear import head_linear
from kernels.mla_decode import launch, mla_decode
from kernels.page import PAGE_TOKENS
from kernels.runtime.dependent import launches_dependently
from workers.memory.scratch import Scratch
from workers.models.attention.backend import Backend, Heads
from workers.models.attention.decode_rows import DecodeMemory, Entering, absorb
from workers.models.batch import DecodeBatch
from workers.parallel.group import Group


@dataclass(frozen=True)
class ShardedRows(Backend):
    """Decode rows of which this rank has a part of the entries."""

    group: Group
    rows: DecodeBatch
    """Its `own` is this rank's part of the rows, which the plan is for."""
    q_THD: Tensor
    """Roped, unless they are `entering`."""
    entering: Entering | None
    memory: DecodeMemory
    q_RWXC: Tensor
    """Absorbed queries of all ranks of the group, heads side by side."""
    out_RWXL: Tensor
    """Attention of all heads to this rank's entries."""
    lse_RWX: Tensor
    merged_THL: Tensor | None
    """In invariant mode: what is merged, in fp32 until it is rounded once."""
    out_THV: Tensor

    @staticmethod
    def of(
        heads: Heads,
        group: Group,
        rows: DecodeBatch,
        q_THD: Tensor,
        entering: Entering | None,
        out_THV: Tensor,
        scratch: Scratch,
    ) -> ShardedRows:
        """Take memory for the rows from `scratch`."""
        assert rows.own is not None
        count, width = rows.own.bound_RW.shape
        dtype, of_all = heads.norm_L.dtype, (count, width, group.mesh.cache.size * heads.count)
        merged_THL = None
        if heads.invariant:
            merged_THL = scratch.empty(count * width, heads.count, heads.latent, dtype=torch.float32)
        return ShardedRows(
            group=group,
            rows=rows,
            q_THD=q_THD,
            entering=entering,
            memory=DecodeMemory.of(heads, count, width, scratch),
            q_RWXC=scratch.empty(*of_all, heads.latent + heads.rope, dtype=dtype),
            out_RWXL=scratch.empty(*of_all, heads.latent, dtype=torch.float32 if heads.invariant else dtype),
            lse_RWX=scratch.empty(*of_all, dtype=torch.float32),
            merged_THL=merged_THL,
            out_THV=out_THV,
        )

    def of_first(self, rows: DecodeBatch, q_THD: Tensor, out_THV: Tensor) -> ShardedRows:
        """Return the same for other rows, no more of them, in the first part of the memory."""
        assert self.rows.own is not None
        count, width = rows.length_R.shape[0], self.q_RWXC.shape[1]
        return replace(
            self,
            rows=replace(rows, own=self.rows.own.of_first(count)),
            q_THD=q_THD,
            memory=self.memory.first(count),
            q_RWXC=self.q_RWXC[:count],
            out_RWXL=self.out_RWXL[:count],
            lse_RWX=self.lse_RWX[:count],
            merged_THL=None if self.merged_THL is None else self.merged_THL[: count * width],
            out_THV=out_THV,
        )

    @override
    def attend(self, heads: Heads, cache_PKC: Tensor) -> None:
        memory, own, group, workspace = self.memory, self.rows.own, self.group, self.rows.workspace
        assert own is not None
        invariant = heads.invariant
        dependent = workspace is not None and not invariant and launches_dependently(cache_PKC.device)
        q_THC, shards = memory.q_RWHC.flatten(0, 1), group.mesh.cache.size
        absorb(heads, self.q_THD, self.entering, q_THC, cache_PKC, dependent=dependent)
        tokens = len(q_THC)
        group.gather_shards(q_THC.flatten(1), self.q_RWXC.view(tokens, shards, -1))
        tensors = self.q_RWXC, cache_PKC, own.page_RP, own.length_R, self.out_RWXL, self.lse_RWX
        if workspace is None or invariant:
            mla_decode(*tensors, scale=heads.scale, workspace=workspace, invariant=invariant, own=own, shards=shards)
        else:
            # What the kernel before writes are queries alone: all entries were written before it.
            launch.attend(*tensors, workspace, scale=heads.scale, dependent=dependent, early=dependent, own=own)
            launch.merge(self.out_RWXL, self.lse_RWX, workspace, dependent=dependent)
        attended_THL = memory.attended_RWHL.flatten(0, 1)
        by_shard = tokens, shards, heads.count
        parts = self.out_RWXL.view(*by_shard, -1), self.lse_RWX.view(by_shard)
        into_THL = attended_THL if self.merged_THL is None else self.merged_THL
        group.merge_shards(*parts, into_THL, memory.lse_RWH.flatten(0, 1), tree=invariant)
        if self.merged_THL is not None:
            attended_THL.copy_(self.merged_THL)
        value_HLV = heads.value_HVL.transpose(1, 2)
        head_linear(attended_THL, value_HLV, self.out_THV, invariant=invariant, dependent=dependent)
        if heads.sink_H is not None:
            heads.add_sinks(self.out_THV, memory.lse_RWH.flatten(0, 1))


@dataclass(frozen=True)
class SharedContext:
    """A piece of cached context whose entries lie on several ranks. Each gathers those that it has, and gets the others
    from their owners. What this step writes lies behind it."""

    group: Group
    page_BP: Tensor
    """int32: local ids of the own pages, the null page for others."""
    owner_S11: Tensor
    """int64: the shard that has each entry."""
    part_SC: Tensor
    part_SDC: Tensor
    """The parts of all ranks."""

    @staticmethod
    def memory(
        group: Group, entries: int, features: int, dtype: torch.dtype, scratch: Scratch
    ) -> tuple[Tensor, Tensor]:
        """Take memory for pieces of at most so many entries, which follow one another, from `scratch`."""
        of_all = entries, group.mesh.shards.count, features
        return scratch.empty(entries, features, dtype=dtype), scratch.empty(*of_all, dtype=dtype)

    @staticmethod
    def of(
        group: Group, page_BP: Tensor, cu_B1: Tensor, begin: int, out_SC: Tensor, memory: tuple[Tensor, Tensor]
    ) -> SharedContext:
        """Make it for a call of `gather`. `page_BP`: page tables of global ids. `cu_B1`, `begin`: see `gather_context`.
        `memory`: of `SharedContext.memory`."""
        shards = group.mesh.shards
        place_S = torch.arange(len(out_SC), dtype=cu_B1.dtype, device=cu_B1.device)
        # Bounded for those who ask how much memory it takes, without entries.
        row_S = torch.searchsorted(cu_B1[1:].contiguous(), place_S, right=True).clamp(max=page_BP.shape[0] - 1)
        column_S = (begin + place_S - cu_B1[row_S]).long() // PAGE_TOKENS
        page_S = page_BP[row_S, column_S.clamp(max=page_BP.shape[1] - 1)]
        return SharedContext(
            group=group,
            page_BP=own_pages(page_BP, shards).to(torch.int32),
            owner_S11=((page_S.long() - 1) % shards.count).view(-1, 1, 1),
            part_SC=memory[0][: len(out_SC)],
            part_SDC=memory[1][: len(out_SC)],
        )

    def reserve(self) -> None:
        """Exchange nothing of use once, of one entry and of all: kernels for few and for many are compiled then. All
        ranks together."""
        for count in (1, len(self.part_SC)):
            self.group.gather_shards(self.part_SC[:count], self.part_SDC[:count])

    def gather(self, cache_PKC: Tensor, cu_B1: Tensor, out_SC: Tensor, *, begin: int, latent: int) -> None:
        """`gather_context`, from the caches of all ranks."""
        gather_context(cache_PKC, self.page_BP, cu_B1, self.part_SC, begin=begin, latent=latent)
        self.group.gather_shards(self.part_SC, self.part_SDC)
        # Taken, and not added up: what others have in their place may be anything.
        torch.gather(self.part_SDC, 1, self.owner_S11.expand(-1, 1, out_SC.shape[1]), out=out_SC.unsqueeze(1))
