"""A CPU that passes for a Hopper GPU: kernels compute nothing, and Triton tells which it would have to compile."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partialmethod
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels.runtime import repeat
from workers.graphs import capture, segments
from workers.memory.scratch import Scratch
from workers.proof import decode_steps
from workers.step.sampling import SamplingState

_devices = count(1)


class _Compiled:
    """Stands for a compiled kernel, or for a graph: nothing is computed."""

    function = packed_metadata = None

    def launch_metadata(self, *args: Any) -> None:
        """Tell Triton's profiler nothing."""

    def run(self, *args: Any) -> None:
        """A launch."""

    def replay(self) -> None:
        """Replay a graph, which does nothing here."""

    reset = replay


class _Device:
    """Part of a `torch.device` that the sampling looks at."""

    type = "cuda"


class _Driver:
    """Triton's. Every one has a device of its own: nobody else finds in Triton's caches what is put there."""

    def __init__(self) -> None:
        self._device = -1000 - next(_devices)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0


def another_device() -> Any:
    """Return a driver for Triton with a device of its own, for which nothing is compiled yet."""
    return _Driver()


def pretend(patch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Pretend from now on that this is a Hopper GPU. Return the list that fills with the variants that Triton compiles,
    by its own rule: kernels with what it specialises of their arguments."""
    variants: list[tuple[str, str]] = []

    def compile(self: Any, key: str, signature: Any, device: int, *rest: Any) -> _Compiled:
        variants.append((self.fn.__name__, key))
        compiled = self.device_caches[device][0][key] = _Compiled()
        return compiled

    patch.setattr(driver, "_active", another_device())
    patch.setattr(JITFunction, "_do_compile", compile)
    patch.setattr(repeat, "_stream", lambda device: 0)
    patch.setattr(repeat, "_direct", lambda compiled: None)
    for name, module in list(sys.modules.items()):
        for asked in ("is_hopper", "launches_dependently"):
            if name.startswith(("kernels.", "workers.")) and hasattr(module, asked):
                patch.setattr(module, asked, lambda device: True)
    patch.setattr(torch.version, "cuda", "12.8")
    patch.setattr(Tensor, "is_cuda", True)
    patch.setattr(Tensor, "pin_memory", lambda self: self)
    zeros = torch.zeros
    patch.setattr(torch, "zeros", lambda *args, pin_memory=False, **options: zeros(*args, **options))
    # Nothing that a kernel should have written is ever anything but a valid id, length or address.
    patch.setattr(torch, "empty", lambda *args, pin_memory=False, **options: zeros(*args, **options))
    empty = Scratch.empty
    patch.setattr(Scratch, "empty", lambda self, *shape, dtype: empty(self, *shape, dtype=dtype).zero_())
    patch.setattr(Scratch, "fill", lambda self, byte: None)
    patch.setitem(decode_steps.MOST_PAGES, "cpu", decode_steps.MOST_PAGES["cuda"])
    # On a GPU the self-test's reference is the prefill path.
    init = decode_steps.SelfTest.__init__
    patch.setattr(decode_steps.SelfTest, "__init__", partialmethod(init, plain=False))
    for name, value in {"mem_get_info": (0, 0), "synchronize": None, "empty_cache": None}.items():
        patch.setattr(torch.cuda, name, lambda *args, value=value: value)

    def record(device: torch.device, call: Callable[[], Any]) -> tuple[_Compiled, Any]:
        return _Compiled(), call()

    # Products of cuBLAS, some of which a CPU has not.
    patch.setattr(torch, "mm", lambda x, y, *, out, out_dtype=None: out)
    sample = SamplingState._sample

    def sampled(self: SamplingState, *args: Any) -> Tensor:
        device, self.device = self.device, _Device()  # type: ignore[assignment]
        try:
            return sample(self, *args)
        finally:
            self.device = device

    patch.setattr(SamplingState, "_sample", sampled)
    patch.setattr(capture, "record", record)
    patch.setattr(segments, "record", record)
    return variants
