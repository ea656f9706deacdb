"""One replica whose scheduler and ranks are killed: streams wait for those that take their places, and go on."""

import asyncio
import os
import signal

import httpx
import pytest
from served_application import Server, wait_gone
from timed_client import begin, client, until

pytestmark = [pytest.mark.cluster, pytest.mark.alone, pytest.mark.long, pytest.mark.soak]

CONFIG = {
    "engine": {"model": "demo", "max_rows": 16, "token_budget": 512},
    "port": 0,
    "dashboard": False,
    "drain": {"deregister_s": 0.5, "timeout_s": 60},
    "health": {"patience_s": 300},
}


@pytest.fixture(scope="module")
def server(launch) -> Server:
    return launch(CONFIG).wait()


@pytest.mark.parametrize("title", ["ray::WorkerActor", "ray::SchedulerActor"])
async def test_streams_go_on_with_the_tokens_that_they_would_have_had(server: Server, title: str) -> None:
    front = server.pids("ray::ServeReplica:latentserve:engine")
    old = server.pids("ray::SchedulerActor") + server.pids("ray::WorkerActor")
    [victim] = server.pids(title)
    async with client(300.0) as http:
        ask = {"max_tokens": 1900, "ignore_eos": True, "temperature": 0}
        undisturbed = await asyncio.gather(*await begin(http, server.url, 2, **ask))
        tasks = await begin(http, server.url, 2, **ask)
        os.kill(victim, signal.SIGKILL)
        disturbed = await asyncio.gather(*tasks)
        assert all(result.done for result in disturbed), [result.error or result.broken for result in disturbed]
        assert [result.text for result in disturbed] == [result.text for result in undisturbed]

        async def well() -> bool:
            try:
                return (await http.get(f"{server.url}/health")).status_code == 200
            except httpx.HTTPError:
                return False

        await until(well, 30.0)
    wait_gone(old, 10.0)
    assert server.pids("ray::ServeReplica:latentserve:engine") == front
    assert len(server.pids("ray::SchedulerActor") + server.pids("ray::WorkerActor")) == len(old)
