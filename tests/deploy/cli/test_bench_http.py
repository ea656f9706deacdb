"""`latentserve bench http`, against a server that answers as told."""

from __future__ import annotations

import asyncio

import pytest

from deploy.cli.bench_load import SETTINGS
from tests.deploy.loadtest.sse_server import completions, serving


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port", "http://x/?a=1", "http://x:70000"])
def test_addresses_that_are_none(url, command):
    ran = command("bench", "http", "--url", url)
    assert ran.code == 2
    assert "--url" in ran.err


def test_rate_and_concurrency_exclude_each_other(command):
    assert "not both" in command("bench", "http", "--rate", "1", "--concurrency", "2").err
    assert "--rate: Input should be greater than 0, not 0" in command("bench", "http", "--rate", "0").err


def test_a_run_in_which_nothing_finished_fails(command):
    ran = command("bench", "http", "--url", "http://127.0.0.1:1", "--requests", "2")
    assert ran.code == 1
    assert "no request finished" in ran.err
    assert "cannot connect to http://127.0.0.1:1/v1/models" in ran.err
    assert "Traceback" not in ran.err
    ran = command("bench", "http", "--url", "http://127.0.0.1:1", "--requests", "2", "--model", "m")
    assert ran.code == 1
    assert "no request finished: http://127.0.0.1:1 did not answer" in ran.err
    assert "cannot connect" in ran.err


@pytest.fixture
def endpoint():
    """URL of a server in a thread of its own, for the command as the user runs it."""
    import threading

    loop, started, found = asyncio.new_event_loop(), threading.Event(), []

    async def serve():
        stop = asyncio.Event()
        async with serving(completions) as server:
            found.extend([server.url, stop])
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    started.wait()
    yield found[0]
    loop.call_soon_threadsafe(found[1].set)
    thread.join()


def test_the_command_prints_json(command, endpoint):
    ran = command(
        "bench", "http", "--url", endpoint, "--requests", "5", "--concurrency", "2", "--output", "3", "--json"
    )
    assert ran.code == 0
    result = ran.json
    assert (result["finished"], result["generated_tokens"], result["tokens_per_event"]) == (5, 15, 1.0)
    assert set(result["ttft_ms"]) == set(result["itl_ms"]) == {"mean", "p50", "p90", "p99", "max"}


def test_the_command_prints_tables(command, endpoint):
    ran = command("bench", "http", "--url", endpoint, "--requests", "5", "--rate", "100")
    assert ran.code == 0
    for words in ("time to first token", "time per output token", "inter-token latency", "5 of 5 requests finished"):
        assert words in ran.out


def test_both_commands_have_all_options_of_a_load(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    shown = [command("bench", name, "--help").out for name in ("http", "compare")]
    http, compare = ([" ".join(line.split()) for line in text.splitlines()] for text in shown)
    for setting in SETTINGS:
        (line,) = (line for line in http if line.startswith(f"│ {setting.option} "))
        assert line in compare
        assert setting.help({}) in line


def test_all_mistakes_are_told_at_once(command):
    ran = command("bench", "compare", "http://x", "http://y", "--vocab", "1", "--timeout", "0", "--slo-gap", "-1")
    assert ran.code == 2
    assert [line.partition(": Input")[0] for line in ran.err.splitlines()] == [
        "error: --vocab",
        "--timeout",
        "--slo-gap",
    ]
