"""A replica with a small cache under clients of every bad habit at once: nobody else notices, and nothing is left."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import psutil
import pytest
from served_application import Server
from timed_client import client, until

from bench.hostile_clients import Habits

pytestmark = [pytest.mark.cluster, pytest.mark.alone, pytest.mark.soak]

# Eight rows of which each may need half of the pages: some are preempted, and soon there are too many requests.
CONFIG = {
    "engine": {
        "model": "demo",
        "tensor_parallel": 1,
        "max_rows": 8,
        "token_budget": 96,
        "cache_pages": 16,
        "queue_limit": 8,
    },
    "port": 0,
    "ingress": "direct",
    "drain": {"deregister_s": 0.5, "timeout_s": 60},
    "dashboard": False,
}
SECONDS = 3.0
MOST_SECONDS = 60.0
CLIENTS = 16
ALWAYS_THE_SAME = (
    {"prompt": "def read_lines(path):", "max_tokens": 24, "temperature": 0},
    {"prompt": "import os\n", "max_tokens": 24, "temperature": 0.7, "seed": 5, "n": 2},
)


@pytest.fixture(scope="module")
def server(launch) -> Server:
    return launch(CONFIG).wait()


async def figures(http: httpx.AsyncClient, url: str) -> dict[str, float]:
    text = (await http.get(f"{url}/metrics")).text
    return {name: float(value) for name, value in re.findall(r"^latentserve_(\w+) (\S+)$", text, re.M)}


async def test_nobody_notices_and_nothing_is_left(server: Server) -> None:
    habits = Habits(server.url)
    ways: list[Callable[[], Awaitable[None]]] = [habits.reads_to_the_end] * 4 + [habits.leaves] * 4
    ways += [habits.leaves_in_the_middle_of_its_body, habits.stops_reading_for_a_while, habits.talks_nonsense]
    front = psutil.Process(server.pids("ray::ServeReplica:latentserve:engine")[0])
    held = [front, *front.children()]  # its watchdog

    async def ask(http: httpx.AsyncClient, body: dict) -> list[str]:
        request = {"model": "demo", "priority": -1, **body}
        while (answer := await http.post(f"{server.url}/v1/completions", json=request)).status_code == 429:
            await asyncio.sleep(0.1)
        return [choice["text"] for choice in answer.json()["choices"]]

    async with client() as http:
        said = [await ask(http, body) for body in ALWAYS_THE_SAME]
        await asyncio.sleep(0.2)
        open_before = [process.num_fds() for process in held]
        begun = time.monotonic()

        def enough() -> bool:
            """Tell whether much was served and some was refused, which a busy machine takes longer for."""
            spent = time.monotonic() - begun
            assert spent < MOST_SECONDS, habits.seen
            return spent > SECONDS and habits.seen["200"] > 10 and habits.seen["429"] > 0

        async def come_and_go(number: int) -> None:
            turn = number
            while not enough():
                await ways[turn % len(ways)]()
                turn += 1

        async def ask_on() -> None:
            while not enough():
                assert [await ask(http, body) for body in ALWAYS_THE_SAME] == said

        async with asyncio.TaskGroup() as group:
            group.create_task(habits.needs_more_pages_than_there_are())
            for number in range(CLIENTS):
                group.create_task(come_and_go(number))
            group.create_task(ask_on())

        async def idle() -> dict[str, float]:
            now = await figures(http, server.url)
            busy = [now[name] for name in ("requests_in_flight", "engine_running", "engine_waiting")]
            return now if not any(busy) and now["engine_pages_free"] == now["engine_pages_total"] else {}

        now = await until(idle, 60.0)
        assert now["engine_preemptions_total"] > 0
        assert now["engine_cached_tokens_total"] > 0
        assert [await ask(http, body) for body in ALWAYS_THE_SAME] == said

        async def closed() -> bool:
            return [process.num_fds() for process in held] == open_before

        await until(closed, 60.0)
    logs = Path(server.find(r"logs in (\S+)"))
    for file in logs.glob("worker-*.err"):
        assert not re.search(r"Traceback|never retrieved|never awaited", file.read_text()), file
