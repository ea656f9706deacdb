"""Stalls of a front under the largest requests: the longest gap of a neighbour's stream, the slowest /health, and the
longest time for which the event loop stood still.

    python bench/front_stalls.py --limit 1.0

The server (uvicorn with uvloop and httptools, the real application and tokenizer) runs in a process of its own, with an
engine that gives every stream a token each 10 ms. The requests are sent by another process. Ends with 1 if a gap or a
/health took longer than the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import os
import resource
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import orjson
import uvicorn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.frontend import ROOT, NullEngine
from deploy.api.app import create_app
from deploy.config.api import ApiConfig
from deploy.text.tokenizer import Tokenizer

PACE_S = 0.01
CONTEXT = 131_072
BEAT_S = 0.001
QUIET_S = 0.5
"""Seconds of watching before the first request and behind the last answer."""
MODEL = "null"


class PacedEngine(NullEngine):
    """A token for every stream each `PACE_S` seconds, of a model with an ordinary context."""

    pace_s = PACE_S

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.info = replace(self.info, max_context=CONTEXT)


class Heart:
    """Beats in the event loop; `worst` is the longest time between two beats, less the pause that was asked for."""

    worst = 0.0

    async def run(self) -> None:
        """Beat until cancelled."""
        last = time.perf_counter()
        while True:
            await asyncio.sleep(BEAT_S)
            now = time.perf_counter()
            self.worst, last = max(self.worst, now - last - BEAT_S), now


async def serve(model: str, pipe: Connection) -> None:
    """The server's process. Sends its port; then answers whatever it receives with the seconds for which its loop was
    held since the last time, and the most memory it has taken, MiB."""
    tokenizer = Tokenizer.load(model)
    if tokenizer is None:
        raise SystemExit(f"{model} holds no tokenizer")
    app = create_app(PacedEngine(tokenizer), tokenizer, ApiConfig(probe_ttl_s=0))
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    config = uvicorn.Config(app, http="httptools", access_log=False, lifespan="off", log_level="warning")
    heart = Heart()

    def tell() -> None:
        pipe.recv()
        pipe.send((heart.worst, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
        heart.worst = 0.0

    gc.collect()
    gc.freeze()  # as a replica does once it is up
    asyncio.get_running_loop().add_reader(pipe.fileno(), tell)
    beating = asyncio.create_task(heart.run())
    pipe.send(listener.getsockname()[1])
    await uvicorn.Server(config).serve(sockets=[listener])
    beating.cancel()


def run_server(model: str, pipe: Connection) -> None:
    """Entry of the server's process."""
    import uvloop

    with suppress(KeyboardInterrupt):
        uvloop.run(serve(model, pipe))


def chat(**more: object) -> bytes:
    """A chat that asks for little, with further fields."""
    return orjson.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **more})


def keys() -> bytes:
    """500,000 names, 8.3 MB."""
    return chat(chat_template_kwargs={f"name{number:06}": 1 for number in range(500_000)})


CASES: dict[str, tuple[str, Callable[[], bytes], int]] = {
    "500,000 chat_template_kwargs": ("/v1/chat/completions", keys, 1),
    "the same, 24 at once": ("/v1/chat/completions", keys, 24),
    "2,000,000 stop strings": ("/v1/chat/completions", lambda: chat(stop=["a"] * 2_000_000), 1),
    "600,000 logit_bias": (
        "/v1/chat/completions",
        lambda: chat(logit_bias=dict.fromkeys(map(str, range(600_000)), 1)),
        1,
    ),
    "8 MB to /tokenize": ("/tokenize", lambda: orjson.dumps({"prompt": "x y " * 2_000_000}), 1),
    "8 MB of token ids": (
        "/v1/completions",
        lambda: orjson.dumps({"model": MODEL, "prompt": [123] * 2_000_000, "max_tokens": 4}),
        1,
    ),
    "8 prompts of 120,000 ids": (
        "/v1/completions",
        lambda: orjson.dumps({"model": MODEL, "prompt": [[123] * 120_000] * 8, "max_tokens": 4}),
        1,
    ),
    "1,000,000 ids to /detokenize": ("/detokenize", lambda: orjson.dumps({"tokens": [123] * 1_000_000}), 1),
    "1,000,000 wrong ids": ("/detokenize", lambda: orjson.dumps({"tokens": [None] * 1_000_000}), 1),
    "8,192 messages": (
        "/v1/chat/completions",
        lambda: chat(messages=[{"role": "user", "content": "x" * 900}] * 8192),
        1,
    ),
    "a chat of 8 MB, 8 at once": (
        "/v1/chat/completions",
        lambda: chat(messages=[{"role": "user", "content": "one two " * 1_000_000}]),
        8,
    ),
}  # fmt: skip
"""Requests by name: path, body, and the number that is sent at once."""


