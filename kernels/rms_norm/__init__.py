"""Root-mean-square layer normalisation, alone and with the residual addition before it.

Shape legend: T tokens, E features, P parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.rms_norm import launch, reference


@dataclass(frozen=True)
class AddNorm:
    """What becomes of a sum x: residual += x, in place and rounded to its dtype, then out = rms_norm(residual)."""

    residual_TE: Tensor
    weight_E: Tensor
    eps: float


def rms_norm(x_TE: Tensor, weight_E: Tensor, out_TE: Tensor, *, eps: float, dependent: bool = False) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight, computed in fp32 and rounded once (Zhang and Sennrich, 2019).

    Any floating dtype (on a GPU up to fp32); the last dimension of every tensor is contiguous, rows may be strided.
    `out_TE` may be `x_TE`. `dependent`: programmatic dependent launch, see `launch`.
    """
    if x_TE.is_cuda:
        launch.rms_norm(x_TE, weight_E, out_TE, eps, dependent=dependent)
    else:
        reference.rms_norm(x_TE, weight_E, out_TE, eps)


def add_rms_norm(
    x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, out_TE: Tensor, *, eps: float, dependent: bool = False
) -> None:
    """residual += x (in place, rounded to its dtype), then out = rms_norm(residual).

    `out_TE` may be `x_TE`, but not `residual_TE`. `x_TE` may be parts in fp32, [T, P, E], as `part_linear` leaves them:
    they are added in their order, and the sum is rounded to the residual's dtype. A dependent launch is safe then when
    the kernel before has not written the residual and lets its successor start after its own wait only.
    """
    if x_TE.is_cuda:
        launch.add_rms_norm(x_TE, residual_TE, weight_E, out_TE, eps, dependent=dependent)
    else:
        reference.add_rms_norm(x_TE, residual_TE, weight_E, out_TE, eps)
