"""Cost of the HTTP front with an engine that costs nothing: tokens per second at many streams, time to first token at
one.

    python bench/frontend.py --streams 64 --tokens 512 [--parsers] [--journals]

The server (uvicorn with uvloop and httptools, the real application and tokenizer) runs in a process of its own. Its
engine hands every stream one token per turn of the event loop. The client counts events on raw sockets. With
--parsers, reasoning and tool calls are looked for in all streams; with --tracing, spans of all requests are made and
thrown away. With --journals there are two servers, asked in turns: both with the layer that a replica has under Ray
Serve, one with journals of its answers, as replicas keep them that have a neighbor, and one without. On a busy machine
the server's processor time per token says the most.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import multiprocessing
import os
import signal
import socket
import statistics
import sys
import time
from contextlib import suppress
from itertools import cycle, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, cast

import psutil
import uvicorn
import uvloop
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deploy.api.app import create_app
from deploy.config.api import ApiConfig
from deploy.text.tokenizer import Tokenizer
from workers.processes.client import OutputMailbox
from workers.protocol.front import ModelInfo
from workers.protocol.messages import EngineStats, Request, RequestOutput

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from deploy.observability.tracing import Tracing

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "Write a function that reads the lines of a file and returns them sorted by length. " * 6


class NullEngine:
    """Engine that gives one token per stream per turn of the loop, out of a fixed text."""

    fault = None
    pace_s = 0.0
    """Seconds between two turns; 0: as soon as the loop comes round."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.info = ModelInfo("null", 1 << 20, tokenizer.size, (), 1, int(time.time()))
        self.stats = EngineStats(slots=1 << 20)
        text = (ROOT / "bench" / "frontend.py").read_text(encoding="ascii")
        self._ids = tokenizer.encode(text, add_special_tokens=False)
        self._streams: dict[OutputMailbox, list[RequestOutput]] = {}
        self._ticker: asyncio.Task[None] | None = None

    def generate(self, request: Request) -> OutputMailbox:
        """Yield outputs at once, of nothing."""
        mailbox = OutputMailbox(lambda: self._streams.pop(mailbox, []).clear())
        count = request.sampling.max_tokens
        outputs = [RequestOutput(request.request_id, (token,)) for token in islice(cycle(self._ids), count - 1)]
        outputs.append(RequestOutput(request.request_id, (self._ids[0],), "length"))
        self._streams[mailbox] = outputs[::-1]
        if self._ticker is None or self._ticker.done():
            self._ticker = asyncio.get_running_loop().create_task(self._tick())
        return mailbox

    async def _tick(self) -> None:
        while self._streams:
            for mailbox, outputs in list(self._streams.items()):
                mailbox.put(outputs.pop())
                if not outputs:
                    del self._streams[mailbox]
            await asyncio.sleep(self.pace_s)

    async def health_check(self) -> None:
        """Sound at any time."""


TEMPLATE = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    "{{ '<|assistant|><think></think>' }}{# <arg_key> #}"
)
"""Chat template like that of a model that thinks and calls tools, in GLM's format."""
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def null_tracing() -> Tracing:
    """Spans that go nowhere."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    from deploy.observability.tracing import Tracing

    class Nowhere(SpanExporter):
        def export(self, spans: object) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    return Tracing(Nowhere())


def under_serve(app: ASGIApp, journals: bool) -> ASGIApp:
    """The application behind the layer that it has in a replica. Call this in the running event loop."""
    from deploy.routing.arrivals import Arrivals
    from deploy.serve.journals import Journals
    from deploy.serve.stream_watchdog import StreamWatchdog
    from deploy.serve.under_serve import UnderServe

    watchdog = StreamWatchdog([b"words"] * 3)
    kept = Journals(watchdog, lambda: "fingerprint") if journals else None
    layer = UnderServe(app, "replica", Arrivals(), watchdog, journals=kept)

    class Wrapped:
        """Object in which Ray Serve hands a request on."""

        def __init__(self, receive: Receive) -> None:
            self._receive = receive

        async def __call__(self) -> Message:
            return await self._receive()

    async def handed_on(scope: Scope, receive: Receive, send: Send) -> None:
        await layer(scope, Wrapped(receive), send)

    return handed_on


def serve(
    model: str, pipe: Connection, profile: str | None, parsers: bool, tracing: bool, journals: bool | None = None
) -> None:
    """The server's process; sends its port. `journals`: see `under_serve`; None for the application alone."""
    tokenizer = Tokenizer.load(model)
    if tokenizer is None:
        raise SystemExit(f"{model} holds no tokenizer")
    config, spans = ApiConfig(chat_template=TEMPLATE if parsers else None), null_tracing() if tracing else None
    app: ASGIApp = create_app(NullEngine(tokenizer), tokenizer, config, tracing=spans)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    gc.collect()
    gc.freeze()  # as a replica does once it is up
    pipe.send(listener.getsockname()[1])
    if journals is not None:
        app = under_serve(app, journals)
    settings = uvicorn.Config(
        app, loop="uvloop", http="httptools", access_log=False, lifespan="off", log_level="warning"
    )
    server = uvicorn.Server(settings)
    profiler = cProfile.Profile()
    with suppress(KeyboardInterrupt):  # how the client ends it
        if profile is None:
            server.run(sockets=[listener])
        else:
            profiler.runcall(server.run, sockets=[listener])
    if profile is not None:
        profiler.dump_stats(profile)


def body(tokens: int, parsers: bool) -> bytes:
    """A streamed chat request."""
    payload = {
        "model": "null",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": tokens,
        "stream": True,
        **({"tools": [TOOL]} if parsers else {}),
    }
    raw = json.dumps(payload).encode()
    lines = ("POST /v1/chat/completions HTTP/1.1", "Host: x", "Content-Type: application/json")
    return "\r\n".join((*lines, f"Content-Length: {len(raw)}", "", "")).encode() + raw


