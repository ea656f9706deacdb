"""Random contents of pages, for those who prove what a step does to a cache.

Shape legend: P pages in play, K = 64 entries per page.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.cache.paged import PagedCache


class RandomPages:
    """Random contents of some pages of every layer: a copy, on the cache's device, from which the pages are restored
    and with which they are compared."""

    def __init__(self, cache: PagedCache, page_P: Tensor, generator: torch.Generator) -> None:
        """Contents for the pages `page_P` (int64), drawn layer by layer. The cache gets them with `restore`."""
        self._cache, self._page_P = cache, page_P
        pages, device = len(page_P), page_P.device
        self._contents = [spec.random(pages, device, generator) for spec in cache.specs]

    def poison(self, layer: int, chosen_PK: Tensor) -> None:
        """Let the chosen entries (bool) be such that whatever is computed from one of them is NaN."""
        self._cache.specs[layer].poison(self._contents[layer], chosen_PK)

    def restore(self) -> None:
        """Write the contents to the pages of the cache."""
        for layer, content in zip(self._cache.layers, self._contents, strict=True):
            layer.index_copy_(0, self._page_P, content)

    def changed(self, layer: int) -> Tensor:
        """bool [P, K]: the entries of the cache of which any bit is another one than here."""
        spec, now = self._cache.specs[layer], self._cache.layers[layer].index_select(0, self._page_P)
        return (spec.bits(now) != spec.bits(self._contents[layer])).any(-1)
