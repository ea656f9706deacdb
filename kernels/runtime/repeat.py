"""Launches for the next layer what was launched for the one before.

Layers of one shape launch the same kernels, with the same numbers and in the same memory, but for the tensors that are
a layer's own. To find out what to launch, and to hand it to Triton, takes the host many times as long as the launch
itself: longer than the device needs for a step of few tokens. So what the first layer launches is noted, and launched
again with the next layer's tensors in the place of its own.

Written for Triton 3.6 and torch 2.11 to 2.13, of which it needs private parts: how a kernel is launched, what a
compiled one is made of, what an operator does. Where one is missing a line is logged, and every layer launches for
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from triton import JITFunction
from typing_extensions import override

from kernels.private_api import PrivateApi, lacking
from kernels.runtime.ahead import launches_compute
from kernels.runtime.launcher import STREAM
from kernels.runtime.launcher import direct as _direct
from kernels.runtime.operators import WATCHING, OperatorMode

_THEMSELVES: Final = "every layer launches its kernels for itself, which takes the host several times as long"
_LAUNCHES: Final = PrivateApi(
    "triton",
    (
        "triton.JITFunction.run(grid, warmup)",
        "triton.runtime.jit.KernelParam.name",
        "triton.runtime.jit.KernelParam.default",
        "triton.backends.nvidia.driver.CudaLauncher.__call__(gridX, gridY, gridZ, stream, function)",
    ),
    _THEMSELVES,
)
_OPERATORS: Final = PrivateApi(
    "torch", ("torch.ops.aten.add.Tensor._schema.is_mutable", "torch.ops.aten.add.Tensor.is_view"), _THEMSELVES
)
_STREAMS: Final = PrivateApi(
    "torch", ("torch._C._cuda_getCurrentRawStream",), "the stream is asked for through objects, which takes longer"
)
_RUN: Final[Any] = getattr(JITFunction, "run", None)
"""Triton's launch function. Whoever puts another function there, to compile alone for example, sees every launch."""
_off = 0
_known_types: set[tuple[type, type]] = set()
"""Types of kernels, and of what Triton makes of them, that have everything `_Kernel` takes."""


class Layers:
    """The tensors that are each layer's own: the n-th of one layer is to it what the n-th of another is to that."""

    def __init__(self, own: Sequence[Sequence[Tensor]]) -> None:
        self.own = own
        self.addresses = [[tensor.data_ptr() for tensor in tensors] for tensors in own]
        first = own[0]
        self.alike = [len(first) == len(tensors) and all(map(_alike, first, tensors)) for tensors in own]
        """Whether kernels take a layer's tensors as they take the first layer's."""
        self._spans = [
            (which, tensor.data_ptr(), tensor.data_ptr() + _span(tensor)) for which, tensor in enumerate(first)
        ]

    def place(self, tensor: Tensor) -> _Place | None:
        """Return the place of `tensor` in the first layer's own tensors; None if it is in none of them."""
        address = tensor.data_ptr()
        for which, begin, end in self._spans:
            if begin <= address < end:
                return _Place(which, address - begin)
        return None

    def hold(self, value: Any) -> bool:
        """Whether one of the first layer's own tensors is in a list, a tuple or a dictionary."""
        if isinstance(value, Tensor):
            return self.place(value) is not None
        if isinstance(value, dict):
            value = list(value.values())
        return isinstance(value, (list, tuple)) and any(map(self.hold, value))


class Repeat:
    """Repeats the first layer's launches of a pass for the layers after it."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._noted: list[_Again] = []

    def __call__(self, index: int, call: Callable[[], None]) -> None:
        """Do what `call` does for layer `index`.

        `call` is run for the first layer, for one whose tensors differ from the first's in shape, dtype or alignment,
        and for all on a CPU, where `nothing_repeated` says so, and where Triton or torch lack what is needed. It reads
        and writes the same tensors and numbers for every layer, but for those that are the layer's own. RuntimeError if
        it makes a new tensor, or hands a layer's own on in a list. It launches from one thread; what others launch
        meanwhile is theirs. Where launches compute nothing, layers whose tensors are like the first's are left out.
        """
        layers = self._layers
        if index and layers.alike[index] and not launches_compute():
            return  # it launches the first layer's kernels
        if index and self._noted and layers.alike[index]:
            own, addresses, stream = layers.own[index], layers.addresses[index], _stream(layers.own[0][0].device)
            for again in self._noted:
                again(own, addresses, stream)
        elif index or not _possible(layers):
            call()
        else:
            with _noting(layers) as noted:
                call()
            self._noted = noted


@contextmanager
def nothing_repeated() -> Iterator[None]:
    """Let every layer run itself within this context: for those who watch it."""
    global _off
    _off += 1
    try:
        yield
    finally:
        _off -= 1


def _possible(layers: Layers) -> bool:
    wanted = len(layers.own) > 1 and layers.own[0][0].is_cuda and not _off
    return wanted and _known() and JITFunction.run is _RUN


def _known() -> bool:
    """Whether Triton and torch have what is needed to note a launch."""
    return _LAUNCHES.there() and _OPERATORS.there() and WATCHING.there()


def _stream(device: torch.device) -> int:
    if not _STREAMS.there():
        return int(torch.cuda.current_stream(device).cuda_stream)
    return int(torch._C._cuda_getCurrentRawStream(device.index))


class _Again(Protocol):
    def __call__(self, own: Sequence[Tensor], addresses: Sequence[int], stream: int) -> None: ...


@dataclass(frozen=True)
class _Place:
    """Place in a layer's own tensor."""

    which: int
    offset: int
    """Offset in bytes."""


