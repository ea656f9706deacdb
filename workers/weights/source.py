"""Where a model's constructors get their weights from.

A model builds itself from a `WeightSource`, twice: a `Census` first collects, on the meta device, which tensors it
wants, in which shapes and how many bytes they take; after that was held against the files, a `CheckpointReader` fills
real memory, each rank's with its slices alone. So the model's constructors are the only place that names a tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from workers.parallel.group import TensorParallel
from workers.weights.weight import Weight

Shape = tuple[int, ...]


class WeightSource(ABC):
    """Where a model's constructors get their tensors from."""

    def __init__(
        self,
        group: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
        stored: Callable[[str], str] = str,
    ) -> None:
        """`stored`: what the checkpoint calls a tensor, of the name that the model asks for."""
        self.group = group
        self.dtype = dtype
        self.device = device
        self.stored = stored

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Uninitialised memory for a tensor that is no matrix of a product, such as the weights of a norm."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def weight(self, *shape: int, dtype: torch.dtype | None = None) -> Weight:
        """Room for a matrix of weights, (N, K) or (X, N, K): see `Weight`."""
        return Weight(self.empty(*shape, dtype=dtype))

    def load_weight(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Weight:
        """The whole matrix `name`, which must have `shape`."""
        into = self.weight(*shape, dtype=dtype)
        self.fill(into, name)
        return into

    def load(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The whole tensor `name`, which must have `shape`."""
        into = self.empty(*shape, dtype=dtype)
        self.fill(into, name)
        return into

    def fill(
        self, into: Tensor | Weight, name: str, *, shard: int | None = None, unit: int | None = None, units: int = 1
    ) -> None:
        """Copy tensor `name` into `into`, or, with `shard`, this rank's part of that dimension (which `into` has).

        `unit`: not of the whole dimension, but of the unit-th of its `units` equal parts. ValueError when there is no
        such part.
        """
        if unit is not None and (shard is None or not 0 <= unit < units):
            raise ValueError(f"{name}: part {unit} of {units} of dimension {shard} does not exist")
        shape, index = list(into.shape), [slice(None)] * len(into.shape)
        if shard is not None:
            length = shape[shard] * self.group.size
            own, begin = self.group.shard(length, name), (unit or 0) * length
            shape[shard] = length * units
            index[shard] = slice(begin + own.start, begin + own.stop)
        self.fill_part(into.data if isinstance(into, Weight) else into, name, tuple(shape), tuple(index))

    def lossless(self, name: str) -> torch.dtype:
        """The model's dtype if tensor `name` is stored in it, else fp32."""
        return torch.float32

    @abstractmethod
    def fill_part(self, into: Tensor, name: str, shape: Shape, index: tuple[slice, ...]) -> None:
        """Copy `index` of the tensor `name`, whose shape in the checkpoint is `shape`, into `into`."""

    @abstractmethod
    def progress(self, text: str) -> None:
        """Tell the user what is being loaded."""

    def settle(self) -> None:  # noqa: B027 - most sources fill at once
        """Wait until everything that was asked for is in place: before it is read or changed, and at the end."""


class Census(WeightSource):
    """Collects what a model wants, without memory."""

    def __init__(self, group: TensorParallel, dtype: torch.dtype, stored: Callable[[str], str] = str) -> None:
        super().__init__(group, dtype, torch.device("meta"), stored)
        self.shapes: dict[str, Shape] = {}
        """By the checkpoint's names."""
        self.bytes = 0
        """Of this rank's share."""

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Counts the bytes."""
        tensor = super().empty(*shape, dtype=dtype)
        self.bytes += tensor.nbytes
        return tensor

    def fill_part(self, into: Tensor, name: str, shape: Shape, index: tuple[slice, ...]) -> None:
        """Notes the name and the shape."""
        self.shapes[self.stored(name)] = shape

    def progress(self, text: str) -> None:
        """Says nothing."""
