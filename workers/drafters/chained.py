"""Drafters whose pass leads from each draft to the next: it reads a token beside a hidden state, and leaves the hidden
state that the next token is read beside.

Shape legend: T tokens, R rows, N rows of logits, E hidden features, V vocabulary.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor
from typing_extensions import override

from workers.cache.paged import PagedCache
from workers.memory.scratch import Scratch
from workers.models.batch import Batch
from workers.models.drafter import DraftedRows, Drafter
from workers.models.model import Model
from workers.models.segments import Segments
from workers.weights.weight import Weight


class ChainedDrafter(Drafter):
    """Reads the model's final hidden states, and then its own, which are of the same kind."""

    model: Model
    head_YE: Weight
    """This rank's rows of its output head."""
    segments: Segments

    @override
    def catch_up(
        self, token_T: Tensor, hidden_TE: Tensor, batch: Batch, cache: PagedCache, scratch: Scratch | None = None
    ) -> Tensor:
        return self.segments.forward(token_T, hidden_TE, batch, cache, scratch or Scratch(token_T.device))

    def logits(self, hidden_NE: Tensor, scratch: Scratch | None = None) -> Tensor:
        """Logits of its hidden states, fp32 [N, V]: of the token behind theirs."""
        return self.model.logits(hidden_NE, scratch, self.head_YE)

    @override
    def draft(
        self, hidden_RE: Tensor | None, rows: DraftedRows, drafts: int, cache: PagedCache, scratch: Scratch
    ) -> None:
        """A pass of one token per row leads from each draft to the next."""
        assert hidden_RE is not None
        for index in range(drafts):
            token_R = rows.choose(partial(self.logits, hidden_RE, scratch), index)
            batch = rows.feed(token_R, index)
            if index + 1 < drafts:
                hidden_RE = self.catch_up(token_R, hidden_RE, batch, cache, scratch)
