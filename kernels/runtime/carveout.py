"""Leaves memory to the first cache of a multiprocessor, for kernels whose weights go from memory to registers.

A multiprocessor cuts shared memory and its first cache (L1) out of the same memory. Whatever a thread asks for has a
line in that cache until it is there; where all lines are taken, the next request waits. For a kernel of more than
48 KiB of shared memory Triton asks the driver to cut out as much of that as there is, which leaves 28 KiB to the cache
of a Hopper GPU: less than its loads need that are on their way. For a kernel of less the driver cuts out what that
needs. Kernels of unlike cuts cannot share a multiprocessor: so a dependent launch finds no room there until the kernel
before has left it.

On one H200 gate and up of sixteen tokens with INT4 weights (Kimi K2) took 698 us as Triton has it, and 460 with this
cut; two kernels of four tokens one behind the other 239 and 216.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from typing import Any, Final

import torch

from kernels.runtime.hopper import is_hopper

logger = logging.getLogger("latentserve.carveout")

SHARED_PERCENT: Final = 58
"""Percentage of the 228 KiB that can be shared memory: 132 KiB, which leaves 124 to the cache. It is the same for all
kernels, so that they need not wait for each other."""
SHARED_BYTES: Final = 132 * 1024
"""Shared memory of the programs of a multiprocessor together, with 1 KiB that the system takes for each."""

_CARVEOUT: Final = 9
"""CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT."""
_done: set[int] = set()


def leave_to_cache(launched: Any) -> None:
    """Let the kernel that a launch on a Hopper GPU returned have this cut from its next launch on. Nothing happens to
    one that was only compiled, nor on other GPUs, whose memory is of another size."""
    function = getattr(launched, "function", None)
    if not isinstance(function, int) or function in _done:
        return
    _done.add(function)
    if not is_hopper(torch.device("cuda", torch.cuda.current_device())):
        return
    if error := _driver().cuFuncSetAttribute(ctypes.c_void_p(function), _CARVEOUT, SHARED_PERCENT):
        logger.warning("%s has less cache than it needs and is slower: CUDA error %d", launched.name, error)


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
