"""How a checkpoint stores a matrix, and in which tensors: nobody says it but the tensors that are there.

A matrix `X.weight` is stored as it is, or
- in FP8, as DeepSeek publishes it: `X.weight` in e4m3, and a scale for each block of 128 x 128, `X.weight_scale_inv`;
- in INT4, as compressed-tensors packs it: `X.weight_packed`, eight numbers in an int32, the first one lowest, a scale
  for 32 input features, `X.weight_scale`, and the shape of the matrix, `X.weight_shape`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from kernels.matrix import GROUP
from workers.weights.weight import Format

Shape = tuple[int, ...]

PLAIN_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Of numbers that are stored as they are, by safetensors' names."""
FP8_DTYPE: Final = "F8_E4M3"
BLOCK: Final = 128
"""Rows, and columns, that share a scale in published FP8."""
WORD: Final = 8
"""Numbers of INT4 in an int32."""
FP8_SCALES: Final = "_scale_inv"
INT4_PACKED: Final = "_packed"
INT4_SCALES: Final = "_scale"
INT4_SHAPE: Final = "_shape"
"""What is added to a matrix's name."""


@dataclass(frozen=True)
class Wanted:
    """What a tensor of the checkpoint must be."""

    shape: Shape
    dtypes: tuple[str, ...] = tuple(PLAIN_DTYPES)
    """Those that can be read, by safetensors' names."""


def stored_format(name: str, dtype_of: Callable[[str], str | None]) -> Format:
    """How matrix `name` is stored in files whose tensors have these dtypes; None: there is no such tensor."""
    if dtype_of(name) is None and dtype_of(name + INT4_PACKED) is not None:
        return Format.INT4_GROUPS
    return Format.FP8_BLOCKS if dtype_of(name) == FP8_DTYPE else Format.PLAIN


def tensors_of(name: str, format: Format, rows: int, columns: int) -> dict[str, Wanted]:
    """The tensors that a matrix stored so consists of."""
    match format:
        case Format.PLAIN:
            return {name: Wanted((rows, columns))}
        case Format.FP8_BLOCKS:
            blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
            return {
                name: Wanted((rows, columns), (FP8_DTYPE,)),
                name + FP8_SCALES: Wanted(blocks, ("F32", "BF16", "F16")),
            }
        case Format.INT4_GROUPS:
            return {
                name + INT4_PACKED: Wanted((rows, -(-columns // WORD)), ("I32",)),
                name + INT4_SCALES: Wanted((rows, -(-columns // GROUP)), ("BF16",)),
                name + INT4_SHAPE: Wanted((2,), ("I32", "I64")),
            }
