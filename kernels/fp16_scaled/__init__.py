"""Rows in fp16, each with a power of two: the form in which FP8 weights are multiplied by few tokens.

The tensor cores of Hopper multiply FP8 by FP8 alone, but one instruction makes fp16 of two FP8 numbers. fp16 has fewer
exponents than bf16. So each row is multiplied by a power of two that brings its largest number to between 2^14 and
2^15. Numbers above 2^-31 of the largest are then exact; those below are off by at most 2^-39 of it, less than what sums
in fp32 lose.

Shape legend: T rows, F features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.fp16_scaled import launch, reference

__all__ = ["Fp16Scaled", "to_fp16_scaled"]


@dataclass(frozen=True)
class Fp16Scaled:
    """Rows x = half * unit."""

    fp16_TF: Tensor
    """fp16, contiguous."""
    unit_T: Tensor
    """fp32 powers of two, contiguous."""

    @staticmethod
    def empty(x_TF: Tensor, empty: Callable[..., Tensor]) -> Fp16Scaled:
        """Memory for these rows, from `empty(*shape, dtype=...)`."""
        return Fp16Scaled(empty(*x_TF.shape, dtype=torch.float16), empty(x_TF.shape[0], dtype=torch.float32))

    def float(self) -> Tensor:
        """The rows in fp32."""
        return self.fp16_TF.float() * self.unit_T[:, None]


def to_fp16_scaled(x_TF: Tensor, out: Fp16Scaled, *, dependent: bool = False) -> None:
    """out = x. `x_TF`: bf16, rows of contiguous features. A row with an infinity or NaN keeps it.

    ValueError where the shapes differ. `dependent`: programmatic dependent launch; always safe.
    """
    if out.fp16_TF.shape != x_TF.shape or out.unit_T.shape != x_TF.shape[:1]:
        raise ValueError(f"{tuple(x_TF.shape)} rows do not fit memory for {tuple(out.fp16_TF.shape)}")
    if x_TF.is_cuda:
        launch.to_fp16_scaled(x_TF, out.fp16_TF, out.unit_T, dependent=dependent)
    else:
        reference.to_fp16_scaled(x_TF, out.fp16_TF, out.unit_T)
