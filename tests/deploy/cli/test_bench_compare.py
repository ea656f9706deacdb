"""`latentserve bench compare`, goodput, and the page of a run, against servers that answer as told."""

from __future__ import annotations

import asyncio
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.loadtest.load import LoadRun, RequestRecord
from deploy.loadtest.load_page import MOST_POINTS, counted, cumulative
from deploy.loadtest.load_report import Limits, LoadReport
from tests.deploy.loadtest.sse_server import Server, completions, serving


@contextmanager
def running(**how: float) -> Iterator[Server]:
    """A server in a thread of its own, for the command as the user runs it."""
    loop, started, found = asyncio.new_event_loop(), threading.Event(), []

    async def serve() -> None:
        stop = asyncio.Event()
        async with serving(partial(completions, **how)) as server:
            found.extend([server, stop])
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    started.wait()
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(found[1].set)
        thread.join()
        loop.close()


def test_two_endpoints_get_the_same_and_take_turns(command):
    with running() as fast, running(gap_s=0.02) as slow:
        ran = command(
            *("bench", "compare", fast.url, slow.url, "--model", "m", "--requests", "3", "--output", "4"),
            *("--rounds", "3", "--slo-gap", "10000", "--json"),
        )
    assert ran.code == 0
    assert (ran.json["first"]["finished"], ran.json["second"]["finished"]) == (9, 9)
    first, second, over = ran.json["first"], ran.json["second"], ran.json["second_over_first"]
    assert over["itl_p50_ms"] > 1  # a machine that stands still for a moment holds up few tokens, and neither more
    for name, statistic in (("itl", "p50"), ("tpot", "mean")):
        ratio = second[f"{name}_ms"][statistic] / first[f"{name}_ms"][statistic]
        assert over[f"{name}_{statistic}_ms"] == pytest.approx(ratio, rel=1e-3)
    throughput = second["output_tokens_per_s"] / first["output_tokens_per_s"]
    goodput = second["goodput"]["requests_per_s"] / first["goodput"]["requests_per_s"]
    assert over["output_tokens_per_s"] == pytest.approx(throughput, rel=1e-3, abs=1e-4)
    assert over["goodput_requests_per_s"] == pytest.approx(goodput, rel=1e-3, abs=1e-4)
    prompts = [[exchange.body["prompt"] for exchange in server.exchanges] for server in (fast, slow)]
    assert prompts[0] == prompts[1]
    assert len({str(prompt) for prompt in prompts[0]}) == 12  # with warm-ups; no round repeats another's
    # First, second, second, first, first, second: whoever was last goes first.
    at = sorted((exchange.at, who) for who, server in enumerate((fast, slow)) for exchange in server.exchanges)
    assert [who for _, who in at] == [0] * 4 + [1] * 8 + [0] * 8 + [1] * 4


def test_the_table_says_which_is_which(command):
    with running() as one, running() as other:
        ran = command("bench", "compare", one.url, other.url, "--model", "m", "--model", "n", "--requests", "2")
    assert ran.code == 0
    assert f"1: m at {one.url}, 4 of 4 requests finished" in ran.out
    assert f"2: n at {other.url}, 4 of 4 requests finished" in ran.out
    for words in ("2 / 1", "time to first token, p99, ms", "tok/s out"):
        assert words in ran.out
    assert {exchange.body["model"] for exchange in other.exchanges} == {"n"}


def test_one_that_does_not_answer_fails(command):
    with running() as one:
        ran = command("bench", "compare", one.url, "http://127.0.0.1:1", "--model", "m", "--requests", "1")
    assert ran.code == 1
    assert "no request finished: http://127.0.0.1:1 did not answer" in ran.err
    assert command("bench", "compare", "ftp://x", "http://y").code == 2
    three = ["--model", "a", "--model", "b", "--model", "c"]
    assert "--model was given 3 times" in command("bench", "compare", "http://x", "http://y", *three).err


def test_goodput_counts_who_was_served_within_the_limits():
    records = [
        RequestRecord(sent=0.0, arrivals=[0.1, 0.2], tokens=2),
        RequestRecord(sent=0.0, arrivals=[0.3, 0.4], tokens=2),
        RequestRecord(sent=0.0, arrivals=[0.1, 0.5], tokens=2),
        RequestRecord(sent=0.0, arrivals=[0.1], tokens=1),
        RequestRecord(sent=0.0, error="HTTP 429"),
    ]
    run = LoadRun(records, 2.0)
    for limits, kept in ((Limits(200, None), 3), (Limits(None, 200), 3), (Limits(200, 200), 2), (Limits(1, 1), 0)):
        report = LoadReport.of(run, limits)
        assert report.goodput is not None
        assert (report.kept, report.goodput["requests_per_s"], report.goodput["share"]) == (kept, kept / 2, kept / 5)
    assert LoadReport.of(run).goodput is None


@pytest.mark.long
def test_a_page_is_whole_and_needs_nothing_else(command, tmp_path: Path):
    page = tmp_path / "load.html"
    with running(gap_s=0.01) as server:
        ran = command(
            *("bench", "http", "--url", server.url, "--model", "<m>", "--requests", "4", "--concurrency", "2"),
            *("--slo-ttft", "60000", "--html", str(page)),
        )
    assert ran.code == 0
    assert "4 of 4 with first token within 60000 ms: goodput" in ran.out
    text = page.read_text()
    assert "http" not in text.replace(server.url, "")
    assert "&lt;m&gt;" in text
    assert "<m>" not in text
    plots = [
        ET.fromstring(part.partition("</svg>")[0] + "</svg>") for part in map("<svg".__add__, text.split("<svg")[1:])
    ]
    assert [len(plot.findall("polyline")) for plot in plots] == [3, 1, 2]
    for plot in plots:
        for line in plot.findall("polyline"):
            assert all(0 <= float(x) <= 640 for dot in line.get("points", "").split() for x in dot.split(","))
    with running() as server:
        ran = command("bench", "http", "--url", server.url, "--requests", "2", "--html", "/dev/full")
    assert ran.code == 1
    assert "2 of 2 requests finished" in ran.out  # what was measured is not lost
    assert "the page cannot be written" in ran.err
    for impossible in (tmp_path / "none" / "x.html", tmp_path, tmp_path / ("x" * 300)):
        ran = command("bench", "http", "--html", str(impossible), "--model", "m")
        assert ran.code == 2
        assert "--html" in ran.err


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=1500))
def test_a_distribution_ends_with_the_slowest(values: list[float]) -> None:
    points = cumulative(values)
    assert len(points) <= MOST_POINTS + 1
    assert points[-1] == (max(values), 1.0)
    for value, share in points:
        assert share >= sum(other < value for other in values) / len(values)
        assert share <= sum(other <= value for other in values) / len(values)


def test_spans_are_counted_while_they_are_open() -> None:
    assert dict(counted([(0.0, 60.0), (30.0, 120.0)])) == {
        float(at): float((at < 60) + (30 <= at < 120)) for at in range(121)
    }
