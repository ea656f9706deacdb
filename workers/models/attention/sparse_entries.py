"""Sparse attention of invariant mode where ranks share out the pages of one cache: each rank gets the selected entries
that others have, and attends with its own heads to all of them, as one rank does that has the whole cache. What travels
does not depend on the context: as many entries for a token as it attends to.

Shape legend: D shards, T tokens, H heads of this rank, C cached features or bytes, L latent features, P pages, K = 64
entries per page, S selected positions, G tokens whose entries are gathered at a time, Q = G S places, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kernels.page import PAGE_TOKENS, pages_for
from kernels.selected_places import SelectedPlaces, find_places
from kernels.sparse import InvariantWorkspace, sparse_decode
from workers.cache.spec import latent_spec
from workers.memory.scratch import Scratch
from workers.models.attention.backend import Heads
from workers.models.batch import Selection
from workers.parallel.group import Group

GATHERED: Final = 64
"""Tokens whose entries are gathered at a time, of all ranks together: some 150 MB of 2,048 entries in bf16, and what is
chosen of them."""


@dataclass(frozen=True)
class SharedEntries:
    """Memory and communication for the selected entries of some tokens."""

    group: Group
    places: SelectedPlaces
    part_QC: Tensor
    """What this rank has of them, and anything in the place of others."""
    part_QDC: Tensor
    """What all ranks have."""
    entry_QC: Tensor
    """Of every place the entry of the rank that has it."""

    @staticmethod
    def of(
        group: Group, heads: Heads, attending: int, top_k: int, device: torch.device, scratch: Scratch
    ) -> SharedEntries:
        """Take memory for `attending` tokens at the most, which attend to `top_k` entries, from `scratch`."""
        shards = group.mesh.cache.size
        like = latent_spec(heads.latent, heads.rope, heads.norm_L.dtype, fp8=heads.fp8_cache).allocate(0, device)
        tokens = min(attending, max(1, GATHERED // shards))
        places = tokens * pages_for(top_k) * PAGE_TOKENS
        return SharedEntries(
            group=group,
            places=SelectedPlaces.allocate(tokens, top_k, scratch.empty),
            part_QC=scratch.empty(places, like.shape[-1], dtype=like.dtype),
            part_QDC=scratch.empty(places, shards, like.shape[-1], dtype=like.dtype),
            entry_QC=scratch.empty(places, like.shape[-1], dtype=like.dtype),
        )

    def reserve(self) -> None:
        """Exchange nothing of use once, of one place and of all. All ranks together."""
        for count in sorted({min(1, len(self.part_QC)), len(self.part_QC)} - {0}):
            self._exchange(count)

    def attend(
        self,
        heads: Heads,
        q_THC: Tensor,
        cache_PKC: Tensor,
        page_RP: Tensor,
        local_RP: Tensor,
        selection: Selection,
        out_THL: Tensor,
        lse_TH: Tensor,
        workspace: InvariantWorkspace | None,
    ) -> None:
        """Attention of tokens to what is selected for them. `page_RP`: global ids. `local_RP`: this rank's of the same
        pages, the null page for others'. `selection`: of these tokens. `workspace`: for as many."""
        assert selection.own is not None
        step = len(self.places.row_T)
        for begin in range(0, len(q_THC), step):
            turn = slice(begin, begin + step)
            where = selection.of(turn)
            assert where.own is not None
            tokens, shards = len(where.row_T), self.group.mesh.shards
            places = self.places.of_first(tokens)
            lists = where.selected_TS, where.own.selected_TS, where.row_T, page_RP, local_RP
            find_places(*lists, len(cache_PKC), shards, places, where.fault_1)
            place_Q, owner_Q11 = places.place_TX.flatten(), places.owner_TX.view(-1, 1, 1)
            count, features = len(place_Q), self.part_QC.shape[1]
            torch.index_select(cache_PKC.flatten(0, 1), 0, place_Q, out=self.part_QC[:count])
            self._exchange(count)
            entry_Q1C = self.entry_QC[:count].unsqueeze(1)
            torch.gather(self.part_QDC[:count], 1, owner_Q11.expand(-1, 1, features), out=entry_Q1C)
            sparse_decode(
                q_THC[turn],
                entry_Q1C.view(-1, PAGE_TOKENS, features),
                places.page_TY,
                places.row_T,
                places.index_TS,
                out_THL[turn],
                lse_TH[turn],
                where.fault_1,
                scale=heads.scale,
                workspace=workspace,
                invariant=True,
            )

    def _exchange(self, places: int) -> None:
        part_QC, part_QDC = self.part_QC[:places], self.part_QDC[:places]
        if part_QC.dtype == torch.uint8 and part_QC.is_cuda:
            # Words, whatever they are called. The one that is sent as another is of codes that are no numbers.
            part_QC, part_QDC = part_QC.view(torch.float32), part_QDC.view(torch.float32)
        self.group.gather_shards(part_QC, part_QDC)
