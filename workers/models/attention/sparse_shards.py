"""Sparse attention where ranks share out the pages of one cache (`kernels.page.Shards`), its index keys included.

Each rank scores the entries that it has, for all tokens, and offers its best to the others: score and position of as
many as a token attends to, so that the best of all are among them. Every rank has what all offer, and selects from it
by itself (`kernels.sparse_shards`): the same positions on all, whatever their number. Then ranks gather the absorbed
queries, attend with all heads to those selected entries that they have, send each head's part to its rank, and merge
it there, as dense decode rows do (`shards`). Chunks of prompts take the same way. In invariant mode selected entries
travel in place of queries and parts (`sparse_entries`).

All ranks exchange in every layer, whatever they have of a row, and in equal turns.

Shape legend: D shards, T tokens, H heads of this rank, X = D H, C cached features, L latent features, P pages, K = 64
entries per page, S selected positions, N scores of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.page import pages_for
from kernels.sparse import SelectWorkspace, SparseWorkspace, select_positions, sparse_decode
from kernels.sparse_shards import (
    Candidates,
    OwnPages,
    find_own_pages,
    keep_selected,
    offer_candidates,
    order_candidates,
    own_bounds,
)
from workers.memory.scratch import Scratch
from workers.models.attention.backend import Heads
from workers.models.attention.decode_rows import DecodeMemory
from workers.models.attention.sparse_entries import SharedEntries
from workers.models.batch import Batch, OwnSelection, Selection
from workers.parallel.group import Group


def heads_of_all(heads: Heads, shards: int) -> Heads:
    """`heads` as a shard attends with: those of all ranks that share out the cache, in numbers alone."""
    return heads if shards == 1 else replace(heads, count=shards * heads.count)


def own_selection(batch: Batch, row_T: Tensor, bound_T: Tensor, selected_TS: Tensor, scratch: Scratch) -> OwnSelection:
    """Find this rank's part of the rows of `batch`, whose tokens have these rows and bounds, and take room for its part
    of what is `selected_TS`; where that is given, find it as well."""
    assert batch.group is not None
    shards, split, tokens = batch.group.mesh.shards, batch.layout.decode_tokens, len(row_T)
    own = OwnSelection(
        decode=None,
        prefill=None,
        bound_T=scratch.empty(tokens, dtype=torch.int32),
        first_T=scratch.empty(tokens, dtype=torch.bool),
        selected_TS=scratch.empty(*selected_TS.shape, dtype=torch.int32),
    )

    def found(part: slice, page_RP: Tensor) -> OwnPages:
        rows, columns = page_RP.shape
        pages = OwnPages.allocate(rows, columns, scratch.empty)
        find_own_pages(page_RP, pages, shards)
        own_bounds(row_T[part], bound_T[part], pages, own.bound_T[part], own.first_T[part])
        if batch.given_TS is not None:
            keep_selected(None, selected_TS[part], row_T[part], pages, own.selected_TS[part])
        return pages

    decode, prefill = None, None
    if batch.decode is not None and split:
        decode = found(slice(0, split), batch.decode.page_RP)
    if batch.prefill is not None and batch.prefill.count:
        # As wide as the rows' tables are in `SparseGeometry`.
        longest = max(start + count for start, count in zip(batch.prefill.start, batch.prefill.count, strict=True))
        prefill = found(slice(split, tokens), batch.prefill.page_NP[:, : pages_for(longest)])
    return replace(own, decode=decode, prefill=prefill)


@dataclass(frozen=True)
class SharedSelection:
    """Memory and communication of some rows' tokens, of one kind, beside what `SparseRows` has."""

    group: Group
    selection: Selection
    own: OwnSelection
    pages: OwnPages | None
    """None where nothing will be computed."""
    candidates: Candidates
    """Of as many tokens as are scored at once."""
    memory: DecodeMemory | None
    """Queries, results and log-sum-exps of the heads of all ranks, of as many tokens as attend at once; None in
    invariant mode."""
    entries: SharedEntries | None
    """In invariant mode what travels in place of those."""

    @staticmethod
    def of(
        group: Group,
        selection: Selection,
        pages: OwnPages | None,
        heads: Heads,
        scored: int,
        attending: int,
        scratch: Scratch,
    ) -> SharedSelection:
        """Take memory for so many tokens that are scored, or attend, at once from `scratch`. `heads`: this rank's."""
        assert selection.own is not None
        shards, top_k = group.mesh.cache.size, selection.selected_TS.shape[1]
        memory, entries = None, None
        if heads.invariant:
            entries = SharedEntries.of(group, heads, attending, top_k, selection.row_T.device, scratch)
        else:
            memory = DecodeMemory.of(heads_of_all(heads, shards), attending, 1, scratch)
        return SharedSelection(
            group=group,
            selection=selection,
            own=selection.own,
            pages=pages,
            candidates=Candidates.allocate(scored, shards, top_k, scratch.empty),
            memory=memory,
            entries=entries,
        )

    @property
    def there(self) -> OwnPages:
        """Own pages of the rows, of which there are some."""
        assert self.pages is not None
        return self.pages

    def leave_out(self, score_TN: Tensor, turn: slice, first: int) -> None:
        """Give the entries before `first` the least score, on the shard that has them."""
        score_TN[:, :first].masked_fill_(self.own.first_T[turn].unsqueeze(1), -torch.inf)

    def select(
        self,
        score_TN: Tensor,
        turn: slice,
        first: int,
        workspaces: tuple[Mapping[int, SelectWorkspace], Mapping[int, SelectWorkspace]],
        *,
        dependent: bool,
    ) -> None:
        """Select the positions of some tokens, which have these scores of their own entries. `workspaces`: for these
        scores, and for those of the candidates of all shards."""
        where, tokens = self.selection.of(turn), len(score_TN)
        candidates, own_TS = self.candidates.first(tokens), self.own.selected_TS[turn]
        selected_TS = where.selected_TS
        own = score_TN, self.own.bound_T[turn], selected_TS, where.fault_1
        select_positions(*own, workspaces[0].get(tokens), dependent=dependent)
        offered = selected_TS, score_TN, where.row_T, self.there, candidates.part_TY
        offer_candidates(*offered, dependent=dependent)
        # Words, whatever they are called.
        part_TY, part_TDY = (part.view(torch.float32) for part in (candidates.part_TY, candidates.part_TDY))
        self.group.gather_shards(part_TY, part_TDY)
        order_candidates(candidates, dependent=dependent)
        chosen = candidates.score_TX, candidates.count_T, candidates.index_TS, where.fault_1
        select_positions(*chosen, workspaces[1].get(tokens), dependent=dependent)
        kept = candidates, selected_TS, where.row_T, self.there, own_TS
        keep_selected(*kept, first=first, dependent=dependent)

    def keep(self) -> None:
        """Find this rank's part of what is selected anew: somebody has changed it."""
        own_TS, where = self.own.selected_TS, self.selection
        keep_selected(None, where.selected_TS, where.row_T, self.there, own_TS)

    def attend(
        self,
        heads: Heads,
        q_THC: Tensor,
        cache_PKC: Tensor,
        turn: slice,
        out_THL: Tensor,
        lse_TH: Tensor,
        workspace: SparseWorkspace | None,
        *,
        dependent: bool,
    ) -> None:
        """Attention of some tokens to what is selected, and its log-sum-exp, of this rank's heads. `workspace`: for the
        heads of all."""
        assert self.memory is not None
        tokens, shards, memory = len(q_THC), self.group.mesh.cache.size, self.memory.first(len(q_THC))
        q_TXC, out_TXL, lse_TX = (x.squeeze(1) for x in (memory.q_RWHC, memory.attended_RWHL, memory.lse_RWH))
        self.group.gather_shards(q_THC.flatten(1), q_TXC.view(tokens, shards, -1))
        sparse_decode(
            q_TXC,
            cache_PKC,
            self.there.local_RP,
            self.selection.row_T[turn],
            self.own.selected_TS[turn],
            out_TXL,
            lse_TX,
            self.selection.fault_1,
            scale=heads.scale,
            workspace=workspace,
            dependent=dependent,
        )
        by_shard = tokens, shards, heads.count
        self.group.merge_shards(out_TXL.view(*by_shard, -1), lse_TX.view(by_shard), out_THL, lse_TH)

    def reserve(self, own: DecodeMemory) -> None:
        """Exchange nothing of use once, of one token and of all: kernels for few and for many are compiled then, and so
        is that of `keep`. All ranks together. `own`: memory of this rank's heads."""
        shards = self.group.mesh.cache.size
        part_TY, part_TDY = (x.view(torch.float32) for x in (self.candidates.part_TY, self.candidates.part_TDY))
        for count in sorted({min(1, len(part_TY)), len(part_TY)} - {0}):
            self.group.gather_shards(part_TY[:count], part_TDY[:count])
        if self.entries is not None:
            self.entries.reserve()
        attending = 0 if self.memory is None else len(own.q_RWHC)
        for count in sorted({min(1, attending), attending} - {0}):
            assert self.memory is not None
            mine, all = own.first(count), self.memory.first(count)
            heads = mine.lse_RWH.shape[2]
            self.group.gather_shards(mine.q_RWHC.view(count, -1), all.q_RWHC.view(count, shards, -1))
            parts = all.attended_RWHL.view(count, shards, heads, -1), all.lse_RWH.view(count, shards, heads)
            self.group.merge_shards(*parts, mine.attended_RWHL.squeeze(1), mine.lse_RWH.squeeze(1))
        if self.pages is not None:
            self.keep()  # the self-test alone does this without candidates
