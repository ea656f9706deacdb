"""Verification in plain torch. Shape legend: D decode rows, W width, X = W - 1 drafts."""

from __future__ import annotations

import torch


def accept(
    target_DW: torch.Tensor,
    draft_DX: torch.Tensor,
    accepted_D: torch.Tensor,
    vocab: int | None,
    fault_1: torch.Tensor | None,
    faults_1: torch.Tensor | None = None,
) -> None:
    """See the launcher, `kernels.verify.accept_drafts`."""
    before_DX = target_DW[:, :-1]
    accepted_DX = (draft_DX == before_DX) & (draft_DX >= 0)
    if vocab is not None:
        accepted_DX &= draft_DX < vocab
        if fault_1 is not None:
            tokens = torch.cat((target_DW, draft_DX), dim=1)
            fault_1.add_(((tokens < 0) | (tokens >= vocab)).sum())
            if faults_1 is not None:
                faults_1.copy_(fault_1)
    accepted_D.copy_(accepted_DX.to(torch.int64).cumprod(dim=1).sum(dim=1))
