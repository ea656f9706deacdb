"""The load generator, against a server that answers as told."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from itertools import pairwise

import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.loadtest.load import LoadRun, RequestRecord, run_load
from deploy.loadtest.load_report import PERCENTILES, LoadReport, percentile
from deploy.loadtest.load_spec import LoadSpec
from deploy.loadtest.served_model import served_model
from deploy.loadtest.sse_client import SseConnection, Target
from deploy.mistakes import CommandFailure, UsageMistake
from tests.deploy.loadtest.sse_server import completions, serving


def spec(url: str, **fields) -> LoadSpec:
    return LoadSpec(**{"url": url, "model": "m", "requests": 6, "input": 5, "output": 4, "warmup": 0, **fields})


async def load(answer, **fields) -> tuple[LoadReport, LoadRun, object]:
    async with serving(answer) as server:
        run = await run_load(spec(server.url, **fields), lambda record: None)
        return LoadReport.of(run), run, server


async def test_a_closed_loop_counts_and_reuses_connections():
    async def answer(exchange):
        await completions(exchange, gap_s=0.01)

    report, _, server = await load(answer, requests=9, concurrency=3)
    assert (report.requests, report.finished, report.errors) == (9, 9, {})
    assert (report.prompt_tokens, report.generated_tokens, report.events) == (45, 36, 36)
    assert server.most_open == server.connections == 3


async def test_latencies_are_those_of_the_server():
    async def answer(exchange):
        await asyncio.sleep(0.05)
        await completions(exchange, gap_s=0.02, per_event=2)

    report, run, _ = await load(answer, requests=3, output=6)
    assert report.generated_tokens == 18
    assert report.events == 9
    # Never early; late by what a busy machine adds, which is less than a wrong unit would show: a factor of 1,000.
    assert 70 <= report.latencies["ttft"].mean < 35_000
    assert 20 <= report.latencies["itl"].mean < 10_000
    assert report.latencies["tpot"].mean == pytest.approx(
        statistics.fmean((r.arrivals[-1] - r.arrivals[0]) / 5 for r in run.records) * 1e3
    )
    assert report.latencies["e2e"].most <= run.duration * 1e3


@pytest.mark.soak
async def test_times_are_those_that_another_client_measures():
    """The openai client asks the same server beside the load, in the same event loop, one request after the other."""

    async def answer(exchange):
        if exchange.path != "/v1/models":
            await asyncio.sleep(0.06)
        await completions(exchange, gap_s=0.02)

    firsts, gaps, wholes = [], [], []
    async with (
        serving(answer) as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):

        async def ask() -> None:
            begun = time.perf_counter()
            stream = await client.completions.create(model="m", prompt=[1] * 5, max_tokens=12, stream=True)
            arrivals = [time.perf_counter() async for chunk in stream if chunk.choices]
            firsts.append(arrivals[0] - begun)
            gaps.extend(after - before for before, after in pairwise(arrivals))
            wholes.append(arrivals[-1] - begun)

        await ask()  # a connection
        firsts.clear(), gaps.clear(), wholes.clear()
        running = asyncio.create_task(
            run_load(spec(server.url, requests=40, output=12, concurrency=2), lambda record: None)
        )
        while not running.done():
            await ask()
    report = LoadReport.of(await running)
    assert len(firsts) > 10
    for name, measured in (("ttft", firsts), ("itl", gaps), ("e2e", wholes)):
        theirs = statistics.median(measured) * 1e3
        assert report.latencies[name].percentiles[PERCENTILES.index(50)] == pytest.approx(theirs, rel=0.15), name


async def test_what_is_sent():
    _, _, server = await load(completions, requests=2, api_key="secret", temperature=0.5, seed=3)
    first, second = server.exchanges
    assert first.path == "/v1/completions"
    assert first.headers["authorization"] == "Bearer secret"
    assert first.body | {"prompt": None} == {
        "model": "m",
        "prompt": None,
        "max_tokens": 4,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert len(first.body["prompt"]) == 5
    assert all(10 <= token < 1000 for token in first.body["prompt"])
    assert first.body["prompt"] != second.body["prompt"]
    assert json.loads(spec("http://x", seed=3, temperature=0.5).body(0)) == first.body
    assert spec("http://x", seed=4).body(0) != spec("http://x", seed=3).body(0)


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_tokens_without_text_are_seen_where_their_ids_are_asked_for(api: str):
    async def answer(exchange):
        assert exchange.body["return_token_ids"] is True
        await exchange.head("200 OK", "text/event-stream; charset=utf-8", "Transfer-Encoding: chunked")
        if api == "chat":
            await exchange.event(choices=[{"delta": {"role": "assistant", "content": ""}}])
        for token in range(3):
            what = {"delta": {"content": ""}} if api == "chat" else {"text": ""}
            await exchange.event(choices=[{**what, "token_ids": [token]}])
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.end()

    report, _, _ = await load(answer, requests=1, chat=api == "chat", token_ids=True)
    assert (report.finished, report.events, report.generated_tokens) == (1, 3, 3)


async def test_warmup_is_sent_but_not_counted():
    report, _, server = await load(completions, requests=2, warmup=3)
    assert (report.requests, len(server.exchanges)) == (2, 5)
    assert len({json.dumps(exchange.body) for exchange in server.exchanges}) == 5


async def test_chat_counts_no_role_event():
    async def answer(exchange):
        assert exchange.path == "/v1/chat/completions"
        assert len(exchange.body["messages"][0]["content"].split()) == 5
        await exchange.head("200 OK", "text/event-stream; charset=utf-8", "Transfer-Encoding: chunked")
        await exchange.event(choices=[{"delta": {"role": "assistant", "content": ""}}])
        for _ in range(2):
            await exchange.event(choices=[{"delta": {"content": "x"}}])
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.end()

    report, _, _ = await load(answer, requests=1, chat=True)
    assert (report.finished, report.events, report.generated_tokens) == (1, 2, 2)


@pytest.mark.alone
async def test_an_open_loop_arrives_as_a_poisson_process():
    async def answer(exchange):
        await completions(exchange, gap_s=0.05)

    report, run, server = await load(answer, requests=60, rate=200.0, seed=1)
    assert report.finished == 60
    # The next request does not wait for the last one.
    assert server.most_open > 5
    sent = sorted(record.sent for record in run.records)
    gaps = np.diff(sent)
    # Never early; one after the other they would take twelve seconds.
    assert 0.5 * 59 / 200 < sent[-1] - sent[0] < 6
    # Exponential gaps spread as much as they are long; even ones would not.
    assert gaps.std() > 0.5 * gaps.mean()


async def _overloaded(exchange):
    await exchange.json("429 Too Many Requests", {"error": {"message": "queue is full", "type": "overloaded"}})


async def _faulty(exchange):
    await exchange.head("200 OK", "text/event-stream", "Transfer-Encoding: chunked")
    await exchange.event(choices=[{"text": "x"}])
    await exchange.event(error={"message": "rank 1 died"})
    await exchange.end()


async def _cut(exchange):
    await exchange.head("200 OK", "text/event-stream", "Transfer-Encoding: chunked")
    await exchange.event(choices=[{"text": "x"}])
    exchange.writer.close()


async def _undone(exchange):
    await exchange.head("200 OK", "text/event-stream", "Transfer-Encoding: chunked")
    await exchange.event(choices=[{"text": "x"}])
    await exchange.end()


async def _garbled(exchange):
    await exchange.head("200 OK", "text/event-stream", "Transfer-Encoding: chunked")
    await exchange.chunk(b"data: {\n\ndata: [DONE]\n\n")
    await exchange.end()


async def _not_streamed(exchange):
    await exchange.json("200 OK", {"choices": [{"text": "x"}]})


async def _no_tokens(exchange):
    await exchange.head("200 OK", "text/event-stream", "Transfer-Encoding: chunked")
    await exchange.chunk(b"data: [DONE]\n\n")
    await exchange.end()


async def _not_http(exchange):
    exchange.writer.write(b"220 mail.example ESMTP\r\n")


async def _silent(exchange):
    await asyncio.sleep(3600)


async def _hang_up(exchange):
    exchange.writer.close()


@pytest.mark.parametrize(
    ("answer", "kind", "detail"),
    [
        (_overloaded, "HTTP 429", "queue is full"),
        (_faulty, "error event", "rank 1 died"),
        (_cut, "stream ended early", ""),
        (_undone, "stream ended early", ""),
        (_garbled, "unreadable event", "{"),
        (_not_streamed, "no event stream", '{"choices": [{"text": "x"}]}'),
        (_no_tokens, "no tokens", ""),
        (_not_http, "connection lost", "not HTTP"),
        (_silent, "timeout", "no end after"),
        (_hang_up, "connection lost", "the server closed the connection"),
    ],
)
async def test_errors_by_kind(answer, kind, detail):
    report, _, _ = await load(answer, requests=3, concurrency=2, timeout_s=0.3 if answer is _silent else 60)
    assert (report.finished, report.errors) == (0, {kind: 3})
    assert detail in report.details.get(kind, "")


async def test_failed_requests_do_not_count():
    turns = iter([True, False, True, False])

    async def answer(exchange):
        await (completions if next(turns) else _faulty)(exchange)

    report, _, _ = await load(answer, requests=4)
    assert (report.requests, report.finished, report.errors) == (4, 2, {"error event": 2})
    assert report.generated_tokens == 8


async def test_nobody_listens():
    run = await run_load(spec("http://127.0.0.1:1", requests=2), lambda record: None)
    assert LoadReport.of(run).errors == {"cannot connect": 2}


async def test_a_kept_connection_that_the_server_closed_is_replaced():
    async def answer(exchange):
        await completions(exchange)
        exchange.writer.close()

    report, _, server = await load(answer, requests=4)
    assert (report.finished, report.errors, server.connections) == (4, {}, 4)


async def test_an_event_stream_may_end_with_its_connection():
    async def answer(exchange):
        await exchange.head("200 OK", "text/event-stream", "Connection: close")
        exchange.writer.write(b'data: {"choices": [{"text": "x"}]}\n\ndata: [DONE]\n\n')
        exchange.writer.close()

    report, _, _ = await load(answer, requests=2)
    assert (report.finished, report.errors) == (2, {})


EVENTS = [b'{"choices": []}', b"two", b"line1\nline2", "ünïcode".encode(), b"[DONE]"]


@settings(max_examples=200, deadline=None)
@given(cuts=st.lists(st.integers(1, 400)), crlf=st.booleans(), chunk=st.integers(1, 90))
def test_events_do_not_depend_on_how_they_arrive(cuts, crlf, chunk):
    body = b": a comment\n\n" + b"".join(
        b"".join(b"data: " + line + b"\n" for line in event.split(b"\n")) + b"\n" for event in EVENTS
    )
    if crlf:
        body = body.replace(b"\n", b"\r\n")
    chunks = [body[i : i + chunk] for i in range(0, len(body), chunk)]
    wire = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    wire += b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [*chunks, b""])
    connection, seen = SseConnection(), []
    connection.expect(lambda data, now: seen.append(data))
    places = sorted({0, len(wire), *(cut % len(wire) for cut in cuts)})
    for begin, end in pairwise(places):
        connection.data_received(wire[begin:end])
    assert seen == EVENTS


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.sampled_from([0, 1, 50, 90, 99, 100]))
def test_percentiles_are_numpys(values, percent):
    ordered = sorted(values)
    assert percentile(ordered, percent) == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-9)


def test_the_report_sums_up():
    records = [RequestRecord(sent=1.0, arrivals=[1.1, 1.2, 1.4], prompt_tokens=7, tokens=4) for _ in range(2)]
    report = LoadReport.of(LoadRun(records, 2.0))
    assert report.latencies["ttft"].report() == pytest.approx(
        {"mean": 100, "p50": 100, "p90": 100, "p99": 100, "max": 100}
    )
    assert report.latencies["tpot"].mean == pytest.approx(100)
    assert report.latencies["itl"].report() == pytest.approx(
        {"mean": 150, "p50": 150, "p90": 200, "p99": 200, "max": 200}
    )
    assert report.throughput == {"requests_per_s": 1.0, "input_tokens_per_s": 7.0, "output_tokens_per_s": 4.0}


@pytest.mark.parametrize(
    ("url", "host", "port", "path"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000, ""),
        ("127.0.0.1:8000", "127.0.0.1", 8000, ""),
        ("https://example.org/", "example.org", 443, ""),
        ("http://example.org/base/v1", "example.org", 80, "/base"),
        ("http://[::1]:9/v1/", "::1", 9, ""),
    ],
)
def test_addresses(url, host, port, path):
    target = Target(url)
    assert (target.host, target.port, target.path) == (host, port, path)


@pytest.mark.parametrize(
    ("status", "content", "expected"),
    [
        ("200 OK", {"data": [{"id": "only"}]}, "only"),
        ("200 OK", {"data": [{"id": "one"}, {"id": "two"}]}, r"serves several models: give --model, one of one, two$"),
        ("200 OK", {"data": []}, r"/v1/models says that no model is served$"),
        ("200 OK", ["m"], r"does not say \(HTTP 200\): give --model$"),
        ("404 Not Found", {"detail": "Not Found"}, r"does not say \(HTTP 404\): give --model$"),
        ("401 Unauthorized", {"error": {"message": "no"}}, r"answers HTTP 401: give its key with --api-key$"),
        ("", None, r"cannot connect to http://.*/v1/models, .* \(no answer in time\)"),
    ],
)
async def test_an_endpoint_is_asked_what_it_serves(status: str, content: object, expected: str) -> None:
    async def answer(exchange):
        assert exchange.path == "/v1/models"
        assert exchange.headers.get("authorization") == "Bearer secret"
        if not status:
            await asyncio.sleep(60)
        await exchange.json(status, content)

    async with serving(answer) as server:
        asking = served_model(f"{server.url}/v1", "secret", 60.0 if status else 0.2)
        if expected == "only":
            assert await asking == "only"
        else:
            with pytest.raises((CommandFailure, UsageMistake), match=expected):
                await asking
