"""Place of a rank's caches in memory that another rank can take over: one layer behind the other."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.page import Shards
from workers.cache.spec import CacheSpec
from workers.memory.cache_memory import CacheMemory, HostCache


def own_pages(spec: CacheSpec, pages: int, shards: Shards) -> int:
    """Pages that a rank has of a layer, of which it has `pages` where ranks share them out."""
    return pages if spec.sharded else shards.pages(pages)


def _spans(specs: Sequence[CacheSpec], pages: int, shards: Shards, granule: int) -> Iterator[tuple[int, Tensor]]:
    """Offset of each layer, and a tensor like it that has no memory. Every layer begins where memory can begin, so that
    a part of it can have memory while the rest has none."""
    offset = 0
    for spec in specs:
        like = spec.allocate(own_pages(spec, pages, shards), torch.device("meta"))
        yield offset, like
        offset += -(-like.nbytes // granule) * granule


def bytes_of(specs: Sequence[CacheSpec], pages: int, shards: Shards, granule: int) -> int:
    """Bytes that such layers take, one behind the other."""
    return sum(-(-like.nbytes // granule) * granule for _, like in _spans(specs, pages, shards, granule))


@dataclass(frozen=True)
class CachePlace:
    """Memory for the layers of a cache."""

    memory: CacheMemory
    """Has the bytes that `bytes_of` says."""
    granule: int
    """See `granule`."""
    backed: int | None = None
    """Pages of this rank that get memory, where the others have but their addresses for now."""

    def layers(self, specs: Sequence[CacheSpec], pages: int, shards: Shards) -> list[Tensor]:
        """Tensors of all layers as their specs would allocate them."""
        found = []
        for (offset, like), spec in zip(_spans(specs, pages, shards, self.granule), specs, strict=True):
            if self.backed is not None:
                few = own_pages(spec, self.backed, shards)
                self.memory.back(offset, min(few, len(like)) * (like.nbytes // len(like)))
            found.append(self.memory.at(offset, like.nbytes).view(like.dtype).view(like.shape))
        return found


def granule(device: torch.device) -> int:
    """Bytes at whose multiples memory of a device can be put behind addresses."""
    if device.type == "cpu":
        return mmap.PAGESIZE
    from workers.memory.device_cache import device_granule

    return device_granule(device)


def new_cache_memory(size: int, device: torch.device) -> CacheMemory:
    """All memory of caches of so many bytes on `device`; `NoSharedMemory` where it cannot be had."""
    if device.type == "cpu":
        return HostCache.new(size)
    from workers.memory.device_cache import DeviceCache

    return DeviceCache.new(size, device)


def reserved_cache_memory(size: int, device: torch.device) -> CacheMemory:
    """Addresses for caches of so many bytes on `device`; `NoSharedMemory` where they cannot be had."""
    if device.type == "cpu":
        return HostCache.reserved(size)
    from workers.memory.device_cache import DeviceCache

    return DeviceCache.reserved(size, device)
