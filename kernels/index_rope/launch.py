"""Launches the Triton kernel. Allocates nothing and waits for nothing, so it may be captured into a CUDA graph.

`dependent` launches with programmatic dependent launch (compute capability 9.0 and above). It is safe when the rotation
was not written by the kernel launched just before; it is read ahead of the wait for it.
"""

from __future__ import annotations

import triton
from torch import Tensor

from kernels.index_rope import kernel
from kernels.index_rope.hadamard import stages_of

_GROUP = 16
"""Heads a program rotates."""


def index_rope(
    q_TJI: Tensor,
    both_TX: Tensor,
    norm_I: Tensor,
    bias_I: Tensor,
    rotation_TO: Tensor,
    key_TI: Tensor,
    weight_TJ: Tensor,
    code_TJI: Tensor | None,
    eps: float,
    factor: float,
    *,
    dependent: bool = False,
) -> None:
    """See `kernels.index_rope.index_rope`."""
    tokens, heads, features = q_TJI.shape
    if not tokens:
        return
    block, rope = triton.next_power_of_2(features), rotation_TO.shape[1]
    group = min(_GROUP, triton.next_power_of_2(heads or _GROUP))
    # Features that are not roped are read where all are rounded alone.
    width = rope if code_TJI is None else features
    kernel.index_rope[(tokens, 1 + triton.cdiv(heads, group))](
        q_TJI,
        both_TX,
        norm_I,
        bias_I,
        rotation_TO,
        key_TI,
        weight_TJ,
        q_TJI if code_TJI is None else code_TJI,
        eps,
        factor,
        Q_TOKEN=q_TJI.stride(0),
        BOTH_STRIDE=both_TX.stride(0),
        KEY_STRIDE=key_TI.stride(0),
        ROTATION_STRIDE=rotation_TO.stride(0),
        HEADS=heads,
        GROUP=group,
        FEATURES=features,
        BLOCK=block,
        ROPE=rope,
        WIDTH=width,
        WIDTH_BLOCK=triton.next_power_of_2(width),
        INT8=code_TJI is not None,
        STAGES=stages_of(features),
        DEPENDENT=dependent,
        num_warps=2,
        **({"launch_pdl": True} if dependent else {}),
    )