class Stream(asyncio.Protocol):
    """Connection of a client: sends a request, counts the events of its answer."""

    def __init__(self) -> None:
        self.events = 0
        self.first = 0.0
        self.transport: asyncio.Transport | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def request(self, raw: bytes) -> asyncio.Future[None]:
        """Send a request; done when its answer has ended."""
        self.events, self.first = 0, 0.0
        self.done = asyncio.get_running_loop().create_future()
        assert self.transport is not None
        self.transport.write(raw)
        return self.done

    @override
    def data_received(self, data: bytes) -> None:
        if not self.first and b'"delta":{"content":"' in data:
            self.first = time.perf_counter()
        self.events += data.count(b"data: {")
        if data.endswith(b"0\r\n\r\n"):
            self.done.set_result(None)

    @override
    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError("the server closed the connection"))


async def throughput(port: int, streams: int, tokens: int, parsers: bool) -> tuple[float, float]:
    """(tokens per second, events per token) of `streams` streams at once."""
    loop = asyncio.get_running_loop()
    connections = [(await loop.create_connection(Stream, "127.0.0.1", port))[1] for _ in range(streams)]
    raw = body(tokens, parsers)
    begin = time.perf_counter()
    await asyncio.gather(*(connection.request(raw) for connection in connections))
    seconds = time.perf_counter() - begin
    events = sum(connection.events for connection in connections) - streams  # less the roles
    for connection in connections:
        assert connection.transport is not None
        connection.transport.close()
    return streams * tokens / seconds, events / (streams * tokens)


async def first_tokens(port: int, requests: int, parsers: bool) -> list[float]:
    """Seconds to the first token of `requests` requests, one after another."""
    _, connection = await asyncio.get_running_loop().create_connection(Stream, "127.0.0.1", port)
    raw, times = body(4, parsers), []
    for _ in range(requests):
        begin = time.perf_counter()
        await connection.request(raw)
        times.append(connection.first - begin)
    assert connection.transport is not None
    connection.transport.close()
    return times


async def measure(port: int, server: psutil.Process, options: argparse.Namespace) -> None:
    await throughput(port, options.streams, 32, options.parsers)  # warm
    rates = []
    before = server.cpu_times()
    for _ in range(options.repeat):
        rate, events = await throughput(port, options.streams, options.tokens, options.parsers)
        rates.append(rate)
        print(f"{options.streams} streams x {options.tokens} tokens: {rate:9.0f} tok/s, {events:.3f} events per token")
    after = server.cpu_times()
    seconds = after.user + after.system - before.user - before.system
    times = sorted(await first_tokens(port, options.requests, options.parsers))
    median, p99 = statistics.median(times) * 1e3, times[int(len(times) * 0.99)] * 1e3
    print(f"median of {options.repeat}: {statistics.median(rates):.0f} tok/s")
    token = seconds / options.repeat / options.streams / options.tokens
    print(f"processor time of the server: {token * 1e6:.1f} us a token")
    print(
        f"time to first token at concurrency 1, {options.requests} requests: median {median:.2f} ms, p99 {p99:.2f} ms"
    )


async def compare(servers: list[tuple[int, psutil.Process]], options: argparse.Namespace) -> None:
    """Ask servers without and with journals in turns, and print what the journals cost."""
    rates: tuple[list[float], list[float]] = [], []
    spent: tuple[list[float], list[float]] = [], []
    for port, _ in servers:
        await throughput(port, options.streams, 32, options.parsers)  # warm
    for turn in range(options.repeat):
        for which in (0, 1) if turn % 2 else (1, 0):
            port, server = servers[which]
            before = server.cpu_times()
            rate, _ = await throughput(port, options.streams, options.tokens, options.parsers)
            after = server.cpu_times()
            seconds = after.user + after.system - before.user - before.system
            rates[which].append(rate)
            spent[which].append(seconds / options.streams / options.tokens * 1e6)
    for name, rated, tokens in zip(("without", "with"), rates, spent, strict=True):
        print(f"{name:>8} journals: {statistics.median(rated):9.0f} tok/s, {statistics.median(tokens):.2f} us a token")
    ratios = [after / before for before, after in zip(*rates, strict=True)]
    costs = [before / after for before, after in zip(*spent, strict=True)]
    print(f"with / without, medians of {options.repeat} pairs: {statistics.median(ratios):.3f} of the tokens a second")
    print(f"{statistics.median(costs):.3f} of the tokens in a second of the server's processor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "assets" / "demo"), help="a folder with a tokenizer")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each stream")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--requests", type=int, default=300, help="requests of the first-token measurement")
    parser.add_argument("--parsers", action="store_true", help="look for reasoning and tool calls in all streams")
    parser.add_argument("--tracing", action="store_true", help="make spans of all requests")
    parser.add_argument("--journals", action="store_true", help="compare servers with and without journals")
    parser.add_argument("--profile", metavar="FILE", help="write a cProfile of the server")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    servers = []
    for journals in (False, True) if options.journals else (None,):
        mine, theirs = context.Pipe()
        given = (options.model, theirs, options.profile, options.parsers, options.tracing, journals)
        server = context.Process(target=serve, args=given, daemon=True)
        server.start()
        theirs.close()
        servers.append((server, mine))
    try:
        known = [(int(mine.recv()), psutil.Process(server.pid)) for server, mine in servers]
        time.sleep(0.5)
        uvloop.run(compare(known, options) if options.journals else measure(*known[0], options))
    finally:
        for server, _ in servers:
            os.kill(server.pid or 0, signal.SIGINT)
            server.join(5)
            server.kill()


if __name__ == "__main__":
    main()
