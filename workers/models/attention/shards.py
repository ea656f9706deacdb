"""Attention where ranks share out the pages of one latent cache (`kernels.page.Shards`): each rank attends with the
heads of all of them to the entries that it has, and the results are merged by log-sum-exp. In this form on a CPU alone.

All ranks exchange in every layer, whatever they have of a row: a rank without an entry of it sends output 0 and
log-sum-exp -inf. What a step feeds is in the cache of its owner before anybody attends.

Shape legend: D shards, T tokens, R rows, W width, H heads of this rank, X = D H, L latent features, C = L + rope
features, V value features, B prefill rows, P pages (of the cache, or of a row's page table), K = 64 entries per page, S
entries of cached context.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from typing_extensions import override

from kernels.decode_state.reference import own_pages
from kernels.gather_context import gather_context
from kernels.head_linear import head_linear
from kernels.mla_decode import mla_decode
from kernels.own_entries import OwnEntries
from kernels.page import PAGE_TOKENS
from workers.memory.scratch import Scratch
from workers.models.attention.backend import Backend, Heads
from workers.models.attention.decode_rows import DecodeMemory, Entering, absorb
from workers.parallel.group import Group


def merge_shards(out_DTHL: Tensor, lse_DTH: Tensor, into_THL: Tensor) -> Tensor:
    """Merge attention to disjoint sets of entries: sums of exp(lse) out and of exp(lse), whose quotient goes to
    `into_THL`; returned is the log-sum-exp of all, [T, H]. They are balanced trees in the order of the shards, so all
    ranks have the same bits.

    A part of log-sum-exp -inf counts for nothing, whatever its output holds; where all are, the result is 0.
    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    top_TH = lse_DTH.amax(0)
    # A finite shift: exp(-inf - 0) is the 0 that is wanted, and -inf - -inf is NaN.
    top_TH = top_TH.masked_fill(top_TH == -torch.inf, 0.0)
    weight_DTH = torch.exp(lse_DTH - top_TH)
    weight_DTH1 = weight_DTH.unsqueeze(-1)
    total_TH = _tree_sum(weight_DTH)
    sum_THL = _tree_sum(torch.where(weight_DTH1 != 0, weight_DTH1 * out_DTHL, 0.0))
    into_THL.copy_(sum_THL / total_TH.masked_fill(total_TH == 0, 1.0).unsqueeze(-1))
    return top_TH + torch.log(total_TH)


def _tree_sum(x_DX: Tensor) -> Tensor:
    """Sum along the first axis as a balanced binary tree."""
    while (count := x_DX.shape[0]) > 1:
        even = count - count % 2
        x_DX = torch.cat([x_DX[0:even:2] + x_DX[1:even:2], x_DX[even:]])
    return x_DX[0]


