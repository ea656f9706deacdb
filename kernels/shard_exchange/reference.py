"""The merge in plain torch.

Shape legend: D shards, T tokens, H heads of a rank, L latent features.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_parts(out_DTHL: Tensor, lse_DTH: Tensor, into_THL: Tensor) -> Tensor:
    """Merge attention to disjoint sets of entries: sums of exp(lse) out and of exp(lse), whose quotient goes to
    `into_THL`; returned is the log-sum-exp of all, [T, H]. They are balanced trees in the order of the shards, so all
    ranks have the same bits.

    A part of log-sum-exp -inf has output 0 and counts for nothing; where all are so, the result is 0. NaN in an output
    stays, whatever the log-sum-exp.
    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    top_TH = lse_DTH.amax(0)
    # A finite shift: exp(-inf - 0) is the 0 that is wanted, and -inf - -inf is NaN.
    top_TH = top_TH.masked_fill(top_TH == -torch.inf, 0.0)
    weight_DTH = torch.exp(lse_DTH - top_TH)
    weight_DTH1 = weight_DTH.unsqueeze(-1)
    total_TH = _tree_sum(weight_DTH)
    sum_THL = _tree_sum(weight_DTH1 * out_DTHL)
    into_THL.copy_(sum_THL / total_TH.masked_fill(total_TH == 0, 1.0).unsqueeze(-1))
    return top_TH + torch.log(total_TH)


def _tree_sum(x_DX: Tensor) -> Tensor:
    """Sum along the first axis as a balanced binary tree."""
    while (count := x_DX.shape[0]) > 1:
        even = count - count % 2
        x_DX = torch.cat([x_DX[0:even:2] + x_DX[1:even:2], x_DX[even:]])
    return x_DX[0]
