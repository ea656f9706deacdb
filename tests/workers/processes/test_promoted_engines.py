"""Replicas of real processes with an engine that stands by, which takes the place of the one that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from test_replica_processes import config

from tests.support.local_processes import LocalFront, LocalProcesses
from tests.tiny_models import write_tiny
from tests.workers.test_engine import engine, random_prompts
from workers.config import EngineConfig
from workers.memory.keeper import KeeperClient
from workers.processes import launch
from workers.processes.failover import FailoverEngine
from workers.protocol.grammar import Grammar
from workers.protocol.messages import Request
from workers.protocol.plan import SamplingParams, StepPlan
from workers.rank.runner import Launched, Runner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("v3"), "v3", seed=3)


@asynccontextmanager
async def front(settings: EngineConfig, **more: Any) -> AsyncIterator[tuple[FailoverEngine, LocalFront]]:
    made = LocalFront(settings, **more)
    try:
        yield await made.start(), made
    finally:
        await made.end()


SAMPLINGS = [
    SamplingParams(60, temperature=0.0),
    SamplingParams(60, temperature=1.0, seed=7, top_p=0.9, frequency_penalty=0.4, repetition_penalty=1.2),
    SamplingParams(60, temperature=1.2, seed=8, top_k=20, presence_penalty=0.5, min_tokens=50, stop_ids=(3, 4, 5)),
    SamplingParams(60, temperature=0.8, seed=9, logprobs=2, prompt_logprobs=0),
]


async def read(made: FailoverEngine, name: str, prompt: list[int], sampling: SamplingParams, at: Any = None) -> Any:
    """Outputs of one request. `at` is called with the number of tokens so far."""
    outputs, tokens = [], 0
    async for output in made.generate(Request(name, tuple(prompt), sampling)):
        assert not output.tokens or output.at == tokens  # nothing is lost, and nothing comes twice
        outputs.append(output)
        tokens += len(output.tokens)
        if at is not None:
            at(tokens)
    return outputs


def tokens_of(outputs: Any) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def kill_at(token: int, made: LocalFront, victim: str) -> Callable[[int], None]:
    """Kill a process of the engine that serves, once, when a stream has so many tokens."""
    left = [True]

    def at(tokens: int) -> None:
        if tokens >= token and left:
            left.clear()
            os.kill(made.current.pid(victim), signal.SIGKILL)

    return at


@pytest.mark.long
@pytest.mark.parametrize(
    ("victim", "settings"),
    [
        ("rank 0", {}),
        pytest.param("rank 1", {"tensor_parallel": 2}, marks=pytest.mark.soak),
        pytest.param("rank 1", {"tensor_parallel": 2, "cache_shards": 2}, marks=pytest.mark.soak),
        pytest.param("rank 1", {"tensor_parallel": 2, "cache_shards": 2, "invariant": True}, marks=pytest.mark.soak),
        pytest.param("scheduler", {"prefix_cache": False}, marks=pytest.mark.soak),
    ],
)
async def test_streams_go_on_at_the_engine_that_stood_by(folder: Path, victim: str, settings: dict[str, Any]) -> None:
    """Twice, as another one stands by then. Their prompts were cached before: nobody may take that for granted in
    memory that is empty now."""
    prompts = random_prompts(4, 200, seed=77)
    prompts[0] = (prompts[0] * 200)[:200]  # of which three pages are cached
    expected = engine(folder, width=1).generate(prompts, SAMPLINGS)
    async with front(config(folder, **settings)) as (made, local):
        first = local.current
        for death in range(2):
            await local.stands_by()
            for warm in range(2):  # its pages are in the prefix cache of the engine that serves
                warmed = await read(made, f"w{death}{warm}", prompts[0], SamplingParams(2, temperature=0.0))
            assert warmed[0].cached_tokens == (192 if settings.get("prefix_cache", True) else 0)
            at = kill_at(5 + 20 * death, local, victim)
            jobs = [
                read(made, f"r{death}{number}", prompts[number], SAMPLINGS[number], at if number == 0 else None)
                for number in range(4)
            ]
            found = await asyncio.wait_for(asyncio.gather(*jobs), 120)
            assert [tokens_of(outputs) for outputs in found] == expected, death
            assert sum(len(output.logprobs) for output in found[3]) == 60
            assert [output.prompt is not None for output in found[3]] == [True] + [False] * (len(found[3]) - 1)
            assert local.current is local.made[death]
            assert made.stats.pages_total == 199 * settings.get("cache_shards", 1)
            assert made.info.max_context == 512  # the model's, and more than fits the pages of one that stands by
        assert local.starts == 1  # no stream has waited for a start
        assert local.current is not first
        await local.stands_by()
        assert len(local.made) == 3  # never two at once
        ended = [processes for processes in (first, *local.made) if await processes.gone(0)]
        assert ended == [first, local.made[0]]
        assert sum("of weights were kept" in line for line in local.told) == 3 * settings.get("tensor_parallel", 1)


MARK = 666
"""Seed of a request with which a step fails."""
worker_main = launch._worker_main


def failing_main(settings: EngineConfig, rank: int, *given: Any) -> None:
    """A rank's process; the last rank of the engine that serves first fails ten steps behind the marked request."""
    launch_step, left = Runner.launch, [10]

    def fail(runner: Runner, plan: StepPlan) -> Launched:
        marked = any(admission.sampling.seed == MARK for admission in plan.admissions)
        left[0] -= marked or left[0] < 10
        if not left[0]:
            raise ValueError("the cause")
        return launch_step(runner, plan)

    if "primary" in given and rank == settings.tensor_parallel - 1:
        setattr(Runner, "launch", fail)  # noqa: B010
    worker_main(settings, rank, *given)


