"""The drafts that steps make: wrong ones change no output, so nothing else would show them but a falling acceptance."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tests.workers.harness import InlineEngine
from tests.workers.models.paged import Paged
from workers.config import DEMO_MODEL, EngineConfig
from workers.models.model import Model
from workers.protocol.plan import SamplingParams
from workers.scheduler.sequence import Phase
from workers.step.sampling import SamplingState


def engine(**settings: Any) -> InlineEngine:
    defaults = {"max_rows": 4, "width": 3, "token_budget": 48, "cache_pages": 60, "max_context": 300, "device": "cpu"}
    made = InlineEngine(EngineConfig(model="demo", selftest=False, **{**defaults, **settings}))
    for layer in made.runner.parts.cache.layers:
        layer.fill_(torch.nan)
    return made


@pytest.fixture(scope="module")
def code() -> list[int]:
    text = (DEMO_MODEL.parent / "training" / "model.py").read_text()
    return list(Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).encode(text).ids)


@torch.inference_mode()
def drafts_after(model: Model, tokens: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """Greedy drafts behind `tokens`, all of which pass through the model as one chunk; and the draft layer's cache."""
    paged = Paged(model, [tokens], room=count + 1)
    step = paged.plan([], 1, [(0, len(tokens) - 1)])
    hidden = paged.draft(step, paged.forward(step))
    entries = paged.cache.layers[-1][paged.rows[0].pages].flatten(0, 1)[1 : len(tokens)]
    drafts = [int(model.drafter.logits(hidden[0])[-1].argmax())]
    for _ in range(count - 1):
        paged.rows[0].tokens.append(drafts[-1])
        hidden = paged.draft(paged.plan([0], 1, []), {0: hidden[0][-1:]})
        paged.rows[0].written += 1
        drafts.append(int(model.drafter.logits(hidden[0])[-1].argmax()))
    return drafts, entries


def run_comparing(made: InlineEngine) -> Counter[tuple[bool, bool]]:
    """Return the number of drafts that were compared, by whether their step was mixed, and whether their row was a
    decode row of it."""
    model, tensors = made.runner.parts.model, made.runner.parts.state.tensors
    compared: Counter[tuple[bool, bool]] = Counter()
    while made.step():
        plan = made.plans[made.runner._steps - 1]
        for sequence in made.scheduler._live.values():
            if sequence.phase is Phase.DECODE and sequence.tokens.length > sequence.goal:
                tokens, slot = list(sequence.tokens.span(0, sequence.tokens.length)), sequence.slot
                drafts, entries = drafts_after(model, tokens, plan.drafts)
                assert tensors.draft_SK[slot, : plan.drafts].tolist() == drafts
                cached = made.runner.parts.cache.layers[-1][tensors.page_SP[slot].long()].flatten(0, 1)
                torch.testing.assert_close(cached[1 : len(tokens)], entries, atol=1e-4, rtol=0)
                compared[bool(plan.prefill), slot in plan.decode_slots] += len(drafts)
    return compared


def test_drafts_are_those_of_the_whole_sequence_at_once(code: list[int]) -> None:
    """Anything may come between: chunks, decode rows beside them, windows accepted in part, shared pages."""
    made = engine()
    for index, (start, length) in enumerate([(0, 70), (300, 5), (0, 70), (640, 133), (64, 1)]):
        made.add(f"r{index}", code[start : start + length], SamplingParams(16, temperature=0.0))
    compared = run_comparing(made)
    assert compared.keys() == {(True, True), (True, False), (False, True)}
    assert compared.total() > 50
    stats = made.scheduler.stats()
    assert 0 < stats.drafts_accepted < stats.drafts_offered
    assert stats.cached_tokens > 0


@pytest.mark.long
def test_drafts_after_a_preemption_are_those_of_the_whole_sequence(code: list[int]) -> None:
    made = engine(cache_pages=6)
    for index, (start, length) in enumerate([(300, 5), (64, 1), (640, 6)]):
        made.add(f"r{index}", code[start : start + length], SamplingParams(90, temperature=0.0))
    assert run_comparing(made)[True, False] >= 8, "three prompts, and one again"
    assert made.scheduler.stats().preemptions > 0


def test_drafts_have_the_noise_of_the_place_where_they_are_verified(
    code: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts know the drafts before them, as penalties want it."""
    target_tokens, draft_tokens = SamplingState.target_tokens, SamplingState.draft_tokens
    drawn: dict[int, list[int]] = {}
    verified = 0

    def targets(self: SamplingState, logits_NV, layout, slot_R, fed_DW, position_N, *, ahead=0, **more):
        nonlocal verified
        for row, slot in enumerate(slot_R[: layout.decode_rows].tolist()):
            places = (position_N[layout.decode_slice(row)] + ahead).tolist()
            assert places[:-1] == drawn[slot]
            verified += layout.width - 1
        drawn.clear()
        return target_tokens(self, logits_NV, layout, slot_R, fed_DW, position_N, ahead=ahead, **more)

    def drafts(self: SamplingState, logits_RV, slot_R, position_R, drafted_SX, **more):
        for slot, position in zip(slot_R.tolist(), position_R.tolist(), strict=True):
            assert drafted_SX.shape[1] == len(drawn.setdefault(slot, []))
            drawn[slot].append(position)
        return draft_tokens(self, logits_RV, slot_R, position_R, drafted_SX, **more)

    monkeypatch.setattr(SamplingState, "target_tokens", targets)
    monkeypatch.setattr(SamplingState, "draft_tokens", drafts)
    made = engine()
    prompts = [code[:70], code[300:305], code[640:773]]
    made.generate(prompts, [SamplingParams(12, temperature=1.0, seed=seed) for seed in range(3)])
    assert verified > 20
    assert made.scheduler.stats().step_seconds["mixed"].count > 0
