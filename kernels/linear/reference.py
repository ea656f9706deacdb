"""References of `kernels.linear` on torch's own products."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import pending_norm
from kernels.matrix import Matrix
from kernels.pending_norm import PendingNorm

PRODUCTS_AT_ONCE: Final = 1 << 22
"""Elements that `invariant_groups` holds, a few tokens at a time."""


def invariant_linear(x_TE: Tensor, weight_FE: Tensor, out_TF: Tensor) -> None:
    """`linear` in an order that depends on E alone.

    torch's products take another way for one row, for few and for many, and so round differently. Its sum of
    contiguous elements has one order for a number of elements, wherever they stand.
    """
    invariant_groups(x_TE.unsqueeze(1), weight_FE.unsqueeze(0), out_TF.unsqueeze(1))


def invariant_groups(x_TGE: Tensor, weight_GFE: Tensor, out_TGF: Tensor) -> None:
    """`invariant_linear` of each of G groups with a matrix of its own."""
    compute = torch.promote_types(x_TGE.dtype, torch.float32)
    weight_GFE = weight_GFE.to(compute)
    step = max(1, PRODUCTS_AT_ONCE // weight_GFE.numel())
    for begin in range(0, x_TGE.shape[0], step):
        part_TGE = x_TGE[begin : begin + step].to(compute)
        # Contiguous whatever the strides of the factors are.
        product_TGFE = torch.empty(part_TGE.shape[0], *weight_GFE.shape, dtype=compute)
        torch.mul(part_TGE.unsqueeze(2), weight_GFE, out=product_TGFE)
        out_TGF[begin : begin + step] = product_TGFE.sum(-1)


def part_linear(x_TE: Tensor, weight_FE: Tensor, out_TPF: Tensor, group: int) -> None:
    """Parts of a product; `group`: input features of a part."""
    groups = zip(torch.split(x_TE, group, dim=1), torch.split(weight_FE, group, dim=1), strict=True)
    for part, (x_TG, weight_FG) in enumerate(groups):
        out_TPF[:, part] = x_TG.float() @ weight_FG.float().t()


def normed_linear(
    x: PendingNorm,
    weight_FE: Matrix,
    out_TF: Tensor,
    norm_A: Tensor | None,
    next: PendingNorm | None,
    scale_T: Tensor | None = None,
) -> None:
    y_TF = pending_norm.normed(x) @ weight_FE.float().t()
    if next is not None and norm_A is not None:
        _leave_norm(y_TF, out_TF, norm_A, next, scale_T)
    else:
        out_TF.copy_(y_TF)


def linear_to_norm(x_TE: Tensor, weight_FE: Matrix, out_TF: Tensor, norm_A: Tensor, next: PendingNorm) -> None:
    _leave_norm(x_TE.float() @ weight_FE.float().t(), out_TF, norm_A, next, None)


def _leave_norm(y_TF: Tensor, out_TF: Tensor, norm_A: Tensor, next: PendingNorm, scale_T: Tensor | None) -> None:
    size = norm_A.shape[0]
    out_TF[:, size:] = y_TF[:, size:].to(out_TF.dtype)
    pending_norm.write(y_TF[:, :size], norm_A, next, scale_T)


def linear_to_residual(x_TE: Tensor, weight_FE: Matrix, residual_TF: Tensor, norm_F: Tensor, out: PendingNorm) -> None:
    residual_TF.add_(x_TE.float() @ weight_FE.float().t())
    pending_norm.write(residual_TF, norm_F, out)


def gated_linear(x: PendingNorm, weight_FE: Matrix, out_TI: Tensor) -> None:
    gate_TI, up_TI = (pending_norm.normed(x) @ weight_FE.float().t()).chunk(2, dim=-1)
    out_TI.copy_(F.silu(gate_TI) * up_TI)
