"""A small HTTP server on raw asyncio streams that answers completions as a test tells it to."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

Answer = Callable[["Exchange"], Awaitable[None]]


@dataclass
class Exchange:
    """One request and the means to answer it."""

    path: str
    headers: dict[str, str]
    body: dict
    at: float
    writer: asyncio.StreamWriter

    async def head(self, status: str = "200 OK", kind: str = "text/event-stream", *more: str) -> None:
        lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", *more]
        self.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n")
        await self.writer.drain()

    async def chunk(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await self.writer.drain()

    async def event(self, **fields) -> None:
        await self.chunk(b"data: " + json.dumps(fields).encode() + b"\n\n")

    async def end(self) -> None:
        await self.chunk(b"")

    async def json(self, status: str, content: object) -> None:
        body = json.dumps(content).encode()
        await self.head(status, "application/json", f"Content-Length: {len(body)}")
        self.writer.write(body)
        await self.writer.drain()


@dataclass
class Server:
    url: str = ""
    exchanges: list[Exchange] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    most_open: int = 0


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[Server]:
    server = Server()

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in head[1:] if line)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                exchange = Exchange(
                    head[0].split()[1], headers, json.loads(body or b"null"), time.perf_counter(), writer
                )
                server.exchanges.append(exchange)
                server.open += 1
                server.most_open = max(server.most_open, server.open)
                try:
                    await answer(exchange)
                finally:
                    server.open -= 1
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(on_connection, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listening.close()


async def completions(exchange: Exchange, gap_s: float = 0.0, per_event: int = 1) -> None:
    """Answer with as many tokens as were asked for, `gap_s` apart, and usage at the end."""
    asked = exchange.body
    if exchange.path == "/v1/models":
        await exchange.json("200 OK", {"object": "list", "data": [{"id": "m", "object": "model"}]})
        return
    await exchange.head("200 OK", "text/event-stream", "Transfer-Encoding: chunked")
    for _ in range(0, asked["max_tokens"], per_event):
        if gap_s:
            await asyncio.sleep(gap_s)
        await exchange.event(choices=[{"index": 0, "text": "x" * per_event, "finish_reason": None}])
    usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": asked["max_tokens"]}
    await exchange.event(choices=[], usage=usage)
    await exchange.chunk(b"data: [DONE]\n\n")
    await exchange.end()
