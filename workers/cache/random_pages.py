"""Random contents of pages, for those who prove what a step does to a cache.

Shape legend: P pages in play, K = 64 entries per page.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.page import NULL_PAGE, WHOLE, Shards
from workers.cache.paged import PagedCache
from workers.memory.pinned import on_device


class RandomPages:
    """Random contents of some pages of every layer: a copy, on the cache's device, from which the pages are restored
    and with which they are compared."""

    def __init__(
        self, cache: PagedCache, pages: Sequence[int], generator: torch.Generator, shards: Shards = WHOLE
    ) -> None:
        """Contents for the pages of these global ids, drawn layer by layer; equal generators draw the same on every
        rank. The cache gets those that are this rank's with `restore`, and the null page."""
        self._cache, device = cache, cache.layers[0].device
        own = [index for index, page in enumerate(pages) if page == NULL_PAGE or shards.owns(page)]
        self.own_P = on_device(own, torch.int64, device)
        """int64: which of the pages are this rank's; below, P counts these alone, in `poison` all."""
        self._page_P = on_device([shards.local(pages[index]) for index in own], torch.int64, device)
        self._contents = [spec.random(len(pages), device, generator) for spec in cache.specs]

    def _own(self, content: Tensor) -> Tensor:
        """This rank's part of some contents, which without other shards is all of them."""
        return content if len(self.own_P) == len(content) else content.index_select(0, self.own_P)

    def poison(self, layer: int, chosen_PK: Tensor) -> None:
        """Let the chosen entries (bool) be such that whatever is computed from one of them is NaN."""
        self._cache.specs[layer].poison(self._contents[layer], chosen_PK)

    def restore(self) -> None:
        """Write the contents to the pages of the cache."""
        for layer, content in zip(self._cache.layers, self._contents, strict=True):
            layer.index_copy_(0, self._page_P, self._own(content))

    def whole(self) -> PagedCache:
        """Copy all contents, those of other ranks, too, to a cache in which the pages lie in the order of their ids
        here: page i is number i."""
        return PagedCache([content.clone() for content in self._contents], self._cache.specs)

    def changed(self, layer: int) -> Tensor:
        """bool [P, K]: the entries of the cache of which any bit is another one than here."""
        spec, now = self._cache.specs[layer], self._cache.layers[layer].index_select(0, self._page_P)
        return (spec.bits(now) != spec.bits(self._own(self._contents[layer]))).any(-1)
