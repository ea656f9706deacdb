"""Random quantized matrices, and what they stand for in double precision, for any device."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dequantize import launch_dequantize
from kernels.matrix import GROUP, BlockScaled, GroupScaled, MicroScaled, MicroScaled4, Scaled

SHAPES = [(16, 64), (53, 96), (130, 1536), (7, 2080)]
"""Rows and features, most of which end in the middle of tiles and blocks."""
BLOCKS = [(128, 128), (16, 64), (64, 128)]


def fp8(rows: int, features: int, block: tuple[int, int], device: torch.device) -> tuple[BlockScaled, Tensor]:
    """Numbers of all sizes, zero and subnormal ones included."""
    torch.manual_seed(rows)
    numbers = torch.randn(rows, features) * 64 * 2.0 ** torch.randint(-14, 2, (rows, features))
    data = numbers.clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // block[0]), -(-features // block[1])) + 0.5
    wide = scales.double().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :features]
    return BlockScaled(data.to(device), scales.to(device), *block), data.double() * wide


def int4(rows: int, features: int, device: torch.device) -> tuple[GroupScaled, Tensor]:
    """Every nibble."""
    torch.manual_seed(rows)
    nibble = torch.randint(0, 16, (rows, features))
    scales = (torch.rand(rows, features // GROUP) + 0.5).bfloat16()
    data = (nibble[:, 0::2] | nibble[:, 1::2] << 4).to(torch.uint8)
    wide = scales.double().repeat_interleave(GROUP, 1)
    return GroupScaled(data.to(device), scales.to(device)), (nibble.double() - 8) * wide


def mxfp8(rows: int, features: int, device: torch.device) -> tuple[MicroScaled, Tensor]:
    """Numbers of all sizes, times exponents up to large ones, and the least, which counts as 0."""
    torch.manual_seed(rows)
    numbers = torch.randn(rows, features) * 64 * 2.0 ** torch.randint(-14, 2, (rows, features))
    data = numbers.clamp(-448, 448).to(torch.float8_e4m3fn)
    exponent = torch.randint(30, 220, (rows, features // GROUP))
    exponent[0, 0] = 0
    factor = torch.where(exponent == 0, 0.0, 2.0 ** (exponent.double() - 127))
    wide = data.double() * factor.repeat_interleave(GROUP, 1)
    return MicroScaled(data.to(device), exponent.to(torch.uint8).to(device)), wide


def mxfp4(rows: int, features: int, device: torch.device) -> tuple[MicroScaled4, Tensor]:
    """Every number, times exponents up to large ones, and the least, which counts as 0."""
    torch.manual_seed(rows)
    nibble = torch.randint(0, 16, (rows, features))
    number = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)[nibble & 7]
    exponent = torch.randint(30, 220, (rows, features // GROUP))
    exponent[0, 0] = 0
    factor = torch.where(exponent == 0, 0.0, 2.0 ** (exponent.double() - 127))
    wide = torch.where(nibble > 7, -number, number) * factor.repeat_interleave(GROUP, 1)
    data = (nibble[:, 0::2] | nibble[:, 1::2] << 4).to(torch.uint8)
    return MicroScaled4(data.to(device), exponent.to(torch.uint8).to(device)), wide


def check(matrix: Scaled, want: Tensor) -> None:
    """Check the kernel in both dtypes: one rounding of a product in fp32, then one to the dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.full(matrix.shape, torch.nan, dtype=dtype, device=matrix.device)
        launch_dequantize(matrix, out)
        assert torch.equal(out.cpu(), want.float().to(dtype))
