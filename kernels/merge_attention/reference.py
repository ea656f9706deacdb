"""Reference of `kernels.merge_attention` in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_attention(
    a_THV: Tensor, a_lse_TH: Tensor, b_THV: Tensor, b_lse_TH: Tensor, out_THV: Tensor, out_lse_TH: Tensor
) -> None:
    """See `kernels.merge_attention.merge_attention`."""
    compute = torch.promote_types(a_THV.dtype, torch.float32)
    b_ZTHV = b_THV if b_THV.ndim == 4 else b_THV.unsqueeze(0)
    part_PTHV = torch.cat([a_THV.unsqueeze(0).to(compute), b_ZTHV.to(compute)])
    lse_PTH = torch.cat([a_lse_TH.unsqueeze(0), b_lse_TH.view(b_ZTHV.shape[:3])])
    top_TH = lse_PTH.amax(0)
    # With no keys on any side the shift must stay finite: exp(-inf - 0) is the 0 that is wanted, -inf - -inf is NaN.
    top_TH = top_TH.masked_fill(top_TH == -torch.inf, 0.0)
    weight_PTH = torch.exp(lse_PTH - top_TH)
    sum_TH = weight_PTH.sum(0)
    merged_THV = (weight_PTH.unsqueeze(-1) * part_PTHV).sum(0)
    out_THV.copy_(merged_THV / sum_TH.masked_fill(sum_TH == 0, 1.0).unsqueeze(-1))
    out_lse_TH.copy_(top_TH + torch.log(sum_TH))
