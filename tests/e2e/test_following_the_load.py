"""The number of replicas follows the load: a burst brings a second one, and the end of one cuts no stream."""

import asyncio
import json
import shutil
from pathlib import Path

import httpx
import pytest
from served_application import Server
from timed_client import Stream, client, how_far, stream, until

pytestmark = [pytest.mark.cluster, pytest.mark.long]

DEMO = Path(__file__).resolve().parents[2] / "assets" / "demo"
CONTEXT, STREAM_TOKENS = 8192, 5000
"""A stream outlasts Serve's decisions, which take a few seconds; the demo model's own context has 2,048 tokens."""
ENGINE = {"device": "cpu", "width": 1, "max_rows": 8, "token_budget": 512}
CONFIG = {
    "name": "demo",
    "autoscaling": {"max_replicas": 2, "upscale_delay_s": 1.0, "downscale_delay_s": 1.0},
    "port": 0,
    "dashboard": False,
    "drain": {"timeout_s": 300},
}
BURST = 20
"""Streams at a time: more than one replica has slots. A third of them would still ask for two replicas, and none ends
because clients on a slow machine are between two requests."""
PATIENCE_S = 240.0
"""Replicas take a minute to start on a slow machine, and the streams two."""
FRONTS = "ray::ServeReplica:latentserve:engine"


@pytest.fixture(scope="module")
def server(launch, tmp_path_factory: pytest.TempPathFactory) -> Server:
    folder = tmp_path_factory.mktemp("long") / "demo"
    shutil.copytree(DEMO, folder)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "max_position_embeddings": CONTEXT}))
    return launch({**CONFIG, "engine": {**ENGINE, "model": str(folder)}}).wait()


async def replicas(http: httpx.AsyncClient, server: Server) -> set[str]:
    live = (await http.get(f"{server.url}/live")).json()
    return {replica["name"] for replica in live["replicas"] if replica["state"] == "serving"}


def controller_says(server: Server) -> str:
    """Return what Serve's controller logged so far."""
    folder = Path(server.find(r"logs in (\S+)")) / "serve"
    return "".join(file.read_text() for file in folder.glob("controller_*.log"))


@pytest.mark.timeout(900)
async def test_a_burst_brings_a_replica_and_no_stream_is_cut_when_one_ends(server: Server) -> None:
    answered: list[Stream] = []
    asked: list[Stream] = []
    over = asyncio.Event()

    def seen() -> str:
        return how_far(answered, asked)

    async def keep_asking(http: httpx.AsyncClient) -> None:
        while not over.is_set():
            asked.append(Stream())
            answered.append(await stream(http, server.url, asked[-1], max_tokens=32, ignore_eos=True))

    async with client(300.0) as http:
        assert len(await replicas(http, server)) == len(server.pids(FRONTS)) == 1
        burst = [asyncio.create_task(keep_asking(http)) for _ in range(BURST)]

        async def two_answer() -> set[str] | None:
            serving = await replicas(http, server)
            return serving if len(serving) == 2 and serving <= {each.replica for each in answered} else None

        both = await until(two_answer, 2 * PATIENCE_S, period_s=0.2, seen=seen)
        long: list[asyncio.Task[Stream]] = []
        results: list[Stream] = []

        async def one_at_each() -> bool:
            result = Stream()
            results.append(result)
            answer = stream(http, server.url, result, max_tokens=STREAM_TOKENS, ignore_eos=True)
            long.append(asyncio.create_task(answer))

            async def begun() -> bool:
                return result.begun or bool(result.broken)

            await until(begun, PATIENCE_S, seen=seen)
            return {each.replica for each in results if not each.done} == both

        await until(one_at_each, PATIENCE_S)
        assert len(long) <= ENGINE["max_rows"] + 1, "a replica without a free slot got another one"
        over.set()
        await asyncio.gather(*burst)

        async def one_ends() -> bool:
            return "Downscaling Deployment(" in controller_says(server)

        await until(one_ends, PATIENCE_S)
        still = {each.replica for each in results if not each.done}
        await asyncio.gather(*long)
        assert still == both, "the streams had ended before a replica was to end"

        async def one_is_left() -> bool:
            return len(await replicas(http, server)) == len(server.pids(FRONTS)) == 1

        await until(one_is_left, PATIENCE_S, period_s=0.2)
        later = await asyncio.gather(*(stream(http, server.url, max_tokens=8) for _ in range(4)))
    everything = [*answered, *results, *later]
    assert all(result.done for result in everything), [each.error or each.broken for each in everything]
    assert {result.replica for result in later} < both
    assert "The load asks for 2 replicas where there are to be 1" in controller_says(server)
