"""What a layer keeps of the newest tokens of each running request, in memory of its slot instead of pages.

Shape legend: X slots, L tokens of a ring, C features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NULL_SLOT = 0
"""Place in a ring's tensor that no slot has: slot s has place s + 1. It is never read. The readable pass
writes tokens of nobody's row there; the pass in segments and what drafts write them nowhere."""


@dataclass(frozen=True)
class RingSpec:
    """A ring: what it keeps of the token at position p lies at p modulo its length, over that of the token so many
    before it.

    It takes no pages, so prompts share snapshots of it (`workers.cache.snapshots`) or nothing. A request that gives up
    its slot loses it, and is computed again from the last snapshot on.
    """

    tokens: int
    """Tokens that it holds."""
    width: int
    """Features of each."""
    dtype: torch.dtype
    needed: int
    """Newest tokens of which the first token of a step reads what the ring has, its own included."""

    kept: int
    """Newest tokens of which the next token needs what the ring has where no entry is begun: a snapshot has them."""
    ahead: bool = False
    """Whether it is a drafter's, which runs a token ahead: what it keeps of a token is made of the one before, too."""

    @property
    def token_bytes(self) -> int:
        """Bytes of a token."""
        return self.width * self.dtype.itemsize

    @property
    def slot_bytes(self) -> int:
        """Bytes that a slot takes."""
        return self.tokens * self.token_bytes

    def allocate(self, slots: int, device: torch.device) -> Tensor:
        """Memory for so many slots, [slots + 1, tokens, width], zeros. Place 0 is nobody's."""
        return torch.zeros(slots + 1, self.tokens, self.width, dtype=self.dtype, device=device)

    def random(self, places: int, device: torch.device, generator: torch.Generator) -> Tensor:
        """Contents of so many places as a model might leave them, [places, tokens, width]; equal generators give equal
        contents."""
        content_XLC = torch.empty(places, self.tokens, self.width, dtype=self.dtype, device=device)
        return content_XLC.uniform_(-1.7, 1.7, generator=generator)
