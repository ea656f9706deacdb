"""A drafter that knows what requests will say, so that windows are accepted to every length. A model of random weights
by itself drafts hardly a token that is accepted."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.tiny_models import VOCAB
from tests.workers.harness import InlineEngine
from workers.step.parts import StepParts


def good_drafts(patch: pytest.MonkeyPatch, run: InlineEngine, want: dict[str, list[int]], share: float = 0.8) -> None:
    """`want`: the tokens of each request, by its id. About this share of all drafts is right."""
    rng = random.Random(3)

    def draft(
        parts: StepParts,
        hidden: Any,
        slot_R: Any,
        position_R: Any,
        length: Any,
        page: Any,
        drafts: int,
        *_: Any,
        **__: Any,
    ):
        live = {sequence.slot: sequence for sequence in run.scheduler._live.values()}
        for slot, position in zip(slot_R.tolist(), position_R.tolist(), strict=True):
            if (sequence := live.get(slot)) is None:
                continue
            said = want[sequence.request.request_id][position - len(sequence.request.prompt) :]
            for index in range(drafts):
                right = index < len(said) and rng.random() < share
                parts.state.tensors.draft_SK[slot, index] = said[index] if right else rng.randrange(VOCAB)

    patch.setattr(StepParts, "draft", draft)
