"""Hopper's asynchrony for `gluon_interpreter`: partitions of warps, mbarriers, copies and wgmma products.

Partitions take turns; who is next, and when a copy arrives or a product is computed, is drawn from `SCHEDULE`, any
time the hardware might choose. The target of a copy holds NaN until it arrives, one of cp.async until it is waited for,
and a product reads its shared memory either when it starts or when it is waited for. So a tile that is read before it
came, or handed back before its products are done, gives wrong numbers under some schedule; a barrier that nobody
completes raises AssertionError, and so does a product with what cp.async brought and nobody fenced. Within a partition
the warps run in step, so a missing `thread_barrier` does not show, nor does the fence of a plain store.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

SCHEDULE = random.Random(0)
"""Seed it to choose a schedule."""
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_PACES = (0.01, 1.0, 100.0)
"""How often one is chosen: drawn for each partition, and for the copies, of each program."""


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

    def _reinterpret(self, dtype: Any, shape: Any, layout: Any) -> Shared:
        """The same memory in other pieces, of whole rows: swizzled ones keep their places."""
        sizes = [number(size) for size in shape]
        assert (dtype, sizes[-1]) == (self.dtype, self.bits.shape[-1]), "only whole rows are understood here"
        return Shared(self.bits.reshape(sizes), dtype)

    def store(self, value: Any) -> None:
        """Write a tensor of the same shape and type."""
        assert value.dtype == self.dtype, f"{value.dtype} stored as {self.dtype}"
        self.bits[...] = value.handle.data

    def load(self, layout: Any = None) -> Any:
        """A tensor of what is there now."""
        handle = interpreter.TensorHandle(np.array(self.bits, order="C"), self.dtype)
        return tl.core.tensor(handle, tl.block_type(self.dtype, list(self.bits.shape)))

    @property
    def place(self) -> int:
        """Where it begins: what two views of one barrier have in common."""
        return int(self.bits.ctypes.data)


class TensorDescriptor:
    """Stands in for Gluon's: boxes of a tensor, with zeros where they leave it."""

    def __init__(self, base: Any, shape: Any, strides: Any, block_shape: Any, layout: Any) -> None:
        assert base.data_ptr() % 16 == 0, "a descriptor's tensor begins at a multiple of 16 bytes"
        assert all(s * base.element_size() % 16 == 0 for s in strides[:-1]), "strides are multiples of 16 bytes"
        assert strides[-1] == 1, "the last dimension is contiguous"
        assert all(size > 0 for size in shape), "a descriptor's tensor has elements"
        self.x = base.as_strided(list(shape), list(strides))
        self.box = list(block_shape)
        self.dtype = _DTYPES[base.dtype]
        self.block_type = SimpleNamespace(nbytes=int(np.prod(self.box)) * base.element_size())

    @staticmethod
    def from_tensor(tensor: Any, block_shape: Any, layout: Any) -> TensorDescriptor:
        """Of a whole tensor."""
        return TensorDescriptor(tensor, tensor.shape, tensor.stride(), block_shape, layout)

    def read(self, coordinates: Any) -> Any:
        """The bits of the box that begins at `coordinates`."""
        starts = [number(c) for c in coordinates]
        inside = [
            slice(max(0, -at), max(0, min(size, limit - at)))
            for at, size, limit in zip(starts, self.box, self.x.shape, strict=True)
        ]
        source = self.x[tuple(slice(at + s.start, at + s.stop) for at, s in zip(starts, inside, strict=True))]
        box = torch.zeros(self.box, dtype=self.x.dtype)
        box[tuple(inside)] = source
        return box.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[box.element_size()]).numpy()


class _Stopped(BaseException):
    """Ends a partition after another has failed."""


