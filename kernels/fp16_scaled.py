"""Rows in fp16, each with a power of two: the form in which FP8 weights are multiplied by few tokens.

The tensor cores of Hopper multiply FP8 by FP8 alone, but one instruction makes fp16 of two FP8 numbers. fp16 has fewer
exponents than bf16. So each row is multiplied by a power of two that brings its largest number to between 2^14 and
2^15. Numbers above 2^-31 of the largest are then exact; those below are off by at most 2^-39 of it, less than what sums
in fp32 lose.

Shape legend: T rows, F features.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


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
        launch_to_fp16_scaled(x_TF, out.fp16_TF, out.unit_T, dependent=dependent)
    else:
        to_fp16_scaled_reference(x_TF, out.fp16_TF, out.unit_T)


def to_fp16_scaled_reference(x_TF: Tensor, fp16_TF: Tensor, unit_T: Tensor) -> None:
    """`to_fp16_scaled` in plain torch."""
    peak_T = x_TF.float().abs().amax(1)
    exponent_T = (peak_T.view(torch.int32) >> 23).clamp_min(15)
    unit_T.copy_(((exponent_T - 14) << 23).view(torch.float32))
    inverse_T = ((268 - exponent_T) << 23).view(torch.float32)
    fp16_TF.copy_(x_TF.float() * inverse_T[:, None])


def launch_to_fp16_scaled(x_TF: Tensor, fp16_TF: Tensor, unit_T: Tensor, *, dependent: bool = False) -> None:
    """`to_fp16_scaled` as a Triton kernel."""
    rows, features = x_TF.shape
    if not rows:
        return
    if x_TF.stride(1) != 1 or not fp16_TF.is_contiguous() or not unit_T.is_contiguous():
        raise ValueError("rows are of contiguous features, and the results contiguous")
    block = triton.next_power_of_2(features)
    to_fp16_scaled_kernel[(rows,)](
        x_TF,
        fp16_TF,
        unit_T,
        X_STRIDE=x_TF.stride(0),
        FEATURES=features,
        BLOCK=block,
        DEPENDENT=dependent,
        num_warps=min(max(block // 512, 1), 16),
        **({"launch_pdl": True} if dependent else {}),
    )


@triton.jit
def unit_of(peak):
    """The power of two by which a row is divided whose largest magnitude is `peak` (fp32), and its inverse: the
    quotients are below 2^15. Of tiny rows and of rows with infinities it is a power of two as well."""
    exponent = tl.maximum(peak.to(tl.int32, bitcast=True) >> 23, 15)
    unit = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    inverse = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    return unit, inverse


@triton.jit
def to_fp16_scaled_kernel(
    x,
    half,
    unit,
    X_STRIDE: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A whole row."""
    row = tl.program_id(0).to(tl.int64)
    f = tl.arange(0, BLOCK)
    inside = f < FEATURES
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    # .cg: a dependent launch may find lines of an earlier kernel in L1.
    value = tl.load(x + row * X_STRIDE + f, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    row_unit, inverse = unit_of(tl.max(tl.abs(value), 0))
    tl.store(half + row * FEATURES + f, (value * inverse).to(tl.float16), mask=inside)
    tl.store(unit + row, row_unit)