async def send_all(port: int, path: str, body: bytes, count: int) -> Counter[int]:
    """Statuses of the answers."""
    limits, headers = httpx.Limits(max_connections=None), {"content-type": "application/json"}
    statuses: Counter[int] = Counter()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120, limits=limits) as http:

        async def one() -> None:
            try:
                statuses[(await http.post(path, content=body, headers=headers)).status_code] += 1
            except httpx.HTTPError:
                statuses[0] += 1

        await asyncio.gather(*(one() for _ in range(count)))
    return statuses


def run_sender(port: int, pipe: Connection) -> None:
    """Entry of the sender's process: gets names of cases, sends statuses."""
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            path, body, count = CASES[pipe.recv()]
            raw = body()
            pipe.send(None)
            pipe.recv()
            pipe.send(asyncio.run(send_all(port, path, raw, count)))


async def watch_stream(http: httpx.AsyncClient, gaps: list[float]) -> None:
    """Note the pauses of a neighbour's stream, for ever."""
    asked = {"model": MODEL, "prompt": "hi", "max_tokens": 100_000, "stream": True}
    async with http.stream("POST", "/v1/completions", json=asked) as answer:
        last = time.perf_counter()
        async for _ in answer.aiter_raw():
            now = time.perf_counter()
            gaps.append(now - last)
            last = now


async def watch_health(http: httpx.AsyncClient, times: list[float]) -> None:
    """Note how long /health takes, ten times a second, for ever."""
    while True:
        begin = time.perf_counter()
        status = (await http.get("/health")).status_code
        times.append(time.perf_counter() - begin if status == 200 else float("inf"))
        await asyncio.sleep(0.1)


async def measure(port: int, name: str, server: Connection, sender: Connection) -> tuple[float, float]:
    """The longest gap and the slowest /health while a case is sent; prints them."""
    loop = asyncio.get_running_loop()
    sender.send(name)
    sender.recv()
    gaps: list[float] = []
    times: list[float] = []
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:
        watchers = [asyncio.create_task(watch_stream(http, gaps)), asyncio.create_task(watch_health(http, times))]
        await asyncio.sleep(QUIET_S)
        server.send(None)
        server.recv()
        gaps.clear()
        times.clear()
        begin = time.perf_counter()
        sender.send(None)
        statuses = await loop.run_in_executor(None, sender.recv)
        seconds = time.perf_counter() - begin
        await asyncio.sleep(QUIET_S)
        for watcher in watchers:
            watcher.cancel()
    server.send(None)
    held, memory = server.recv()
    gap, slowest = max(gaps, default=float("inf")), max(times, default=float("inf"))
    answers = ", ".join(f"{count} x {status or 'broken'}" for status, count in sorted(statuses.items()))
    print(
        f"{name:30} {gap * 1e3:9.0f} {slowest * 1e3:9.0f} {held * 1e3:9.0f} {memory:9.0f} {seconds:9.2f}  {answers}",
        flush=True,
    )
    return gap, slowest


def main() -> int:
    """Run the cases and judge them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "assets" / "demo"), help="a folder with a tokenizer")
    parser.add_argument("--limit", type=float, default=1.0, help="seconds that a gap and a /health may take")
    parser.add_argument("--only", help="run the cases whose name contains this")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    server_pipe, theirs = context.Pipe()
    server = context.Process(target=run_server, args=(options.model, theirs), daemon=True)
    server.start()
    port = server_pipe.recv()
    sender_pipe, its = context.Pipe()
    sender = context.Process(target=run_sender, args=(port, its), daemon=True)
    sender.start()
    worst = 0.0
    columns = ("gap, ms", "health", "loop held", "peak MiB", "seconds")
    print(f"{'':30} " + " ".join(f"{column:>9}" for column in columns) + "  answers")
    try:
        for name in CASES:
            if not options.only or options.only in name:
                worst = max(worst, *asyncio.run(measure(port, name, server_pipe, sender_pipe)))
    finally:
        for process in (sender, server):
            os.kill(process.pid or 0, signal.SIGTERM)
            process.join(5)
            process.kill()
    print(f"longest gap or /health: {worst:.2f} s; at most {options.limit:g} s are allowed")
    return int(worst > options.limit)


if __name__ == "__main__":
    sys.exit(main())
