"""The paged caches of one rank.

Shape legend: E entries, C features or bytes of an entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.page import NULL_PAGE, WHOLE, Shards
from workers.cache.place import CachePlace, own_pages
from workers.cache.rings import RingSpec
from workers.cache.snapshots import RingSnapshots
from workers.cache.spec import CacheSpec
from workers.memory.scratch import on_device


class OutOfBoundsFault(RuntimeError):
    """Kernels have met indices that lie outside of the cache: what they computed is void."""

    def __init__(self, count: int) -> None:
        super().__init__(
            f"{count} positions, pages or rows of sparse attention were outside the cache; this is a mistake in the "
            "server: please report it"
        )


@dataclass(eq=False)
class PagedCache:
    """Paged cache: one tensor per layer, all of the same pages; the model's layers, then the drafter's."""

    layers: list[Tensor]
    """Cache tensors, each as its spec allocates it."""
    specs: Sequence[CacheSpec]
    shards: Shards = WHOLE
    """This rank's share of the pages; a layer whose spec is not `sharded` has all of them."""
    rings: list[Tensor] = field(default_factory=list)
    """Rings of slots, as their specs allocate them; models of latent attention have none."""
    ring_specs: Sequence[RingSpec] = ()
    """Those of `rings`."""
    snapshots: RingSnapshots | None = None
    """Snapshots of `rings` for prompts that share pages, where there is memory for some."""
    out_of_bounds_count_1: Tensor = field(init=False)
    """int64: so many rows, positions and pages have kernels found outside of what they point into, and not followed."""

    def __post_init__(self) -> None:
        self.out_of_bounds_count_1 = torch.zeros(
            1, dtype=torch.int64, device=self.layers[0].device if self.layers else "cpu"
        )

    @staticmethod
    def allocate(
        specs: Sequence[CacheSpec],
        pages: int,
        device: torch.device,
        shards: Shards = WHOLE,
        rings: Sequence[RingSpec] = (),
        slots: int = 0,
        snapshots: int = 0,
        place: CachePlace | None = None,
    ) -> PagedCache:
        """A cache with a layer per spec, rings of so many slots and memory for so many snapshots of them. `pages`: that
        this rank has, the null page included. `place`: where the layers are to lie, in memory for so many pages."""
        if place is None:
            layers = [spec.allocate(own_pages(spec, pages, shards), device) for spec in specs]
        else:
            layers = place.layers(specs, pages, shards)
        kept = RingSnapshots(rings, snapshots, device) if snapshots else None
        return PagedCache(layers, specs, shards, [ring.allocate(slots, device) for ring in rings], rings, kept)

    @property
    def pages(self) -> int:
        """Pages that this rank has of the model's layers, the null page included."""
        return self.layers[0].shape[0]

    def places(self, pages: Sequence[int], spec: CacheSpec) -> tuple[list[int], list[int]]:
        """Find those pages, of global ids, that this rank has in layers of `spec`: their indices in `pages`
        and in the layer. Every rank has the null page."""
        whole = not spec.sharded
        here = [index for index, page in enumerate(pages) if whole or page == NULL_PAGE or self.shards.owns(page)]
        return here, [pages[index] if whole else self.shards.local(pages[index]) for index in here]

    def zero_fill(self, pages: Sequence[int]) -> None:
        """Fill these pages, by their global ids, with zeros in every layer, as far as this rank has them."""
        filled: dict[bool, Tensor] = {}
        for layer, spec in zip(self.layers, self.specs, strict=True):
            if spec.sharded not in filled:
                filled[spec.sharded] = on_device(self.places(pages, spec)[1], torch.int64, layer.device)
            layer.index_fill_(0, filled[spec.sharded], 0.0)

    def clear_slots(self) -> None:
        """Fill what is kept beside pages, the rings of all slots and their snapshots, with zeros."""
        for ring in self.rings:
            ring.zero_()
        if self.snapshots is not None:
            self.snapshots.clear()

    @property
    def kept_bytes(self) -> int:
        """Bytes of the device that `kept` takes."""
        return sum(ring.nbytes for ring in self.rings)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put the rings of all slots back at the end of the block."""
        copies = [ring.clone() for ring in self.rings]
        try:
            yield
        finally:
            for ring, copy in zip(self.rings, copies, strict=True):
                ring.copy_(copy)

    def entry_bits(self, layer: int, entry_E: Tensor) -> Tensor:
        """All bits of some entries of a layer, as integers [E, C]. `entry_E` (int64): page * entries of a page +
        offset."""
        return self.specs[layer].entry_bits(self.layers[layer], entry_E)
