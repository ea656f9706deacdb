"""Reference of `kernels.rms_norm` in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.parts import added


def rms_norm(x_TE: Tensor, weight_E: Tensor, out_TE: Tensor, eps: float) -> None:
    """See `kernels.rms_norm.rms_norm`."""
    compute = torch.promote_types(x_TE.dtype, torch.float32)
    out_TE.copy_(F.rms_norm(x_TE.to(compute), weight_E.shape, weight_E.to(compute), eps))


def add_rms_norm(x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, out_TE: Tensor, eps: float) -> None:
    """See `kernels.rms_norm.add_rms_norm`."""
    if x_TE.dim() == 3:
        x_TE = added(x_TE, residual_TE.dtype)
    residual_TE.add_(x_TE)
    rms_norm(residual_TE, weight_E, out_TE, eps)
