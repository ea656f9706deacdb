"""Small values from the host to the device, without the host waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def on_device(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of (nested) `values`. On a GPU it goes through pinned memory, which torch keeps until the copy is done:
    a copy from ordinary memory would wait for everything launched before it."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
