"""A matrix of weights, in whatever format it is stored.

Models name tensors and never ask for a format: they say which tensors a matrix is made of (`WeightSource.matrix`), and
hand it to whoever multiplies (see `workers.models.layer_ops`). That one asks the weight, and chooses a kernel that
reads its format.

Shape legend: X experts, N output features, K input features, B blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from kernels.matrix import Matrix
from workers.weights.formats import PLAIN
from workers.weights.formats.format import Block, Format


@dataclass(frozen=True)
class Formats:
    """Formats in which a model's matrices are stored. They become more until it is built."""

    experts: set[Format] = field(default_factory=set)
    others: set[Format] = field(default_factory=set)
    """Formats of matrices outside of mixtures of experts."""

    def __contains__(self, format: Format) -> bool:
        return format in self.experts or format in self.others

    @property
    def all(self) -> set[Format]:
        """Formats of all matrices."""
        return self.experts | self.others


@dataclass(frozen=True)
class Weight:
    """The matrix [N, K] of a product x · weight^T, or [X, N, K], one per expert."""

    data: Tensor
    format: Format = PLAIN
    scales: Tensor | None = None
    """Scales of the numbers in `data`; None where the format has none."""
    block: Block = None
    """Rows and columns that share a scale, where the format has blocks of several sizes."""

    def __post_init__(self) -> None:
        self.format.check(self.data, self.scales, self.block)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix as it is multiplied, however it is stored: (N, K) or (X, N, K)."""
        return self.format.shape(self.data)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory, scales included: what a product reads."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @property
    def scaled_rows(self) -> int:
        """Neighbouring rows that share a scale."""
        return self.format.scaled_rows(self.block)

    def __getitem__(self, part: int | slice) -> Weight:
        """An expert, some experts, or some output features of a matrix, in the same memory. Output features in blocks
        begin at the beginning of a block, and end at the end of one or of the matrix; else ValueError."""
        if self.scales is None:
            return Weight(self.data[part], self.format)
        if self.data.dim() == 3:
            return Weight(self.data[part], self.format, self.scales[part], self.block)
        if isinstance(part, int):
            raise ValueError("a single row of quantized weights is no matrix")
        rows, height = self.shape[0], self.scaled_rows
        begin, end, step = part.indices(rows)
        if step != 1 or begin % height or (end % height and end != rows):
            raise ValueError(f"rows {begin} to {end} do not begin and end with blocks of {height} rows")
        return Weight(self.data[part], self.format, self.scales[begin // height : -(-end // height)], self.block)

    @property
    def plain(self) -> Tensor:
        """The matrix itself, for kernels that read no other format; TypeError if it is stored in another one."""
        if self.format is not PLAIN:
            raise TypeError(f"weights of format {self.format.name!r} come to a product that reads plain ones alone")
        return self.data

    @cached_property
    def matrix(self) -> Matrix:
        """The matrix in the form of kernels that read every format, made for the first product, not for each."""
        return self.format.matrix(self.data, self.scales, self.block)

    def multiply_as(self, matrix: Matrix) -> None:
        """Hand `matrix`, which means the same, to products from now on."""
        vars(self)["matrix"] = matrix

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The numbers that the matrix stands for, computed in fp32 and rounded once to `dtype`, in memory of their own
        unless they are stored so. For CPUs and tests: products on GPUs read the weights as they are stored."""
        return self.format.dequantized(self.data, self.scales, self.block).to(dtype)