class _Address:
    """Stands for the tensor behind a descriptor: it has what Triton asks of one."""

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
    """Launch of a Triton kernel."""

    def __init__(
        self, kernel: Any, compiled: Any, grid: Any, args: Sequence[Any], options: dict[str, Any], layers: Layers
    ) -> None:
        named = [
            args[i] if i < len(args) else options.get(param.name, param.default)
            for i, param in enumerate(kernel.params)
        ]
        if callable(grid):
            grid = grid(dict(zip(kernel.arg_names, named, strict=True)))
        self._boxes: list[tuple[int, _Place, Any]] = []
        for position, value in enumerate(named):
            base = getattr(value, "base", None)  # a descriptor's
            if isinstance(value, Tensor):
                # An address alone: of a tensor Triton would ask the driver whether it lies on the device.
                named[position] = layers.place(value) or value.data_ptr()
            elif isinstance(base, Tensor) and (place := layers.place(base)) is not None:
                named[position] = place
                self._boxes.append((position, place, value))
            elif layers.hold(value):
                raise RuntimeError(f"{kernel.fn.__name__} takes a layer's tensor among others: cannot be repeated")
        sizes, hooks = (*grid, 1, 1)[:3], (None, None, None)
        head = (*sizes, 0, compiled.function, compiled.packed_metadata, *hooks)
        self._launch, self._args = compiled.run, [*head, *named]
        self._boxes = [(position + len(head), place, like) for position, place, like in self._boxes]
        if not self._boxes and (direct := _direct(compiled)) is not None:
            self._launch, self._args = direct[0], direct[1](*self._args)
        boxes = {position for position, _, _ in self._boxes}
        self._own = [(i, x) for i, x in enumerate(self._args) if isinstance(x, _Place) and i not in boxes]

    def __call__(self, own: Sequence[Tensor], addresses: Sequence[int], stream: int) -> None:
        args = self._args
        args[STREAM] = stream
        for position, place in self._own:
            args[position] = addresses[place.which] + place.offset
        for position, place, like in self._boxes:
            base = _Address(addresses[place.which] + place.offset)
            args[position] = _Box(base, like.shape, like.strides, like.padding)
        self._launch(*args)


class _Operation:
    """Operator of torch that writes into given memory."""

    def __init__(self, function: Any, args: Sequence[Any], options: dict[str, Any], layers: Layers) -> None:
        self._function, self._args, self._options = function, list(args), dict(options)
        self._own: list[tuple[Any, Any, _Place, torch.Size, tuple[int, ...]]] = []
        for holder in (self._args, self._options):
            items = holder.items() if isinstance(holder, dict) else enumerate(holder)
            for key, value in list(items):
                place = layers.place(value) if isinstance(value, Tensor) else None
                if place is None:
                    if layers.hold(value):
                        raise RuntimeError(f"{function} takes a layer's tensor among others: cannot be repeated")
                    continue
                if value.dtype != layers.own[0][place.which].dtype:
                    raise RuntimeError(f"{function} reads a layer's tensor as {value.dtype}: cannot be repeated")
                self._own.append((holder, key, place, value.shape, value.stride()))

    def __call__(self, own: Sequence[Tensor], addresses: Sequence[int], stream: int) -> None:
        for holder, key, place, shape, strides in self._own:
            tensor = own[place.which]
            begin = tensor.storage_offset() + place.offset // tensor.itemsize
            holder[key] = tensor.as_strided(shape, strides, begin)
        self._function(*self._args, **self._options)


class _Operations(OperatorMode):
    """Notes operators that write; refuses those whose result is new."""

    def __init__(self, noted: list[_Again], layers: Layers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noted, self._layers = noted, layers

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            self._noted.append(_Operation(func, args, kwargs, self._layers))
        elif not func.is_view or _storages(result) - _storages(args):  # what copies only where it must is a "view", too
            raise RuntimeError(f"{func} makes something new: what does that cannot be repeated for another layer")
        return result


@contextmanager
def _noting(layers: Layers) -> Iterator[list[_Again]]:
    """Note every launch within this context; if one cannot be noted, there are none at the end."""
    noted: list[_Again] = []
    thread, whole = get_ident(), True

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        nonlocal whole
        compiled = _RUN(kernel, *args, grid=grid, warmup=warmup, **options)
        if get_ident() != thread:
            return compiled
        if gone := _unknown(kernel, compiled):
            _LAUNCHES.lost(gone)
            whole = False
        else:
            noted.append(_Kernel(kernel, compiled, grid, args, options, layers))
        return compiled

    JITFunction.run = run
    try:
        with _Operations(noted, layers):
            yield noted
        if not whole:
            noted.clear()
    finally:
        JITFunction.run = _RUN


def _unknown(kernel: Any, compiled: Any) -> str:
    """Return what a kernel, or what Triton made of it, lacks of what `_Kernel` takes; empty if they have all. It is
    called at every launch, and looks once for each type."""
    types = type(kernel), type(compiled)
    if types in _known_types:
        return ""
    gone = lacking(kernel, ("params", "arg_names", "fn"))
    gone = gone or lacking(compiled, ("run", "function", "packed_metadata"))
    if not gone:
        _known_types.add(types)
    return gone


def _storages(value: Any) -> set[int]:
    """Return the storages of a tensor, or of those in a list or tuple."""
    if isinstance(value, Tensor):
        return {value.untyped_storage().data_ptr()}
    return {at for item in value for at in _storages(item)} if isinstance(value, (list, tuple)) else set()


def _span(tensor: Tensor) -> int:
    """Bytes from its first element to the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _alike(first: Tensor, other: Tensor) -> bool:
    return (
        first.shape == other.shape
        and first.stride() == other.stride()
        and first.dtype == other.dtype
        # Kernels were compiled for it.
        and not (first.data_ptr() - other.data_ptr()) % 16
    )
