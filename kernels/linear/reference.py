"""References of `kernels.linear` on torch's own products."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.matrix import Matrix
from kernels.pending_norm import reference as pending_norm
from kernels.pending_norm.pieces import PendingNorm

PRODUCTS_AT_ONCE: Final = 1 << 22
"""Elements that `invariant_linear` holds, a few tokens at a time."""


def linear(x_TE: Tensor, weight_FE: Tensor, out_TF: Tensor) -> None:
    """See `kernels.linear.linear`."""
    if out_TF.dtype == x_TE.dtype:
        torch.mm(x_TE, weight_FE.t(), out=out_TF)
    elif x_TE.is_cuda:
        torch.mm(x_TE, weight_FE.t(), out_dtype=out_TF.dtype, out=out_TF)
    else:
        torch.mm(x_TE.to(out_TF.dtype), weight_FE.t().to(out_TF.dtype), out=out_TF)


def invariant_linear(x_TE: Tensor, weight_FE: Tensor, out_TF: Tensor) -> None:
    """`linear` in an order that depends on E alone.

    torch's products take another way for one row, for few and for many, and so round differently. Its sum of
    contiguous elements has one order for a number of elements, wherever they stand.
    """
    compute = torch.promote_types(x_TE.dtype, torch.float32)
    weight_FE = weight_FE.to(compute)
    step = max(1, PRODUCTS_AT_ONCE // weight_FE.numel())
    product_TFE = torch.empty(min(step, x_TE.shape[0]), *weight_FE.shape, dtype=compute)
    for part_TE, into_TF in zip(torch.split(x_TE, step), torch.split(out_TF, step), strict=True):
        part_TFE = product_TFE[: len(part_TE)]
        torch.mul(part_TE.to(compute).unsqueeze(1), weight_FE, out=part_TFE)
        into_TF.copy_(part_TFE.sum(-1))


def part_linear(x_TE: Tensor, weight_FE: Tensor, out_TPF: Tensor, group: int) -> None:
    """See `kernels.linear.part_linear`; `group`: input features of a part."""
    groups = zip(torch.split(x_TE, group, dim=1), torch.split(weight_FE, group, dim=1), strict=True)
    for part, (x_TG, weight_FG) in enumerate(groups):
        out_TPF[:, part] = x_TG.float() @ weight_FG.float().t()


def normed_linear(
    x: PendingNorm, weight_FE: Matrix, out_TF: Tensor, norm_A: Tensor | None, next: PendingNorm | None
) -> None:
    """See `kernels.linear.normed_linear`."""
    y_TF = pending_norm.normed(x) @ weight_FE.float().t()
    if next is not None and norm_A is not None:
        size = norm_A.shape[0]
        out_TF[:, size:] = y_TF[:, size:].to(out_TF.dtype)
        pending_norm.write(y_TF[:, :size], norm_A, next)
    else:
        out_TF.copy_(y_TF)


def linear_to_residual(x_TE: Tensor, weight_FE: Matrix, residual_TF: Tensor, norm_F: Tensor, out: PendingNorm) -> None:
    """See `kernels.linear.linear_to_residual`."""
    residual_TF.add_(x_TE.float() @ weight_FE.float().t())
    pending_norm.write(residual_TF, norm_F, out)


def gated_linear(x: PendingNorm, weight_FE: Matrix, out_TI: Tensor) -> None:
    """See `kernels.linear.gated_linear`."""
    gate_TI, up_TI = (pending_norm.normed(x) @ weight_FE.float().t()).chunk(2, dim=-1)
    out_TI.copy_(F.silu(gate_TI) * up_TI)
