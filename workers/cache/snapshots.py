"""Snapshots of rings: what the rings of a row hold that its next token needs, kept beside the pages of a prefix.

A page that prompts share is not enough where layers keep something of a row's newest tokens in its slot: whoever goes
on behind the page needs that as well. Where no compressed entry is begun and not ended, it is little: the entries of
the window, and of compressors those tokens that take part in the next entry, too.

Shape legend: N snapshots, K tokens of a ring that are kept, C features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.cache.rings import NULL_SLOT, RingSpec


def snapshot_bytes(rings: Sequence[RingSpec]) -> int:
    """Bytes that a snapshot of these rings takes."""
    return sum(ring.kept * ring.token_bytes for ring in rings)


class RingSnapshots:
    """Memory for a number of snapshots. Who has which of them, the scheduler decides."""

    def __init__(self, rings: Sequence[RingSpec], count: int, device: torch.device) -> None:
        self._specs, self.count = rings, count
        self._kept = [torch.zeros(count, ring.kept, ring.width, dtype=ring.dtype, device=device) for ring in rings]

    def clear(self) -> None:
        """Fill all of them with zeros."""
        for kept_NKC in self._kept:
            kept_NKC.zero_()

    def save(self, rings: Sequence[Tensor], slot: int, snapshot: int, tokens: int) -> None:
        """Copy what the rings of a slot hold into a snapshot. `tokens`: that the row has fed, and none beyond."""
        for spec, ring_XLC, kept_NKC in zip(self._specs, rings, self._kept, strict=True):
            place_K = _places(spec, tokens, kept_NKC.device)
            kept_NKC[snapshot, spec.kept - len(place_K) :] = ring_XLC[slot + 1 + NULL_SLOT, place_K]

    def restore(self, rings: Sequence[Tensor], slot: int, snapshot: int, tokens: int) -> None:
        """Put a snapshot into the rings of a slot. `tokens`: that its row had fed when it was saved.

        A drafter runs one token ahead, and that token is another one in every row: what it keeps of it is missing, and
        NaN says so."""
        for spec, ring_XLC, kept_NKC in zip(self._specs, rings, self._kept, strict=True):
            place_K = _places(spec, tokens, kept_NKC.device)
            ring_XLC[slot + 1 + NULL_SLOT, place_K] = kept_NKC[snapshot, spec.kept - len(place_K) :]
            if spec.ahead:
                ring_XLC[slot + 1 + NULL_SLOT, tokens % spec.tokens] = torch.nan


def _places(spec: RingSpec, tokens: int, device: torch.device) -> Tensor:
    """Where a ring has the newest of so many tokens, as many as are kept; int64."""
    return torch.arange(max(0, tokens - spec.kept), tokens, device=device) % spec.tokens
