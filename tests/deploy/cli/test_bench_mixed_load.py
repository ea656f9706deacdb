"""The benchmark of long prompts beside streams: what it computes of what came, and what it says where nothing comes."""

from __future__ import annotations

import json
import socket
from asyncio import sleep
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.deploy.loadtest.sse_server import Exchange, completions, serving

pytestmark = pytest.mark.soak

SMALL = "--model m --streams 3 --stream-input 4 --output 500 --input 40 --period 0.05 --seconds 0.1 --settle 0.2"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "bench"))
    import mixed_load

    return mixed_load


def given(bench: ModuleType, url: str, more: str = "") -> Any:
    return bench.options().parse_args([*SMALL.split(), "--url", url, *more.split()])


def answer(bench: ModuleType, *events: tuple[float, int], sent: float = 0.0, finished: bool = False) -> Any:
    return bench.Answer("stream", sent, list(events), finished=finished)


def a_run(bench: ModuleType, **stream: bool) -> Any:
    """Two streams: 10 ms a step alone, then one of them with a gap of 30 ms."""
    streams = [
        answer(bench, (0.98, 1), (0.99, 2), (1.00, 1), (1.01, 3), (1.02, 1), (1.05, 2), (1.06, 1), (1.20, 9)),
        answer(bench, (0.98, 1), (0.99, 2), (1.00, 1), (1.01, 3), (1.02, 1), (1.03, 2), (1.04, 1), **stream),
    ]
    longs = [answer(bench, (1.10, 1), sent=1.02), answer(bench, (1.15, 4), sent=1.05)]
    return bench.Run(streams, longs, 0.99, 1.02, 1.10)


def test_gaps_and_tokens(bench: ModuleType) -> None:
    found = bench.Figures.of(a_run(bench))
    assert found.alone.percentiles == pytest.approx((10.0, 10.0, 10.0))
    assert found.beside.most == pytest.approx(30.0)
    assert found.beside.percentiles[0] == pytest.approx(10.0)
    assert found.beside.percentiles[-1] == pytest.approx(10 + 0.95 * 20)  # between the last two of six
    assert found.ratio == pytest.approx(2.9)
    assert found.alone_tokens_per_s == pytest.approx(2 * (2 + 1 + 3) / 0.03)
    assert found.beside_tokens_per_s == pytest.approx(2 * (1 + 2 + 1) / 0.08)
    assert found.tokens_per_event == pytest.approx(8 / 6)
    assert (found.first_token_median_ms, found.first_token_max_ms) == pytest.approx((90.0, 100.0))
    assert (found.ended, found.told) == (0, True)


@pytest.mark.parametrize(
    ("bound", "finished", "status", "said"),
    [
        (None, False, 0, "p99 beside / p50 alone: 2.90"),
        (3.0, False, 0, "1.33 an event"),
        (2.5, False, 1, "2.90 times p50 alone, more than 2.5"),
        (None, True, 1, "1 streams ended before"),
    ],
)
def test_the_verdict(
    bench: ModuleType,
    bound: float | None,
    finished: bool,
    status: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = given(bench, "http://host", f"--json {tmp_path / 'figures'}")
    asked.bound = bound
    assert bench.verdict(bench.Figures.of(a_run(bench, finished=finished)), asked) == status
    assert said in capsys.readouterr().out
    written = json.loads((tmp_path / "figures").read_text())
    assert written["ratio"] == pytest.approx(2.9)
    assert written["beside_gap_ms"]["max"] == pytest.approx(30.0)


@pytest.mark.parametrize("told", [True, False])
async def test_a_load(bench: ModuleType, told: bool) -> None:
    """Two tokens an event, each 5 ms, where the endpoint says which they are."""
    ids = {"token_ids": [7, 8]} if told else {}

    async def stream(exchange: Exchange) -> None:
        await exchange.head("200 OK", "text/event-stream", "Transfer-Encoding: chunked")
        for _ in range(0, exchange.body["max_tokens"], 2):
            await sleep(0.005)
            await exchange.event(choices=[{"index": 0, "text": "", "finish_reason": None, **ids}])
        # The end by itself carries no token.
        await exchange.event(choices=[{"index": 0, "text": "", "finish_reason": "length", "token_ids": []}])
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.end()

    async with serving(stream) as server:
        found = await bench.measured(given(bench, server.url))
    assert (found.streams, found.longs, found.ended, found.told) == (3, 2, 0, told)
    # Never early; late by what a busy machine adds, which is less than a wrong unit would show: a factor of 1,000.
    assert 5 <= found.alone.percentiles[0] < 2_500
    assert found.tokens_per_event == (2 if told else 1)
    assert found.first_token_median_ms >= 5
    bodies = [exchange.body for exchange in server.exchanges]
    assert [body["max_tokens"] for body in bodies] == [20] * 3 + [500] * 3 + [4] * 2
    assert [len(body["prompt"]) for body in bodies] == [4] * 6 + [40] * 2
    assert all(body["ignore_eos"] and body["stream"] and body["temperature"] == 0 for body in bodies)
    assert bodies[0]["prompt"] != bodies[1]["prompt"]


async def refused(exchange: Exchange) -> None:
    """The context is too short for long prompts."""
    if len(exchange.body["prompt"]) > 4:
        await exchange.json("400 Bad Request", {"error": {"message": "too long"}})
    else:
        await completions(exchange, gap_s=0.005)


async def failing(exchange: Exchange) -> None:
    """The engine fails in the middle of streams."""
    await exchange.head("200 OK", "text/event-stream", "Transfer-Encoding: chunked")
    await exchange.event(choices=[{"index": 0, "text": "x", "token_ids": [1]}])
    await exchange.event(error={"message": "rank 0 is gone"})
    await exchange.end()


async def leaving(exchange: Exchange) -> None:
    exchange.writer.close()


async def silent(exchange: Exchange) -> None:
    await sleep(0.5)


@pytest.mark.parametrize(
    ("behaves", "more", "said"),
    [
        (refused, "", r"^long prompt \d: HTTP 400: too long$"),
        (failing, "", r"^warm-up \d: rank 0 is gone$"),
        (leaving, "", r"^warm-up \d: the server closed the connection$"),
        (silent, "--limit 0.2", r"^it did not end within 0.2 s$"),
    ],
)
async def test_an_error_of_the_server_ends_it(bench: ModuleType, behaves: Any, more: str, said: str) -> None:
    async with serving(behaves) as server:
        with pytest.raises(bench.Failed, match=said):
            await bench.measured(given(bench, server.url, more))


@pytest.mark.parametrize("url", [None, "ftp://host"])
def test_an_endpoint_that_is_not_there(
    bench: ModuleType, url: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        words = islice(SMALL.split(), 2, None)
        asked = url or f"http://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setattr("sys.argv", ["mixed_load.py", *words, "--url", asked])
        with pytest.raises(SystemExit) as left:
            bench.main()
    if url is None:
        assert "cannot connect to" in str(left.value)
        assert "\n" not in str(left.value)
    else:
        assert "is not an address" in capsys.readouterr().err
