"""Targets that are made to agree with drafts, whoever does it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCAB = 50
ROWS, WIDTH = 40, 4


def drawn(seed: int) -> tuple[Tensor, Tensor]:
    """Targets, a tenth of which agree, and drafts among what rows feed; one draft is no token."""
    generator = torch.Generator().manual_seed(seed)
    target_DW = torch.randint(0, VOCAB, (ROWS, WIDTH), generator=generator)
    fed_DW = torch.randint(0, VOCAB, (ROWS, WIDTH), generator=generator)
    agree = torch.rand(ROWS, WIDTH - 1, generator=generator) < 0.1
    fed_DW[:, 1:] = torch.where(agree, target_DW[:, :-1], fed_DW[:, 1:])
    fed_DW[3, 2] = -1
    return target_DW, fed_DW[:, 1:]


def check(agreement: Any, agree: Callable[[Tensor, Tensor, int], None]) -> None:
    """Check that targets agree as often as was told, and that nothing else changes."""
    for probability in (0.0, 0.3, 1.0):
        agreement._probability[0] = probability
        agreed = total = 0
        before: list[Tensor] = []
        for seed in range(25):
            target_DW, draft_DX = drawn(seed % 2)
            usual_DW = target_DW.clone()
            agree(target_DW, draft_DX, VOCAB)
            assert torch.equal(target_DW[:, -1], usual_DW[:, -1])
            assert target_DW[3, 1] == usual_DW[3, 1]
            assert ((target_DW >= 0) & (target_DW < VOCAB)).all()
            same_DX = target_DW[:, :-1] == draft_DX
            kept_DX = target_DW[:, :-1] == usual_DW[:, :-1]
            assert (same_DX | kept_DX | (usual_DW[:, :-1] == draft_DX)).all()
            agreed, total = agreed + int(same_DX.sum()), total + same_DX.numel() - 1
            before.append(same_DX)
        assert abs(agreed / total - probability) < 5 * (0.25 / total) ** 0.5 * (0 < probability < 1) + 1e-9
        if probability == 0.3:
            assert not torch.equal(before[0], before[2]), "each step draws anew"
    agreement._probability[0] = -1.0
    target_DW, draft_DX = drawn(0)
    usual_DW = target_DW.clone()
    agree(target_DW, draft_DX, VOCAB)
    assert torch.equal(target_DW, usual_DW)


def nowhere() -> Path:
    """A file that is not there."""
    return Path("/nonexistent/acceptance")


SLOTS, ROOM = 24, 3


def check_drafts(agreement: Any, redraw: Callable[[Tensor, Tensor, Tensor, int, int], None]) -> None:
    """Random in every place, the same for every rank, and nothing else changes."""
    slot_R = torch.tensor([5, -1, 0, *range(6, SLOTS), -1])
    seen: list[Tensor] = []
    for drafts in (1, 3, 2):
        for step in range(12):
            length_S = torch.arange(SLOTS + 1) * 7 + 3 * step + 1000 * drafts
            made_SK = [torch.full((SLOTS + 1, ROOM), -77) for _ in range(3)]
            for draft_SK, probability in zip(made_SK, (0.0, 0.9, -1.0), strict=True):
                agreement._probability[0] = probability
                redraw(length_S, slot_R, draft_SK, drafts, VOCAB)
            assert torch.equal(made_SK[0], made_SK[1])
            assert (made_SK[2] == -77).all(), "the file says nothing"
            live_R = slot_R[slot_R >= 0]
            drawn_RX = made_SK[0][live_R, :drafts].clone()
            assert ((drawn_RX >= 0) & (drawn_RX < VOCAB)).all()
            made_SK[0][live_R, :drafts] = -77
            assert (made_SK[0] == -77).all(), "of padding, of other slots and behind the drafts"
            if drafts == 3:
                seen.append(drawn_RX)
    drawn = torch.stack(seen)
    counts = torch.bincount(drawn.flatten(), minlength=VOCAB)
    expected = drawn.numel() / VOCAB
    assert ((counts - expected).abs() < 5 * expected**0.5).all(), "every token as often"
    for alike in (drawn[1:] == drawn[:-1], drawn[:, 1:] == drawn[:, :-1], drawn[..., 1:] == drawn[..., :-1]):
        assert alike.float().mean() < 3 / VOCAB, "steps, rows and places have nothing to do with each other"
