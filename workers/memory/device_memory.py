"""Memory of a GPU that outlives the process that made it, by the virtual memory management of CUDA's driver.

The memory is made in pieces (`cuMemCreate`), which lie one behind the other in one range of addresses. A piece lives as
long as it is mapped anywhere or any process has a descriptor of it open, one without CUDA as well. So it stays when its
maker is killed or its context is lost by an error.

The driver's functions are called by `ctypes`: torch has no binding for them, and its own allocator exports nothing that
outlives the process. Names and numbers are those of `cuda.h`, CUDA 12.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import override

from workers.memory.weight_memory import NoSharedMemory, WeightMemory

PIECE_BYTES: Final = 2 << 30
"""Most bytes of a piece: many small ones take long to map."""
_PINNED, _DEVICE, _POSIX_DESCRIPTOR, _MINIMUM = 1, 1, 1, 0
_READ, READ_WRITE = 1, 3
_SUPPORTS_DESCRIPTORS: Final = 103
"""CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"""


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compressionType", c_ubyte),
        ("gpuDirectRDMACapable", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = (
        ("type", c_int),
        ("requestedHandleTypes", c_int),
        ("location", _Location),
        ("win32HandleMetaData", c_void_p),
        ("allocFlags", _Flags),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = (("location", _Location), ("flags", c_int))


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NoSharedMemory(f"CUDA's driver cannot be loaded: {error}") from None


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver; `NoSharedMemory` with its error."""
    driver = _driver()
    if code := getattr(driver, name)(*arguments):
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, byref(text))
        said = text.value.decode() if text.value else f"error {code}"
        raise NoSharedMemory(f"{name}: {said}")


class AddressRange:
    """A range of addresses of one device, with the pieces that are mapped there."""

    def __init__(self, size: int, index: int) -> None:
        self.size, self.index = size, index
        self._mapped: list[tuple[int, int]] = []
        address = c_uint64()
        call("cuMemAddressReserve", byref(address), c_size_t(size), c_size_t(0), c_uint64(0), c_uint64(0))
        self.address = address.value

    def map(self, offset: int, size: int, handle: c_uint64) -> None:
        """Map a piece there. The handle is released: the mapping holds the memory."""
        try:
            call("cuMemMap", c_uint64(self.address + offset), c_size_t(size), c_size_t(0), handle, c_uint64(0))
            self._mapped.append((self.address + offset, size))
        finally:
            call("cuMemRelease", handle)

    def map_imported(self, descriptors: Sequence[int]) -> None:
        """Map the pieces of a range of this size that another process made, by their descriptors, which stay open."""
        found = spans(self.size)
        if len(found) != len(descriptors):
            raise NoSharedMemory(f"there are {len(descriptors)} descriptors of {len(found)} pieces")
        for (offset, length), descriptor in zip(found, descriptors, strict=True):
            handle = c_uint64()
            call("cuMemImportFromShareableHandle", byref(handle), c_void_p(descriptor), c_int(_POSIX_DESCRIPTOR))
            self.map(offset, length, handle)

    def allow(self, access: int, offset: int = 0, size: int | None = None) -> None:
        """Let the device read, or read and write, all of it, or so many bytes from `offset` on."""
        wanted, length = _Access(_Location(_DEVICE, self.index), access), self.size if size is None else size
        call("cuMemSetAccess", c_uint64(self.address + offset), c_size_t(length), byref(wanted), c_size_t(1))

    def unmap(self) -> None:
        """Unmap the pieces; the addresses stay reserved."""
        for address, size in self._mapped:
            call("cuMemUnmap", c_uint64(address), c_size_t(size))
        self._mapped.clear()

    def close(self) -> None:
        """Unmap the pieces, and give the addresses back."""
        self.unmap()
        if self.address:
            call("cuMemAddressFree", c_uint64(self.address), c_size_t(self.size))
        self.address = 0


