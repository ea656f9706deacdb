"""Prompt look-up: drafts are what followed the newest tokens where they stood before, in the row's own prompt and
output. No weights, no cache: see `kernels.ngram`."""

from __future__ import annotations

from torch import Tensor, int64
from typing_extensions import override

from kernels.ngram import blocks, propose
from workers.cache.paged import PagedCache
from workers.memory.scratch import Scratch
from workers.models.drafter import DraftedRows, Drafter


class Ngram(Drafter):
    """Finds drafts among the tokens that slots keep. Every rank finds the same, without a word to the others."""

    reads_tokens = True

    @override
    def draft(
        self, hidden_RE: Tensor | None, rows: DraftedRows, drafts: int, cache: PagedCache, scratch: Scratch
    ) -> None:
        if not drafts:
            return
        state, slot_R = rows.state, rows.slot_R
        with scratch.scope():
            found_RC = scratch.empty(slot_R.shape[0], blocks(state.token_SX.shape[1]), dtype=int64)
            propose(state.token_SX, state.length_S, slot_R, state.draft_SK, drafts, found_RC)
