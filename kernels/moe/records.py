"""Records that the experts' kernels of scaled weights take as one parameter each: the storage of the weights, and the
tile that a program works on at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from kernels.matrix import GROUP, BlockScaled, GroupScaled, Matrix, MicroScaled, MicroScaled4


class Stored(NamedTuple):
    """Storage of the matrices of a product, with the numbers of features that share a scale, where they have scales."""

    format: str = "plain"
    """"plain", "fp8", "mxfp8", "int4" or "mxfp4"."""
    rows: int = 1
    """Output features that share a scale."""
    features: int = 1
    """Input features that share a scale."""
    scale_rows: int = 1
    """Rows of scales of an expert."""
    scales: int = 1
    """Scales of a row."""
    in_fp8: bool = False
    """Whether rows in MXFP4 are known to be FP8 times a power of two (`MicroScaled4.least`)."""


PLAIN: Final = Stored()
FOUR_BITS: Final = ("int4", "mxfp4")
"""Formats with two numbers in a byte, and scales of a row's groups."""
EIGHT_BITS: Final = ("fp8", "mxfp8")
"""Formats with a number in a byte: with a scale of a block, whose sums are multiplied by it, and with scales of a row's
groups, which its numbers are multiplied by."""


class Tile(NamedTuple):
    """Tile that a program with scaled weights works on at a time, and how it does."""

    rows: int
    """Pairs."""
    block: int
    """Output features (`gate_up`: of gate, and as many of up)."""
    block_k: int
    """Input features of a step."""
    stages: int
    group: int
    """Tiles that go through the output features together."""
    tma: bool
    """Whether weights come through the copy engine."""
    precision: str
    """Precision of products, as `tl.dot` names it. It matters in fp32 alone."""


STORED: Final[dict[type, Callable[[Any], tuple[str, int, int]]]] = {
    BlockScaled: lambda matrix: ("fp8", matrix.rows, matrix.features),
    GroupScaled: lambda matrix: ("int4", 1, GROUP),
    MicroScaled: lambda matrix: ("mxfp8", 1, GROUP),
    MicroScaled4: lambda matrix: ("mxfp4", 1, GROUP),
}
"""Storage by the class of a matrix: its format, and the output and input features that share a scale."""


def stored(matrix: Matrix) -> Stored:
    """Return the storage of the experts' matrices [X, N, K]."""
    if isinstance(matrix, Tensor):
        return PLAIN
    if type(matrix) not in STORED:
        raise TypeError(f"no kernel multiplies experts in {type(matrix).__name__}")
    _, scale_rows, scales = matrix.scales.shape
    in_fp8 = isinstance(matrix, MicroScaled4) and matrix.least is not None
    return Stored(*STORED[type(matrix)](matrix), scale_rows, scales, in_fp8)


def memory(matrix: Matrix) -> tuple[Tensor, Tensor | None]:
    """The memory of the experts' matrices as kernels take it, and that of their scales: FP8 as bytes."""
    if isinstance(matrix, Tensor):
        return matrix, None
    return matrix.data.view(torch.uint8), matrix.scales
