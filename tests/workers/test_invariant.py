"""Invariant mode: a request's logits are bitwise the same alone, in any batch, mixed or not, at any width.

Logprobs of the chosen and of the most probable tokens stand for the logits: they are compared bit for bit.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import VOCAB, write_tiny
from tests.workers.harness import InlineEngine
from workers.config import DEMO_MODEL, EngineConfig
from workers.protocol.plan import SamplingParams, TopLogprobs

KINDS = ["v3-yarn", "v2-no-q-lora", "demo"]
Outcome = tuple[list[int], list[TopLogprobs]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    tiny = {kind: write_tiny(tmp_path_factory.mktemp(kind), kind, seed=3) for kind in KINDS[:-1]}
    return {**tiny, "demo": DEMO_MODEL}


def engine(folder: Path, **settings: Any) -> InlineEngine:
    defaults = {"width": 3, "max_rows": 8, "token_budget": 96, "cache_pages": 60, "max_context": 400, "selftest": False}
    return InlineEngine(EngineConfig(model=str(folder), device="cpu", invariant=True, **{**defaults, **settings}))


def generate(run: InlineEngine, jobs: list[tuple[list[int], SamplingParams]]) -> list[Outcome]:
    run.generate([prompt for prompt, _ in jobs], [params for _, params in jobs])
    records = list(run.finished.values())[-len(jobs) :]
    return [(r.tokens, [entry for output in r.outputs for entry in output.logprobs]) for r in records]


@cache
def jobs(kind: str) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of up to three pages, some with a common beginning of two; greedy and sampled."""
    rng = random.Random(kind)
    vocab = 4000 if kind == "demo" else VOCAB
    shared = [rng.randrange(10, vocab) for _ in range(130)]
    prompts = [[rng.randrange(10, vocab) for _ in range(count)] for count in (1, 63, 90, 140)]
    prompts += [shared + prompt[:9] for prompt in prompts[1:3]]
    return [
        (prompt, SamplingParams(10 + index, temperature=0.8 * (index % 2), seed=index, logprobs=3))
        for index, prompt in enumerate(prompts)
    ]


@cache
def alone(kind: str, folder: Path) -> list[Outcome]:
    """Every job in an engine that has nothing else to do, without drafts."""
    run = engine(folder, width=1, prefix_cache=False, token_budget=400)
    outcomes = [generate(run, [job])[0] for job in jobs(kind)]
    assert run.scheduler.stats().step_seconds["mixed"].count == 0
    return outcomes


QUICK = (("v3-yarn", 2), ("v2-no-q-lora", 4))


@pytest.mark.parametrize(
    ("kind", "width", "token_budget"),
    [
        pytest.param(kind, width, budget, marks=() if (kind, width) in QUICK else pytest.mark.long)
        for kind in KINDS
        for width, budget in [(1, 400), (2, 40), (3, 96), (4, 33)]
    ],
)
def test_a_request_in_any_batch_is_the_request_alone(
    kind: str, width: int, token_budget: int, folders: dict[str, Path]
) -> None:
    run = engine(folders[kind], width=width, token_budget=token_budget)
    order = random.Random(width).sample(range(len(jobs(kind))), len(jobs(kind)))
    outcomes = generate(run, [jobs(kind)[index] for index in order])
    assert run.scheduler.stats().step_seconds["mixed"].count > 0
    for index, outcome in zip(order, outcomes, strict=True):
        assert outcome == alone(kind, folders[kind])[index], f"request {index}"


@pytest.mark.parametrize(
    "kind",
    ["glm5", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("hyv4", "axk2", "axk1", "mistral4"))],
)
def test_families_that_have_more_than_others_are_the_same_in_any_batch(kind: str, tmp_path: Path) -> None:
    """A selection, sinks, several residual streams, gates, a norm of experts, queries scaled by their position."""
    folder, own = write_tiny(tmp_path, kind, seed=3), jobs(kind)[1:4]
    alone = engine(folder, width=1, prefix_cache=False, token_budget=400)
    single = [generate(alone, [job])[0] for job in own]
    drafter = "auto" if kind in ("glm5", "hyv4") else "ngram"
    crowded = engine(folder, width=4, token_budget=33, drafter=drafter)
    assert generate(crowded, own[::-1]) == single[::-1]
    assert crowded.scheduler.stats().step_seconds["mixed"].count > 0


@pytest.mark.parametrize(
    "kind", [pytest.param("v3-yarn", marks=pytest.mark.long), pytest.param("demo", marks=pytest.mark.soak)]
)
def test_preemptions_and_prefix_hits_on_generated_pages_change_no_bit(kind: str, folders: dict[str, Path]) -> None:
    params = SamplingParams(70, temperature=0.0, logprobs=3)
    long = [(prompt[-45:], params) for prompt, _ in jobs(kind)[:4]]
    crowded = engine(folders[kind], max_context=200, cache_pages=6)
    outcomes = generate(crowded, long)
    assert crowded.scheduler.stats().preemptions > 0
    roomy = engine(folders[kind], width=2)
    assert [generate(roomy, [job])[0] for job in long] == outcomes
    # What was generated comes back as a prompt: its pages are found, and the answer goes on as if never interrupted.
    before = roomy.scheduler.stats().cached_tokens
    for (prompt, _), (tokens, logprobs) in zip(long, outcomes, strict=True):
        rest = SamplingParams(5, temperature=0.0, logprobs=3)
        assert generate(roomy, [(prompt + tokens[:65], rest)]) == [(tokens[65:], logprobs[65:])]
    assert roomy.scheduler.stats().cached_tokens - before >= 63 * len(long)


@pytest.mark.long
def test_an_fp8_cache_changes_no_bit_either(folders: dict[str, Path]) -> None:
    """Bits are equal in other chunks and batches, and on cached pages, which the requests find that have a beginning in
    common."""
    kind, fp8 = "v3-yarn", {"kv_cache_dtype": "fp8"}
    single = [
        generate(engine(folders[kind], width=1, prefix_cache=False, token_budget=400, **fp8), [job])[0]
        for job in jobs(kind)
    ]
    assert single != alone(kind, folders[kind])
    crowded, cold = engine(folders[kind], width=3, **fp8), engine(folders[kind], width=2, token_budget=40, **fp8)
    assert generate(crowded, jobs(kind)) == single
    assert generate(cold, jobs(kind)[::-1]) == single[::-1]
    before = crowded.scheduler.stats().cached_tokens
    assert generate(crowded, jobs(kind)) == single
    assert crowded.scheduler.stats().cached_tokens > before + 128


def test_the_self_test_passes(folders: dict[str, Path]) -> None:
    assert engine(folders["demo"], selftest=True, max_rows=2).replica.selftest is not None


@pytest.mark.parametrize("ranks", [3, 6, 16])
def test_numbers_of_ranks_without_a_tree_are_refused(ranks: int) -> None:
    with pytest.raises(ValueError, match=f"tensor_parallel 1, 2, 4 and 8, not for {ranks}"):
        EngineConfig(model="demo", invariant=True, tensor_parallel=ranks)
