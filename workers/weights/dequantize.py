"""What quantized numbers stand for, in plain torch.

Shape legend: N output features, K input features, B / C rows and columns of scales, G = K / 32 groups.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fp8_blocks(data: Tensor, scales: Tensor, row_N: Tensor, column_K: Tensor) -> Tensor:
    """fp32 [.., N, K] of e4m3 numbers [.., N, K] and scales [.., B, C]: number times scale, where `row_N` and
    `column_K` (int64) say whose. A published scale is called an inverse, and is multiplied by all the same."""
    return data.float() * scales.float().index_select(-2, row_N).index_select(-1, column_K)


def int4_groups(data: Tensor, scales: Tensor) -> Tensor:
    """fp32 [.., N, K] of bytes [.., N, K / 2], the low half the even input feature, and scales [.., N, G]."""
    number = torch.stack([data & 15, data >> 4], dim=-1).flatten(-2).float() - 8
    return number * scales.float().repeat_interleave(32, dim=-1)[..., : number.shape[-1]]
