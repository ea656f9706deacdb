"""Launches the Triton merge. Allocates nothing and waits for nothing."""

from __future__ import annotations

import triton
from torch import Tensor

from kernels.merge_attention import kernel

_ELEMENTS = 4096
"""Numbers of each part a program holds."""


def merge_attention(
    a_THV: Tensor, a_lse_TH: Tensor, b_THV: Tensor, b_lse_TH: Tensor, out_THV: Tensor, out_lse_TH: Tensor
) -> None:
    """See `kernels.merge_attention.merge_attention`."""
    tokens, heads, value = a_THV.shape
    if not tokens:
        return
    parts, b_part, b_lse_part = 1, 0, 0
    if b_THV.ndim == 4:
        parts, b_part, b_lse_part = b_THV.shape[0], b_THV.stride(0), b_lse_TH.stride(0)
        b_THV, b_lse_TH = b_THV[0], b_lse_TH[0]
    for tensor in (a_THV, b_THV, out_THV):
        assert tensor.stride(2) == 1
    for tensor in (a_lse_TH, b_lse_TH, out_lse_TH):
        assert tensor.is_contiguous()
    lanes = triton.next_power_of_2(value)
    pairs = max(_ELEMENTS // lanes, 1)
    kernel.merge[(triton.cdiv(tokens * heads, pairs),)](
        a_THV,
        a_lse_TH,
        b_THV,
        b_lse_TH,
        out_THV,
        out_lse_TH,
        tokens * heads,
        heads,
        parts,
        b_part,
        b_lse_part,
        A_ROW=a_THV.stride(0),
        A_HEAD=a_THV.stride(1),
        B_ROW=b_THV.stride(0),
        B_HEAD=b_THV.stride(1),
        OUT_ROW=out_THV.stride(0),
        OUT_HEAD=out_THV.stride(1),
        VALUE=value,
        LANES=lanes,
        PAIRS=pairs,
        num_warps=4,
    )
