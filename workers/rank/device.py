"""What a rank computes on, and in which numbers."""

from __future__ import annotations

import torch

from workers.config import EngineConfig
from workers.environment import visible_gpus


def pick_device(config: EngineConfig, device_index: int | None) -> torch.device:
    """The device of one rank; RuntimeError when `cuda` is asked for and there is none, or none for this rank."""
    wanted = config.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("device = cuda, but torch sees no CUDA device; use --device cpu or auto")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    index, count = device_index or 0, torch.cuda.device_count()
    if index >= count:
        raise RuntimeError(
            f"there is no GPU {index}: each rank needs one of its own, and torch sees {count} here; give "
            f"--tensor-parallel {count}, or --device cpu"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def passed_over(config: EngineConfig, device: torch.device) -> str:
    """Return the message for a start where `auto` chose the CPU of a machine with GPUs; empty otherwise."""
    if device.type != "cpu" or config.device != "auto" or not (count := visible_gpus()):
        return ""
    return (
        f"running on the CPU: torch {torch.__version__} can use none of this machine's GPUs, of which the driver shows "
        f"{count} (built for CUDA: {torch.version.cuda or 'no'})"
    )


def pick_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """dtype of weights and cache."""
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = getattr(torch, config.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def captures_steps(device: torch.device) -> bool:
    """Whether steps on this device can be captured into graphs."""
    return device.type == "cuda"
