"""Twenty times an application is deployed again: replica after replica is replaced, then one is taken away. Clients ask
all the while, streamed and not, and none is refused or cut."""

import asyncio
import signal
import time

import httpx
import pytest
from served_application import Server, wait_gone
from test_rolling_update import CODE, CONFIG, REPLICAS, SHORT, keep_asking
from timed_client import client, stream, until

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(1800)]

UPDATES = 5
"""Of each of the four applications, the last of which takes a replica away."""
UPDATE_TIMEOUT_S = 300


async def keep_streaming(server: Server, ended: asyncio.Event) -> list[str]:
    """One stream after the other; what went wrong."""
    wrong, count = [], 0
    async with client() as http:
        while not ended.is_set():
            begun = time.monotonic()
            try:
                result = await stream(http, server.url, max_tokens=200, ignore_eos=True)
                if not result.done:
                    wrong.append(
                        f"stream at {begun:.1f}, {result.ended - begun:.1f} s, {len(result.events)} events: "
                        f"{result.broken} {result.error}"
                    )
            except (httpx.HTTPError, AssertionError) as error:
                wrong.append(f"stream: {type(error).__name__}: {error}")
            count += 1
    assert count > 5
    return wrong


@pytest.mark.parametrize("ingress", ["direct", "proxy"])
@pytest.mark.parametrize("replicas", [2, 3])
async def test_no_client_notices_updates(launch, replicas: int, ingress: str) -> None:
    drain = {"deregister_s": 2.0, "timeout_s": 60}
    server: Server = launch({**CONFIG, "replicas": replicas, "ingress": ingress, "drain": drain}, CODE)
    await asyncio.to_thread(server.wait)
    beside = 1 if ingress == "direct" else 0  # the router
    ended = asyncio.Event()
    asking = [
        *(asyncio.create_task(keep_streaming(server, ended)) for _ in range(4)),
        asyncio.create_task(keep_asking(server, ended, "POST", "/v1/completions", json=SHORT)),
        asyncio.create_task(
            keep_asking(server, ended, "POST", "/v1/completions", json=SHORT, headers={"connection": "close"})
        ),
        asyncio.create_task(keep_asking(server, ended, "GET", "/v1/models", headers={"connection": "close"})),
        asyncio.create_task(keep_asking(server, ended, "GET", "/health")),
    ]
    for update in range(1, UPDATES + 1):
        old, last = server.pids(REPLICAS), update == UPDATES
        assert len(old) == replicas + beside
        server.process.send_signal(signal.SIGUSR2 if last else signal.SIGUSR1)

        async def updated(update: int = update, old: list[int] = old, last: bool = last) -> bool:
            assert server.process.poll() is None, server.lines
            there = server.pids(REPLICAS)
            told = sum("updated" in line for line in list(server.lines)) == update
            return told and (len(there) == len(old) - 1 if last else not set(old) & set(there))

        await until(updated, UPDATE_TIMEOUT_S)
    ended.set()
    wrong = [line for lines in await asyncio.gather(*asking) for line in lines]
    assert not wrong, (wrong, server.lines)
    pids = server.pids()
    assert await asyncio.to_thread(server.stop) == 0
    wait_gone(pids)
