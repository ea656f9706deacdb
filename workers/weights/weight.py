"""A matrix of weights, in whatever format it is stored.

Models name tensors and never ask for a format: they say which tensors a matrix is made of (`WeightSource.matrix`), and
hand it to whoever multiplies (see `workers.models.token_wise`). That one asks the weight, and chooses a kernel that
reads its format.

Shape legend: X experts, N output features, K input features, B blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from kernels.matrix import GROUP, BlockScaled, GroupScaled, Matrix
from workers.weights.dequantize import fp8_blocks, int4_groups


class Format(Enum):
    """How the numbers of a matrix are stored."""

    PLAIN = "plain"
    """As they are, in the dtype of the activations or, where nothing may be rounded, in fp32."""
    FP8_BLOCKS = "FP8 in blocks"
    """e4m3 numbers [.., N, K]; a block of rows and columns shares an fp32 scale. Blocks at the end may be cut."""
    INT4_GROUPS = "INT4 in groups"
    """Two numbers per byte, [.., N, K / 2], the low half the even input feature, stored with 8 added; 32 neighbouring
    input features of a row share a bf16 scale, [.., N, K / 32]."""


@dataclass(frozen=True)
class Formats:
    """In which a model's matrices are stored. They become more until it is built."""

    experts: set[Format] = field(default_factory=set)
    others: set[Format] = field(default_factory=set)
    """Of matrices outside of mixtures of experts."""

    def __contains__(self, format: Format) -> bool:
        return format in self.experts or format in self.others


@dataclass(frozen=True)
class Weight:
    """The matrix [N, K] of a product x · weight^T, or [X, N, K], one per expert."""

    data: Tensor
    format: Format = Format.PLAIN
    scales: Tensor | None = None
    """What the numbers in `data` are multiplied by; None where the format has none."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale, powers of two; of FP8 alone."""

    def __post_init__(self) -> None:
        rows, columns = self.shape[-2:] if self.data.dim() > 1 else (0, 0)
        match self.format:
            case Format.PLAIN:
                if self.scales is not None or self.block is not None:
                    raise ValueError("plain weights have no scales")
                return
            case Format.FP8_BLOCKS:
                if self.block is None or any(size & (size - 1) or size < 1 for size in self.block):
                    raise ValueError(f"FP8 weights have blocks whose sides are powers of two, not {self.block}")
                dtypes, sides = (torch.float8_e4m3fn, torch.float32), self.block
            case Format.INT4_GROUPS:
                if self.block is not None:
                    raise ValueError("INT4 weights have groups of input features, no blocks")
                dtypes, sides = (torch.uint8, torch.bfloat16), (1, GROUP)
        wanted = (*self.data.shape[:-2], -(-rows // sides[0]), -(-columns // sides[1]))
        if self.scales is None or self.scales.shape != wanted or columns % (GROUP if self.block is None else 1):
            raise ValueError(f"{self.format.value}, of shape {list(self.shape)}: scales must be {list(wanted)}")
        if (self.data.dtype, self.scales.dtype) != dtypes:
            raise ValueError(f"{self.format.value}: numbers and scales are {dtypes[0]} and {dtypes[1]}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix as it is multiplied, however it is stored: (N, K) or (X, N, K)."""
        *outer, last = self.data.shape
        return (*outer, 2 * last if self.format is Format.INT4_GROUPS else last)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory, scales included: what a product reads."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def __getitem__(self, part: int | slice) -> Weight:
        """An expert, some experts, or some output features of a matrix, in the same memory. Output features in FP8
        begin at the beginning of a block, and end at the end of one or of the matrix; else ValueError."""
        if self.scales is None:
            return Weight(self.data[part])
        if self.data.dim() == 3:
            return Weight(self.data[part], self.format, self.scales[part], self.block)
        if isinstance(part, int):
            raise ValueError("a single row of quantized weights is no matrix")
        rows, height = self.shape[0], 1 if self.block is None else self.block[0]
        begin, end, step = part.indices(rows)
        if step != 1 or begin % height or (end % height and end != rows):
            raise ValueError(f"rows {begin} to {end} do not begin and end with blocks of {height} rows")
        return Weight(self.data[part], self.format, self.scales[begin // height : -(-end // height)], self.block)

    @property
    def plain(self) -> Tensor:
        """The matrix itself, for kernels that read no other format; TypeError if it is stored in another one."""
        if self.format is not Format.PLAIN:
            raise TypeError(f"weights of format {self.format.value!r} come to a product that reads plain ones alone")
        return self.data

    @property
    def matrix(self) -> Matrix:
        """As kernels take it that read every format."""
        match self.format:
            case Format.PLAIN:
                return self.data
            case Format.FP8_BLOCKS:
                assert self.scales is not None
                assert self.block is not None
                return BlockScaled(self.data, self.scales, *self.block)
            case Format.INT4_GROUPS:
                assert self.scales is not None
                return GroupScaled(self.data, self.scales)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The numbers that the matrix stands for, computed in fp32 and rounded once to `dtype`, in memory of their own
        unless they are stored so. For CPUs and tests: products on GPUs read the weights as they are stored."""
        if self.scales is None:
            return self.data.to(dtype)
        if self.block is None:
            return int4_groups(self.data, self.scales).to(dtype)
        row_N, column_K = (
            torch.arange(size, device=self.data.device) // side
            for size, side in zip(self.shape[-2:], self.block, strict=True)
        )
        return fp8_blocks(self.data, self.scales, row_N, column_K).to(dtype)
