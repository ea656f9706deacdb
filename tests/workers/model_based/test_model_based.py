"""The engine under random schedules against the reference, which takes one request at a time and the whole sequence for
every token; and that this finds what is planted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.workers.model_based import routing
from tests.workers.model_based.drive import Bench
from tests.workers.model_based.planted import FOUND_WITHIN, PLANTED
from tests.workers.model_based.schedules import MAX_CONTEXT, POISON, Add, Apply, Cancel, Plan, Schedule, random_schedule
from tests.workers.model_based.shrink import shrink
from tests.workers.model_based.soak import keep, main, soak
from tests.workers.models.oracle import oracle_logits
from workers.protocol.plan import SamplingParams
from workers.protocol.scores import Scores
from workers.protocol.tiers import DiskPage
from workers.step.decode import DecodeStep
from workers.tiers.disk_files import DiskFiles


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("v3"))


def nothing_differs(bench: Bench, steps: int, first_seed: int, folder: Path) -> Counter[str]:
    """Runs so many steps of schedules from this seed on; what was seen in them."""
    outcome = soak(bench, steps, first_seed)
    seen = outcome.seen
    if outcome.problem:
        file = keep(bench, first_seed + seen["schedules"] - 1, folder)
        pytest.fail(f"{outcome.problem}: python -m tests.workers.model_based.soak --schedule {file}")
    # And the schedules did what they are for.
    assert outcome.steps >= steps
    assert seen["drafts offered"] > seen["drafts accepted"] > steps / 40
    assert min(seen["preemptions"], seen["bad rows"], seen["cached tokens"]) > 0
    assert seen["near ties"] < seen["tokens"] / 500
    return seen


def everything_was_asked_for(seen: Counter[str]) -> None:
    """Every end, width, drafter and grammars, which takes some thousand steps."""
    assert all(seen[f"ended: {end}"] > 5 for end in ("stop", "length", "failed", "cancelled"))
    assert all(seen[f"mixed steps of width {width}"] > 5 for width in range(1, 5))
    assert all(seen[f"drafts of {drafter}"] > 100 for drafter in ("the model", "ngram", "gqa", "mla"))
    assert min(seen["with a grammar"], seen["steps with masks"] / 10) > 20


def test_1000_steps_of_random_schedules(bench: Bench, tmp_path: Path) -> None:
    nothing_differs(bench, 1000, 100_000, tmp_path)


@pytest.mark.long
def test_3000_steps_of_random_schedules(bench: Bench, tmp_path: Path) -> None:
    seen = nothing_differs(bench, 3000, 0, tmp_path)
    everything_was_asked_for(seen)
    # Few schedules are so wide.
    assert sum(seen[f"mixed steps of width {width}"] for width in range(5, 9)) > 20


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(500, id="quick"),
        pytest.param(2500, marks=pytest.mark.long),
        pytest.param(9000, marks=pytest.mark.soak),
    ],
)
def test_pages_that_come_from_host_memory_and_disk(bench: Bench, tmp_path: Path, steps: int) -> None:
    outcome = soak(bench, steps, 200_000 + steps, behind=True)
    if outcome.problem:
        file = keep(bench, 200_000 + steps + outcome.seen["schedules"] - 1, tmp_path, behind=True)
        pytest.fail(f"{outcome.problem}: python -m tests.workers.model_based.soak --schedule {file}")
    assert min(outcome.seen["pages from host memory"], outcome.seen["pages from disk"]) > 1


def test_a_page_of_another_prompt_that_comes_from_disk_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: contents are those of the slot beside, and nobody compares them."""
    honest = DiskFiles.read

    def read(self: DiskFiles, page: DiskPage, record_B: Any) -> bool:
        good = honest(self, page, record_B)
        record_B[:] = np.roll(record_B, 64)
        return good

    monkeypatch.setattr(DiskFiles, "read", read)
    assert "instead of" in soak(bench, 3000, 200_500, behind=True).problem


