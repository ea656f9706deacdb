"""Rows in fp16 with a power of two each, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def to_fp16_scaled(x_TF: Tensor, fp16_TF: Tensor, unit_T: Tensor) -> None:
    """See `kernels.fp16_scaled.to_fp16_scaled`."""
    peak_T = x_TF.float().abs().amax(1)
    exponent_T = (peak_T.view(torch.int32) >> 23).clamp_min(15)
    unit_T.copy_(((exponent_T - 14) << 23).view(torch.float32))
    inverse_T = ((268 - exponent_T) << 23).view(torch.float32)
    fp16_TF.copy_(x_TF.float() * inverse_T[:, None])
