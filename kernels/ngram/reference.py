"""Prompt look-up in plain torch, row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ngram.size import LEAST, MOST


def propose(token_SX: Tensor, newest_S: Tensor, slot_R: Tensor, draft_SK: Tensor, drafts: int) -> None:
    """See the launcher."""
    for slot in slot_R[slot_R >= 0].tolist():
        newest = int(newest_S[slot])
        row_X = token_SX[slot, : newest + 1]
        draft_SK[slot, :drafts] = 0
        for count in range(min(MOST, newest), LEAST - 1, -1):
            # Windows of `count` tokens, but for the newest itself.
            same = (row_X.unfold(0, count, 1)[:-1] == row_X[-count:]).all(1).nonzero()
            if len(same):
                behind = int(same[-1]) + count
                index_K = behind + torch.arange(drafts, device=token_SX.device) % (newest + 1 - behind)
                draft_SK[slot, :drafts] = row_X[index_K].to(torch.int64)
                break
