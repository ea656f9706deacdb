"""Matrices that are stored in fewer bits, as plain numbers: for products that read nothing else.

Shape legend: N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import triton
from torch import Tensor

from kernels.dequantize import kernel
from kernels.matrix import GROUP, BlockScaled, GroupScaled, Scaled

__all__ = ["dequantize"]

_ROWS, _FEATURES = 16, 64
"""Of a program's tile: those of the smallest block."""


def dequantize(matrix: Scaled, out_NK: Tensor) -> None:
    """out = the numbers that the matrix stands for, computed in fp32 and rounded once to the dtype of `out_NK`.

    `out_NK` is contiguous and shares no memory with the matrix. ValueError for several experts' matrices.
    """
    if len(matrix.shape) != 2 or matrix.shape != tuple(out_NK.shape) or not out_NK.is_contiguous():
        raise ValueError(f"a matrix {matrix.shape} does not go into {tuple(out_NK.shape)}")
    if out_NK.is_cuda:
        launch(matrix, out_NK)
    else:
        out_NK.copy_(matrix.float())


def launch(matrix: Scaled, out_NK: Tensor) -> None:
    """`dequantize` as a Triton kernel. TypeError for a matrix of a class that is not in `LAUNCHES`."""
    if type(matrix) not in LAUNCHES:
        raise TypeError(f"no kernel dequantizes {type(matrix).__name__}")
    LAUNCHES[type(matrix)](matrix, out_NK)


def _grid(rows: int, features: int) -> tuple[int, int]:
    return triton.cdiv(features, 4 * _FEATURES), triton.cdiv(rows, _ROWS)


def _blocks(matrix: BlockScaled, out_NK: Tensor) -> None:
    rows, features = matrix.shape
    kernel.blocks[_grid(rows, features)](
        matrix.data,
        matrix.scales,
        out_NK,
        rows,
        FEATURES=features,
        SCALES=matrix.scales.shape[1],
        BLOCK_ROWS=matrix.rows,
        BLOCK_FEATURES=matrix.features,
        TILE_ROWS=_ROWS,
        TILE_FEATURES=4 * _FEATURES,
    )


def _groups(matrix: GroupScaled, out_NK: Tensor) -> None:
    rows, features = matrix.shape
    kernel.groups[_grid(rows, features)](
        matrix.data,
        matrix.scales,
        out_NK,
        rows,
        FEATURES=features,
        GROUP=GROUP,
        TILE_ROWS=_ROWS,
        TILE_FEATURES=4 * _FEATURES,
    )


LAUNCHES: Final[dict[type, Callable[[Any, Tensor], None]]] = {BlockScaled: _blocks, GroupScaled: _groups}
"""By the class of the matrix."""
