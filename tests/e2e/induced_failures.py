"""Killing parts of a running application, and what its clients must see."""

import asyncio
import os
import time
from pathlib import Path

import httpx
import psutil
from served_application import Server, wait_gone
from timed_client import client, stream, until

SILENT_S = 2.5
"""Longest a health check of this kind may be held up."""


def socket_folders(server: Server) -> list[Path]:
    """Of the channels that the application's schedulers hold open on this node."""
    found = set()
    for pid in server.pids("ray::SchedulerActor"):
        for connection in psutil.Process(pid).net_connections("unix"):
            if "/latentserve-" in connection.laddr:
                found.add(Path(connection.laddr).parent)
    return sorted(found)


async def kill_under_load(
    server: Server, pid: int, number: int, within_s: float, serve_proxy: bool = False
) -> list[str]:
    """Signal `pid` while four streams run. Every stream must end with an error event within `within_s`, `/health` say
    so, the application serve again within 15 s, and no process of the old replica be left. Returns the errors.

    `serve_proxy`: that proxy holds requests while there is no replica, `/health` among them, and what it says about a
    replica that died is its own.
    """
    folders = socket_folders(server)
    old = server.pids("ray::ServeReplica:latentserve:engine") + server.pids("ray::SchedulerActor")
    old += server.pids("ray::WorkerActor")
    assert pid in old
    async with client() as http:
        tasks = [asyncio.create_task(stream(http, server.url, max_tokens=1900, ignore_eos=True)) for _ in range(4)]
        await asyncio.sleep(1.0)
        assert not any(task.done() for task in tasks)
        os.kill(pid, number)
        begun = time.monotonic()
        streams = await asyncio.gather(*tasks)
        for result in streams:
            assert len(result.events) > 1, "it had not begun"
            assert not result.done
            assert result.error, f"no error event; the connection: {result.broken or 'ended'}"
            assert result.ended - begun < within_s

        async def unhealthy() -> str:
            answer = await http.get(f"{server.url}/health", timeout=SILENT_S)
            return answer.json()["error"]["message"] if answer.status_code == 503 else ""

        if not serve_proxy:
            assert await until(unhealthy, 1.0)

        async def serves() -> bool:
            try:
                answer = await http.post(
                    f"{server.url}/v1/completions", json={"model": "demo", "prompt": "a", "max_tokens": 2}, timeout=15.0
                )
            except httpx.HTTPError:
                return False  # a request may fall into the moment of the exit
            if answer.status_code != 200 and not serve_proxy:
                assert answer.json()["error"]["message"], "every refusal is in the envelope"
            return answer.status_code == 200

        await until(serves, 15.0 - (time.monotonic() - begun))
        assert (await http.get(f"{server.url}/health")).status_code == 200
    wait_gone(old, 5.0)
    assert not [folder for folder in folders if folder.exists()]
    return [result.error for result in streams]
