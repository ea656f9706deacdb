"""Memory for the caches of a rank, at addresses that stay while the memory behind them is replaced.

A rank that serves has all of it, in a form of which another process can hold descriptors (`HostCache.new`). A rank that
stands by has the same addresses with nearly nothing behind them (`HostCache.reserved`): whatever knows the addresses,
such as captured graphs, may be made there. Once the rank that served has ended, its memory is mapped at the addresses
of the one that takes its place (`take_over`), empty.

On a CPU that is an anonymous file (`memfd_create`); on a GPU see `workers.memory.device_cache`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from typing_extensions import override

from workers.memory.weight_memory import NoSharedMemory

_FIXED, _NORESERVE = 0x10, 0x4000
"""Flags of mmap(2) that Python does not name."""
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class CacheMemory(ABC):
    """Addresses for the caches of a rank, and the memory behind them, which is zeros at first."""

    size: int
    """Bytes."""

    @abstractmethod
    def back(self, offset: int, size: int) -> None:
        """Put memory of this process behind some of the reserved addresses: `size` bytes from a multiple of
        `granule`."""

    @abstractmethod
    def at(self, offset: int, size: int) -> Tensor:
        """uint8 [size], some bytes of it, of which the first must have memory. The addresses stay reserved as long as
        any of these tensors is there."""

    @abstractmethod
    def descriptors(self) -> Sequence[int]:
        """Descriptors of all of it, in order. They are closed by `close_descriptors`."""

    @abstractmethod
    def close_descriptors(self) -> None:
        """Close this process's descriptors: the memory stays mapped."""

    @abstractmethod
    def take_over(self, descriptors: Sequence[int]) -> None:
        """Put memory of a process that has ended behind all of the addresses, in the place of what is there, and fill
        it with zeros. The descriptors, which are closed, were those of a memory of this size. `NoSharedMemory`, after
        which nothing may be read or written here any more."""


class HostCache(CacheMemory):
    """Addresses of this process, with an anonymous file behind them or memory that comes when it is touched."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._descriptor = -1
        self._address = self._map(None, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1)
        self._buffer = (ctypes.c_ubyte * size).from_address(self._address)
        # Tensors hold the buffer. At the end of a process the system does it.
        weakref.finalize(self._buffer, _LIBC.munmap, self._address, size).atexit = False

    @classmethod
    def new(cls, size: int) -> HostCache:
        """Make all of it. `NoSharedMemory` where the system gives none."""
        memory = cls(size)
        try:
            memory._descriptor = os.memfd_create("latentserve cache", os.MFD_CLOEXEC)
            os.ftruncate(memory._descriptor, size)
        except OSError as error:
            memory.close_descriptors()
            raise NoSharedMemory(f"the system gives no anonymous file of {size} bytes: {error.strerror}") from None
        memory._map(memory._address, mmap.MAP_SHARED | _FIXED, memory._descriptor)
        return memory

    @classmethod
    def reserved(cls, size: int) -> HostCache:
        """Reserve the addresses. What is touched has memory."""
        return cls(size)

    def _map(self, address: int | None, flags: int, descriptor: int) -> int:
        found: int | None = _LIBC.mmap(address, self.size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
        if found is None or found == ctypes.c_void_p(-1).value:
            why = os.strerror(ctypes.get_errno())
            raise NoSharedMemory(f"the system maps no {self.size} bytes for a cache: {why}")
        return found

    @override
    def back(self, offset: int, size: int) -> None:
        assert 0 <= offset <= offset + size <= self.size  # it comes when it is touched

    @override
    def at(self, offset: int, size: int) -> Tensor:
        return torch.frombuffer(self._buffer, dtype=torch.uint8, count=size, offset=offset)

    @override
    def descriptors(self) -> Sequence[int]:
        return (self._descriptor,)

    @override
    def close_descriptors(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    @override
    def take_over(self, descriptors: Sequence[int]) -> None:
        try:
            (descriptor,) = descriptors
            if os.fstat(descriptor).st_size != self.size:
                raise NoSharedMemory(f"it has {os.fstat(descriptor).st_size} bytes, not {self.size}")
            os.ftruncate(descriptor, 0)  # what comes back is zeros; and whoever still had it cannot write any more
            os.ftruncate(descriptor, self.size)
            self._map(self._address, mmap.MAP_SHARED | _FIXED, descriptor)
        except (OSError, ValueError) as error:
            raise NoSharedMemory(f"an anonymous file cannot be mapped: {error}") from None
        finally:
            for each in descriptors:
                os.close(each)
