"""Launches the verification. Allocates nothing and waits for nothing, so it may be captured into a CUDA graph.

`dependent` launches with programmatic dependent launch (compute capability 9.0 and above). It is always safe.
"""

from __future__ import annotations

import triton
from torch import Tensor

from kernels.verify import kernel

_NO_LIMIT = 2**62


def accept(
    target_DW: Tensor,
    draft_DX: Tensor,
    accepted_D: Tensor,
    vocab: int | None,
    fault_1: Tensor | None,
    faults_1: Tensor | None = None,
    *,
    dependent: bool = False,
) -> None:
    """See `kernels.verify.accept_drafts`."""
    rows, width = target_DW.shape
    if not rows:
        return
    lanes = triton.next_power_of_2(width)
    block = 128 // min(lanes, 128)
    if faults_1 is not None:  # one program, which knows all faults
        block = max(block, triton.next_power_of_2(rows))
    kernel.accept[(triton.cdiv(rows, block),)](
        target_DW,
        draft_DX if width > 1 else target_DW,
        accepted_D,
        accepted_D if fault_1 is None else fault_1,
        accepted_D if faults_1 is None else faults_1,
        rows,
        target_DW.stride(0),
        draft_DX.stride(0),
        _NO_LIMIT if vocab is None else vocab,
        DRAFTS=width - 1,
        LANES=lanes,
        ROWS=block,
        CHECKED=vocab is not None and fault_1 is not None,
        TOLD=faults_1 is not None,
        DEPENDENT=dependent,
        num_warps=min(max(block * lanes // 256, 4), 16),
        **({"launch_pdl": True} if dependent else {}),
    )
