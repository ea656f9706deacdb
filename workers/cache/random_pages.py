"""Random contents of pages, for those who prove what a step does to a cache.

Shape legend: P pages in play, K entries per page.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.cache.paged import PagedCache
from workers.cache.spec import CacheSpec
from workers.memory.scratch import on_device


class RandomPages:
    """Random contents of some pages of every layer: a copy, on the cache's device, from which the pages are restored
    and with which they are compared."""

    def __init__(self, cache: PagedCache, pages: Sequence[int], generator: torch.Generator) -> None:
        """Contents for the pages of these global ids, drawn layer by layer; equal generators draw the same on every
        rank. The cache gets those that are this rank's with `restore`, and the null page."""
        self._cache, self._pages, device = cache, pages, cache.layers[0].device
        self._places: dict[bool, tuple[Tensor, Tensor]] = {}
        self._contents = [spec.random(len(pages), device, generator) for spec in cache.specs]

    def _placed(self, spec: CacheSpec) -> tuple[Tensor, Tensor]:
        """Which of the pages this rank has in layers of `spec`, and where; int64."""
        if spec.sharded not in self._places:
            here, there = self._cache.places(self._pages, spec)
            device = self._cache.layers[0].device
            self._places[spec.sharded] = on_device(here, torch.int64, device), on_device(there, torch.int64, device)
        return self._places[spec.sharded]

    def own(self, layer: int, x_PK: Tensor) -> Tensor:
        """This rank's part of something that there is of every page, which without other shards is all of it."""
        own_P, _ = self._placed(self._cache.specs[layer])
        return x_PK if len(own_P) == len(x_PK) else x_PK.index_select(0, own_P)

    def poison(self, layer: int, chosen_PK: Tensor) -> None:
        """Let the chosen entries (bool) be such that whatever is computed from one of them is NaN."""
        self._cache.specs[layer].poison(self._contents[layer], chosen_PK)

    def restore(self) -> None:
        """Write the contents to the pages of the cache."""
        for index, (layer, content) in enumerate(zip(self._cache.layers, self._contents, strict=True)):
            _, page_P = self._placed(self._cache.specs[index])
            layer.index_copy_(0, page_P, self.own(index, content))

    def whole(self) -> PagedCache:
        """Copy all contents, those of other ranks, too, to a cache in which the pages lie in the order of their ids
        here: page i is number i."""
        return PagedCache([content.clone() for content in self._contents], self._cache.specs)

    def changed(self, layer: int) -> Tensor:
        """bool [P, K]: the entries of the cache of which any bit is another one than here; of this rank's pages."""
        spec = self._cache.specs[layer]
        now = self._cache.layers[layer].index_select(0, self._placed(spec)[1])
        return (spec.bits(now) != spec.bits(self.own(layer, self._contents[layer]))).any(-1)
