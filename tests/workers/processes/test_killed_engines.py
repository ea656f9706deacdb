"""A replica of real processes that are killed in the middle of their streams, and started again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_replica_processes import config

from tests.tiny_models import write_tiny
from tests.workers.test_engine import engine, random_prompts
from workers.config import EngineConfig
from workers.memory.keeper import WeightKeeper
from workers.processes.client import EngineClient
from workers.processes.failover import FailoverEngine
from workers.processes.launch import LocalReplica
from workers.protocol.messages import Request
from workers.protocol.plan import SamplingParams

STREAMS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("v3"), "v3", seed=3)


class Engines:
    """Starts one set of processes after the other, as a front does it under Ray."""

    def __init__(self, settings: EngineConfig) -> None:
        self._settings = settings
        self.keeper = WeightKeeper() if settings.keep_weights else None
        self.told: list[list[str]] = []
        """What the ranks of each set told."""
        self.seconds: list[float] = []
        """What each took to start."""
        self._watcher: asyncio.Task[None] | None = None
        self.replica: LocalReplica | None = None

    async def start(self) -> EngineClient:
        self.end_processes()
        begin = time.perf_counter()
        keeper = None if self.keeper is None else self.keeper.path()
        waiting = STREAMS if self.told else 0 if self._settings.graphs_at_start == "few" else None
        replica = self.replica = LocalReplica(self._settings, keeper)
        client = EngineClient(self._settings, await asyncio.to_thread(replica.connect, waiting), "tiny")
        self.told.append([])
        client.on_progress.append(self.told[-1].append)
        self._watcher = asyncio.create_task(self._watch(replica, client))
        await client.ready(300)
        self.seconds.append(time.perf_counter() - begin)
        return client

    @staticmethod
    async def _watch(replica: LocalReplica, client: EngineClient) -> None:
        while not (dead := replica.dead()):
            await asyncio.sleep(0.05)
        client.fail(dead)

    def end_processes(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        if self.replica is not None:
            self.replica.kill()

    def end(self) -> None:
        self.end_processes()
        if self.keeper is not None:
            self.keeper.close()


@asynccontextmanager
async def failing_over(settings: EngineConfig) -> AsyncIterator[tuple[FailoverEngine, Engines]]:
    engines = Engines(settings)
    try:
        made = FailoverEngine(await engines.start(), engines.start, 300.0)
        yield made, engines
        await made.close()
    finally:
        engines.end()


SAMPLINGS = [
    SamplingParams(60, temperature=0.0),
    SamplingParams(60, temperature=1.0, seed=7, top_p=0.9, frequency_penalty=0.4, repetition_penalty=1.2),
    SamplingParams(60, temperature=1.2, seed=8, top_k=20, presence_penalty=0.5, min_tokens=50, stop_ids=(3, 4, 5)),
    SamplingParams(60, temperature=0.8, seed=9, logprobs=2, prompt_logprobs=0),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("victim", "settings"),
    [
        ("rank 0", {}),
        pytest.param("rank 0", {"keep_weights": False}, marks=pytest.mark.soak),
        pytest.param("rank 1", {"tensor_parallel": 2}, marks=pytest.mark.soak),
        pytest.param("scheduler", {}, marks=pytest.mark.soak),
    ],
)
async def test_streams_of_a_killed_engine_get_the_tokens_of_a_run_without_a_death(
    folder: Path, victim: str, settings: dict[str, Any]
) -> None:
    prompts = random_prompts(4, 120, seed=77)
    expected = engine(folder, width=1).generate(prompts, SAMPLINGS)
    killing = asyncio.Event()

    async def read(made: FailoverEngine, number: int) -> list[Any]:
        request = Request(f"r{number}", tuple(prompts[number]), SAMPLINGS[number])
        outputs = []
        async for output in made.generate(request):
            outputs.append(output)
            if sum(len(one.tokens) for one in outputs) > 5:
                killing.set()
        return outputs

    async with failing_over(config(folder, **settings)) as (made, engines):
        readers = [asyncio.create_task(read(made, number)) for number in range(4)]
        await killing.wait()
        assert engines.replica is not None
        [pid] = [process.pid for process in engines.replica.processes if process.name == victim]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        found = await asyncio.wait_for(asyncio.gather(*readers), 400)
        assert made.fault is None
        assert made.streams == 0
        kept = [sum("of weights were kept" in line for line in told) for told in engines.told]
        assert kept == [0, settings.get("tensor_parallel", 1) if settings.get("keep_weights", True) else 0]
        keeper = None if engines.keeper is None else engines.keeper.pid
    assert [[token for output in one for token in output.tokens] for one in found] == expected
    assert sum(len(output.logprobs) for output in found[3]) == 60
    assert [output.prompt is not None for output in found[3]] == [True] + [False] * (len(found[3]) - 1)
    assert max(process.exitcode is None for process in engines.replica.processes) is False
    assert keeper is None or not psutil.pid_exists(keeper)
