"""Launches for the next layer what was launched for the one before.

Layers of one shape launch the same kernels, with the same numbers and in the same memory, but for the tensors that are
a layer's own. To find out what to launch, and to hand it to Triton, takes the host many times as long as the launch
itself: longer than the device needs for a step of few tokens. So what the first layer launches is noted, and launched
again with the next layer's tensors in the place of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

_RUN: Final = JITFunction.run
"""How Triton launches. Whoever puts another function there, to compile alone for example, sees every launch."""
_off = 0


class Repeat:
    """What a layer does, done again for the layers after it."""

    def __init__(self, layers: int) -> None:
        """`layers`: how many there are. Of one alone nothing is noted."""
        self._layers = layers
        self._own: tuple[Tensor, ...] = ()
        self._noted: list[_Again] = []

    def __call__(self, own: Sequence[Tensor], call: Callable[[], None]) -> None:
        """Do what `call` does for the layer whose own tensors are `own`.

        `call` is run for the first layer, on a CPU, where `nothing_repeated` says so, and for layers whose tensors are
        of another shape, dtype or alignment than the first's. Apart from `own` it reads and writes the same tensors
        and numbers for every layer. It makes no new tensor; RuntimeError if it does.
        """
        if self._layers == 1 or not _possible(own):
            call()
        elif not self._noted:
            with _noting(own) as noted:
                call()
            self._own, self._noted = tuple(own), noted
        elif all(map(_alike, self._own, own)):
            addresses = [tensor.data_ptr() for tensor in own]
            stream = _stream(own[0].device)
            for again in self._noted:
                again(own, addresses, stream)
        else:
            call()


@contextmanager
def nothing_repeated() -> Iterator[None]:
    """Within this context every layer runs itself: for those who watch it."""
    global _off
    _off += 1
    try:
        yield
    finally:
        _off -= 1


def _possible(own: Sequence[Tensor]) -> bool:
    return not _off and own[0].is_cuda and JITFunction.run is _RUN


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


class _Again(Protocol):
    def __call__(self, own: Sequence[Tensor], addresses: Sequence[int], stream: int) -> None: ...


@dataclass(frozen=True)
class _Place:
    """Where in a layer's own tensor something begins."""

    which: int
    offset: int
    """In bytes."""


class _Address:
    """What Triton asks of the tensor behind a descriptor."""

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


@dataclass(frozen=True)
class _Box:
    """A descriptor over a layer's own tensor."""

    base: _Address
    shape: list[int]
    strides: list[int]
    padding: str


class _Kernel:
    """One launch of a Triton kernel."""

    def __init__(
        self, kernel: Any, compiled: Any, grid: Any, args: Sequence[Any], options: dict[str, Any], own: Sequence[Tensor]
    ) -> None:
        named = [
            args[i] if i < len(args) else options.get(param.name, param.default)
            for i, param in enumerate(kernel.params)
        ]
        if callable(grid):
            grid = grid(dict(zip(kernel.arg_names, named, strict=True)))
        self._run, self._grid = compiled.run, (*grid, 1, 1)[:3]
        self._head = (compiled.function, compiled.packed_metadata, None, None, None)
        self._args: list[Any] = []
        self._own: list[tuple[int, _Place]] = []
        self._boxes: list[tuple[int, _Place, Any]] = []
        for position, value in enumerate(named):
            base = getattr(value, "base", None)  # a descriptor's
            tensor = base if isinstance(base, Tensor) else value
            if not isinstance(tensor, Tensor):
                self._args.append(value)
                continue
            place = _place(tensor, own)
            if tensor is base:
                self._args.append(value)
                if place is not None:
                    self._boxes.append((position, place, value))
            else:
                # An address alone: of a tensor Triton would ask the driver whether it lies on the device.
                self._args.append(tensor.data_ptr())
                if place is not None:
                    self._own.append((position, place))

    def __call__(self, own: Sequence[Tensor], addresses: Sequence[int], stream: int) -> None:
        args = self._args
        for position, place in self._own:
            args[position] = addresses[place.which] + place.offset
        for position, place, like in self._boxes:
            base = _Address(addresses[place.which] + place.offset)
            args[position] = _Box(base, like.shape, like.strides, like.padding)
        self._run(*self._grid, stream, *self._head, *args)


class _Operation:
    """One operator of torch that writes into given memory."""

    def __init__(self, function: Any, args: Sequence[Any], options: dict[str, Any], own: Sequence[Tensor]) -> None:
        self._function, self._args, self._options = function, list(args), dict(options)
        self._own: list[tuple[Any, Any, _Place, Tensor]] = []
        for holder in (self._args, self._options):
            items = holder.items() if isinstance(holder, dict) else enumerate(holder)
            for key, value in list(items):
                place = _place(value, own) if isinstance(value, Tensor) else None
                if place is None:
                    continue
                if value.dtype != own[place.which].dtype:
                    raise RuntimeError(f"{function} reads a layer's tensor as {value.dtype}: cannot be repeated")
                self._own.append((holder, key, place, value))

    def __call__(self, own: Sequence[Tensor], addresses: Sequence[int], stream: int) -> None:
        for holder, key, place, like in self._own:
            tensor = own[place.which]
            begin = tensor.storage_offset() + place.offset // tensor.itemsize
            holder[key] = tensor.as_strided(like.shape, like.stride(), begin)
        self._function(*self._args, **self._options)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operators that write; refuses those whose result is new."""

    def __init__(self, noted: list[_Again], own: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noted, self._own = noted, own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            self._noted.append(_Operation(func, args, kwargs, self._own))
        elif not func.is_view:
            raise RuntimeError(f"{func} makes something new: what does that cannot be repeated for another layer")
        return result


@contextmanager
def _noting(own: Sequence[Tensor]) -> Iterator[list[_Again]]:
    """Within this context everything that is launched is also noted."""
    noted: list[_Again] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = _RUN(kernel, *args, grid=grid, warmup=warmup, **options)
        noted.append(_Kernel(kernel, compiled, grid, args, options, own))
        return compiled

    JITFunction.run = run
    try:
        with _Operations(noted, own):
            yield noted
    finally:
        JITFunction.run = _RUN


def _span(tensor: Tensor) -> int:
    """Bytes from its first element to the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _place(tensor: Tensor, own: Sequence[Tensor]) -> _Place | None:
    for which, owned in enumerate(own):
        offset = tensor.data_ptr() - owned.data_ptr()
        if tensor.numel() and 0 <= offset < _span(owned):
            return _Place(which, offset)
    return None


def _alike(first: Tensor, other: Tensor) -> bool:
    return (
        first.shape == other.shape
        and first.stride() == other.stride()
        and first.dtype == other.dtype
        # Kernels were compiled for it.
        and not (first.data_ptr() - other.data_ptr()) % 16
    )
