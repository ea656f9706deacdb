"""Dtypes of numbers that a checkpoint stores as they are."""

from __future__ import annotations

from typing import Final

import torch

PLAIN_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Dtypes of plain numbers by safetensors' names, which are `wanted.PLAIN_NAMES`."""
