"""One replica whose scheduler and ranks are killed: streams wait for those that take their places, and go on."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import httpx
import psutil
import pytest
from served_application import Server, wait_gone
from timed_client import begin, client, until

pytestmark = [pytest.mark.cluster, pytest.mark.alone, pytest.mark.long, pytest.mark.soak]

CONFIG = {
    "engine": {"model": "demo", "max_rows": 16, "token_budget": 512},
    "port": 0,
    "dashboard": False,
    "drain": {"deregister_s": 0.5, "timeout_s": 60},
    "health": {"patience_s": 300, "standby": "imported"},
}


@pytest.fixture(scope="module")
def server(launch) -> Server:
    return launch(CONFIG).wait()


def running(server: Server) -> list[int]:
    """Return the processes of the engine that serves, without those that stand by."""
    return sorted(server.pids("ray::SchedulerActor.run") + server.pids("ray::WorkerActor.run"))


def standing_by(server: Server) -> list[int]:
    every = server.pids("ray::SchedulerActor") + server.pids("ray::WorkerActor")
    return sorted({*every} - {*running(server)})


def keepers(server: Server) -> list[int]:
    """Return the weight keepers, each a child of a front."""
    found = []
    for front in server.pids("ray::ServeReplica:latentserve:engine"):
        for child in psutil.Process(front).children():
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                if any("keeper_process" in part for part in child.cmdline()):
                    found.append(child.pid)
    return found


@pytest.mark.parametrize("victim", ["ray::WorkerActor.run", "ray::SchedulerActor.run"])
async def test_streams_go_on_with_the_tokens_that_they_would_have_had(server: Server, victim: str) -> None:
    front, keeper = server.pids("ray::ServeReplica:latentserve:engine"), keepers(server)
    assert len(keeper) == 1

    async def ready() -> bool:
        return len(standing_by(server)) == 2

    await until(ready, 60.0)
    old, waiting = running(server), standing_by(server)
    assert len(old) == 2
    [pid] = server.pids(victim)
    kept = sum("GiB of weights were kept" in line for line in server.lines)
    async with client(300.0) as http:
        ask = {"max_tokens": 1900, "ignore_eos": True, "temperature": 0}
        undisturbed = await asyncio.gather(*await begin(http, server.url, 2, **ask))
        tasks = await begin(http, server.url, 2, **ask)
        os.kill(pid, signal.SIGKILL)
        disturbed = await asyncio.gather(*tasks)
        assert all(result.done for result in disturbed), [result.error or result.broken for result in disturbed]
        assert [result.text for result in disturbed] == [result.text for result in undisturbed]

        async def well() -> bool:
            try:
                return (await http.get(f"{server.url}/health")).status_code == 200
            except httpx.HTTPError:
                return False

        await until(well, 60.0)

        async def told() -> bool:
            return sum("GiB of weights were kept" in line for line in server.lines) == kept + 1

        await until(told, 60.0)
        assert (await http.get(f"{server.url}/selftest")).json()["inherited"] == 1
    wait_gone(old)
    assert server.pids("ray::ServeReplica:latentserve:engine") == front
    assert keepers(server) == keeper
    assert running(server) == waiting
    print(*(line for line in server.lines if "serving again" in line or "started in" in line), sep="\n")


def test_nothing_is_left_at_the_end(server: Server) -> None:
    pids, [keeper] = server.pids(), keepers(server)
    folder = Path(psutil.Process(keeper).cmdline()[-1])
    assert folder.is_dir()
    assert server.stop() == 0
    wait_gone(pids)
    assert not folder.exists()
