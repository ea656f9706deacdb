"""A replica on a GPU whose rank is killed while a second engine stands by: it replays its graphs over the memory of the
dead one's cache, and streams get the same tokens."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from itertools import pairwise

import pytest
import torch
from test_promoted_engines import front

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
    heartbeat_timeout_s=10.0,
)
"""In invariant mode no token depends on where a stream was cut. The cache is as large as memory allows."""


async def test_streams_go_on_at_the_engine_that_stood_by() -> None:
    halfway = asyncio.Event()
    arrived: list[float] = []

    async def read(made: FailoverEngine, name: str, number: int) -> list[int]:
        sampling = SamplingParams(300, temperature=0.7, seed=number)
        tokens: list[int] = []
        async for output in made.generate(Request(name, tuple(range(10 + number, 130 + number)), sampling)):
            tokens += output.tokens
            arrived.append(time.perf_counter())
            if len(tokens) > 40:
                halfway.set()
        return tokens

    async with front(SETTINGS) as (made, local):
        expected = await asyncio.gather(*(read(made, f"a{number}", number) for number in range(4)))
        pages = made.stats.pages_total
        for death in range(2):
            await local.stands_by()
            halfway.clear()
            readers = [asyncio.create_task(read(made, f"b{death}{number}", number)) for number in range(4)]
            await halfway.wait()
            killed = time.perf_counter()
            os.kill(local.current.pid("rank 0"), signal.SIGKILL)
            assert await asyncio.wait_for(asyncio.gather(*readers), 400) == expected
            later = [killed, *(moment for moment in arrived if moment > killed)]
            print(f"longest wait {max(b - a for a, b in pairwise(later)):.2f} s")
            assert local.current is local.made[death]
            assert made.selftest is not None
            assert made.selftest.passed
        assert (local.starts, made.stats.pages_total) == (1, pages)