@dataclass(frozen=True)
class ShardedRows(Backend):
    """Decode rows of which this rank has a part of the entries."""

    group: Group
    own: OwnEntries
    q_THD: Tensor
    """Roped, unless they are `entering`."""
    entering: Entering | None
    memory: DecodeMemory
    q_DRWHC: Tensor
    """Absorbed queries of all ranks of the group."""
    q_RWXC: Tensor
    """The same, heads side by side."""
    out_RWXL: Tensor
    """fp32: attention of all heads to this rank's entries."""
    lse_RWX: Tensor
    sent_DRWHL: Tensor
    sent_lse_DRWH: Tensor
    found_DRWHL: Tensor
    """fp32: attention of this rank's heads to the entries of every rank."""
    found_lse_DRWH: Tensor
    out_THV: Tensor

    @staticmethod
    def of(
        heads: Heads,
        group: Group,
        own: OwnEntries,
        q_THD: Tensor,
        entering: Entering | None,
        out_THV: Tensor,
        scratch: Scratch,
    ) -> ShardedRows:
        """Take memory for the rows from `scratch`."""
        (rows, width), shards = own.bound_RW.shape, group.mesh.cache.size
        memory = DecodeMemory.of(heads, rows, width, scratch)
        dtype, features, of_rank = heads.norm_L.dtype, heads.latent + heads.rope, (rows, width, heads.count)
        of_all = rows, width, shards * heads.count
        partial = torch.promote_types(dtype, torch.float32)
        return ShardedRows(
            group=group,
            own=own,
            q_THD=q_THD,
            entering=entering,
            memory=memory,
            q_DRWHC=scratch.empty(shards, *of_rank, features, dtype=dtype),
            q_RWXC=scratch.empty(*of_all, features, dtype=dtype),
            out_RWXL=scratch.empty(*of_all, heads.latent, dtype=partial),
            lse_RWX=scratch.empty(*of_all, dtype=torch.float32),
            sent_DRWHL=scratch.empty(shards, *of_rank, heads.latent, dtype=partial),
            sent_lse_DRWH=scratch.empty(shards, *of_rank, dtype=torch.float32),
            found_DRWHL=scratch.empty(shards, *of_rank, heads.latent, dtype=partial),
            found_lse_DRWH=scratch.empty(shards, *of_rank, dtype=torch.float32),
            out_THV=out_THV,
        )

    @override
    def attend(self, heads: Heads, cache_PKC: Tensor) -> None:
        memory, own = self.memory, self.own
        absorb(heads, self.q_THD, self.entering, memory.q_RWHC.flatten(0, 1), cache_PKC, dependent=False)
        self.group.gather_shards(memory.q_RWHC, self.q_DRWHC)
        self._by_head(self.q_RWXC).copy_(self.q_DRWHC.permute(1, 2, 0, 3, 4))
        tensors = self.q_RWXC, cache_PKC, own.page_RP, own.length_R, self.out_RWXL, self.lse_RWX
        mla_decode(*tensors, scale=heads.scale, own=own)
        self.sent_DRWHL.copy_(self._by_head(self.out_RWXL).permute(2, 0, 1, 3, 4))
        self.sent_lse_DRWH.copy_(self._by_head(self.lse_RWX).permute(2, 0, 1, 3))
        self.group.exchange_shards(self.sent_DRWHL, self.found_DRWHL)
        self.group.exchange_shards(self.sent_lse_DRWH, self.found_lse_DRWH)
        lse_RWH = merge_shards(self.found_DRWHL, self.found_lse_DRWH, memory.attended_RWHL)
        head_linear(memory.attended_RWHL.flatten(0, 1), heads.value_HVL.transpose(1, 2), self.out_THV)
        heads.add_sinks(self.out_THV, lse_RWH.flatten(0, 1))

    def _by_head(self, x_RWX: Tensor) -> Tensor:
        """[R, W, D, H, ...] of what has all heads side by side."""
        rows, width, _, *features = x_RWX.shape
        return x_RWX.view(rows, width, self.group.mesh.cache.size, -1, *features)


@dataclass(frozen=True)
class SharedContext:
    """A piece of cached context whose entries lie on several ranks. Each gathers those that it has, and gets the others
    from their owners. What this step writes lies behind it."""

    group: Group
    page_BP: Tensor
    """int32: local ids of the own pages, the null page for others."""
    owner_1S1: Tensor
    """int64: the shard that has each entry."""
    part_SC: Tensor
    part_DSC: Tensor
    """The parts of all ranks."""

    @staticmethod
    def of(group: Group, page_BP: Tensor, cu_B1: Tensor, begin: int, out_SC: Tensor, scratch: Scratch) -> SharedContext:
        """Make it for a call of `gather`. `page_BP`: page tables of global ids. `cu_B1`, `begin`: see `gather_context`;
        they are read on the host. Memory comes from `scratch`."""
        shards, bounds = group.mesh.shards, cu_B1.tolist()
        counts = [end - at for at, end in pairwise(bounds)]
        columns = [torch.arange(begin, begin + count) // PAGE_TOKENS for count in counts]
        page_S = torch.cat([page_P[column] for page_P, column in zip(page_BP, columns, strict=True)])
        return SharedContext(
            group=group,
            page_BP=own_pages(page_BP, shards).to(torch.int32),
            owner_1S1=((page_S.long() - 1) % shards.count).view(1, -1, 1),
            part_SC=scratch.empty(*out_SC.shape, dtype=out_SC.dtype),
            part_DSC=scratch.empty(shards.count, *out_SC.shape, dtype=out_SC.dtype),
        )

    def gather(self, cache_PKC: Tensor, cu_B1: Tensor, out_SC: Tensor, *, begin: int, latent: int) -> None:
        """`gather_context`, from the caches of all ranks."""
        gather_context(cache_PKC, self.page_BP, cu_B1, self.part_SC, begin=begin, latent=latent)
        self.group.gather_shards(self.part_SC, self.part_DSC)
        # Taken, and not added up: what others have in their place may be anything.
        torch.take_along_dim(self.part_DSC, self.owner_1S1, 0, out=out_SC.unsqueeze(0))
