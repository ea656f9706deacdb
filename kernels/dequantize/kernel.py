"""Dequantization in Triton: a tile of rows and features per program."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def blocks(
    data,
    scale,
    out,
    rows,
    FEATURES: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_FEATURES: tl.constexpr,
):
    """e4m3 numbers, each times the scale of its block."""
    n = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    k = tl.program_id(0) * TILE_FEATURES + tl.arange(0, TILE_FEATURES)[None, :]
    inside = (n < rows) & (k < FEATURES)
    at = n.to(tl.int64) * FEATURES + k
    number = tl.load(data + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(scale + n // BLOCK_ROWS * SCALES + k // BLOCK_FEATURES, mask=inside, other=0.0)
    tl.store(out + at, (number * factor).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def groups(
    data,
    scale,
    out,
    rows,
    FEATURES: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_FEATURES: tl.constexpr,
):
    """Nibbles less 8, each times the scale of its row's group."""
    n = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    k = tl.program_id(0) * TILE_FEATURES + tl.arange(0, TILE_FEATURES)[None, :]
    inside = (n < rows) & (k < FEATURES)
    row = n.to(tl.int64)
    byte = tl.load(data + row * (FEATURES // 2) + k // 2, mask=inside, other=0).to(tl.int32)
    number = ((byte >> (k % 2 * 4)) & 15) - 8
    factor = tl.load(scale + row * (FEATURES // GROUP) + k // GROUP, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * FEATURES + k, (number.to(tl.float32) * factor).to(out.dtype.element_ty), mask=inside)
