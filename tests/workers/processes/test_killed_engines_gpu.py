"""A replica on a GPU that is killed in the middle of its streams: they go on with the same tokens, and its weights have
stayed in the GPU's memory."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest
import torch
from test_killed_engines import failing_over

from workers.config import EngineConfig
from workers.processes.failover import FailoverEngine
from workers.protocol.messages import Request
from workers.protocol.plan import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SETTINGS = EngineConfig(
    model="demo",
    device="cuda",
    invariant=True,
    max_rows=4,
    token_budget=64,
    cache_pages=60,
    heartbeat_timeout_s=10.0,
)
"""In invariant mode no token depends on where a stream was cut."""


async def captured(told: list[str]) -> None:
    """Wait until an engine that began to serve with few graphs has told that all others are captured."""
    async with asyncio.timeout(60):
        while not any("s of serving" in line for line in told):
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("graphs", ["all", "few"])
async def test_streams_go_on_with_the_weights_that_stayed(graphs: str) -> None:
    settings = SETTINGS.model_copy(update={"graphs_at_start": graphs})
    halfway = asyncio.Event()

    async def read(made: FailoverEngine, name: str, number: int) -> list[int]:
        sampling = SamplingParams(300, temperature=0.7, seed=number)
        tokens: list[int] = []
        async for output in made.generate(Request(name, tuple(range(10 + number, 60 + number)), sampling)):
            tokens += output.tokens
            if len(tokens) > 40:
                halfway.set()
        return tokens

    async with failing_over(settings) as (made, engines):
        expected = await asyncio.gather(*(read(made, f"a{number}", number) for number in range(4)))
        if graphs == "few":  # what an engine has proven is inherited once that is all of it
            await captured(engines.told[0])
        halfway.clear()
        readers = [asyncio.create_task(read(made, f"b{number}", number)) for number in range(4)]
        await halfway.wait()
        assert engines.replica is not None
        pid = engines.replica.workers[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert await asyncio.wait_for(asyncio.gather(*readers), 400) == expected
        assert [sum("of weights were kept" in line for line in told) for told in engines.told] == [0, 1]
        assert engines.keeper is not None
        keeper = engines.keeper.pid
        assert made.selftest is not None
        assert made.selftest.inherited > 0
        again = engines.told[1]
        assert any("portions follow while it serves" in line for line in again)
        await captured(again)
        assert made.selftest.passed
    assert keeper is not None
    assert not psutil.pid_exists(keeper)
    print("seconds of the start and of the restart:", [f"{seconds:.1f}" for seconds in engines.seconds])
