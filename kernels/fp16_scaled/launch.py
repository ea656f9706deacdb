"""Launches the conversion of rows to scaled fp16. Allocates nothing and waits for nothing, so it may be captured into a
CUDA graph.

`dependent` launches with programmatic dependent launch (compute capability 9.0 and above). It is always safe.
"""

from __future__ import annotations

import triton
from torch import Tensor

from kernels.fp16_scaled import kernel


def to_fp16_scaled(x_TF: Tensor, fp16_TF: Tensor, unit_T: Tensor, *, dependent: bool = False) -> None:
    """See `kernels.fp16_scaled.to_fp16_scaled`."""
    rows, features = x_TF.shape
    if not rows:
        return
    if x_TF.stride(1) != 1 or not fp16_TF.is_contiguous() or not unit_T.is_contiguous():
        raise ValueError("rows are of contiguous features, and the results contiguous")
    block = triton.next_power_of_2(features)
    kernel.to_fp16_scaled[(rows,)](
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
