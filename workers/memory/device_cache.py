"""Memory for the caches of a rank on a GPU, see `workers.memory.cache_memory`.

The addresses are a range of the driver's virtual memory management. Graphs that were captured over a range can be
replayed once other memory is mapped there. What a rank that stands by needs meanwhile is in small pieces of its own,
which nobody else can map; the pieces that it takes over are those of the rank that served.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from typing_extensions import override

from workers.memory.cache_memory import CacheMemory
from workers.memory.device_memory import (
    READ_WRITE,
    AddressRange,
    DeviceBytes,
    exported_piece,
    index_of,
    least_piece,
    piece_properties,
    spans,
    whole_granules,
)
from workers.memory.weight_memory import NoSharedMemory

_ZEROED_AT_ONCE: Final = 1 << 30


class DeviceCache(CacheMemory):
    """A range of addresses of a GPU, with pieces of memory behind them."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._properties = piece_properties(device)
        self.size, self._device = size, device
        self._descriptors: list[int] = []
        self._range = AddressRange(whole_granules(size, self._properties), index_of(device))
        # At the end of a process the driver does it, and may be gone before.
        weakref.finalize(self, AddressRange.close, self._range).atexit = False

    @classmethod
    def new(cls, size: int, device: torch.device) -> DeviceCache:
        """Make all of it. `NoSharedMemory` where the device has no such memory, or not so much of it."""
        memory = cls(size, device)
        try:
            for offset, length in spans(memory._range.size):
                handle, descriptor = exported_piece(length, memory._properties)
                memory._descriptors.append(descriptor)
                memory._range.map(offset, length, handle)
            memory._range.allow(READ_WRITE)
        except NoSharedMemory:
            memory.close_descriptors()
            memory._range.close()
            raise
        memory._zero(0, size)
        return memory

    @classmethod
    def reserved(cls, size: int, device: torch.device) -> DeviceCache:
        """Reserve the addresses."""
        return cls(size, device)

    @override
    def back(self, offset: int, size: int) -> None:
        length = whole_granules(size, self._properties)
        handle, descriptor = exported_piece(length, self._properties)
        os.close(descriptor)
        self._range.map(offset, length, handle)
        self._range.allow(READ_WRITE, offset, length)
        self._zero(offset, length)

    @override
    def at(self, offset: int, size: int) -> Tensor:
        return torch.as_tensor(DeviceBytes(self, self._range.address + offset, size), device=self._device)

    @override
    def descriptors(self) -> Sequence[int]:
        return self._descriptors

    @override
    def close_descriptors(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    @override
    def take_over(self, descriptors: Sequence[int]) -> None:
        try:
            torch.cuda.synchronize(self._device)  # nothing that was launched may still use what is unmapped
            self._range.unmap()
            self._range.map_imported(descriptors)
            self._range.allow(READ_WRITE)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._zero(0, self.size)

    def _zero(self, offset: int, size: int) -> None:
        for begin in range(offset, offset + size, _ZEROED_AT_ONCE):
            self.at(begin, min(_ZEROED_AT_ONCE, offset + size - begin)).zero_()
        torch.cuda.synchronize(self._device)


def device_granule(device: torch.device) -> int:
    """Bytes at whose multiples memory of a GPU can be mapped."""
    return least_piece(piece_properties(device))
