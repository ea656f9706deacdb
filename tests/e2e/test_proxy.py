"""The fallback: Serve's own proxy in front of the same replica. One rank, so that no rendezvous is involved either."""

import asyncio
import contextlib
import signal
from pathlib import Path

import pytest
from induced_failures import kill_under_load
from served_application import Server, wait_gone
from timed_client import begin, client, stream, until

pytestmark = [pytest.mark.cluster, pytest.mark.alone, pytest.mark.long]

CONFIG = {
    "engine": {"model": "demo", "max_rows": 16, "token_budget": 512},
    "port": 0,
    "ingress": "proxy",
    "dashboard": False,
    "drain": {"deregister_s": 0.5, "timeout_s": 60},
    "health": {"patience_s": 0},
}


@pytest.fixture(scope="module")
def server(launch) -> Server:
    return launch(CONFIG).wait()


async def test_the_same_application_serves(server: Server) -> None:
    for pid in server.pids():
        with contextlib.suppress(OSError):  # Ray ends processes that nobody needed
            assert b"haproxy" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    async with client() as http:
        result = await stream(http, server.url, max_tokens=24)
        whole = await http.post(
            f"{server.url}/v1/completions",
            json={"model": "demo", "prompt": "def f(x):", "max_tokens": 24, "temperature": 0},
        )
        assert result.done
        assert result.text == whole.json()["choices"][0]["text"] != ""
        kind = {"content-type": "application/json"}
        wrong = await http.post(f"{server.url}/v1/completions", content=b"{", headers=kind)
        assert wrong.status_code == 400
        assert wrong.json()["error"]["code"] == "invalid_json"


async def test_a_killed_worker_ends_every_stream_and_is_repaired(server: Server) -> None:
    # Serve's proxy holds requests while no replica is ready: /health answers once there is one again.
    errors = await kill_under_load(server, server.pids("ray::WorkerActor")[0], signal.SIGKILL, serve_proxy=True)
    assert all("rank 0 died" in error for error in errors)


async def test_a_second_interrupt_does_not_wait_for_streams(server: Server) -> None:
    """Last in this module: the application is gone afterwards."""
    pids = server.pids()
    async with client() as http:
        (running,) = await begin(http, server.url, 1, max_tokens=1900, ignore_eos=True)
        server.process.send_signal(signal.SIGINT)

        async def draining() -> str:
            return server.find("(draining)")

        await until(draining, 60.0)
        assert not running.done()
        server.process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(server.ended) == 0
        result = await running
        assert not result.done
    wait_gone(pids)