SHARED = {"indexer_types": ["full", "shared"]}
SPARSE = [("v32", {}), ("glm5", SHARED), ("v32", {"index_topk": 128}), ("glm5", SHARED | {"index_topk": 128})]
"""Queries attend to 16 tokens of up to 200; or to two pages, and steps of rows that have no more are dense."""


@pytest.mark.parametrize(
    ("kind", "config"),  # in the longer lane both kinds of models, and both numbers of tokens that are selected
    [pytest.param(*case, marks=pytest.mark.long if n in (0, 3) else pytest.mark.soak) for n, case in enumerate(SPARSE)],
)
def test_sparse_attention_under_random_schedules(
    kind: str, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedules have grammars, drafters, preemptions, prefix hits, entries that become NaN, and each width."""
    ran: Counter[bool] = Counter()
    run = DecodeStep.run
    monkeypatch.setattr(DecodeStep, "run", lambda own, *masks: (ran.update([own.key.dense]), run(own, *masks))[1])
    outcome = soak(Bench(tmp_path, kind, **config), 800, 50_000)
    seen = outcome.seen
    assert outcome.problem == ""
    assert ran[False] > 100, ran
    if "index_topk" in config:
        assert ran[True] > 100, ran
    else:
        assert not ran[True]
    assert min(seen["preemptions"], seen["bad rows"], seen["cached tokens"], seen["drafts accepted"]) > 0
    assert min(seen["with a grammar"], seen["drafts offered"] / 100) > 1


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_11000_steps_of_other_schedules(bench: Bench, tmp_path: Path) -> None:
    seen = nothing_differs(bench, 11_000, 10_000, tmp_path)
    everything_was_asked_for(seen)
    assert all(seen[f"mixed steps of width {width}"] > 5 for width in range(5, 9))


QUICK = (
    "acceptance one too long",
    "a mask for all of a window",
    "noise of half a seed",
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.long) for n in PLANTED])
def test_a_planted_fault_is_found(bench: Bench, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, first_seed = PLANTED[name]
    plant(monkeypatch)
    found = soak(bench, FOUND_WITHIN, first_seed)
    # A token that a mask let through, or another one, ends its row.
    assert "instead of" in found.problem or "failed without a cause" in found.problem


TIED = [
    37, 8, 46, 25, 13, 4, 2, 41, 55, 57, 51, 13, 25, 18, 59, 33,
    42, 21, 9, 1, 57, 26, 55, 56, 42, 27, 59, 56, 6, 5, 25, 41,
    52, 42, 20, 6, 6, 10, 50, 47, 20, 8, 33, 45, 36, 30, 1, 1,
    14, 38, 44, 44, 31, 54, 62, 27, 3, 7, 4, 47, 61, 13, 57, 21,
]  # fmt: skip
"""Token 56 comes as near to one expert as to another."""


def scored(logits_TV: np.ndarray, prompt: list[int]) -> Scores:
    """Score a prompt by logits, without the most probable ids."""
    x_TV = logits_TV[:-1].astype(np.float64)
    logprob_TV = x_TV - np.log(np.exp(x_TV).sum(1, keepdims=True))
    chosen_T = logprob_TV[range(len(x_TV)), prompt[1:]]
    rank_T = 1 + (logprob_TV > chosen_T[:, None]).sum(1)
    return Scores(0, chosen_T.astype("<f4").tobytes(), rank_T.astype("<u4").tobytes())


def test_of_experts_that_are_nearly_equal_either_is_right(bench: Bench) -> None:
    reference, sampling = bench.reference, SamplingParams(1, prompt_logprobs=0)
    model, usual_TV = reference._model, reference.logits_of(tuple(TIED))
    assert [place[:2] for place in routing.near_ties(model, TIED)] == [(0, 56)]
    (other_TV,) = [oracle_logits(model, TIED).numpy() for _ in routing.routed_otherwise(model, TIED)]
    assert np.abs(other_TV - usual_TV)[56:].max() > 0.1
    np.testing.assert_array_equal(other_TV[:56], usual_TV[:56])
    for logits_TV in (usual_TV, other_TV):
        assert reference.judge_scores(TIED, sampling, scored(logits_TV, TIED)) == ""
    assert "token 57 of the prompt" in reference.judge_scores(TIED, sampling, scored((usual_TV + other_TV) / 2, TIED))
    np.testing.assert_array_equal(oracle_logits(model, TIED).numpy(), usual_TV)


def test_a_failing_schedule_is_made_small_and_replayed_from_a_file(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    PLANTED["noise of half a seed"][0](monkeypatch)
    plain = SamplingParams(5, temperature=0.0)
    sampled = SamplingParams(12, temperature=1.2, top_k=30, seed=2**40 + 5, frequency_penalty=0.5, logprobs=1)
    engine = {"width": 3, "max_rows": 4, "token_budget": 40, "cache_pages": 9, "max_context": MAX_CONTEXT}
    events = (
        Add("1", (5, 6, 7) * 9, plain),
        Plan(),
        Add("2", (9, 8, 7, 6, 5, 4, 3, 2) * 4, sampled, 1),
        Apply(),
        Cancel("1"),
        Add("3", (11, 12), plain),
    )
    large = Schedule(0, engine, False, events)
    assert bench.run(large).problem
    small = shrink(large, lambda schedule: bool(bench.run(schedule).problem), attempts=80)
    [event] = small.events
    assert isinstance(event, Add)
    assert (event.sampling.temperature, event.sampling.top_k, event.sampling.logprobs) == (1.2, 0, -1)
    assert len(event.prompt) <= 4
    assert event.sampling.max_tokens < 12
    file = tmp_path / "small.json"
    file.write_bytes(small.to_json())
    assert main(["--schedule", str(file)]) == 1
    assert "instead of" in capsys.readouterr().out
    monkeypatch.undo()
    assert main(["--schedule", str(file)]) == 0
    assert "nothing differs" in capsys.readouterr().out


def test_a_schedule_is_a_function_of_its_seed_and_survives_a_file() -> None:
    for seed in range(30):
        schedule = random_schedule(seed)
        assert random_schedule(seed) == schedule != random_schedule(seed + 1)
        assert Schedule.from_json(schedule.to_json()) == schedule


def requests_of(seeds: range) -> list[Add]:
    return [event for seed in seeds for event in random_schedule(seed).events if isinstance(event, Add)]


def test_the_definition_agrees_with_its_judge(bench: Bench) -> None:
    """Token by token, each from the whole sequence; and a pass over all of them at once."""
    for event in requests_of(range(3))[::2]:
        prompt, sampling = event.prompt, replace(event.sampling, logprobs=-1, max_tokens=6)
        answer = bench.reference.answer(prompt, sampling)
        assert bench.reference.judge(prompt, sampling, answer.tokens, answer.finish) == ""


def test_the_judge_sees_what_is_wrong_with_an_answer(bench: Bench) -> None:
    judge, prompt = bench.reference.judge, (5, 6, 7)
    sampling = SamplingParams(6, temperature=1.0, seed=3, logit_bias=((POISON, -100.0),))
    tokens = bench.reference.answer(prompt, sampling).tokens
    assert judge(prompt, sampling, tokens, "length") == ""
    assert judge(prompt, sampling, tokens[:4], "cancelled") == ""
    assert judge(prompt, sampling, tokens[:4], "length") == "it ends by length instead of going on"
    assert judge(prompt, sampling, tokens, "stop") == "it ends by stop instead of length"
    assert judge(prompt, sampling, tokens, "failed") == "it failed without a cause"
    assert "follows the end" in judge(prompt, sampling, (*tokens, 1), "length")
    for index in range(6):
        other = (tokens[index] + 1) % 60
        assert f"token {index} is" in judge(prompt, sampling, (*tokens[:index], other, *tokens[index + 1 :]), "length")
    stop = replace(sampling, stop_ids=(tokens[2],))
    end = tokens.index(tokens[2]) + 1
    assert judge(prompt, stop, tokens[:end], "stop") == ""
    assert "follows the end" in judge(prompt, stop, tokens, "length")
    assert "nobody asked" not in judge(prompt, replace(sampling, logprobs=0), (), None)
