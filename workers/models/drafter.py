"""Drafters: they propose the tokens that a model verifies.

Shape legend: T tokens, R rows, E hidden features, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from kernels.decode_state import SlotTensors
from workers.cache.paged import PagedCache
from workers.cache.rings import RingSpec
from workers.cache.spec import CacheSpec
from workers.memory.scratch import Scratch
from workers.models.batch import Batch
from workers.models.segments import Segments


class DraftedRows(Protocol):
    """The part of a step that a drafter may use for its rows."""

    @property
    def slot_R(self) -> Tensor:
        """int64: the slot of every row, -1 for padding."""

    @property
    def state(self) -> SlotTensors:
        """State of all slots. A drafter that needs no pass of its own writes `draft_SK` itself."""

    def choose(self, logits: Callable[[], Tensor], index: int) -> Tensor:
        """Draft number `index` of every row, int64 [R], decided on rank 0 for all ranks, of `logits` (fp32 [R, V]),
        whose memory is free afterwards."""

    def feed(self, token_R: Tensor, index: int) -> Batch:
        """Note it as the rows' draft number `index`; the batch of a pass over these tokens alone."""

    def verify(self, likely_R: Tensor, drafts: int) -> None:
        """Have the next step verify only the first `likely_R` (int64) of the rows' `drafts` drafts. Rank 0 decides for
        all ranks."""


class Drafter(ABC):
    """Proposes tokens. What it needs of a row's tokens it keeps in layers of the paged cache that are its own, which a
    pass over the tokens of every step brings up to date; or it looks at the tokens themselves. Steps ask for both, and
    know no kind of drafter."""

    cache: Sequence[CacheSpec] = ()
    """Cache specs of its layers, which lie behind the model's. Its entries lie one position further than the model's,
    because entry j pairs the hidden state of position j - 1 with the token at j: entry 0 does not exist. A drafter
    without any has no pass over the tokens of a step."""
    segments: Segments | None = None
    """Segments of its pass over the tokens of a step, which comes after the model's. None unless it has one that reads
    the model's final hidden states of all tokens."""
    aux_hidden_state_layers: tuple[int, ...] = ()
    """Layers of the model: it reads the residual stream that enters each of them, side by side, [T, E for each], in
    place of the model's final hidden states. A layer may be there twice. Where there are several streams, it reads
    the mean of them; or all of them, one after the other, of a layer that it names once for each."""
    keeps = 0
    """Positions that it selects for a token, if its passes behind the one over a step's tokens attend to those that
    this one selected for the rows' newest tokens: see `Batch.kept_TS`."""
    most_drafts: int | None = None
    """Most drafts that it makes of a row; None: any number."""
    position_numbers = 0
    """fp32 numbers of every position in tables of its own."""
    estimates = False
    """Whether it says how likely a draft is to be accepted."""
    least_confidence = 0.0
    """Where it says that: least probability that a draft and those before it are accepted, for them to be verified;
    whoever chooses the drafter sets it."""
    reads_tokens = False
    """Whether slots keep the tokens of their rows for it (`SlotTensors.token_SX`)."""

    @property
    def follows(self) -> bool:
        """Whether it has a pass over the tokens of a step: `catch_up`."""
        return bool(self.cache)

    def rings(self, width: int) -> list[RingSpec]:
        """Specs of what it keeps of each slot, where a step feeds up to `width` tokens of a row."""
        return []

    def catch_up(
        self, token_T: Tensor, hidden_TE: Tensor, batch: Batch, cache: PagedCache, scratch: Scratch | None = None
    ) -> Tensor | None:
        """Take tokens into its cache; returns its hidden states, [T, E], of which `draft` wants those of the newest
        tokens. None of a drafter without a cache, or of one that drafts from what it has cached alone.

        Token i of `token_T` stands one position after the one whose hidden state (the model's, or the auxiliary hidden
        states that it reads) is row i of `hidden_TE`. `batch` has that later position's cache index, and `first` = 1.
        Memory comes from `scratch`, or is fresh where there is none.
        """
        return None

    @abstractmethod
    def draft(
        self, hidden_RE: Tensor | None, rows: DraftedRows, drafts: int, cache: PagedCache, scratch: Scratch
    ) -> None:
        """Propose `drafts` tokens for every row. `hidden_RE`: what `catch_up` returned of the rows' newest tokens,
        which are in its cache already; None where that returned None, and of a drafter without a cache."""
