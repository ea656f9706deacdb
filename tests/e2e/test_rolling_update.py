"""An application of two replicas is deployed again with a change: no client may notice."""

import asyncio
import signal

import httpx
import pytest
from served_application import Server, wait_gone
from timed_client import begin, client, until

pytestmark = [pytest.mark.cluster, pytest.mark.long]

CODE = "from updated_program import main; main()"
CONFIG = {
    "engine": {"model": "demo", "max_rows": 16, "token_budget": 512},
    "replicas": 2,
    "port": 0,
    "ingress": "direct",
    "dashboard": False,
    # HAProxy, which is reloaded with new replicas, has to know of them before the old ones are gone. That takes longer
    # than the default of 2 s where fifty processes want two cores.
    "drain": {"deregister_s": 8.0, "timeout_s": 300},
}
SHORT = {"model": "demo", "prompt": "def f(x):", "max_tokens": 2}
UPDATE_TIMEOUT_S = 360
"""Streams take a minute and a half on a slow machine, and are waited for."""
REPLICAS = "ray::ServeReplica:latentserve"


@pytest.fixture(scope="module")
def server(launch) -> Server:
    return launch(CONFIG, CODE).wait()


async def keep_asking(server: Server, ended: asyncio.Event, method: str, path: str, **request: object) -> list[str]:
    """One request after the other; what went wrong."""
    wrong, count = [], 0
    async with client() as http:
        while not ended.is_set():
            try:
                answer = await http.request(method, f"{server.url}{path}", **request)
                if answer.status_code != 200:
                    wrong.append(f"{method} {path}: {answer.status_code} {answer.text}")
            except httpx.HTTPError as error:
                wrong.append(f"{method} {path}: {type(error).__name__}: {error}")
            count += 1
            await asyncio.sleep(0.02)
    assert count > 5
    return wrong


async def test_each_replica_shows_both(server: Server) -> None:
    async with client() as http:

        async def both_serve() -> dict:
            live = (await http.get(f"{server.url}/live")).json()
            return live if live["total"]["serving"] == 2 else {}

        live = await until(both_serve, 60.0, period_s=1.0)
    assert [replica["state"] for replica in live["replicas"]] == ["serving"] * 2
    assert live["total"]["slots"] == 32


@pytest.mark.timeout(480)
async def test_no_client_notices_the_update_of_two_replicas(server: Server) -> None:
    old = server.pids(REPLICAS)
    assert len(old) == 3  # two engines, the router
    ended = asyncio.Event()
    async with client() as http:
        streams = await begin(http, server.url, 4, max_tokens=1900, ignore_eos=True)
        # GET goes past the router; a new connection for each request, and one that stays.
        asking = [
            asyncio.create_task(keep_asking(server, ended, "POST", "/v1/completions", json=SHORT)),
            asyncio.create_task(keep_asking(server, ended, "GET", "/v1/models", headers={"connection": "close"})),
            asyncio.create_task(keep_asking(server, ended, "GET", "/health")),
        ]

        server.process.send_signal(signal.SIGUSR1)

        async def updated() -> bool:
            assert server.process.poll() is None, server.lines
            return bool(server.find("(updated)")) and not set(old) & set(server.pids(REPLICAS))

        await until(updated, UPDATE_TIMEOUT_S)
        results = await asyncio.gather(*streams)
        # The connections that carried streams are used again. Their HAProxy was replaced meanwhile, and the replicas it
        # knows of are gone.
        again = [await http.post(f"{server.url}/v1/completions", json=SHORT) for _ in range(4)]
        ended.set()
        wrong = [line for lines in await asyncio.gather(*asking) for line in lines]
    assert not wrong
    assert all(result.done for result in results), [(result.broken, result.error) for result in results]
    assert [answer.status_code for answer in again] == [200] * 4
    assert len(server.pids(REPLICAS)) == 3


def test_the_updated_application_stops_like_any_other(server: Server) -> None:
    """Last in this module: the application is gone afterwards."""
    pids = server.pids()
    assert server.stop() == 0
    wait_gone(pids)
