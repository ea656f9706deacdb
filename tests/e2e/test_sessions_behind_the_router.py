"""Sessions that return to two replicas with host memory and disks, after their pages have left the caches, and after a
replica's engine was killed."""

import asyncio
import os
import re
import signal
from collections.abc import Callable

import httpx
import psutil
import pytest
from served_application import Server
from timed_client import client, until

from deploy.routing.policy import REMEMBER_S
from kernels.page import PAGE_TOKENS
from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.protocol.plan import SamplingParams

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(1800)]

PAGES = 10
"""Of a session's first prompt: fewer than eight are not worth a look at the disk."""
SESSIONS = [[number + 10 * place % 3000 for place in range(PAGES * PAGE_TOKENS)] for number in range(10, 18)]
ENGINE = {"model": "demo", "device": "cpu", "drafter": "none", "max_context": 800, "max_rows": 2, "invariant": True}
ANSWER_TOKENS = 8
REPLICAS = "ray::ServeReplica:latentserve:engine"


@pytest.fixture(scope="module")
def server(launch: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    """Each replica has room for one prompt on the device, and host memory and a disk for all."""
    disk = tmp_path_factory.mktemp("d")
    tiers = {"cache_pages": 16, "host_cache_bytes": 100_000_000, "disk_cache_bytes": 100_000_000}
    sizes = {"tensor_parallel": 1, "token_budget": 256, "disk_cache_dir": str(disk), "selftest": False}
    config = {
        "engine": {**ENGINE, **tiers, **sizes},
        "replicas": 2,
        "port": 0,
        "ingress": "direct",
        "dashboard": False,
        "drain": {"deregister_s": 0.5, "timeout_s": 30},
        "health": {"patience_s": 300},
    }
    return launch(config).wait()


def addresses(server: Server) -> list[str]:
    """Return where each replica takes requests itself, past the router."""
    found = [
        connection.laddr.port
        for pid in server.pids(REPLICAS)
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.ip == "127.0.0.1"
    ]
    assert len(found) == 2
    return [f"http://127.0.0.1:{port}" for port in found]


async def figures(http: httpx.AsyncClient, server: Server, name: str) -> list[float]:
    """What each replica says of a figure of its engine."""
    texts = [(await http.get(f"{url}/metrics")).text for url in addresses(server)]
    found = [re.search(rf"^latentserve_engine_{name}(?:_total)?(?:{{[^}}]*}})? (\S+)$", text, re.M) for text in texts]
    return [0.0 if one is None else float(one[1]) for one in found]


async def ask(http: httpx.AsyncClient, server: Server, prompt: list[int]) -> tuple[str, int, list[int]]:
    """The replica that answers, the prompt tokens that it had cached, and the tokens of its answer."""
    sampling = {"max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = await http.post(f"{server.url}/v1/completions", json={"model": "demo", "prompt": prompt, **sampling})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    cached = (body["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    return answer.headers["x-latentserve-replica"], cached, body["choices"][0]["token_ids"]


async def test_sessions_find_their_pages_behind_the_router_and_behind_a_kill(server: Server) -> None:
    # In invariant mode tokens do not depend on what runs beside them, nor on where pages come from.
    roomy = InlineEngine(EngineConfig(**ENGINE, tensor_parallel=1, selftest=False))
    sampling = SamplingParams(ANSWER_TOKENS, temperature=0.0)
    answers = roomy.generate(SESSIONS, sampling)
    again = [[*session, *answer, 7, 8, 9] for session, answer in zip(SESSIONS, answers, strict=True)]
    expected = roomy.generate(again, sampling)

    async with client() as http, asyncio.timeout(280):
        # Two at a time, so that both replicas get some.
        first = []
        for number in range(0, len(SESSIONS), 2):
            first += await asyncio.gather(*(ask(http, server, prompt) for prompt in SESSIONS[number : number + 2]))
        assert [tokens for _, _, tokens in first] == answers
        homes = [replica for replica, _, _ in first]
        assert len(set(homes)) == 2, "both replicas have sessions"

        # The router goes by reports alone, and the device of neither replica has more than one session.
        await asyncio.sleep(REMEMBER_S + 1)
        returned = [await ask(http, server, prompt) for prompt in again]
        assert [tokens for _, _, tokens in returned] == expected
        assert [(replica, cached) for replica, cached, _ in returned] == [(home, PAGES * PAGE_TOKENS) for home in homes]
        loaded = await figures(http, server, "host_loaded_pages")
        assert sum(loaded) >= (len(SESSIONS) - 2) * PAGES, loaded

        async def all_on_disk() -> bool:
            return sum(await figures(http, server, "disk_saved_pages")) >= len(SESSIONS) * PAGES

        await until(all_on_disk, 60.0)
        ranks = server.pids("ray::WorkerActor")
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)

        async def back() -> bool:
            pids = server.pids("ray::WorkerActor")
            health = [(await http.get(f"{url}/health")).status_code for url in addresses(server)]
            return len(pids) == 2 and not set(pids) & set(ranks) and health == [200, 200]

        await until(back, 120.0)

        async def adopted() -> bool:
            return sum(await figures(http, server, "disk_pages")) >= len(SESSIONS) * PAGES

        await until(adopted, 60.0)
        await asyncio.sleep(REMEMBER_S + 1)
        after = [await ask(http, server, prompt) for prompt in again]
        assert [tokens for _, _, tokens in after] == expected
        print(homes, returned, after)

        async def both_read() -> bool:
            """Whoever starts first may take the other's folder: routers find out. The first load of each replica begins
            whatever its disk is taken for; how many follow depends on how fast that was."""
            return min(await figures(http, server, "disk_loaded_pages")) >= PAGES - 2

        await until(both_read, 60.0)
