"""Prompt look-up in steps: drafts are those of the whole sequence whatever steps it took, and change no token."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from kernels.ngram import LEAST, MOST
from tests.tiny_models import VOCAB, write_tiny
from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.fit.memory_plan import memory_plan
from workers.fit.settings import Unfit, check_fit
from workers.protocol.plan import SamplingParams
from workers.protocol.request import pack_tokens
from workers.rank.runner import PlanError
from workers.scheduler.sequence import Phase


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a layer that drafts."""
    return write_tiny(tmp_path_factory.mktemp("v2"), "v2", seed=3, num_hidden_layers=2)


def engine(folder: Path, **settings: Any) -> InlineEngine:
    defaults = {"drafter": "ngram", "width": 3, "max_rows": 4, "token_budget": 48, "cache_pages": 60}
    defaults |= {"max_context": 300, "device": "cpu", "selftest": False}
    made = InlineEngine(EngineConfig(model=str(folder), **{**defaults, **settings}))
    made.runner.parts.state.tensors.token_SX.fill_(VOCAB - 1)  # what nobody wrote is one token, which is found anywhere
    return made


def repetitive(count: int, longest: int, seed: int) -> list[list[int]]:
    """Prompts of few different tokens, half of which begin alike."""
    rng = random.Random(seed)
    shared = [rng.randrange(5) for _ in range(130)]
    return [
        (shared if index % 2 else []) + [rng.randrange(5) for _ in range(rng.randint(1, longest))]
        for index in range(count)
    ]


def looked_up(tokens: list[int], count: int) -> list[int]:
    longer = list(tokens)
    for length in range(MOST, LEAST - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                for index in range(count):
                    longer.append(longer[end + index])
                return longer[len(tokens) :]
    return [0] * count


def run_comparing(made: InlineEngine) -> Counter[tuple[bool, bool]]:
    """Return the number of drafts that were compared, by whether their step was mixed, and whether their row was a
    decode row of it."""
    tensors = made.runner.parts.state.tensors
    compared: Counter[tuple[bool, bool]] = Counter()
    while made.step():
        plan = made.plans[made.runner._steps - 1]
        for sequence in made.scheduler._live.values():
            if sequence.phase is Phase.DECODE and sequence.tokens.length > sequence.goal:
                tokens, slot = list(sequence.tokens.span(0, sequence.tokens.length)), sequence.slot
                assert tensors.token_SX[slot, : len(tokens)].tolist() == tokens
                assert tensors.draft_SK[slot, : plan.drafts].tolist() == looked_up(tokens, plan.drafts)
                compared[bool(plan.prefill), slot in plan.decode_slots] += plan.drafts
    return compared


@pytest.mark.parametrize(
    ("pages", "width"),
    [*(pytest.param(*sizes, marks=pytest.mark.long) for sizes in [(60, 2), (60, 4), (8, 2)]), (8, 4)],
)
def test_drafts_are_those_of_the_whole_sequence(folder: Path, width: int, pages: int) -> None:
    """Anything may come between: chunks, decode rows beside them, shared pages, and, with few pages, preemptions."""
    made = engine(folder, width=width, cache_pages=pages)
    for index, prompt in enumerate(repetitive(8, 40, seed=width)):
        made.add(f"r{index}", prompt, SamplingParams(120, temperature=0.0))
    compared = run_comparing(made)
    assert compared.keys() == {(True, True), (True, False), (False, True)}
    stats = made.scheduler.stats()
    assert 0 < stats.drafts_accepted < stats.drafts_offered
    assert stats.cached_tokens > 0
    assert bool(stats.preemptions) == (pages == 8)


@pytest.mark.parametrize(
    ("temperature", "widths"),
    [
        (0.8, (3,)),
        pytest.param(0.8, (1, 2, 4), marks=pytest.mark.long),
        pytest.param(0.0, (1, 2, 3, 4), marks=pytest.mark.long),
    ],
)
def test_no_token_changes(folder: Path, temperature: float, widths: tuple[int, ...]) -> None:
    prompts = repetitive(10, 60, seed=7)
    params = [SamplingParams(40, temperature=temperature, seed=seed) for seed in range(len(prompts))]
    plain = engine(folder, drafter="none", prefix_cache=False).generate(prompts, params)
    for width in widths:
        crowded = engine(folder, width=width, cache_pages=8)
        assert crowded.generate(prompts, params) == plain
        assert (crowded.scheduler.stats().drafts_accepted > 0) == (width > 1)


def test_prefix_hits_keep_their_length(folder: Path) -> None:
    """A drafter without a cache needs nothing recomputed: the prompts cost what they cost without drafts."""
    prompts, fed = repetitive(10, 60, seed=8), set()
    for drafter in ("ngram", "none"):
        made = engine(folder, drafter=drafter, max_rows=1)
        made.generate(prompts, SamplingParams(5, temperature=0.0))
        stats = made.scheduler.stats()
        assert stats.cached_tokens > 0
        fed.add((stats.cached_tokens, sum(part.total for part in stats.step_prefill_tokens.values())))
    assert len(fed) == 1


def test_steps_pass_the_self_test(folder: Path) -> None:
    made = engine(folder, selftest=True, max_rows=2)
    assert made.replica.selftest is not None
    assert made.replica.selftest.passed


def test_tokens_of_newcomers_are_checked(folder: Path) -> None:
    made = engine(folder)
    made.add("r", [1, 2, 3], SamplingParams(5))
    plan = made.scheduler.plan()
    assert plan is not None
    (admission,) = plan.admissions
    assert admission.tokens == pack_tokens([1, 2, 3])
    for tokens, said in (([], "0 bytes"), ([1] * 2000, "8000 bytes"), ([1, VOCAB], "outside"), ([2**31], "outside")):
        wrong = replace(plan, admissions=(replace(admission, tokens=pack_tokens(tokens)),))
        with pytest.raises(PlanError, match=said):
            made.runner.execute(wrong)
    made.runner.execute(plan)


def test_a_model_with_a_draft_layer_may_do_without(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "v3", seed=3, num_hidden_layers=2)
    own, none, ngram = (engine(folder, drafter=name) for name in ("mtp", "none", "ngram"))
    assert [made.runner.parts.width for made in (own, none, ngram)] == [3, 1, 3]
    assert [len(made.runner.parts.cache.layers) for made in (own, none, ngram)] == [3, 2, 2]
    prompts = repetitive(4, 30, seed=9)
    texts = [made.generate(prompts, SamplingParams(20, temperature=0.0)) for made in (own, none, ngram)]
    assert texts[0] == texts[1] == texts[2]


def test_a_draft_layer_that_is_not_there_is_missed_before_anything_is_loaded(folder: Path) -> None:
    with pytest.raises(Unfit, match=r"declares no draft layer .* give --drafter ngram"):
        check_fit(EngineConfig(model=str(folder), drafter="mtp"))
    check_fit(EngineConfig(model=str(folder), drafter="mtp", width=1))
    with pytest.raises(ValueError, match="have no draft layer"):
        engine(folder, drafter="mtp")


def test_the_memory_plan_counts_the_tokens_of_all_slots(folder: Path) -> None:
    plans = [
        memory_plan(EngineConfig(model=str(folder), drafter=drafter, max_context=300), 8 << 30)
        for drafter in ("none", "ngram")
    ]
    pages = -(-(300 - 1 + 3 * 2) // 64)
    assert plans[1].rest - plans[0].rest >= 65 * pages * 64 * torch.int32.itemsize
