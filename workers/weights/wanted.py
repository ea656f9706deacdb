"""Requirements on the tensors of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

Shape = tuple[int, ...]
PLAIN_NAMES: Final = ("F64", "F32", "F16", "BF16")
"""safetensors' names of the dtypes of numbers that are stored as they are."""
INTEGER_NAMES: Final = ("I64", "I32")
"""Those of tables of ids."""
FP8_DTYPE: Final = "F8_E4M3"
FP8_SCALES: Final = "_scale_inv"
"""Suffix of the name of an FP8 matrix that gives the tensor with its scales."""
MX_SCALES: Final = "_scale"
"""Suffix of the name of an MXFP8 matrix that gives the tensor with its scales."""
MX_DTYPES: Final = ("U8", "F8_E8M0")
"""Dtypes of these, both of which are bytes."""
BLOCK: Final = 128
"""Rows, and columns, of such a matrix that share a scale in a checkpoint."""


@dataclass(frozen=True)
class Wanted:
    """Requirements on a tensor of the checkpoint."""

    shape: Shape
    dtypes: tuple[str, ...] = PLAIN_NAMES
    """Dtypes that can be read, by safetensors' names."""
