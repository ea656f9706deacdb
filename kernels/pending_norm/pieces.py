"""A norm on its way: what the kernels of few tokens hand one another instead of normed activations.

The sum of squares of a row is complete only when every program that wrote a piece of the row is done, so the division
by the root mean square is left to whoever multiplies the row by a matrix: it commutes with the product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

PIECE = 16
"""Features of one sum of squares: the columns of one program."""


@dataclass(frozen=True)
class PendingNorm:
    """Rows that are normed but for the division by their root mean square. Shape legend: T tokens, E features,
    P = E / 16 pieces."""

    x_TE: Tensor
    """The rows times the norm's weight, in the dtype of the products."""
    square_TP: Tensor
    """fp32: sums of squares of 16 features each, of the rows without the weight. Who divides needs their sum alone, so
    a program that ends within 16 features may leave the squares of its part in a piece beside."""
    eps: float

    def __post_init__(self) -> None:
        tokens, features = self.x_TE.shape
        if features % PIECE or self.square_TP.shape != (tokens, features // PIECE):
            raise ValueError(f"{features} features of {tokens} tokens have no sums {tuple(self.square_TP.shape)}")
        if self.square_TP.dtype != torch.float32 or not self.square_TP.is_contiguous():
            raise ValueError("sums of squares are contiguous fp32")

    @staticmethod
    def empty(tokens: int, features: int, eps: float, dtype: torch.dtype, empty: Callable[..., Tensor]) -> PendingNorm:
        """Memory for one, from `empty(*shape, dtype=...)`."""
        square_TP = empty(tokens, features // PIECE, dtype=torch.float32)
        return PendingNorm(empty(tokens, features, dtype=dtype), square_TP, eps)
