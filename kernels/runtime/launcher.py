"""The inner function of the launcher that Triton makes for a compiled kernel: calling it directly saves most of the
time of a launch.

Written for Triton 3.6, whose launcher is private. Where it is made of other parts a line is logged, and launches go
through the whole of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from kernels.private_api import PrivateApi, lacking

_INSIDE: Final = PrivateApi(
    "triton",
    (
        "triton.backends.nvidia.driver._BASE_ARGS_FORMAT",
        "triton.backends.nvidia.driver.wrap_handle_tensordesc(launcher, signature, tensordesc_meta)",
    ),
    "repeated launches go through the whole of Triton's launcher, where the host spends most of a launch",
)

STREAM: Final = 3
"""Index of the stream among a launcher's arguments."""
_LAUNCHER: Final = "iiiKKppOOOOOO"
"""The arguments before a kernel's own that Triton 3.6 hands to what it compiled: the grid, the stream, the kernel, two
flags, two pieces of memory, what is known about the kernel and the launch, two hooks."""


@cache
def direct(compiled: Any) -> tuple[Callable[..., None], Callable[..., list[Any]]] | None:
    """Return the function that a compiled kernel's `run` calls in the end, and one that makes its arguments from those
    of `run`, with descriptors encoded: most of the time of `run` is spent on that. None where this Triton has it
    otherwise."""
    if not _INSIDE.there():
        return None
    from triton.backends.nvidia import driver as nvidia

    if gone := _missing_inside(compiled, nvidia):
        _INSIDE.lost(gone)
        return None
    run, signature = compiled.run, compiled.src.signature
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    launch, fixed = run.launch, (run.launch_cooperative_grid, run.launch_pdl, None, None)
    described = getattr(compiled.metadata, "tensordesc_meta", None)
    encode = nvidia.wrap_handle_tensordesc(lambda *args: args, signature, described)
    if _has_descriptors(signature):
        launch = inspect.getclosurevars(launch).nonlocals["launcher"]

    def arguments(*args: Any) -> list[Any]:
        return list(encode(*args[: STREAM + 2], *fixed, *args[STREAM + 2 :]))

    return launch, arguments


def _missing_inside(compiled: Any, nvidia: Any) -> str:
    """Return what a compiled kernel's launcher lacks of what `direct` takes; empty if it has all."""
    if nvidia._BASE_ARGS_FORMAT != _LAUNCHER:
        return f"launcher with the arguments {_LAUNCHER}"
    if gone := lacking(compiled, ("src", "metadata")) or lacking(compiled.src, ("signature",)):
        return gone
    parts = ("launch", "launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
    if gone := lacking(compiled.run, parts):
        return gone
    if _has_descriptors(compiled.src.signature):
        launch = compiled.run.launch
        if not inspect.isfunction(launch) or "launcher" not in inspect.getclosurevars(launch).nonlocals:
            return "launcher inside the one that encodes descriptors"
    return ""


def _has_descriptors(signature: dict[str, Any]) -> bool:
    return any(str(kind).startswith("tensordesc") for kind in signature.values())
