"""Verification of drafts: how many of a decode row's drafts are accepted.

A decode row feeds its last token and X drafts, and the target model's token is sampled at each of the W = X + 1
positions. Draft i stands if all drafts before it do and it equals the target token at its position, the token that
would have been sampled there without drafts. The row emits its target tokens 0 ... accepted.

Noise is a function of the position alone, so the emitted tokens follow the target's distribution p whatever was
drafted. A draft that is sampled with the same noise from q agrees with probability (1 - d) / (1 + d) or more, where d
is the total variation distance of p and q: a Gumbel coupling (Daliri, Musco, Suresh, arXiv:2408.07978), not rejection
sampling.
"""

from __future__ import annotations

import torch

from kernels.verify import launch, reference

__all__ = ["accept_drafts"]


def accept_drafts(
    target_DW: torch.Tensor,
    draft_DX: torch.Tensor,
    accepted_D: torch.Tensor,
    vocab: int | None = None,
    fault_1: torch.Tensor | None = None,
    faults_1: torch.Tensor | None = None,
    *,
    dependent: bool = False,
) -> None:
    """Write the number of leading drafts that are accepted, 0 ... X, to `accepted_D` (int64 [D]).

    `target_DW`, `draft_DX`: int64 token ids. An id that is no token (below 0, or not below `vocab`) is never accepted,
    even if both sides agree on it, and with `vocab` given adds 1 to `fault_1` (int64 [1]) wherever it occurs.
    `faults_1` (int64 [1], goes with `fault_1`): what `fault_1` is then. `dependent`: programmatic dependent launch, see
    `launch`.
    """
    rows, width = target_DW.shape
    assert draft_DX.shape == (rows, width - 1)
    assert accepted_D.shape == (rows,)
    if target_DW.is_cuda:
        launch.accept(target_DW, draft_DX, accepted_D, vocab, fault_1, faults_1, dependent=dependent)
        return
    reference.accept(target_DW, draft_DX, accepted_D, vocab, fault_1, faults_1)
