"""Launches the Triton norm. Allocates nothing and waits for nothing, so it may be captured into a CUDA graph.

`dependent` launches with programmatic dependent launch (compute capability 9.0 and above). It is always safe.
"""

from __future__ import annotations

import triton
from torch import Tensor

from kernels.rms_norm import kernel


def rms_norm(x_TE: Tensor, weight_E: Tensor, out_TE: Tensor, eps: float, *, dependent: bool = False) -> None:
    """See `kernels.rms_norm.rms_norm`."""
    _norm(x_TE, None, weight_E, out_TE, eps, dependent)


def add_rms_norm(
    x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, out_TE: Tensor, eps: float, *, dependent: bool = False
) -> None:
    """See `kernels.rms_norm.add_rms_norm`."""
    _norm(x_TE, residual_TE, weight_E, out_TE, eps, dependent)


def _norm(
    x_TE: Tensor, residual_TE: Tensor | None, weight_E: Tensor, out_TE: Tensor, eps: float, dependent: bool
) -> None:
    tokens, *parts, features = x_TE.shape
    if not tokens:
        return
    block = triton.next_power_of_2(features)
    warps = min(max(block // 512, 1), 8)
    if parts:  # a thread holds all parts of its features at once, 32 values or little more
        warps = min(max(parts[0] * block // 1024, warps), 16)
    kernel.norm[(tokens,)](
        x_TE,
        x_TE if residual_TE is None else residual_TE,
        weight_E,
        out_TE,
        eps,
        X_STRIDE=x_TE.stride(0),
        X_PART=x_TE.stride(1) if parts else 0,
        PARTS=parts[0] if parts else 0,
        RESIDUAL_STRIDE=0 if residual_TE is None else residual_TE.stride(0),
        OUT_STRIDE=out_TE.stride(0),
        FEATURES=features,
        BLOCK=block,
        ADD=residual_TE is not None,
        DEPENDENT=dependent,
        num_warps=warps,
        **({"launch_pdl": True} if dependent else {}),
    )
