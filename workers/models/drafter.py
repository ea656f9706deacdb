"""What proposes the tokens that a model verifies.

Shape legend: T tokens, R rows, E hidden features, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from workers.cache.paged import PagedCache
from workers.cache.spec import CacheSpec
from workers.memory.scratch import Scratch
from workers.models.batch import Batch
from workers.models.segments import Segments


class DraftedRows(Protocol):
    """What a step lets a drafter do for its rows."""

    def choose(self, logits: Callable[[], Tensor], index: int) -> Tensor:
        """Draft number `index` of every row, int64 [R], decided on rank 0 for all ranks, of `logits` (fp32 [R, V]),
        whose memory is free afterwards."""

    def feed(self, token_R: Tensor, index: int) -> Batch:
        """Note it as the rows' draft number `index`; the batch of a pass over these tokens alone."""


class Drafter(ABC):
    """Proposes tokens. It reads the final hidden states of the model, and keeps what it needs of every token in layers
    of the paged cache that are its own."""

    cache: Sequence[CacheSpec]
    """Its layers, which lie behind the model's. Its entries lie one position further than the model's, for entry j
    pairs the hidden state of position j - 1 with the token at j: entry 0 does not exist."""
    segments: Segments
    """Of its pass over the tokens of a step, behind the model's."""

    @abstractmethod
    def catch_up(
        self, token_T: Tensor, hidden_TE: Tensor, batch: Batch, cache: PagedCache, scratch: Scratch | None = None
    ) -> Tensor:
        """Take tokens into its cache; returns its hidden states, [T, E], of which `logits` tells the next token.

        Token i of `token_T` stands one position after the one whose hidden state (the model's, or what this method
        returned) is row i of `hidden_TE`. `batch` has that later position's cache index, and `first` = 1. Memory comes
        from `scratch`, or is fresh where there is none.
        """

    @abstractmethod
    def logits(self, hidden_NE: Tensor, scratch: Scratch | None = None) -> Tensor:
        """Logits of its hidden states, fp32 [N, V]."""

    @abstractmethod
    def draft(self, hidden_RE: Tensor, rows: DraftedRows, drafts: int, cache: PagedCache, scratch: Scratch) -> None:
        """Propose `drafts` tokens for every row, one after the other. `hidden_RE`: its own, of the rows' newest tokens,
        which are in its cache already."""
