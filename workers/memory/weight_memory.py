"""Memory for the weights of a rank that outlives it wherever somebody holds its descriptors.

On a CPU it is an anonymous file (`memfd_create`); on a GPU allocations of the driver's virtual memory management, with
handles that are exported as descriptors (`workers.memory.device_memory`). Once filled it is made read-only: whoever
writes to weights by mistake is ended, and does not spoil those of the next rank.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from typing_extensions import override

ALIGNMENT: Final = 512
"""Bytes at whose multiples tensors begin, as those that torch allocates on a GPU do."""
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | 0x10
"""No mapping that is made later can be written to (F_SEAL_FUTURE_WRITE, which Python does not name)."""
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class NoSharedMemory(RuntimeError):
    """Error where there can be no such memory; the message says why."""


class WeightMemory(ABC):
    """Memory of a rank's weights, mapped in one piece."""

    size: int
    """Bytes."""

    @abstractmethod
    def at(self, offset: int, size: int) -> Tensor:
        """uint8 [size], some bytes of it. The memory stays mapped as long as any of these tensors is there."""

    @abstractmethod
    def descriptors(self) -> Sequence[int]:
        """Descriptors of all of it, in order. They are closed by `close_descriptors`."""

    @abstractmethod
    def close_descriptors(self) -> None:
        """Close this process's descriptors: the memory stays mapped."""

    @abstractmethod
    def seal(self) -> None:
        """Make it read-only, here and for those who map it later. What was written must have arrived."""

    @abstractmethod
    def unmap(self) -> None:
        """Unmap it; no tensor of it may be used any more."""


class HostWeights(WeightMemory):
    """An anonymous file."""

    def __init__(self, descriptor: int, size: int, mapped: mmap.mmap) -> None:
        self.size, self._descriptor = size, descriptor
        self._mapped: mmap.mmap | None = mapped

    @classmethod
    def new(cls, size: int) -> HostWeights:
        """Make it, of zeros."""
        try:
            descriptor = os.memfd_create("latentserve weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise NoSharedMemory(f"the system gives no anonymous file: {error.strerror}") from None
        try:
            os.ftruncate(descriptor, size)
            return cls(descriptor, size, mmap.mmap(descriptor, size))
        except (OSError, ValueError) as error:
            os.close(descriptor)
            raise NoSharedMemory(f"the system gives no anonymous file of {size} bytes: {error}") from None

    @classmethod
    def of(cls, descriptors: Sequence[int], size: int) -> HostWeights:
        """Map one that another process made."""
        try:
            (descriptor,) = descriptors
            if os.fstat(descriptor).st_size != size:
                raise ValueError(f"it has {os.fstat(descriptor).st_size} bytes, not {size}")
            return cls(descriptor, size, mmap.mmap(descriptor, size, prot=mmap.PROT_READ))
        except (OSError, ValueError) as error:
            for each in descriptors:
                os.close(each)
            raise NoSharedMemory(f"an anonymous file cannot be mapped: {error}") from None

    @override
    def at(self, offset: int, size: int) -> Tensor:
        assert self._mapped is not None
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # as it should be
            return torch.frombuffer(self._mapped, dtype=torch.uint8, count=size, offset=offset)

    @override
    def descriptors(self) -> Sequence[int]:
        return (self._descriptor,)

    @override
    def close_descriptors(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    @override
    def seal(self) -> None:
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
        begin = ctypes.c_void_p(self.at(0, 1).data_ptr())
        if _LIBC.mprotect(begin, ctypes.c_size_t(self.size), mmap.PROT_READ):
            raise OSError(ctypes.get_errno(), "the memory of weights cannot be made read-only")

    @override
    def unmap(self) -> None:
        self.close_descriptors()
        self._mapped = None  # the last tensor takes it along
