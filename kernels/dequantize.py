"""Matrices that are stored in fewer bits, as plain numbers: for products that read nothing else.

Shape legend: N output features, K input features.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import triton
import triton.language as tl
from torch import Tensor

from kernels.matrix import GROUP, BlockScaled, GroupScaled, MicroScaled, MicroScaled4, Scaled

_ROWS, _FEATURES = 16, 64
"""Rows and features of a program's tile: those of the smallest block."""
_GROUPS: Final = 128
"""Groups of neighbouring numbers that a program takes where a matrix is read group by group."""


def dequantize(matrix: Scaled, out_NK: Tensor) -> None:
    """out = the numbers that the matrix stands for, computed in fp32 and rounded once to the dtype of `out_NK`.

    `out_NK` is contiguous and shares no memory with the matrix. ValueError for several experts' matrices.
    """
    if len(matrix.shape) != 2 or matrix.shape != tuple(out_NK.shape) or not out_NK.is_contiguous():
        raise ValueError(f"a matrix {matrix.shape} does not go into {tuple(out_NK.shape)}")
    if out_NK.is_cuda:
        launch_dequantize(matrix, out_NK)
    else:
        out_NK.copy_(matrix.float())


def launch_dequantize(matrix: Scaled, out_NK: Tensor) -> None:
    """`dequantize` as a Triton kernel, always by a plain launch: the product behind it may be launched dependently and
    read the numbers through L1. TypeError for a matrix of a class that is not in `LAUNCHES`."""
    if type(matrix) not in LAUNCHES:
        raise TypeError(f"no kernel dequantizes {type(matrix).__name__}")
    LAUNCHES[type(matrix)](matrix, out_NK)


def _grid(rows: int, features: int) -> tuple[int, int]:
    return triton.cdiv(features, 4 * _FEATURES), triton.cdiv(rows, _ROWS)


def _blocks(matrix: BlockScaled, out_NK: Tensor) -> None:
    rows, features = matrix.shape
    dequantize_blocks_kernel[_grid(rows, features)](
        matrix.data,
        matrix.scales,
        out_NK,
        rows,
        FEATURES=features,
        SCALES=matrix.scales.shape[1],
        BLOCK_ROWS=matrix.rows,
        BLOCK_FEATURES=matrix.features,
        TILE_ROWS=_ROWS,
        TILE_PIECES=4,
        PIECE=_FEATURES,
    )


def _groups(matrix: GroupScaled, out_NK: Tensor) -> None:
    rows, features = matrix.shape
    dequantize_groups_kernel[_grid(rows, features)](
        matrix.data,
        matrix.scales,
        out_NK,
        rows,
        FEATURES=features,
        GROUP=GROUP,
        TILE_ROWS=_ROWS,
        TILE_FEATURES=4 * _FEATURES,
    )


def _exponents(matrix: MicroScaled | MicroScaled4, out_NK: Tensor) -> None:
    groups = matrix.scales.numel()
    dequantize_exponents_kernel[(triton.cdiv(groups, _GROUPS),)](
        matrix.data,
        matrix.scales,
        out_NK,
        groups,
        GROUP=GROUP,
        FOUR_BITS=isinstance(matrix, MicroScaled4),
        TILE=_GROUPS,
    )


LAUNCHES: Final[dict[type, Callable[[Any, Tensor], None]]] = {
    BlockScaled: _blocks,
    GroupScaled: _groups,
    MicroScaled: _exponents,
    MicroScaled4: _exponents,
}
"""Launchers by the class of the matrix."""


@triton.jit(do_not_specialize=["rows"])
def dequantize_blocks_kernel(
    data,
    scale,
    out,
    rows,
    FEATURES: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_PIECES: tl.constexpr,
    PIECE: tl.constexpr,
):
    """A tile of rows and features: e4m3 numbers, each times the scale of its block. A scale is read once for each row
    of the smallest block, not for each number."""
    n = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    p = tl.program_id(0) * TILE_PIECES + tl.arange(0, TILE_PIECES)[None, :]
    inside = (n < rows) & (p * PIECE < FEATURES)
    factor = tl.load(scale + n // BLOCK_ROWS * SCALES + p * PIECE // BLOCK_FEATURES, mask=inside, other=0.0)
    k = p[:, :, None] * PIECE + tl.arange(0, PIECE)[None, None, :]
    at = n[:, :, None].to(tl.int64) * FEATURES + k
    within = inside[:, :, None] & (k < FEATURES)
    number = tl.load(data + at, mask=within, other=0.0).to(tl.float32)
    tl.store(out + at, (number * factor[:, :, None]).to(out.dtype.element_ty), mask=within)


@triton.jit(do_not_specialize=["rows"])
def dequantize_groups_kernel(
    data,
    scale,
    out,
    rows,
    FEATURES: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_FEATURES: tl.constexpr,
):
    """A tile of rows and features: nibbles less 8, each times the scale of its row's group."""
    n = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    k = tl.program_id(0) * TILE_FEATURES + tl.arange(0, TILE_FEATURES)[None, :]
    inside = (n < rows) & (k < FEATURES)
    row = n.to(tl.int64)
    byte = tl.load(data + row * (FEATURES // 2) + k // 2, mask=inside, other=0).to(tl.int32)
    number = ((byte >> (k % 2 * 4)) & 15) - 8
    factor = tl.load(scale + row * (FEATURES // GROUP) + k // GROUP, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * FEATURES + k, (number.to(tl.float32) * factor).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["groups"])
def dequantize_exponents_kernel(
    data,
    scale,
    out,
    groups,
    GROUP: tl.constexpr,
    FOUR_BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Groups of neighbouring numbers, in e4m3, or two in E2M1 per byte, each times 2 to the power of its group's byte
    less 127. Rows have whole groups, so a matrix is its groups one behind the other."""
    g = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside, wide = g < groups, (g < groups)[:, None]
    byte = tl.load(scale + g, mask=inside, other=0)
    factor = (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    if FOUR_BITS:
        at = g[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
        pair = tl.load(data + at, mask=wide, other=0).to(tl.int32)
        code = tl.interleave(pair & 15, pair >> 4)
        exponent = (code >> 1) & 3
        halves = tl.where(exponent > 0, (2 + (code & 1)) << (tl.maximum(exponent, 1) - 1), code & 1)
        number = tl.where(code > 7, -halves, halves).to(tl.float32) * 0.5
    else:
        number = tl.load(data + g[:, None] * GROUP + tl.arange(0, GROUP)[None, :], mask=wide, other=0.0).to(tl.float32)
    at = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(out + at, (number * factor[:, None]).to(out.dtype.element_ty), mask=wide)
