"""Records a call into a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from workers.graphs.guard import capture_guard

T = TypeVar("T")


def record(device: torch.device, call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of `call`, and what the captured call returned, which every replay fills anew.

    All that it launches must have run for real before: that compiles, loads and sets up what a capture cannot. Raises
    CaptureViolation for that, and for what a replay could not repeat.
    """
    graph = torch.cuda.CUDAGraph()
    violations: list[Exception] = []
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            try:
                with capture_guard(device):
                    result = call()
            except Exception as error:
                violations.append(error)
                raise
    except Exception as error:
        # Ending a broken capture raises as well, and would hide what broke it.
        raise violations[0] if violations else error from None
    return graph, result


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A graph of a former runner that the collector destroys during a capture would invalidate it."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
