"""Random contents of rings, for those who prove what a step does to them.

Shape legend: X places in play, L tokens of a ring, C features, E places of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.cache.paged import PagedCache
from workers.cache.rings import NULL_SLOT, RingSpec
from workers.memory.bits import bits
from workers.memory.scratch import on_device


@dataclass(frozen=True)
class RingRow:
    """A row of a step: its slot, the positions from which to which it feeds tokens, and drafts that it makes. Of tokens
    of a prompt none is rejected."""

    slot: int
    start: int
    end: int
    drafts: int = 0
    prompt: bool = False


@dataclass(frozen=True)
class _Tokens:
    """Tokens of a ring, bool [X, L]."""

    own_XL: Tensor
    """The step writes them."""
    kept_XL: Tensor
    """The step may not change them."""


class RandomRings:
    """Random contents of the rings of some rows' slots, and NaN wherever a step may read nothing: a copy, on the
    cache's device, from which rings are restored and with which they are compared. Place i is that of row i."""

    def __init__(
        self, cache: PagedCache, rows: Sequence[RingRow], unowned: Sequence[int], generator: torch.Generator
    ) -> None:
        """`unowned`: slots of nobody, which hold what a former request left there. The null slot is in play, too, for
        everybody to write."""
        self._cache, self._device = cache, cache.layers[0].device
        self._place_X = on_device(
            [*(row.slot + 1 + NULL_SLOT for row in rows), *(slot + 1 + NULL_SLOT for slot in unowned), NULL_SLOT],
            torch.int64,
            self._device,
        )
        self._contents: list[Tensor] = []
        self._tokens: list[_Tokens] = []
        self.crowded: list[int] = []
        """Rings in which tokens of the step lie over some that the token behind its first one needs: if that is the
        only one that is accepted, they are gone."""
        for index, spec in enumerate(cache.ring_specs):
            content_XLC = spec.random(len(self._place_X), self._device, generator)
            readable_XL, tokens, crowded = _tokens(spec, rows, len(self._place_X))
            content_XLC.masked_fill_(~readable_XL.to(self._device).unsqueeze(2), torch.nan)
            self._contents.append(content_XLC)
            self._tokens.append(_Tokens(tokens.own_XL.to(self._device), tokens.kept_XL.to(self._device)))
            if crowded:
                self.crowded.append(index)

    def restore(self) -> None:
        """Write the contents to the rings of the cache."""
        for ring_XLC, content_XLC in zip(self._cache.rings, self._contents, strict=True):
            ring_XLC.index_copy_(0, self._place_X, content_XLC)

    def copies(self) -> list[Tensor]:
        """Copies of the contents, in which place i is that of row i."""
        return [content_XLC.clone() for content_XLC in self._contents]

    def own_bits(self, ring: int) -> Tensor:
        """All bits of the step's own tokens in a ring of the cache, as integers [E, C]."""
        return bits(self._now(ring)[self._tokens[ring].own_XL])

    def outside(self, ring: int) -> Tensor:
        """bool: whether a token of a ring changed that the step may not change."""
        return (self._changed_XL(ring) & self._tokens[ring].kept_XL).any()

    def unwritten(self, ring: int) -> Tensor:
        """bool: whether the step left a token of its own as it was; of a drafter's ring it need not write all."""
        if self._cache.ring_specs[ring].ahead:
            return torch.zeros((), dtype=torch.bool, device=self._device)
        return (~self._changed_XL(ring) & self._tokens[ring].own_XL).any()

    def _now(self, ring: int) -> Tensor:
        return self._cache.rings[ring].index_select(0, self._place_X)

    def _changed_XL(self, ring: int) -> Tensor:
        return (bits(self._now(ring)) != bits(self._contents[ring])).any(2)


def _tokens(spec: RingSpec, rows: Sequence[RingRow], places: int) -> tuple[Tensor, _Tokens, bool]:
    """Which tokens of the places in play a step may read, bool [X, L]; which it may write; and whether it writes over
    some that are needed behind it. On the host."""
    readable_XL, own_XL = torch.zeros(2, places, spec.tokens, dtype=torch.bool).unbind()
    crowded = False
    for place, row in enumerate(rows):
        start, end = row.start, row.end
        if spec.ahead:  # behind the verified tokens it has the drafts, but for the last, which is never fed
            start, end = start + 1, end + max(row.drafts, 1)
        readable_XL[place, torch.arange(max(spec.ahead, start + 1 - spec.needed), start) % spec.tokens] = True
        own_XL[place, torch.arange(max(start, end - spec.tokens), end) % spec.tokens] = True
        needed_X = torch.arange(max(0, start + 2 - spec.needed), start) % spec.tokens
        crowded = crowded or (not row.prompt and bool(own_XL[place, needed_X].any()))
    kept_XL = ~own_XL
    kept_XL[-1] = False
    return readable_XL, _Tokens(own_XL, kept_XL), crowded
