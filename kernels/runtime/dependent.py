"""The places where kernels may be launched dependently: docs/internals/kernels.md states the rules."""

from __future__ import annotations

from functools import cache

import torch


@cache
def launches_dependently(device: torch.device) -> bool:
    """Whether `device` has programmatic dependent launch: a CUDA GPU of compute capability 9.0 or above."""
    return (
        device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9, 0)
    )
