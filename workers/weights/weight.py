"""A matrix of weights, in whatever format it is stored.

Models name tensors and never ask for a format: they make room for a matrix (`WeightSource.weight`), have it filled, and
hand it to whoever multiplies (see `workers.models.token_wise`). That one asks the weight, and chooses a kernel that
reads its format.

Shape legend: X experts, N output features, K input features.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import Tensor


class Format(Enum):
    """How the numbers of a matrix are stored."""

    PLAIN = "plain"
    """As they are, in the dtype of the activations or, where nothing may be rounded, in fp32."""


@dataclass(frozen=True)
class Weight:
    """The matrix [N, K] of a product x · weight^T, or [X, N, K], one per expert."""

    data: Tensor
    format: Format = Format.PLAIN
    scales: Tensor | None = None
    """What the numbers in `data` are multiplied by; None where the format has none."""

    def __post_init__(self) -> None:
        if self.format is Format.PLAIN and self.scales is not None:
            raise ValueError("plain weights have no scales")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix, however it is stored: (N, K) or (X, N, K)."""
        return tuple(self.data.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory, scales included: what a product reads."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def __getitem__(self, part: int | slice) -> Weight:
        """An expert, or some output features, in the same memory."""
        return Weight(self.data[part])

    @property
    def plain(self) -> Tensor:
        """The matrix itself, for kernels that read no other format; TypeError if it is stored in another one."""
        if self.format is not Format.PLAIN:
            raise TypeError(f"weights of format {self.format.value!r} come to a product that reads plain ones alone")
        return self.data
