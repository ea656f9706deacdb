"""Matrices in FP8 (e4m3) with a scale for every block, as DeepSeek-V3 publishes them (arXiv:2412.19437, section 3.3).

Shape legend: X experts (or none), N output features, K input features, B rows of blocks, C columns of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockScaled:
    """w[n, k] = data[n, k] * scales[n // rows, k // features]."""

    data: Tensor
    """float8_e4m3fn [N, K] or [X, N, K], contiguous."""
    scales: Tensor
    """fp32 [B, C] or [X, B, C], contiguous; the last block of either direction may end beyond the matrix."""
    rows: int = 128
    """Output features of a block; a power of two from 16 to 128."""
    features: int = 128
    """Input features of a block: 64 or 128."""

    def __post_init__(self) -> None:
        *experts, rows, features = self.data.shape
        blocks = (*experts, -(-rows // self.rows), -(-features // self.features))
        if self.data.dtype != torch.float8_e4m3fn or self.scales.dtype != torch.float32:
            raise ValueError(f"data is float8_e4m3fn and scales fp32, not {self.data.dtype} and {self.scales.dtype}")
        if self.rows not in (16, 32, 64, 128) or self.features not in (64, 128):
            raise ValueError(f"blocks of {self.rows} x {self.features} are not supported")
        if tuple(self.scales.shape) != blocks:
            raise ValueError(
                f"a matrix {tuple(self.data.shape)} in blocks of {self.rows} x {self.features} has scales {blocks}, "
                f"not {tuple(self.scales.shape)}"
            )
        if not self.data.is_contiguous() or not self.scales.is_contiguous():
            raise ValueError("data and scales are contiguous")

    @property
    def shape(self) -> torch.Size:
        """Of the matrix."""
        return self.data.shape

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.data.device

    def __getitem__(self, expert: int) -> BlockScaled:
        """The matrix of an expert."""
        return BlockScaled(self.data[expert], self.scales[expert], self.rows, self.features)

    def float(self) -> Tensor:
        """The matrix in fp32, every product rounded once."""
        *_, rows, features = self.data.shape
        scales = self.scales.repeat_interleave(self.rows, -2)[..., :rows, :]
        return self.data.float() * scales.repeat_interleave(self.features, -1)[..., :features]


Matrix = Tensor | BlockScaled
"""What kernels multiply with."""
