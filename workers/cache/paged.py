"""The paged caches of one rank.

Shape legend: E entries, C features or bytes of an entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workers.cache.rings import RingSpec
from workers.cache.spec import CacheSpec
from workers.memory.pinned import on_device


class OutOfBoundsFault(RuntimeError):
    """Kernels have met indices that lie outside of the cache: what they computed is void."""

    def __init__(self, count: int) -> None:
        super().__init__(
            f"{count} positions, pages or rows of sparse attention were outside the cache; this is a mistake in the "
            "server: please report it"
        )


@dataclass
class PagedCache:
    """Paged cache: one tensor per layer, all of the same pages; the model's layers, then the drafter's."""

    layers: list[Tensor]
    """Cache tensors, each as its spec allocates it."""
    specs: Sequence[CacheSpec]
    rings: list[Tensor] = field(default_factory=list)
    """Rings of slots, as their specs allocate them; models of latent attention have none."""
    out_of_bounds_count_1: Tensor = field(init=False)
    """int64: so many rows, positions and pages have kernels found outside of what they point into, and not followed."""

    def __post_init__(self) -> None:
        self.out_of_bounds_count_1 = torch.zeros(
            1, dtype=torch.int64, device=self.layers[0].device if self.layers else "cpu"
        )

    @staticmethod
    def allocate(
        specs: Sequence[CacheSpec], pages: int, device: torch.device, rings: Sequence[RingSpec] = (), slots: int = 0
    ) -> PagedCache:
        """A cache of so many pages, the null page included, with a layer per spec; and rings of so many slots."""
        layers = [spec.allocate(pages, device) for spec in specs]
        return PagedCache(layers, specs, [ring.allocate(slots, device) for ring in rings])

    @property
    def pages(self) -> int:
        """Pages of every layer, the null page included."""
        return self.layers[0].shape[0]

    def zero_fill(self, pages: Sequence[int]) -> None:
        """Fill these pages of every layer with zeros."""
        if pages:
            page_P = on_device(pages, torch.int64, self.layers[0].device)
            for layer in self.layers:
                layer.index_fill_(0, page_P, 0.0)

    def entry_bits(self, layer: int, entry_E: Tensor) -> Tensor:
        """All bits of some entries of a layer, as integers [E, C]. `entry_E` (int64): page * 64 + offset."""
        return self.specs[layer].entry_bits(self.layers[layer], entry_E)
