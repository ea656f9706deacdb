"""Memory for what a step computes on its way: explicit, so that a captured graph's buffers are retained by design.

`Scratch` hands out pieces of one buffer like a stack. A captured step and its replays see the same addresses because
they make the same requests in the same order; results that outlive a scope are asked for before it opens. What small
values the host has for a step reaches the device by `on_device`, which does not wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

_ALIGNMENT = 256
"""Bytes; what vectorised and bulk loads want, and what the allocators of torch give."""


class ScratchExhausted(RuntimeError):
    """A step asked for more than was measured for it: its shapes depend on something they must not depend on."""


def bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes that a tensor takes of a `Scratch`."""
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


class Scratch:
    """Uninitialised tensors by stack discipline, out of one buffer or, without one, from torch's own allocator."""

    def __init__(self, device: torch.device, buffer: torch.Tensor | None = None, *, zeroed: bool = False) -> None:
        """`buffer`: uint8. Without one every request is a fresh tensor, of zeros if so wanted, and `peak` tells how
        large a buffer must be."""
        self.device = device
        self._buffer = buffer
        self._fresh = torch.zeros if zeroed else torch.empty
        self._used = 0
        self._counted: Scratch | None = None
        """The one whose peak is at least this one's."""
        self.peak = 0
        """Most bytes that were in use at once."""

    @property
    def fixed(self) -> bool:
        """Whether equal requests get the same memory each time: that of a buffer."""
        return self._buffer is not None

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor whose contents are arbitrary."""
        size = math.prod(shape) * dtype.itemsize
        begin = self._used
        self._used = begin + -(-size // _ALIGNMENT) * _ALIGNMENT
        self.peak = max(self.peak, self._used)
        if self._counted is not None:
            self._counted.peak = max(self._counted.peak, self.peak)
        if self._buffer is None:
            return self._fresh(shape, dtype=dtype, device=self.device)
        if self._used > self._buffer.numel():
            raise ScratchExhausted(f"{self._used} bytes of scratch memory wanted, {self._buffer.numel()} reserved")
        return self._buffer[begin : begin + size].view(dtype).view(shape)

    def another(self) -> Scratch:
        """Fresh tensors like this one's, for requests that begin anew in the same memory: the peak of both is at least
        that of these."""
        other = Scratch(self.device)
        other._fresh, other._counted = self._fresh, self
        return other

    def fill(self, byte: int) -> None:
        """Fill the whole buffer, whatever is in use: for tests."""
        if self._buffer is not None:
            self._buffer.fill_(byte)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Give back, at the end of the block, the memory that was taken inside. It will be overwritten."""
        mark = self._used
        try:
            yield
        finally:
            self._used = mark


def on_device(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of (nested) `values`. On a GPU it goes through pinned memory, which torch keeps until the copy is done:
    a copy from ordinary memory would wait for everything launched before it."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
