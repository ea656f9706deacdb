"""One replica with a hot standby, whose scheduler and rank are killed: the second engine takes their place."""

import asyncio
import os
import signal

import psutil
import pytest
from served_application import Server, wait_gone
from test_restarted_engine import CONFIG
from timed_client import begin, client, until

pytestmark = [pytest.mark.cluster, pytest.mark.alone, pytest.mark.long, pytest.mark.soak]


@pytest.fixture(scope="module")
def server(launch) -> Server:
    return launch({**CONFIG, "health": {"patience_s": 300, "standby": "hot"}}).wait()


def told(server: Server) -> int:
    """Return how often an engine that stood by took over."""
    return sum("the engine that stood by took over in" in line for line in server.lines)


@pytest.mark.parametrize("victim", ["ray::WorkerActor.run", "ray::SchedulerActor.run"])
async def test_streams_go_on_at_the_engine_that_stood_by(server: Server, victim: str) -> None:
    async with client(300.0) as http:

        async def stands_by() -> bool:
            [replica] = (await http.get(f"{server.url}/live")).json()["replicas"]
            return replica["standby"] == "ready"

        await until(stands_by, 180.0)
        every = server.pids("ray::SchedulerActor") + server.pids("ray::WorkerActor")
        assert len(every) == 4
        front = server.pids("ray::ServeReplica:latentserve:engine")
        ask = {"max_tokens": 900, "ignore_eos": True, "temperature": 0}
        undisturbed = await asyncio.gather(*await begin(http, server.url, 2, **ask))
        tasks = await begin(http, server.url, 2, **ask)
        taken_over = told(server)
        os.kill(min(server.pids(victim), key=lambda pid: psutil.Process(pid).create_time()), signal.SIGKILL)
        disturbed = await asyncio.gather(*tasks)
        assert all(result.done for result in disturbed), [result.error or result.broken for result in disturbed]
        assert [result.text for result in disturbed] == [result.text for result in undisturbed]
        await until(stands_by, 180.0)  # another one by now
        left = server.pids("ray::SchedulerActor") + server.pids("ray::WorkerActor")
        assert len(left) == 4
        assert len({*left} & {*every}) == 2
        assert server.pids("ray::ServeReplica:latentserve:engine") == front
        assert told(server) == taken_over + 1


def test_nothing_is_left_at_the_end(server: Server) -> None:
    pids = server.pids()
    assert server.stop() == 0
    wait_gone(pids)
