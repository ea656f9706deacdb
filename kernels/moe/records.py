"""What the experts' kernels of scaled weights take together, as one parameter: how the weights lie in memory, and what
a program works on at a time."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from kernels.matrix import GROUP, BlockScaled, Matrix


class Stored(NamedTuple):
    """How the matrices of a product are stored; of their scales, where they have some, which ones share one."""

    format: str = "plain"
    """"plain", "fp8" or "int4"."""
    rows: int = 1
    """Output features that share a scale."""
    features: int = 1
    """Input features that share a scale."""
    scale_rows: int = 1
    """Rows of scales of an expert."""
    scales: int = 1
    """Scales of a row."""


PLAIN: Final = Stored()


class Tile(NamedTuple):
    """What a program of the tiles of scaled weights works on at a time, and how."""

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
    """Of products, as `tl.dot` names it. It matters in fp32 alone."""


def stored(matrix: Matrix) -> Stored:
    """How the experts' matrices [X, N, K] are stored."""
    if isinstance(matrix, Tensor):
        return PLAIN
    sizes = matrix.scales.shape[1:]
    if isinstance(matrix, BlockScaled):
        return Stored("fp8", matrix.rows, matrix.features, *sizes)
    return Stored("int4", 1, GROUP, *sizes)


def memory(matrix: Matrix) -> tuple[Tensor, Tensor | None]:
    """The memory of the experts' matrices as kernels take it, and that of their scales: FP8 as bytes."""
    if isinstance(matrix, Tensor):
        return matrix, None
    return matrix.data.view(torch.uint8), matrix.scales
