"""Reference of `kernels.merge_attention` in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_attention(
    a_THV: Tensor, a_lse_TH: Tensor, b_THV: Tensor, b_lse_TH: Tensor, out_THV: Tensor, out_lse_TH: Tensor
) -> None:
    """See `kernels.merge_attention.merge_attention`."""
    compute = torch.promote_types(a_THV.dtype, torch.float32)
    top_TH = torch.maximum(a_lse_TH, b_lse_TH)
    # With no keys on either side the shift must stay finite: exp(-inf - 0) is the 0 that is wanted, -inf - -inf is NaN.
    top_TH = top_TH.masked_fill(top_TH == -torch.inf, 0.0)
    a_TH = torch.exp(a_lse_TH - top_TH)
    b_TH = torch.exp(b_lse_TH - top_TH)
    sum_TH = a_TH + b_TH
    merged_THV = a_TH.unsqueeze(-1) * a_THV.to(compute) + b_TH.unsqueeze(-1) * b_THV.to(compute)
    out_THV.copy_(merged_THV / sum_TH.masked_fill(sum_TH == 0, 1.0).unsqueeze(-1))
    out_lse_TH.copy_(top_TH + torch.log(sum_TH))
