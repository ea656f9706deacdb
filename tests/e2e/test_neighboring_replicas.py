"""Two replicas, of which one loses its engine: its streams go on at the other."""

import asyncio
import os
import signal
import time

import httpx
import pytest
from served_application import Server
from timed_client import begin, client, until

pytestmark = [pytest.mark.cluster, pytest.mark.alone, pytest.mark.long, pytest.mark.soak]

CONFIG = {
    "engine": {"model": "demo", "max_rows": 16, "token_budget": 512},
    "replicas": 2,
    "port": 0,
    "dashboard": False,
    "drain": {"deregister_s": 0.5, "timeout_s": 60},
    "health": {"patience_s": 300},
}


@pytest.fixture(scope="module")
def server(launch) -> Server:
    return launch(CONFIG).wait()


async def test_streams_of_a_replica_without_an_engine_go_on_at_the_other(server: Server) -> None:
    await asyncio.sleep(3.0)  # in which the two find each other
    fronts = sorted(server.pids("ray::ServeReplica:latentserve:engine"))
    ranks = server.pids("ray::WorkerActor")
    assert len(fronts) == len(ranks) == 2
    async with client(300.0) as http:
        ask = {"max_tokens": 1900, "ignore_eos": True, "temperature": 0}
        undisturbed = await asyncio.gather(*await begin(http, server.url, 4, **ask))
        tasks = await begin(http, server.url, 4, **ask)
        os.kill(ranks[0], signal.SIGKILL)
        begun = time.monotonic()
        disturbed = await asyncio.gather(*tasks)
        print(f"all streams had ended after {time.monotonic() - begun:.1f} s")
        assert all(result.done for result in disturbed), [result.error or result.broken for result in disturbed]
        assert [result.text for result in disturbed] == [result.text for result in undisturbed]
        assert len({result.replica for result in disturbed}) == 2

        async def repaired() -> bool:
            return len(server.pids("ray::WorkerActor")) == 2

        await until(repaired, 60.0)
    assert sorted(server.pids("ray::ServeReplica:latentserve:engine")) == fronts


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_streams_of_a_front_that_dies_go_on_at_the_other(server: Server, number: int) -> None:
    """The client's connection to HAProxy, and HAProxy's to the replica, stay; another process writes into it."""
    await asyncio.sleep(3.0)
    fronts = sorted(server.pids("ray::ServeReplica:latentserve:engine"))
    assert len(fronts) == 2
    async with client(300.0) as http:
        ask = {"max_tokens": 1900, "ignore_eos": True, "temperature": 0}
        undisturbed = await asyncio.gather(*await begin(http, server.url, 4, **ask))
        tasks = await begin(http, server.url, 4, **ask)
        os.kill(fronts[0], number)
        begun = time.monotonic()
        disturbed = await asyncio.gather(*tasks)
        print(f"all streams had ended after {time.monotonic() - begun:.1f} s")
        assert all(result.done for result in disturbed), [result.error or result.broken for result in disturbed]
        assert [result.text for result in disturbed] == [result.text for result in undisturbed]
        assert len({result.replica for result in disturbed}) == 2, "both had streams"

        await until(lambda: replaced(server, fronts[:1]), 120.0)
        await until(lambda: both_serve(server, http), 120.0)


async def test_streams_of_fronts_that_die_together_go_on_at_the_first_one_that_comes(server: Server) -> None:
    """Nobody is there to write into their connections until Serve has started other replicas."""
    await asyncio.sleep(3.0)
    fronts = sorted(server.pids("ray::ServeReplica:latentserve:engine"))
    assert len(fronts) == 2
    async with client(300.0) as http:
        ask = {"max_tokens": 1900, "ignore_eos": True, "temperature": 0}
        undisturbed = await asyncio.gather(*await begin(http, server.url, 4, **ask))
        tasks = await begin(http, server.url, 4, **ask)
        for front in fronts:
            os.kill(front, signal.SIGKILL)
        begun = time.monotonic()
        disturbed = await asyncio.gather(*tasks)
        print(f"all streams had ended after {time.monotonic() - begun:.1f} s")
        assert all(result.done for result in disturbed), [result.error or result.broken for result in disturbed]
        assert [result.text for result in disturbed] == [result.text for result in undisturbed]
        await until(lambda: replaced(server, fronts), 120.0)
        await until(lambda: both_serve(server, http), 120.0)


async def replaced(server: Server, died: list[int]) -> bool:
    """Whether there are two fronts, and none of those that died."""
    now = server.pids("ray::ServeReplica:latentserve:engine")
    return len(now) == 2 and not {*died} & {*now}


async def both_serve(server: Server, http: httpx.AsyncClient) -> bool:
    """Whether both answer; one of them does in any case."""
    asking = (http.post(f"{server.url}/v1/completions", json={"model": "demo", "prompt": "a"}) for _ in "123456")
    answers = await asyncio.gather(*asking)
    assert {answer.status_code for answer in answers} == {200}
    return len({answer.headers["x-latentserve-replica"] for answer in answers}) == 2
