"""Whom tokens chose among the experts, noted in one pass and taken in another that is compared with it.

A router decides discretely: on the least difference of rounding a token may go to other experts, and then all behind it
is different. Who compares two passes lets the second take what the first has chosen, and looks at the choice by itself.

Shape legend: T tokens, K experts that a token chooses, shared ones not among them, X experts to choose from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Choices(ABC):
    """What a way hands its choices to: layer by layer, pass by pass."""

    @abstractmethod
    def settle(self, id_TK: Tensor, weight_TK: Tensor) -> None:
        """A layer's choice, ids -1 of padding; it may be changed in place."""

    @abstractmethod
    def note(self, place_TX: Tensor, weight_TK: Tensor) -> None:
        """The same of a way that takes nobody else's: where an expert stands among a token's, -1 if nowhere."""


class Recorded(Choices):
    """Notes them, in memory of their own."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor]] = []

    def settle(self, id_TK: Tensor, weight_TK: Tensor) -> None:
        """See `Choices`."""
        self.calls.append((id_TK.clone(), weight_TK.clone()))

    def note(self, place_TX: Tensor, weight_TK: Tensor) -> None:
        """See `Choices`."""
        id_TK = torch.full(weight_TK.shape, -1, dtype=torch.int64, device=weight_TK.device)
        token_Y, expert_Y = (place_TX >= 0).nonzero(as_tuple=True)
        id_TK[token_Y, place_TX[token_Y, expert_Y].long()] = expert_Y
        self.settle(id_TK, weight_TK)


class Taken(Choices):
    """Puts the recorded ones in the place of a pass's own."""

    def __init__(self, recorded: Recorded, layers: int, period: int = 0) -> None:
        """Of the first so many calls: behind a target's pass come others, whose tokens may differ. `period`: the pass
        has these tokens again and again; 0: it has the first of those that were recorded."""
        self._recorded, self._layers, self._period, self._at = recorded, layers, period, 0
        self._agreed: list[Tensor] = []

    @property
    def agreement(self) -> float:
        """The share of a pass's own choices that were recorded, too: of the layer where it is least, 1 without one."""
        return float(torch.stack(self._agreed).min()) if self._agreed else 1.0

    def settle(self, id_TK: Tensor, weight_TK: Tensor) -> None:
        """See `Choices`."""
        at, tokens = self._at, id_TK.shape[0]
        self._at += 1
        if at >= min(self._layers, len(self._recorded.calls)) or not tokens:
            return
        index_T = torch.arange(tokens, device=id_TK.device)
        theirs_TK, weights_TK = self._recorded.calls[at]
        if self._period:
            index_T %= self._period
        theirs_TK, weights_TK = theirs_TK[index_T], weights_TK[index_T]
        same_TK = (id_TK.unsqueeze(2) == theirs_TK.unsqueeze(1)).any(2)
        self._agreed.append(same_TK.float().mean())
        id_TK.copy_(theirs_TK)
        weight_TK.copy_(weights_TK)

    def note(self, place_TX: Tensor, weight_TK: Tensor) -> None:
        """See `Choices`."""
        self._at += 1
