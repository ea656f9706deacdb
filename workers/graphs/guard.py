"""Guard of graph captures: allocation, compilation and waiting for the device, which must not happen in one, are made
impossible.

That a kernel is compiled, Triton 3.6 tells a hook that is meant for its cache. Without it a line is logged, and a
compilation is not noticed here.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import triton
from typing_extensions import override

from kernels.private_api import PrivateApi
from kernels.runtime import repeat
from kernels.runtime.operators import OperatorMode

_HOOK: Final = PrivateApi(
    "triton",
    ("triton.knobs.runtime.jit_cache_hook",),
    "a kernel that is compiled while a graph is captured is not noticed; where that breaks the capture, CUDA says less",
)
_ROOT = Path(__file__).resolve().parents[2]
_WAITS = ("synchronizing CUDA operation", "CUDA graph capture", "stream is capturing")
"""Messages of torch and CUDA about an operator that waits: one of the debug mode that is on here, about a copy between
a device and memory that is not pinned, and others."""


class CaptureViolation(RuntimeError):
    """Something that a replay could not repeat happened during a capture; the message names the line."""


def _line() -> str:
    """The innermost line of the project's own code that led here, those aside that only stand between."""
    ours = [str(_ROOT / room) + "/" for room in ("workers", "kernels", "tests")]
    between = __file__, repeat.__file__
    frames = [f for f in traceback.extract_stack() if f.filename.startswith(tuple(ours)) and f.filename not in between]
    if not frames:
        return "unknown line"
    frame = frames[-1]
    return f"{Path(frame.filename).relative_to(_ROOT)}:{frame.lineno}: {frame.line}"


def _storages(values: Any, device_type: str) -> set[int]:
    found: set[int] = set()

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if value.device.type == device_type and value.numel():
                found.add(value.untyped_storage().data_ptr())
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)
        elif isinstance(value, dict):
            for item in value.values():
                visit(item)

    visit(values)
    return found


class _OnDeviceAlone(OperatorMode):
    """Raises when an operator's result lies in memory that none of its operands owns, or when it waits."""

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == self._device_type:
            raise CaptureViolation(f"the host waits for a value during a capture, at {_line()}")
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            if not any(said in str(error) for said in _WAITS):
                raise
            raise CaptureViolation(f"{func} waits for the device during a capture, at {_line()}") from error
        owned = _storages((args, kwargs), self._device_type)
        if _storages(result, self._device_type) - owned:
            raise CaptureViolation(f"{func} allocates during a capture, at {_line()}")
        return result


@contextmanager
def _no_compilation() -> Iterator[None]:
    if not _HOOK.there():
        yield
        return

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise CaptureViolation(f"a kernel is compiled during a capture, at {_line()}; it was not warmed up")

    before = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = refuse
    try:
        yield
    finally:
        triton.knobs.runtime.jit_cache_hook = before


@contextmanager
def capture_guard(device: torch.device) -> Iterator[None]:
    """Raise CaptureViolation, within this context, for allocating on `device`, compiling a kernel, or an operator that
    waits for the device. Waiting without an operator, as torch.cuda.synchronize does, is refused by CUDA itself, and
    the traceback of its error names the line."""
    with _OnDeviceAlone(device.type), _no_compilation():
        if device.type != "cuda":
            yield
            return
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            # It need not see every wait: what it does not see, the capture itself refuses.
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
