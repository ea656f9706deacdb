"""Launches the quantization of activations. Allocates nothing and waits for nothing, so it may be captured into a CUDA
graph.

`dependent` launches with programmatic dependent launch (compute capability 9.0 and above). It is always safe.
"""

from __future__ import annotations

from typing import Final

import triton
from torch import Tensor

from kernels.quantize import kernel
from kernels.quantize.reference import GROUP, LEAST_SCALE, MOST

GROUPS: Final = 8
"""Groups of a program."""
WARPS: Final = 2
"""So a thread has two pieces of 16 bytes on their way."""


def quantize(x: Tensor, out_TK: Tensor, scale_TG: Tensor, *, gated: bool = False, dependent: bool = False) -> None:
    """See `kernels.quantize.quantize`; `gated`: see `silu_mul_quantize` there."""
    tokens, features = out_TK.shape
    if not tokens:
        return
    groups = min(triton.next_power_of_2(triton.cdiv(features, GROUP)), GROUPS)
    kernel.quantize[(tokens, triton.cdiv(features, groups * GROUP))](
        x,
        out_TK,
        scale_TG,
        scale_TG.stride(0),
        scale_TG.stride(1),
        X_STRIDE=x.stride(0),
        FEATURES=features,
        GATED=gated,
        GROUP=GROUP,
        GROUPS=groups,
        MOST=MOST,
        LEAST_SCALE=LEAST_SCALE,
        DEPENDENT=dependent,
        num_warps=WARPS,
        **({"launch_pdl": True} if dependent else {}),
    )
