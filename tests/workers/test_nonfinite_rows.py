"""Rows whose logits are no numbers, in one replica: they end alone, and nobody else's tokens change by a bit."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import VOCAB, write_tiny
from tests.workers.harness import Finished, InlineEngine
from workers.config import EngineConfig
from workers.drafters.mtp import Mtp
from workers.processes.launch import local_engine
from workers.protocol.front import EngineFault, RequestFailed
from workers.protocol.messages import Request
from workers.protocol.plan import SamplingParams
from workers.scheduler import Unsound

POISON = VOCAB - 1
"""The model's embedding of it is no number."""
BANNED = ((POISON, -100.0),)
Job = tuple[list[int], SamplingParams]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_poisoned(tmp_path_factory.mktemp("v3"))


def write_poisoned(folder: Path) -> Path:
    made = write_tiny(folder, "v3", seed=3, num_hidden_layers=2)
    tensors = load_file(made / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    return made


def settings(folder: Path, **changes: Any) -> EngineConfig:
    defaults = {
        "device": "cpu",
        "max_rows": 12,
        "token_budget": 120,
        "cache_pages": 100,
        "max_context": 300,
        "width": 3,
    }
    patient = {"heartbeat_timeout_s": 60.0}  # processes of a busy machine are silent at times
    return EngineConfig(model=str(folder), selftest=False, **{**defaults, **patient, **changes})


def prompts(count: int, longest: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(POISON) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def good_jobs() -> list[Job]:
    """Every other one begins with two pages that the others share, bad ones among them."""
    shared = prompts(1, 1, seed=1)[0] * 130
    return [
        (
            shared + prompt if index % 2 else prompt,
            SamplingParams(
                12, temperature=0.7 * (index % 3), seed=index, presence_penalty=index % 2, logit_bias=BANNED, logprobs=2
            ),
        )
        for index, prompt in enumerate(prompts(8, 60, seed=2))
    ]


def nonfinite_jobs() -> list[Job]:
    """Make jobs with the poison at the end, at the beginning, within the shared pages, and three times the same."""
    shared, [more] = good_jobs()[1][0][:130], prompts(1, 90, seed=3)
    same = [*more, *more, POISON, *more]
    return [
        (prompt, SamplingParams(9, temperature=0.5, seed=seed))
        for seed, prompt in enumerate(
            ([*shared, POISON], [POISON, *shared], [*shared[:70], POISON, *shared[:90]], same, same, same, [POISON])
        )
    ]


def serve(run: InlineEngine, jobs: list[Job]) -> list[Finished]:
    run.generate([prompt for prompt, _ in jobs], [params for _, params in jobs])
    return list(run.finished.values())[-len(jobs) :]


def mixed(good: list[Job], bad: list[Job]) -> tuple[list[Job], list[int]]:
    """Return both kinds in turns, and where the good ones are."""
    jobs: list[Job] = []
    places = []
    for index in range(max(len(good), len(bad))):
        jobs += bad[index : index + 1]
        if index < len(good):
            places.append(len(jobs))
            jobs.append(good[index])
    return jobs, places


def bits(record: Finished) -> list[Any]:
    return [record.finish, record.tokens, [entry for output in record.outputs for entry in output.logprobs]]


@pytest.mark.parametrize("width", [1, pytest.param(3, marks=pytest.mark.long)])
def test_everybody_else_goes_on_bit_for_bit(folder: Path, width: int) -> None:
    expected = serve(InlineEngine(settings(folder, width=width, invariant=True)), good_jobs())
    run = InlineEngine(settings(folder, width=width, invariant=True))
    jobs, places = mixed(good_jobs(), nonfinite_jobs())
    records = serve(run, jobs)
    assert [bits(records[place]) for place in places] == [bits(record) for record in expected]
    assert {record.finish for record in expected} == {"length"}
    ended = [record for place, record in enumerate(records) if place not in places]
    assert [(record.finish, record.tokens) for record in ended] == [("failed", [])] * len(nonfinite_jobs())
    stats = run.scheduler.stats()
    assert stats.bad_rows >= len(nonfinite_jobs())
    assert stats.pages_free == stats.pages_total
    # And once more, now that pages are cached, suspect and zeroed.
    assert [bits(record)[:2] for record in serve(run, good_jobs())] == [bits(record)[:2] for record in expected]


@pytest.mark.parametrize("width", [pytest.param(1, marks=pytest.mark.long), 3])
def test_outside_of_invariant_mode_tokens_stay_what_they_are(folder: Path, width: int) -> None:
    expected = serve(InlineEngine(settings(folder, width=width)), good_jobs())
    jobs, places = mixed(good_jobs(), nonfinite_jobs())
    records = serve(InlineEngine(settings(folder, width=width)), jobs)
    assert [records[place].tokens for place in places] == [record.tokens for record in expected]


@pytest.mark.parametrize("width", [pytest.param(1, marks=pytest.mark.long), 3])
def test_a_row_that_goes_bad_ends_with_what_it_had(folder: Path, width: int) -> None:
    """The row is made to say the poison: that token is sound, and none comes after it."""
    good = good_jobs()
    expected = [record.tokens for record in serve(InlineEngine(settings(folder, width=width)), good)]
    run = InlineEngine(settings(folder, width=width))
    for name, (prompt, params) in enumerate(good):
        run.add(str(name), prompt, params)
    run.add("bad", [1, 2, 3], SamplingParams(50, temperature=0.0, logit_bias=((POISON, 1e4),)))
    done = run.run()
    assert (done["bad"].finish, done["bad"].tokens) == ("failed", [POISON])
    assert "NaN" in done["bad"].outputs[-1].failed
    assert [done[str(name)].tokens for name in range(len(good))] == expected


@pytest.mark.parametrize("width", [1, pytest.param(3, marks=pytest.mark.long)])
def test_who_read_the_pages_of_a_nonfinite_row_is_computed_again(folder: Path, width: int) -> None:
    """The first of some equal beginnings is struck by memory that fails once, while the others read what it wrote."""
    [prompt] = prompts(1, 1, seed=5)
    jobs = [(prompt * 200 + [tail], SamplingParams(8, temperature=0.0, logit_bias=BANNED)) for tail in range(4)]
    expected = [record.tokens for record in serve(InlineEngine(settings(folder, width=width)), jobs)]
    run = InlineEngine(settings(folder, width=width, token_budget=70))
    for name, (tokens, params) in enumerate(jobs):
        run.add(str(name), tokens, params)
    assert run.step()
    [row] = run.plans[0].prefill
    page = run.plans[0].grants[0].pages[0]
    assert row.slot == run.plans[0].grants[0].slot
    for layer in run.runner.parts.cache.layers:
        layer[page, 7] = torch.nan
    done = run.run()
    assert done["0"].finish == "failed"
    assert [done[str(name)].tokens for name in range(1, 4)] == expected[1:]
    assert run.scheduler.stats().bad_rows > 1
    assert page in [page for plan in run.plans for page in plan.zero_fill]
    assert not any(layer[1:].isnan().any() for layer in run.runner.parts.cache.layers), "nobody has zeroed it"


def test_a_draft_layer_without_finite_numbers_costs_drafts_alone(folder: Path) -> None:
    """Drafts of such a layer are tokens, though bad ones: the answers are those without any."""
    expected = [record.tokens for record in serve(InlineEngine(settings(folder, width=1)), good_jobs())]
    run = InlineEngine(settings(folder, width=3))
    drafter = run.runner.parts.drafter
    assert isinstance(drafter, Mtp)
    drafter.embedding_norm_E.fill_(torch.nan)
    assert [record.tokens for record in serve(run, good_jobs())] == expected
    assert run.scheduler.stats().bad_rows == 0


def test_a_broken_model_ends_its_replica(folder: Path) -> None:
    run = InlineEngine(settings(folder))
    run.runner.parts.model.norm_E.fill_(torch.nan)
    run.add("any", [1, 2, 3], SamplingParams(4))
    with pytest.raises(Unsound, match=r"not even a single token by itself.*Check the weights"):
        run.run()
    assert run.finished["any"].tokens == []


async def collect(client: Any, name: str, prompt: list[int]) -> list[int]:
    request = Request(name, tuple(prompt), SamplingParams(5, temperature=0.0, logit_bias=BANNED))
    return [token async for output in client.generate(request) for token in output.tokens]


async def insist(client: Any) -> None:
    """Ask again and again, until the answer is more than that a request failed."""
    for number in range(1000):
        with suppress(RequestFailed):
            await collect(client, f"again {number}", [5, 6])


async def test_in_processes_of_their_own(folder: Path) -> None:
    """A client alone sends bad prompts: each ends with an error of its own, and good ones are served between them."""
    async with local_engine(settings(folder, tensor_parallel=2)) as client:
        for number in range(4):
            with pytest.raises(RequestFailed, match="NaN or infinite logits"):
                await collect(client, f"bad {number}", [5, POISON])
            assert len(await collect(client, f"good {number}", [5, 6])) == 5
        await client.health_check()
        assert client.fault is None


async def test_a_broken_model_is_the_first_cause(folder: Path, tmp_path: Path) -> None:
    broken = write_tiny(tmp_path, "v3", seed=3, num_hidden_layers=1)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"].fill_(torch.nan)
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    async with local_engine(settings(broken)) as client:
        with pytest.raises((EngineFault, RequestFailed)):
            await collect(client, "first", [5, 6])
        with pytest.raises(EngineFault, match=r"^the model gives no finite numbers"):
            await insist(client)


def test_what_a_prefix_hit_does_not_read_it_does_not_vouch_for(folder: Path) -> None:
    """A bad token at the beginning of the second page spoils the entry before it, which is in the first page, for they
    are in one chunk. Who finds that page computes this entry anew, for the draft layer, and reads it later."""
    [shared] = prompts(1, 1, seed=6)
    bad, good = [*shared * 64, POISON], [*shared * 64, 7, 8, 9]
    params = SamplingParams(6, temperature=0.0, logit_bias=BANNED)
    [expected] = serve(InlineEngine(settings(folder)), [(good, params)])
    run = InlineEngine(settings(folder, token_budget=63))
    first, second = serve(run, [(bad, params), (good, params)])
    assert (first.finish, second.tokens) == ("failed", expected.tokens)
    assert run.plans[2].prefill[0].write_from == 64
