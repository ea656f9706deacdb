"""An application whose ranks start ahead of Ray: it serves with them, and everything ends as with ranks of actors."""

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest
from served_application import SERVE, Server, alive, wait_gone
from timed_client import begin, client, until

pytestmark = [pytest.mark.cluster, pytest.mark.long]

AHEAD = "import os\nos.environ['LATENTSERVE_PRESTARTED_RANKS'] = '1'\n" + SERVE
CONFIG = {
    "engine": {"model": "demo", "tensor_parallel": 2, "device": "cpu", "max_rows": 16, "token_budget": 512},
    "port": 0,
    "dashboard": False,
    "drain": {"deregister_s": 0.5, "timeout_s": 60},
    "health": {"patience_s": 300},
}


def prestarted(server: Server) -> list[int]:
    """Return the ranks that started ahead of Ray and have not ended."""
    found = []
    for process in psutil.Process(server.process.pid).children():
        try:
            if "deploy.serve.prestarted_rank" in process.cmdline():
                found.append(process.pid)
        except psutil.Error:
            continue
    return sorted(found)


@pytest.fixture(scope="module")
def server(launch) -> Server:
    return launch(CONFIG, AHEAD).wait()


def test_ranks_that_started_first_serve(server: Server) -> None:
    assert len(prestarted(server)) == 2
    text = "\n".join(server.lines)
    assert text.index("2 ranks start ahead of Ray") < text.index("starting Ray")
    for said in ("rank 0: [", "rank 1: [", "self-test: ", "latent cache, "):
        assert said in text
    [beside] = [line for line in server.lines if line.startswith("beside them, in rank 0, which started ahead of Ray")]
    assert "libraries " in beside
    assert "self-test " in beside
    actors = server.pids("ray::WorkerActor.run")
    assert len(actors) == 2
    assert not any("libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text() for pid in actors)


async def test_the_place_of_one_that_dies_is_taken_with_its_weights(server: Server) -> None:
    old, actors = prestarted(server), server.pids("ray::WorkerActor.run")
    async with client(300.0) as http:
        ask = {"max_tokens": 600, "ignore_eos": True, "temperature": 0}
        [undisturbed] = await asyncio.gather(*await begin(http, server.url, 1, **ask))
        [task] = await begin(http, server.url, 1, **ask)
        os.kill(old[0], signal.SIGKILL)
        disturbed = await task
        assert disturbed.done, disturbed.error or disturbed.broken
        assert disturbed.text == undisturbed.text

        async def told() -> bool:
            return any("GiB of weights were kept" in line for line in server.lines)

        await until(told, 60.0)
    assert server.find(r"(rank . died: its process was killed or crashed)"), server.lines
    wait_gone(old + actors)
    assert len(server.pids("ray::WorkerActor.run")) == 2  # which are the ranks


def test_nothing_is_left_at_the_end(server: Server) -> None:
    pids = server.pids()
    assert server.stop() == 0
    wait_gone(pids)


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
async def test_nothing_is_left_of_a_start_that_is_ended(launch, number: int) -> None:
    server: Server = launch(CONFIG, AHEAD)

    async def begun() -> bool:
        assert server.process.poll() is None, "\n".join(server.lines)
        return any("starting 2 ranks" in line for line in server.lines)

    await until(begun, 400.0)
    ranks, pids = prestarted(server), server.pids()
    assert len(ranks) == 2
    server.process.send_signal(number)
    wait_gone(pids)
    assert not alive(ranks)
