"""Questions of launchers about a device: whether Hopper's own kernels may run there, and how many programs fill it."""

from __future__ import annotations

from functools import cache

import torch


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether `device` is a CUDA GPU of compute capability 9.0: no other has its matrix instructions."""
    return (
        device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) == (9, 0)
    )


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU, or an H200's where there is none: kernels are only compiled then."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 132