class _Partition(threading.Thread):
    def __init__(self, crew: _Crew, function: Any, arguments: Any) -> None:
        super().__init__(daemon=True)
        self.crew, self.function, self.arguments = crew, function, arguments
        self.turn = threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True
        self.awaited = ""
        self.pace = SCHEDULE.choice(_PACES)
        self.done = False
        self.error: BaseException | None = None
        self.products: list[_Product] = []

    def run(self) -> None:
        try:
            self.turn.acquire()
            self._unless_stopped()
            self.function(*self.arguments)
            assert not self.products, f"{self.name} ends with products that nobody waited for"
            assert not _own.groups, f"{self.name} ends with copies that nobody waited for"
        except BaseException as error:
            self.error = error
        self.done = True
        self.crew.turn.release()

    def pause(self, ready: Callable[[], bool], awaited: str) -> None:
        """Let others run, until `ready` and chosen."""
        self.ready, self.awaited = ready, awaited
        self.crew.turn.release()
        self.turn.acquire()
        self._unless_stopped()

    def _unless_stopped(self) -> None:
        if self.crew.stopped:
            raise _Stopped


class _Crew:
    """The partitions of one program, one of which runs at a time."""

    def __init__(self) -> None:
        self.turn = threading.Semaphore(0)
        self.stopped = False
        self.copies: list[Callable[[], None]] = []
        self.pace = SCHEDULE.choice(_PACES)

    def work(self, functions: Any) -> None:
        partitions = [_Partition(self, function, arguments) for function, arguments in functions]
        for i, partition in enumerate(partitions):
            partition.name = f"partition {i} ({partition.function.__name__})"
            partition.start()
        try:
            self._work(partitions)
        finally:
            self.stopped = True
            for partition in partitions:
                partition.turn.release()
                partition.join()

    def _work(self, partitions: list[_Partition]) -> None:
        while any(not partition.done for partition in partitions):
            able = [partition for partition in partitions if not partition.done and partition.ready()]
            if not able and not self.copies:
                waiting = [f"{p.name}: {p.awaited}" for p in partitions if not p.done]
                raise AssertionError("deadlock, all partitions wait: " + "; ".join(waiting))
            moves: list[_Partition | Callable[[], None]] = [*able, *self.copies]
            paces = [partition.pace for partition in able] + [self.pace] * len(self.copies)
            chosen = SCHEDULE.choices(moves, paces)[0]
            if not isinstance(chosen, _Partition):
                self.copies.remove(chosen)
                chosen()
                continue
            chosen.turn.release()
            self.turn.acquire()
            error = chosen.error
            if error is not None:
                raise error
        assert not self.copies, "the program ends while copies into its shared memory are under way"


def _here() -> _Partition:
    partition = threading.current_thread()
    assert isinstance(partition, _Partition), "only partitions of warp_specialize wait, copy and multiply here"
    return partition


def warp_specialize(functions: Any, warps: Any, registers: Any) -> None:
    """Run the partitions to their ends."""
    assert len(functions) == 1 + len(warps) == 1 + len(registers)
    _unfenced.clear()
    _Crew().work(functions)


@dataclass
class _Barrier:
    count: int
    pending: int
    bytes: int = 0
    completed: int = 0

    def move(self, arrivals: int, bytes_expected: int) -> None:
        self.pending -= arrivals
        self.bytes += bytes_expected
        assert self.pending >= 0, "more arrivals at a barrier than it counts"
        if self.pending == 0 and self.bytes == 0:
            self.completed += 1
            self.pending = self.count


_barriers: dict[int, _Barrier] = {}


def _init(barrier: Shared, count: Any) -> None:
    _barriers[barrier.place] = _Barrier(number(count), number(count))


def _expect(barrier: Shared, size: Any, pred: Any = True) -> None:
    if pred:
        _barriers[barrier.place].move(1, number(size))


def _arrive(barrier: Shared, *, count: Any = 1, pred: Any = True) -> None:
    if pred:
        _barriers[barrier.place].move(number(count), 0)
        _here().pause(lambda: True, "")


def _wait(barrier: Shared, phase: Any, pred: Any = True, deps: Any = ()) -> None:
    state, parity = _barriers[barrier.place], number(phase)
    if pred:
        _here().pause(lambda: state.completed & 1 != parity, f"phase {parity} of {state}")


