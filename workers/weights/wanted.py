"""What the tensors of a checkpoint must be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

Shape = tuple[int, ...]
PLAIN_NAMES: Final = ("F64", "F32", "F16", "BF16")
"""safetensors' names of the dtypes of numbers that are stored as they are."""


@dataclass(frozen=True)
class Wanted:
    """What a tensor of the checkpoint must be."""

    shape: Shape
    dtypes: tuple[str, ...] = PLAIN_NAMES
    """Those that can be read, by safetensors' names."""
