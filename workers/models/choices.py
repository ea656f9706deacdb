"""Discrete choices, recorded in one pass and imposed on another that is compared with it: the experts that tokens
chose, and the positions that an indexer selected for them.

Routers and indexers decide discretely: on the least difference of rounding a token may go to other experts, or attend
to another position, and then all behind it is different. Who compares two passes lets the second take what the first
has chosen, and looks at the choice by itself.

Shape legend: T tokens, K experts that a token chooses, shared ones not among them, X experts to choose from, S
positions that a token attends to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from typing_extensions import override


class Choices(ABC):
    """Receives the experts that a path chose: layer by layer, pass by pass."""

    @abstractmethod
    def settle(self, id_TK: Tensor, weight_TK: Tensor) -> None:
        """A layer's choice, ids -1 of padding; it may be changed in place."""

    @abstractmethod
    def note(self, place_TX: Tensor, weight_TK: Tensor) -> None:
        """The same of a path that takes nobody else's: where an expert stands among a token's, -1 if nowhere."""

    @abstractmethod
    def select(self, selected_TS: Tensor, bound_T: Tensor) -> None:
        """The positions that a layer's tokens attend to, rising, -1 where there is none; they may be changed in place.
        `bound_T`: they are below."""


class Recorded(Choices):
    """Notes them, in memory of their own."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor]] = []
        self.selected: list[Tensor] = []

    @override
    def select(self, selected_TS: Tensor, bound_T: Tensor) -> None:
        self.selected.append(selected_TS.clone())

    @override
    def settle(self, id_TK: Tensor, weight_TK: Tensor) -> None:
        self.calls.append((id_TK.clone(), weight_TK.clone()))

    @override
    def note(self, place_TX: Tensor, weight_TK: Tensor) -> None:
        id_TK = torch.full(weight_TK.shape, -1, dtype=torch.int64, device=weight_TK.device)
        token_Y, expert_Y = (place_TX >= 0).nonzero(as_tuple=True)
        id_TK[token_Y, place_TX[token_Y, expert_Y].long()] = expert_Y
        self.settle(id_TK, weight_TK)


class Taken(Choices):
    """Puts the recorded ones in the place of a pass's own."""

    def __init__(self, recorded: Recorded, layers: int, period: int = 0, selecting: int = 0) -> None:
        """Take over the choices of the first `layers` layers, and the first `selecting` selections: other passes follow
        the target's, and their tokens may differ. `period`: the pass has these tokens again and again; 0: it has the
        first of those that were recorded."""
        self._recorded, self._layers, self._period, self._at = recorded, layers, period, 0
        self._selecting, self._selected = selecting, 0
        self._agreed: list[Tensor] = []

    @property
    def agreement(self) -> float:
        """The share of a pass's own choices that were recorded, too: of the layer where it is least, 1 without one."""
        return float(torch.stack(self._agreed).min()) if self._agreed else 1.0

    @override
    def settle(self, id_TK: Tensor, weight_TK: Tensor) -> None:
        at, tokens = self._at, id_TK.shape[0]
        self._at += 1
        if at >= min(self._layers, len(self._recorded.calls)) or not tokens:
            return
        index_T = self._index(id_TK)
        theirs_TK, weights_TK = self._recorded.calls[at]
        theirs_TK, weights_TK = theirs_TK[index_T], weights_TK[index_T]
        same_TK = (id_TK.unsqueeze(2) == theirs_TK.unsqueeze(1)).any(2)
        self._agreed.append(same_TK.float().mean())
        id_TK.copy_(theirs_TK)
        weight_TK.copy_(weights_TK)

    @override
    def note(self, place_TX: Tensor, weight_TK: Tensor) -> None:
        self._at += 1

    @override
    def select(self, selected_TS: Tensor, bound_T: Tensor) -> None:
        """Compare a selection with the recorded one and replace it. Positions that are not selected have to agree as
        well: where nearly all are selected, most would always agree. Rounding changes neither the number of positions
        nor that they lie below the bound. If these differ, nothing agrees."""
        at = self._selected
        self._selected += 1
        if at >= min(self._selecting, len(self._recorded.selected)) or not len(selected_TS):
            return
        theirs_TS = self._recorded.selected[at][self._index(selected_TS)]
        last = torch.iinfo(torch.int32).max
        # A drafter's tokens have nothing at position 0: there -1 stands in front.
        own_TS = selected_TS.masked_fill(selected_TS < 0, last).sort(1).values
        place_TS = torch.searchsorted(own_TS, theirs_TS.contiguous()).clamp_(max=own_TS.shape[1] - 1)
        there_TS = theirs_TS >= 0
        common_T = ((own_TS.gather(1, place_TS) == theirs_TS) & there_TS).sum(1)
        count_T, own_count_T = there_TS.sum(1), (selected_TS >= 0).sum(1)
        left_T = bound_T - count_T
        lawful = ((count_T == own_count_T) & (theirs_TS < bound_T.unsqueeze(1)).all(1)).all()
        contested_T = left_T > 0
        inside = (common_T * contested_T).sum() / (count_T * contested_T).sum().clamp(min=1)
        outside = ((left_T - count_T + common_T) * contested_T).sum() / (left_T * contested_T).sum().clamp(min=1)
        agreed = torch.minimum(inside, outside).where(contested_T.any(), 1.0)
        self._agreed.append(agreed * lawful)
        selected_TS.copy_(theirs_TS)

    def _index(self, of_T: Tensor) -> Tensor:
        """Return the index of the recorded token for each of these tokens."""
        index_T = torch.arange(len(of_T), device=of_T.device)
        return index_T % self._period if self._period else index_T
