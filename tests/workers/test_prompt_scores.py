"""Log-probabilities of prompts: transformers' own, however a prompt is fed, in memory that does not grow with it."""

from __future__ import annotations

import asyncio
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import VOCAB, write_tiny
from tests.workers.harness import InlineEngine
from tests.workers.models.oracle import load_oracle, oracle_logits
from workers.config import EngineConfig
from workers.models.model import Model
from workers.processes.launch import local_engine
from workers.protocol.messages import Request, RequestOutput
from workers.protocol.plan import SamplingParams
from workers.protocol.scores import Scores
from workers.step import mixed

TOP = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("v3"), "v3", seed=3)


def settings(folder: Path, **changes: Any) -> EngineConfig:
    defaults = {"width": 3, "max_rows": 8, "token_budget": 96, "cache_pages": 200, "device": "cpu", "selftest": False}
    patient = {"heartbeat_timeout_s": 60.0}  # processes of a busy machine are silent at times
    return EngineConfig(model=str(folder), **{**defaults, **patient, **changes})


def prompt_of(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]


def asking(top: int = TOP, **sampling: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 5, "temperature": 0.0, "prompt_logprobs": top, **sampling})


@cache
def expected(folder: Path, prompt: tuple[int, ...]) -> torch.Tensor:
    """[places, V]"""
    return torch.log_softmax(oracle_logits(load_oracle(folder), list(prompt)).float(), -1)


def scored(outputs: list[RequestOutput]) -> Scores:
    """The one that came, with the first output."""
    assert outputs[0].prompt is not None
    assert all(output.prompt is None for output in outputs[1:])
    assert outputs[0].cached_tokens == 0
    return outputs[0].prompt


def check(folder: Path, prompt: list[int], found: Scores, top: int = TOP) -> None:
    entries, logprob_PV = list(found.entries()), expected(folder, tuple(prompt))
    assert len(entries) == len(prompt) - 1
    for (chosen, rank, ids, values), logprob_V, token in zip(entries, logprob_PV, prompt[1:], strict=False):
        best = logprob_V.topk(top)
        assert chosen == pytest.approx(logprob_V[token].item(), abs=1e-4)
        assert list(values) == pytest.approx(best.values.tolist(), abs=1e-4)
        assert [logprob_V[one].item() for one in ids] == pytest.approx(best.values.tolist(), abs=1e-4)
        above = [int((logprob_V > logprob_V[token] + slack).sum()) for slack in (1e-4, -1e-4)]
        assert above[0] + 1 <= rank <= above[1] + 1


def serve(run: InlineEngine, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[RequestOutput]]:
    run.generate(prompts, params)
    return [record.outputs for record in list(run.finished.values())[-len(prompts) :]]


@pytest.mark.parametrize(("width", "budget"), [(1, 30), (3, 33), (3, 400)])
def test_they_are_those_of_transformers(folder: Path, width: int, budget: int) -> None:
    """Prompts come in chunks of any size, beside rows that decode, next to others that ask for more, less or
    nothing."""
    run = InlineEngine(settings(folder, width=width, token_budget=budget, max_context=400))
    lengths, tops = (1, 2, 64, 65, 150, 130), (0, 1, TOP, -1, TOP, 0)
    prompts = [prompt_of(count, seed) for seed, count in enumerate(lengths)]
    # Twice: the second time nearly all of the prompts is cached.
    for _ in range(2):
        for prompt, top, outputs in zip(prompts, tops, serve(run, prompts, [asking(top) for top in tops]), strict=True):
            if top < 0:
                assert all(output.prompt is None for output in outputs)
            else:
                check(folder, prompt, scored(outputs), top)
    assert run.scheduler.stats().step_seconds["mixed"].count > 0
    assert run.scheduler.stats().cached_tokens == 64, "of the request alone that did not ask"


def test_choices_and_samples_change_nothing(folder: Path) -> None:
    prompt, run = prompt_of(70, 5), InlineEngine(settings(folder))
    params = [asking(temperature=1.0, seed=seed, logit_bias=((7, 5.0),), repetition_penalty=1.3) for seed in range(4)]
    for outputs in serve(run, [prompt] * 4, params):
        check(folder, prompt, scored(outputs))


@pytest.mark.parametrize("drafter", ["ngram"])
def test_with_a_drafter_without_a_pass_of_its_own(folder: Path, drafter: str) -> None:
    """Then the target's last segment runs for those tokens alone whose hidden states are wanted."""
    prompt, run = prompt_of(150, 6), InlineEngine(settings(folder, drafter=drafter, token_budget=90))
    [outputs] = serve(run, [prompt], [asking()])
    check(folder, prompt, scored(outputs))


@pytest.mark.parametrize("width", [1, 3])
def test_logits_are_computed_in_pieces_of_a_bounded_size(
    folder: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, sizes, honest = prompt_of(300, 7), [], Model.logits

    def noted(model: Model, hidden_NE: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.append(len(hidden_NE))
        return honest(model, hidden_NE, *rest)

    monkeypatch.setattr(Model, "logits", noted)
    monkeypatch.setattr(mixed, "LEAST_AT_ONCE", 16)
    run = InlineEngine(settings(folder, width=width, max_rows=3, token_budget=400))
    sizes.clear()
    [outputs] = serve(run, [prompt], [asking()])
    assert max(sizes) == 16
    assert sizes.count(16) == 19
    check(folder, prompt, scored(outputs))


def test_who_asks_for_nothing_pays_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = InlineEngine(settings(folder))
    serve(run, [prompt_of(100, 8)], [asking(-1)])
    assert all(not plan.layout.score_tokens(plan.prefill) for plan in run.plans)


@pytest.mark.parametrize("kind", ["v3-yarn", pytest.param("glm5", marks=pytest.mark.long)])
def test_in_invariant_mode_no_bit_depends_on_chunks_widths_and_neighbours(kind: str, tmp_path: Path) -> None:
    folder, prompts = write_tiny(tmp_path, kind, seed=3), [prompt_of(count, count) for count in (150, 40, 90)]

    def bits(width: int, budget: int, wanted: list[list[int]]) -> list[Scores]:
        config = settings(folder, width=width, token_budget=budget, max_context=400, invariant=True)
        return [scored(outputs) for outputs in serve(InlineEngine(config), wanted, [asking()] * len(wanted))]

    alone = [bits(1, 400, [prompt])[0] for prompt in prompts]
    assert bits(3, 40, prompts[::-1]) == alone[::-1]
    assert bits(2, 96, prompts) == alone


@pytest.mark.long
async def test_two_ranks(folder: Path) -> None:
    """The ranks have processes of their own; what comes is packed all the way."""
    prompts = [prompt_of(count, count) for count in (1, 60, 140)]

    async def ask(client: Any, prompt: list[int]) -> list[RequestOutput]:
        return [output async for output in client.generate(Request(f"r{len(prompt)}", tuple(prompt), asking()))]

    async with local_engine(settings(folder, tensor_parallel=2)) as client:
        answers = await asyncio.gather(*(ask(client, prompt) for prompt in prompts))
    for prompt, outputs in zip(prompts, answers, strict=True):
        check(folder, prompt, scored(outputs))


def test_the_parts_of_a_prompt_are_joined_in_their_order() -> None:
    one, two = (Scores(1, bytes(4) * n, bytes(4) * n, bytes(4) * n, bytes(4) * n) for n in (2, 3))
    assert Scores.joined([one, two]).count == 5
    assert len(list(Scores.joined([one, two]).entries())) == 5
    assert Scores.joined([]).count == 0