def _copy(box: TensorDescriptor, coordinates: Any, barrier: Shared, target: Shared, pred: Any = True) -> None:
    if not pred:
        return
    state, bits = _barriers[barrier.place], box.read(coordinates)
    assert target.bits.shape == bits.shape

    def arrive() -> None:
        target.bits[...] = bits.view(target.bits.dtype)
        state.move(0, -box.block_type.nbytes)

    target.bits.view(np.uint8)[...] = 0xFF
    _here().crew.copies.append(arrive)


class _OwnCopies(threading.local):
    """A partition's copies by cp.async: those begun, and the committed groups that were not waited for."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.groups: list[list[Any]] = []


_own = _OwnCopies()
_unfenced: list[tuple[int, Any]] = []
"""(thread, bits) of what cp.async wrote."""


def copy_async(target: Shared, value: Any) -> None:
    """`async_copy.async_copy_global_to_shared` of the values it would read."""
    assert value.dtype == target.dtype
    target.bits.view(np.uint8)[...] = 0xFF
    _own.begun.append((target.bits, value.handle.data))


def commit_group() -> None:
    """`async_copy.commit_group`."""
    _own.groups.append(_own.begun)
    _own.begun = []


def wait_group(outstanding: Any = 0) -> None:
    """`async_copy.wait_group`."""
    while len(_own.groups) > number(outstanding):
        for bits, values in _own.groups.pop(0):
            bits[...] = values
            if isinstance(threading.current_thread(), _Partition):
                _unfenced.append((threading.get_ident(), bits))


def _fence() -> None:
    _unfenced[:] = [(thread, bits) for thread, bits in _unfenced if thread != threading.get_ident()]


def _check_fenced(*operands: Any) -> None:
    for operand in operands:
        read = isinstance(operand, Shared) and any(np.may_share_memory(operand.bits, bits) for _, bits in _unfenced)
        assert not read, "a product reads what cp.async wrote and nobody fenced"


class _Product:
    """A product under way, the sum it adds to included."""

    def __init__(self, left: Any, right: Shared, total: Any) -> None:
        self.left, self.right, self.total = left, right, total
        self.result: Any = None

    def __repr__(self) -> str:
        return "a product that may be unfinished"  # what the interpreter says when it should compute with one

    def compute(self) -> Any:
        if self.result is None:
            total = self.total.compute() if isinstance(self.total, _Product) else self.total
            left = self.left.load() if isinstance(self.left, Shared) else self.left
            self.result = tl.dot(left, self.right.load(), total)
        return self.result


def _mma(left: Any, right: Shared, total: Any, *, use_acc: Any = True, is_async: Any = False) -> Any:
    _check_fenced(left, right)
    start = total if use_acc else tl.zeros(total.shape, tl.float32)
    product = _Product(left, right, start)
    partition = _here()
    if not is_async:
        return product.compute()
    partition.products.append(product)
    if SCHEDULE.random() < 0.5:
        product.compute()
    partition.pause(lambda: True, "")
    return product


def _mma_wait(outstanding: Any = 0, deps: Any = ()) -> Any:
    partition = _here()
    partition.pause(lambda: True, "")
    while len(partition.products) > number(outstanding):
        partition.products.pop(0).compute()
    flying = partition.products
    done = [isinstance(dep, _Product) and not any(dep is product for product in flying) for dep in deps]
    results = [dep.compute() if finished else dep for dep, finished in zip(deps, done, strict=True)]
    return results[0] if len(results) == 1 else tuple(results)


def modules(layout: Any) -> list[ModuleType]:
    """Stand-ins for the modules that Hopper's kernels import; `layout` makes any layout."""
    device = ModuleType("triton.experimental.gluon.language.nvidia.hopper")
    device.__dict__.update(
        fence_async_shared=_fence,
        mbarrier=SimpleNamespace(MBarrierLayout=layout, init=_init, expect=_expect, arrive=_arrive, wait=_wait),
        tma=SimpleNamespace(async_copy_global_to_shared=_copy),
        warpgroup_mma=_mma,
        warpgroup_mma_wait=_mma_wait,
    )
    host = ModuleType("triton.experimental.gluon.nvidia.hopper")
    host.__dict__["TensorDescriptor"] = TensorDescriptor
    return [device, host]
