"""Shared memory and cp.async for `gluon_interpreter`: what a copy brings is there once it is waited for, NaN before."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def number(x: Any) -> int:
    """The integer that a scalar of the interpreter, a constexpr or an int is."""
    x = getattr(x, "value", x)
    return int(np.asarray(getattr(getattr(x, "handle", x), "data", x)).item())


class Shared:
    """A piece of shared memory: a view of an array whose bits are NaN until something is stored."""

    def __init__(self, bits: Any, dtype: Any) -> None:
        self.bits, self.dtype = bits, dtype

    @staticmethod
    def allocate(dtype: Any, shape: Any, layout: Any) -> Shared:
        """`gl.allocate_shared_memory`."""
        kind = np.dtype(interpreter._get_np_dtype(dtype))
        sizes = [number(size) for size in shape]
        bits = np.full([*sizes[:-1], sizes[-1] * kind.itemsize], 0xFF, np.uint8)
        return Shared(bits.view(kind), dtype)

    def index(self, i: Any) -> Shared:
        """The i-th along the first dimension."""
        return Shared(self.bits[number(i)], self.dtype)

    def permute(self, order: Any) -> Shared:
        """The same memory with its dimensions in another order."""
        return Shared(np.transpose(self.bits, [number(axis) for axis in order]), self.dtype)

    def slice(self, start: Any, length: Any, dim: Any = 0) -> Shared:
        """`length` from `start` on along one dimension."""
        part = [slice(None)] * number(dim) + [slice(number(start), number(start) + number(length))]
        return Shared(self.bits[tuple(part)], self.dtype)

    def store(self, value: Any) -> None:
        """Write a tensor of the same shape and type."""
        assert value.dtype == self.dtype, f"{value.dtype} stored as {self.dtype}"
        self.bits[...] = value.handle.data

    def load(self, layout: Any = None) -> Any:
        """A tensor of what is there now."""
        handle = interpreter.TensorHandle(np.array(self.bits, order="C"), self.dtype)
        return tl.core.tensor(handle, tl.block_type(self.dtype, list(self.bits.shape)))


_begun: list[Any] = []
_groups: list[list[Any]] = []
"""Copies: begun, and the committed groups that were not waited for."""


def copy_async(target: Shared, value: Any) -> None:
    """`async_copy.async_copy_global_to_shared` of the values it would read."""
    assert value.dtype == target.dtype
    target.bits.view(np.uint8)[...] = 0xFF
    _begun.append((target.bits, value.handle.data))


def commit_group() -> None:
    """`async_copy.commit_group`."""
    _groups.append(list(_begun))
    _begun.clear()


def wait_group(outstanding: Any = 0) -> None:
    """`async_copy.wait_group`."""
    while len(_groups) > number(outstanding):
        for bits, values in _groups.pop(0):
            bits[...] = values
