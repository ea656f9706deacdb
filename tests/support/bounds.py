"""Holds interpreted kernels to their arguments' memory: an access outside fails, where on a GPU it would be silent
or end the process.

Call `check_bounds` once, after `interpreter.repair`: it checks all kernels of the process, also those of other files.
What counts as an argument's memory is its whole storage, or those of the tensors in a tuple. `addressed` adds memory
that a kernel reaches by addresses that lie in its arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor
from triton.runtime import interpreter

_storages: list[tuple[int, int]] = []
_addressed: list[tuple[int, int]] = []
_checking = False


def check_bounds() -> None:
    """Check every load and store of this process's interpreted kernels from now on. Idempotent."""
    global _checking
    if _checking:
        return
    _checking = True
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    plain_arguments, plain_load, plain_store = (
        executor._init_args_hst,
        builder.create_masked_load,
        builder.create_masked_store,
    )

    def arguments(self: Any, args: Any, kwargs: Any) -> Any:
        positional, named = plain_arguments(self, args, kwargs)
        _storages[:] = [*_memory((*positional, *named.values())), *_addressed]
        return positional, named

    def load(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        _check("load", pointers, mask)
        return plain_load(self, pointers, mask, *rest, **named)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _check("store", pointers, mask)
        return plain_store(self, pointers, value, mask, *rest)

    executor._init_args_hst = arguments
    builder.create_masked_load, builder.create_masked_store = load, store


@contextmanager
def addressed(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Count the memory of `tensors` as that of an argument of every kernel that is launched in the block."""
    _addressed[:] = _memory(tensors)
    try:
        yield
    finally:
        _addressed.clear()


def _memory(value: Any) -> Iterator[tuple[int, int]]:
    """First and last address, exclusive, of the storages of a tensor, or of those in tuples and lists."""
    if hasattr(value, "untyped_storage"):
        storage = value.untyped_storage()
        yield storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _memory(each)


def _check(what: str, pointers: Any, mask: Any) -> None:
    wanted = np.broadcast_to(np.asarray(mask.data).astype(bool), np.shape(pointers.data))
    addresses = np.asarray(pointers.data)[wanted]
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    if not addresses.size:
        return
    # Nearly always all lie in one storage.
    lowest, highest = int(addresses.min()), int(addresses.max()) + size
    if any(begin <= lowest and highest <= end for begin, end in _storages):
        return
    inside = np.zeros(addresses.shape, dtype=bool)
    for begin, end in _storages:
        inside |= (addresses >= begin) & (addresses + size <= end)
    if not inside.all():
        first = int(addresses[~inside][0])
        past, length = min(((first - end, end - begin) for begin, end in _storages), key=lambda place: abs(place[0]))
        raise AssertionError(
            f"{(~inside).sum()} of {addresses.size} addresses of a {what} lie outside the arguments; the first lies "
            f"{past} bytes behind the end of a storage of {length} bytes"
        )
