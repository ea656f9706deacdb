"""Killing parts of a running application, and what its clients must see."""

import asyncio
import os
import time
from pathlib import Path

import httpx
import psutil
from served_application import START_TIMEOUT_S, Server, wait_gone
from timed_client import begin, client, until

WITHIN_S = 60.0
"""Seconds in which streams must have ended. How soon they do is measured by `bench/dying_replicas.py`: here their error
says by what the failure was noticed."""


def socket_folders(server: Server) -> list[Path]:
    """Return the folders of the channels that the application's schedulers hold open on this node."""
    found = set()
    for pid in server.pids("ray::SchedulerActor"):
        for connection in psutil.Process(pid).net_connections("unix"):
            if "/latentserve-" in connection.laddr:
                found.add(Path(connection.laddr).parent)
    return sorted(found)


async def kill_under_load(server: Server, pid: int, number: int, serve_proxy: bool = False) -> list[str]:
    """Signal `pid` while four streams run. Every stream must end with an error event, `/health` name the same cause
    until the application serves again, and no process of the old replica be left. Returns the errors.

    `serve_proxy`: that proxy holds requests while there is no replica, `/health` among them, and what it says about a
    replica that died is its own.
    """
    folders = socket_folders(server)
    old = server.pids("ray::ServeReplica:latentserve:engine") + server.pids("ray::SchedulerActor")
    old += server.pids("ray::WorkerActor")
    assert pid in old
    async with client() as http:
        tasks = await begin(http, server.url, 4, max_tokens=1900, ignore_eos=True)
        os.kill(pid, number)
        begun = time.monotonic()
        streams = await asyncio.gather(*tasks)
        for result in streams:
            assert not result.done
            assert result.error, f"no error event; the connection: {result.broken or 'ended'}"
            assert result.ended - begun < WITHIN_S, f"{result.ended - begun:.2f} s: {result.error}"

        async def health() -> list[str]:
            """Collect the answers until it is well again."""
            said = []
            while (answer := await http.get(f"{server.url}/health", timeout=WITHIN_S)).status_code != 200:
                said.append(answer.json()["error"]["message"])
                await asyncio.sleep(0.05)
            return said

        watching = None if serve_proxy else asyncio.create_task(health())

        async def serves() -> bool:
            body = {"model": "demo", "prompt": "a", "max_tokens": 2}
            try:
                answer = await http.post(f"{server.url}/v1/completions", json=body, timeout=WITHIN_S)
            except httpx.HTTPError:
                return False  # a request may fall into the moment of the exit
            if answer.status_code != 200 and not serve_proxy:
                assert answer.json()["error"]["message"], "every refusal is in the envelope"
            return answer.status_code == 200

        # Asked often enough: whoever asks takes processors from those that start.
        await until(serves, START_TIMEOUT_S, period_s=0.25)
        assert (await http.get(f"{server.url}/health")).status_code == 200
        if watching is not None:
            said = await watching
            cause = streams[0].error.removeprefix("the engine is down: ")
            assert said
            assert all(cause in message for message in said), set(said)
    wait_gone(old)
    assert not [folder for folder in folders if folder.exists()]
    return [result.error for result in streams]
