"""One piece of memory for all weights of a rank, from which a model's tensors are taken in the order in which its
constructors ask for them: so the same constructors find each of them again."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from workers.memory.weight_memory import ALIGNMENT, HostWeights, WeightMemory


class Item(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    """Name in torch's words, such as `bfloat16`."""

    @staticmethod
    def of(tensor: Tensor) -> Item:
        """Those of a tensor."""
        return Item(tuple(tensor.shape), _name(tensor.dtype))

    @property
    def bytes(self) -> int:
        """Bytes that it takes."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return prod(self.shape) * dtype.itemsize


def room(census: Sequence[Item]) -> int:
    """Bytes for tensors in an arena; never 0."""
    return max(ALIGNMENT, sum(_rounded(item.bytes) for item in census))


def new_memory(size: int, device: torch.device) -> WeightMemory:
    """Memory of `size` bytes on `device`; `NoSharedMemory` where it cannot be had."""
    if device.type == "cpu":
        return HostWeights.new(size)
    from workers.memory.device_memory import DeviceWeights

    return DeviceWeights.new(size, device)


def memory_of(descriptors: Sequence[int], size: int, device: torch.device) -> WeightMemory:
    """Map memory that another process made, read-only. The descriptors now belong to it. `NoSharedMemory`."""
    if device.type == "cpu":
        return HostWeights.of(descriptors, size)
    from workers.memory.device_memory import DeviceWeights

    return DeviceWeights.of(descriptors, size, device)


class Arena:
    """Hands the tensors of a census out, each in its place."""

    def __init__(self, memory: WeightMemory, census: Sequence[Item]) -> None:
        """`memory` has `room(census)` bytes."""
        self.memory, self.census = memory, list(census)
        self._taken = self._offset = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next tensor; RuntimeError if it is not the one that the census has."""
        wanted = Item(tuple(shape), _name(dtype))
        expected = self.census[self._taken] if self._taken < len(self.census) else None
        if wanted != expected:
            raise RuntimeError(f"tensor {self._taken} of the weights is {wanted}, and {expected} was counted")
        found = self.memory.at(self._offset, wanted.bytes)
        self._taken += 1
        self._offset += _rounded(wanted.bytes)
        return found.view(dtype).view(wanted.shape)


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
