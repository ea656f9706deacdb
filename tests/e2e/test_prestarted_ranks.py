"""An application whose ranks start ahead of Ray: it serves with them, and everything ends as with ranks of actors."""

import asyncio
import os
import signal

import httpx
import psutil
import pytest
from served_application import SERVE, Server, wait_gone
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
    for line in ("rank 0: [", "rank 1: [", "self-test: "):
        assert text.count(f"{line}") >= 1
    [table] = [line for line in server.lines if line.startswith("beside them, in rank 0, which started ahead of Ray")]
    assert "libraries " in table
    assert "self-test " in table
    assert "libraries of the ranks" not in text  # nobody waited for those of the actors, which are none
    for pid in server.pids("ray::WorkerActor"):
        with open(f"/proc/{pid}/maps") as maps:
            assert "libtorch_cpu" not in maps.read()


async def test_a_rank_that_dies_is_replaced_by_one_with_its_weights(server: Server) -> None:
    """Its streams go on with the tokens that they would have had."""
    old = prestarted(server)
    actors = server.pids("ray::WorkerActor")
    async with client(300.0) as http:
        ask = {"max_tokens": 1500, "ignore_eos": True, "temperature": 0}
        undisturbed = await asyncio.gather(*await begin(http, server.url, 2, **ask))
        tasks = await begin(http, server.url, 2, **ask)
        os.kill(old[0], signal.SIGKILL)
        disturbed = await asyncio.gather(*tasks)
        assert [result.text for result in disturbed] == [result.text for result in undisturbed]
        assert all(result.done for result in disturbed), [result.error or result.broken for result in disturbed]

        async def told() -> bool:
            return any("GiB of weights were kept" in line for line in server.lines)

        await until(told, 60.0)
    assert any("rank 0 died: its process was killed or crashed" in line for line in server.lines), server.lines
    wait_gone(old + actors)
    assert not prestarted(server)
    assert len(server.pids("ray::WorkerActor")) == 2


def test_nothing_is_left_where_the_command_is_killed(launch) -> None:
    server: Server = launch(CONFIG, AHEAD)
    deadline_lines = lambda: any("starting 2 ranks" in line for line in server.lines)  # noqa: E731
    asyncio.run(until_true(deadline_lines))
    pids = server.pids()
    assert len(prestarted(server)) == 2
    server.process.send_signal(signal.SIGKILL)
    wait_gone(pids)


async def until_true(condition) -> None:
    async def holds() -> bool:
        return condition()

    await until(holds, 400.0)


assert httpx
