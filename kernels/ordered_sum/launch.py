"""Launches the Triton sum. Allocates nothing and waits for nothing, so it may be captured into a CUDA graph."""

from __future__ import annotations

import triton
from torch import Tensor

from kernels.ordered_sum import kernel


def ordered_sum(part_GTE: Tensor, out_TE: Tensor) -> None:
    """See `kernels.ordered_sum.ordered_sum`."""
    parts, tokens, features = part_GTE.shape
    if not tokens:
        return
    block = max(16, min(triton.next_power_of_2(features), 2048 // parts))
    kernel.ordered_sum[(tokens, triton.cdiv(features, block))](
        part_GTE,
        out_TE,
        part_GTE.stride(0),
        TOKEN_STRIDE=part_GTE.stride(1),
        OUT_STRIDE=out_TE.stride(0),
        FEATURES=features,
        PARTS=parts,
        LEVELS=parts.bit_length() - 1,
        BLOCK=block,
        num_warps=4,
    )
