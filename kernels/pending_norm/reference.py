"""References of `kernels.pending_norm` in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.pending_norm.pieces import PIECE, PendingNorm


def write(residual_TE: Tensor, norm_E: Tensor, out: PendingNorm) -> None:
    """The pending norm of rows."""
    out.x_TE.copy_(residual_TE * norm_E.float())
    out.square_TP.copy_(residual_TE.square().view(*out.square_TP.shape, PIECE).sum(-1))


def inverse_rms(pending: PendingNorm) -> Tensor:
    """What is left to multiply each row by, fp32 [T, 1]."""
    features = pending.x_TE.shape[1]
    return torch.rsqrt(pending.square_TP.sum(1, keepdim=True) / features + pending.eps)


def normed(pending: PendingNorm) -> Tensor:
    """The finished norm, fp32 [T, E]."""
    return pending.x_TE.float() * inverse_rms(pending)
