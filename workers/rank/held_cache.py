"""Caches of a rank in memory that outlives it, for the rank that stands by for it.

The weight keeper holds the descriptors of that memory as it holds those of weights. What was cached does not outlive
the rank: whoever takes the memory over finds zeros in it, and begins with no page in use.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import torch

import kernels
from kernels.page import Shards
from workers.cache.place import CachePlace, bytes_of, granule, new_cache_memory, reserved_cache_memory
from workers.cache.spec import CacheSpec
from workers.config import EngineConfig
from workers.memory.cache_memory import CacheMemory
from workers.memory.keeper import cache_slot
from workers.memory.weight_memory import NoSharedMemory
from workers.weights.kept import KeptWeights, device_identity


@dataclass(frozen=True)
class CacheSize:
    """Size of the cache of a rank that serves."""

    pages: int
    """Of this rank, the null page included."""
    context: int
    """Tokens of the longest request."""


class HeldCache:
    """The place of one rank's caches at its weight keeper."""

    def __init__(self, kept: KeptWeights, config: EngineConfig, specs: Sequence[CacheSpec], shards: Shards) -> None:
        """`kept`: by which all weights were asked for. `specs`: of all caches of the model."""
        self._kept, self._client, self._specs, self._shards = kept, kept.client, specs, shards
        self._granule: Final = granule(kept.device)
        world = kept.group.mesh.world
        settings = config.model_dump_json(exclude={"record_plans", "record_prompts"})
        versions = kernels.__version__, torch.__version__
        parts = *versions, world.rank, world.size, device_identity(kept.device), settings, [*specs], shards
        self._slot = cache_slot(world.rank)
        self._fingerprint = blake2b(repr(parts).encode(), digest_size=16).hexdigest()
        self._memory: CacheMemory | None = None

    def let_go(self) -> None:
        """Let go the memory of a rank that has ended: nobody takes it over."""
        try:
            self._client.forget(self._slot)
        except OSError as error:
            self._kept.tell(f"the weight keeper does not answer: {error}")

    def hand_over(self, size: CacheSize) -> CachePlace | None:
        """Make memory for a cache, and hand its descriptors in. None, which is told, where it cannot be had."""
        try:
            memory = new_cache_memory(self._bytes(size.pages), self._kept.device)
        except NoSharedMemory as error:
            self._kept.tell(f"no engine can stand by: {error}")
            return None
        what = {
            "fingerprint": self._fingerprint,
            "size": memory.size,
            "pages": size.pages,
            "context": size.context,
        }
        try:
            self._client.keep(self._slot, what, memory.descriptors())
        except OSError as error:
            self._kept.tell(f"no engine can stand by: {error}")
        memory.close_descriptors()
        return CachePlace(memory, self._granule)

    def serving(self) -> CacheSize:
        """The size of the cache of the rank that serves. RuntimeError where it does not do what this one would, or its
        memory is not kept, here or on any other rank. Collective."""
        size, problem = CacheSize(0, 0), "it is not kept"
        try:
            if (found := self._client.ask(self._slot, self._fingerprint, let_go=False)) is not None:
                what, descriptors = found
                size = CacheSize(what["pages"], what["context"])
                _close(descriptors)
        except (OSError, KeyError) as error:
            problem = str(error)
        if self._all(size.pages > 0):
            return size
        problem = "another rank has none" if size.pages else problem
        raise RuntimeError(f"there is no cache of an engine that serves: {problem}")

    def reserve(self, pages: int, backed: int) -> CachePlace:
        """The same addresses as a cache of so many pages has, with memory for a few of them."""
        self._memory = reserved_cache_memory(self._bytes(pages), self._kept.device)
        return CachePlace(self._memory, self._granule, backed)

    def take_over(self) -> None:
        """Put the memory of the rank that served, which has ended, behind the addresses. It is empty. RuntimeError
        where that is not there any more, on this rank or another. Collective."""
        problem = "the memory of its cache is not kept any more"
        assert self._memory is not None
        taken = False
        try:
            if (found := self._client.ask(self._slot, self._fingerprint, let_go=False)) is not None:
                what, descriptors = found
                if what["size"] == self._memory.size:
                    self._memory.take_over(descriptors)
                    taken = True
                else:
                    _close(descriptors)
                    problem = f"its cache has {what['size']} bytes now, not {self._memory.size}"
        except (OSError, RuntimeError) as error:
            problem = str(error)
        if not self._all(taken):
            problem = "another rank cannot" if taken else problem
            raise RuntimeError(f"the place of the engine that served cannot be taken: {problem}")

    def _bytes(self, pages: int) -> int:
        return bytes_of(self._specs, pages, self._shards, self._granule)

    def _all(self, good: bool) -> bool:
        mine = torch.tensor([good], dtype=torch.int64, device=self._kept.device)
        return bool(self._kept.group.minimum(mine).item())


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