SCHEMA = '{"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}, "minItems": 9}}}'


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.soak)])
async def test_streams_with_grammars_go_on_after_an_error_in_a_step(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setattr(launch, "_worker_main", failing_main)
    demo = EngineConfig(
        model="demo", device="cpu", invariant=True, max_rows=8, token_budget=128, cache_pages=80, tensor_parallel=ranks
    )
    samplings = [
        SamplingParams(50, temperature=1.0, seed=11, stop_ids=(1,), grammar=Grammar("json_schema", SCHEMA)),
        SamplingParams(50, temperature=0.7, seed=12, stop_ids=(1,), grammar=Grammar("regex", "([a-z]{3} )+")),
        SamplingParams(50, temperature=1.0, seed=13, top_p=0.8, presence_penalty=0.5),
    ]

    async def all_of(made: FailoverEngine, kind: str) -> list[list[int]]:
        jobs = [read(made, f"{kind}{each.seed}", [*range(20, 90)], each) for each in samplings]
        return [tokens_of(outputs) for outputs in await asyncio.wait_for(asyncio.gather(*jobs), 120)]

    async with front(demo) as (made, local):
        expected = await all_of(made, "a")
        await local.stands_by()
        losses: list[str] = []
        made.on_loss.append(losses.append)
        marked = asyncio.create_task(read(made, "m", [5, 6], SamplingParams(60, temperature=0.0, seed=MARK)))
        assert await all_of(made, "b") == expected
        assert len(tokens_of(await asyncio.wait_for(marked, 120))) > 0
        assert losses == [f"rank {ranks - 1}: ValueError: the cause"]
        assert (local.current, local.starts) == (local.made[0], 1)


@pytest.mark.long
async def test_a_second_death_before_another_stands_by_is_a_start(folder: Path) -> None:
    prompts = random_prompts(1, 100, seed=5)
    [expected] = engine(folder, width=1).generate(prompts, SAMPLINGS[1:2])
    async with front(config(folder)) as (made, local):
        await local.stands_by()

        def killed_while_it_starts(processes: LocalProcesses) -> None:
            os.kill(local.current.pid("rank 0"), signal.SIGKILL)
            local.change = lambda processes: None

        local.change = killed_while_it_starts
        found = await asyncio.wait_for(read(made, "a", prompts[0], SAMPLINGS[1], kill_at(9, local, "rank 0")), 200)
        assert tokens_of(found) == expected
        if local.starts == 1:  # the stream was over before the second death
            await asyncio.wait_for(read(made, "b", prompts[0], SAMPLINGS[1]), 200)
        assert local.starts == 2
        assert await local.made[1].gone(0)
        await local.stands_by()
        assert len(local.made) == 3


@pytest.mark.long
async def test_one_that_dies_or_fails_a_rehearsal_is_replaced_and_harms_nobody(folder: Path) -> None:
    prompts = random_prompts(1, 60, seed=6)
    [expected] = engine(folder, width=1).generate(prompts, SAMPLINGS[:1])
    async with front(config(folder, heartbeat_timeout_s=4.0), rehearsal_s=0.3) as (made, local):
        await local.stands_by()
        serving = local.current
        os.kill(local.made[0].pid("rank 0"), signal.SIGKILL)
        found = await read(made, "a", prompts[0], SAMPLINGS[0])
        await asyncio.wait_for(until(lambda: len(local.made) == 2), 60)
        await local.stands_by()
        os.kill(local.made[1].pid("rank 0"), signal.SIGSTOP)  # it is silent
        await asyncio.wait_for(until(lambda: len(local.made) == 3), 60)
        await local.stands_by()
        assert tokens_of(found) == tokens_of(await read(made, "b", prompts[0], SAMPLINGS[0])) == expected
        assert (local.current, local.starts, made.down) == (serving, 1, "")
        assert any("no engine stands by: rank 0 was ended by SIGKILL" in line for line in local.told)


@pytest.mark.long
async def test_without_the_memory_that_it_would_share_none_stands_by_or_takes_over(folder: Path) -> None:
    prompts = random_prompts(1, 60, seed=6)
    [expected] = engine(folder, width=1).generate(prompts, SAMPLINGS[:1])
    async with front(config(folder)) as (made, local):
        await local.stands_by()
        dropped = KeeperClient(local.keeper.path()).drop()
        assert set(dropped) == {"rank 0, model", "rank 0, cache"}
        found = await asyncio.wait_for(read(made, "a", prompts[0], SAMPLINGS[0], kill_at(9, local, "rank 0")), 200)
        assert tokens_of(found) == expected
        assert local.starts == 2  # the ordinary way: weights are loaded
        assert any("the memory of its cache is not kept any more" in line for line in local.told)
        await local.stands_by()
        KeeperClient(local.keeper.path()).drop()
        os.kill(local.made[1].pid("scheduler"), signal.SIGKILL)
        wanted = "no engine stands by: the weight keeper has nothing of rank 0, cache; none will before the next engine"
        await asyncio.wait_for(until(lambda: any(wanted in line for line in local.told)), 60)
        assert len(local.made) == 2
        assert not made.down


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.02)