class DeviceBytes:
    """Some bytes of a range, in the form in which torch takes another project's memory without a copy."""

    def __init__(self, owner: object, address: int, size: int) -> None:
        self._owner = owner  # torch holds this object as long as the tensor is there
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class DeviceWeights(WeightMemory):
    """Pieces of a GPU's memory, one behind the other."""

    def __init__(self, size: int, device: torch.device, room: int) -> None:
        """Reserve addresses. `room`: `size`, rounded up to whole pieces of the least size."""
        self.size, self._device = size, device
        self._descriptors: list[int] = []
        self._range = AddressRange(room, index_of(device))
        # At the end of a process the driver does it, and may be gone before.
        weakref.finalize(self, AddressRange.close, self._range).atexit = False

    @classmethod
    def new(cls, size: int, device: torch.device) -> DeviceWeights:
        """Make it. `NoSharedMemory` where the device has no such memory, or not so much of it."""
        properties = piece_properties(device)
        memory = cls(size, device, whole_granules(size, properties))
        try:
            for offset, length in spans(memory._range.size):
                handle, descriptor = exported_piece(length, properties)
                memory._descriptors.append(descriptor)
                memory._range.map(offset, length, handle)
            memory._range.allow(READ_WRITE)
        except NoSharedMemory:
            memory.unmap()
            raise
        return memory

    @classmethod
    def of(cls, descriptors: Sequence[int], size: int, device: torch.device) -> DeviceWeights:
        """Map what another process made."""
        try:
            memory = cls(size, device, whole_granules(size, piece_properties(device)))
        except NoSharedMemory:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        memory._descriptors = list(descriptors)
        try:
            memory._range.map_imported(descriptors)
            memory._range.allow(_READ)
        except NoSharedMemory:
            memory.unmap()
            raise
        return memory

    @override
    def at(self, offset: int, size: int) -> Tensor:
        if not size:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
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
    def seal(self) -> None:
        torch.cuda.synchronize(self._device)
        self._range.allow(_READ)

    @override
    def unmap(self) -> None:
        self.close_descriptors()
        torch.cuda.synchronize(self._device)
        self._range.close()


def index_of(device: torch.device) -> int:
    """Index of a GPU among those that are visible."""
    return torch.cuda.current_device() if device.index is None else device.index


def piece_properties(device: torch.device) -> _Properties:
    """What every piece on this device is made as; `NoSharedMemory` where it has no descriptors."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    torch.empty(1, device=device)  # makes its context current, which the driver's functions need
    supported = c_int()
    call("cuDeviceGetAttribute", byref(supported), c_int(_SUPPORTS_DESCRIPTORS), c_int(index_of(device)))
    if not supported.value:
        raise NoSharedMemory("the GPU's memory has no descriptors here")
    return _Properties(_PINNED, _POSIX_DESCRIPTOR, _Location(_DEVICE, index_of(device)), None, _Flags())


def least_piece(properties: _Properties) -> int:
    """Bytes of which every piece has a multiple."""
    least = c_size_t()
    call("cuMemGetAllocationGranularity", byref(least), byref(properties), c_uint(_MINIMUM))
    return least.value


def whole_granules(size: int, properties: _Properties) -> int:
    """`size`, rounded up to what pieces can have together."""
    least = least_piece(properties)
    return max(1, -(-size // least)) * least


def exported_piece(size: int, properties: _Properties) -> tuple[c_uint64, int]:
    """Make a piece of memory; its handle, and a descriptor of it, which is the caller's to close."""
    handle, descriptor = c_uint64(), c_int(-1)
    call("cuMemCreate", byref(handle), c_size_t(size), byref(properties), c_uint64(0))
    try:
        call("cuMemExportToShareableHandle", byref(descriptor), handle, c_int(_POSIX_DESCRIPTOR), c_uint64(0))
    except NoSharedMemory:
        call("cuMemRelease", handle)
        raise
    return handle, descriptor.value


def spans(size: int) -> list[tuple[int, int]]:
    """Offsets and bytes of the pieces of a range."""
    return [(begin, min(PIECE_BYTES, size - begin)) for begin in range(0, size, PIECE_BYTES)]
