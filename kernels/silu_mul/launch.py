"""Launches the Triton gate. Allocates nothing and waits for nothing, so it may be captured into a CUDA graph.

`dependent` launches with programmatic dependent launch (compute capability 9.0 and above). It is always safe.
"""

from __future__ import annotations

import triton
from torch import Tensor

from kernels.silu_mul import kernel


def silu_mul(gate_up_TF: Tensor, out_TI: Tensor, *, dependent: bool = False) -> None:
    """See `kernels.silu_mul.silu_mul`."""
    tokens, features = out_TI.shape
    if not tokens:
        return
    if gate_up_TF.stride(1) != 1 or out_TI.stride(1) != 1 or gate_up_TF.shape != (tokens, 2 * features):
        raise ValueError(f"features lie side by side, twice {features} of {tokens} tokens, not {gate_up_TF.shape}")
    block = min(triton.next_power_of_2(features), 1024)
    kernel.silu_mul[(tokens, triton.cdiv(features, block))](
        gate_up_TF,
        out_TI,
        GATE_UP_STRIDE=gate_up_TF.stride(0),
        OUT_STRIDE=out_TI.stride(0),
        FEATURES=features,
        BLOCK=block,
        DEPENDENT=dependent,
        num_warps=max(block // 256, 1),
        **({"launch_pdl": True} if dependent else {}),
    )
