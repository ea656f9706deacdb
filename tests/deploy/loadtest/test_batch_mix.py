"""Composition of an endpoint's steps under load, asked of a real front, and of one that knows no such thing."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from deploy.api.app import create_app
from deploy.loadtest.batch_mix import MixPoint, read, watched
from deploy.loadtest.load import run_load
from deploy.loadtest.load_spec import LoadSpec
from deploy.loadtest.sse_client import SseClient
from tests.deploy.api.fake_engine import FakeEngine, out, serving
from tests.deploy.loadtest.sse_server import Exchange, completions
from tests.deploy.loadtest.sse_server import serving as another
from workers.protocol.messages import Distribution, EngineStats


class Busy(FakeEngine):
    """Makes two decode steps and a mixed one whenever it is looked at."""

    looks = 0

    @property
    def stats(self) -> EngineStats:
        self.looks += 1
        seconds = {
            "decode": Distribution((2 * self.looks, 0), 0.01 * self.looks),
            "mixed": Distribution((self.looks, 0), 0.02 * self.looks),
        }
        return EngineStats(running=1, slots=8, pages_total=100, pages_free=60, step_seconds=seconds)

    @stats.setter
    def stats(self, value: EngineStats) -> None: ...


def slowly(request):  # type: ignore[no-untyped-def]
    yield 2.5
    yield out(7, finish="length")


@pytest.mark.long
async def test_steps_are_told_while_there_is_load() -> None:
    with serving(create_app(Busy(slowly), None)) as port:
        spec = LoadSpec(
            url=f"http://127.0.0.1:{port}/v1", model="tiny", requests=1, input=4, output=1, vocab=500, warmup=0
        )
        run = await run_load(spec, lambda record: None, watch=True)
        unwatched = await run_load(spec, lambda record: None)
    assert [record.error for record in run.records] == [""]
    assert unwatched.mix == ()
    assert run.mix
    for point in run.mix:
        assert 0 < point.at < run.duration
        assert point.decode == pytest.approx(2 * point.mixed) != 0
        assert point.prefill == 0


@pytest.mark.parametrize("turns", range(5))
async def test_who_asks_ends_with_the_load_also_in_the_moment_of_an_answer(
    monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    answer = asyncio.get_running_loop().create_future()

    async def send(*_: object) -> tuple[int, bytes]:
        await asyncio.shield(answer)
        return 200, b'{"replicas": []}'

    monkeypatch.setattr(SseClient, "send", send)
    async with asyncio.timeout(60):
        async with watched("http://127.0.0.1:1", None, []):
            await asyncio.sleep(0.01)  # it has asked
            answer.set_result(None)
            for _ in range(turns):  # of the loop, in which it hears of the answer
                await asyncio.sleep(0)


async def test_of_other_endpoints_nothing_is_known() -> None:
    async def answer(exchange: Exchange) -> None:
        if exchange.path.startswith("/live"):
            await exchange.json("404 Not Found", {"error": "no such path"})
        else:
            await completions(exchange)

    async with another(answer) as server:
        spec = LoadSpec(url=server.url, model="m", requests=2, input=4, output=2, warmup=0)
        run = await run_load(spec, lambda record: None, watch=True)
    assert (len(run.records), run.mix) == (2, ())


def test_replicas_are_added_up() -> None:
    def figures(**rates: float) -> dict[str, object]:
        return {"window_s": 5.0, "steps": {kind: {"per_second": rate, "seconds": 1.0} for kind, rate in rates.items()}}

    replicas = [
        {"name": "a", "figures": figures(decode=3.0, mixed=1.0)},
        {"name": "b", "figures": figures(decode=4.0)},
        {"name": "starts", "figures": None},
        {"name": "new", "figures": {"window_s": 0.0, "steps": {}}},
    ]
    assert list(read(msgspec.json.encode({"replicas": replicas}), 2.0)) == [MixPoint(2.0, 7.0, 0.0, 1.0)]
    assert list(read(msgspec.json.encode({"replicas": replicas[2:]}), 2.0)) == []
    for answer in (b"", b"<html>", b'{"replicas": [1]}', b"{}"):
        with pytest.raises(msgspec.DecodeError):
            list(read(answer, 0.0))
