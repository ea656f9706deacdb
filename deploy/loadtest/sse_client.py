"""A small streaming HTTP/1.1 client that stamps every server-sent event on arrival.

A load generator must not be what is measured: events are cut and stamped in the protocol callback, without a task
switch or an object per line. Connections are kept alive and reused.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import urlsplit

import httptools
from typing_extensions import override

EventHandler = Callable[[bytes, float], None]
"""Gets the data of one event and its arrival (perf_counter seconds)."""


class ConnectionLost(Exception):
    """The connection ended before the response did."""


class Target:
    """Address to connect to: scheme, host, port and base path (a final /v1 left out) of a URL."""

    def __init__(self, url: str) -> None:
        """ValueError when `url` is not http(s)://host[:port][/path]."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        known = parts.scheme in ("http", "https") and port != -1
        if not known or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"{url!r} is not an address such as http://127.0.0.1:8000")
        self.host = parts.hostname
        self.tls = parts.scheme == "https"
        self.port = port or (443 if self.tls else 80)
        self.path = parts.path.rstrip("/").removesuffix("/v1")
        self.authority = parts.netloc.rpartition("@")[2]

    def request(self, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        """A POST of JSON to `path` below the base path, on the wire; without a body a GET."""
        lines = [
            f"{'POST' if body else 'GET'} {self.path}{path} HTTP/1.1",
            f"Host: {self.authority}",
            f"Content-Length: {len(body)}",
            *(["Content-Type: application/json"] if body else []),
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class SseConnection(asyncio.Protocol):
    """One connection, one response at a time. A 2xx event stream goes to the handler, any other body is collected."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[int] | None = None
        self._on_event: EventHandler = lambda data, now: None
        self._streaming = False
        self._buffer = b""
        self.body = b""
        """Body of the last response that was no event stream."""
        self.reusable = True
        self.heard = False
        """Whether any of the current response has arrived."""

    def expect(self, on_event: EventHandler) -> None:
        """Forget the last response; the next one's events go to `on_event`."""
        self._on_event, self._buffer, self.body = on_event, b"", b""
        self._streaming = self.heard = False

    async def exchange(self, request: bytes, on_event: EventHandler) -> int:
        """Send a request, wait for the end of its response, return its status. ConnectionLost when it is cut short."""
        assert self._transport is not None
        assert self._done is None, "a response is outstanding"
        self.expect(on_event)
        self._done = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            self.connection_lost(None)
        else:
            self._transport.write(request)
        try:
            return await self._done
        except asyncio.CancelledError:
            self.close()  # the rest of the response would be taken for the next one's
            raise
        finally:
            self._done = None

    def close(self) -> None:
        """Drop the connection."""
        self.reusable = False
        if self._transport is not None:
            self._transport.close()

    # asyncio.Protocol

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    @override
    def data_received(self, data: bytes) -> None:
        self.heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(ConnectionLost(f"not HTTP: {error}"))
            self.close()

    @override
    def connection_lost(self, error: Exception | None) -> None:
        """End the answer: an event stream may end with its connection: whether it is whole, its last event says."""
        self.reusable = False
        if self._streaming and error is None:
            self._finish(self._parser.get_status_code())
        else:
            self._finish(ConnectionLost(str(error) if error else "the server closed the connection"))

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header: httptools calls it."""
        if name.lower() == b"content-type" and value.lower().startswith(b"text/event-stream"):
            self._streaming = True

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body: httptools calls it."""
        if not self._streaming:
            self.body += body
            return
        now = time.perf_counter()
        buffer = self._buffer + body
        if b"\r" in buffer:
            buffer = buffer.replace(b"\r\n", b"\n")
        *events, self._buffer = buffer.split(b"\n\n")
        for event in events:
            if event.startswith(b"data:") and b"\n" not in event:
                self._on_event(event[5:].strip(), now)
            else:
                lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
                if lines:
                    self._on_event(b"\n".join(lines), now)

    def on_message_complete(self) -> None:
        """End the answer: httptools calls it."""
        if not self._parser.should_keep_alive():
            self.reusable = False
        self._finish(self._parser.get_status_code())

    def _finish(self, outcome: int | Exception) -> None:
        if self._done is None or self._done.done():
            return
        if isinstance(outcome, Exception):
            self._done.set_exception(outcome)
        else:
            self._done.set_result(outcome)


class SseClient:
    """Keeps connections to one target and sends requests over them."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._idle: list[SseConnection] = []
        self._tls = ssl.create_default_context() if target.tls else None

    async def send(
        self, path: str, body: bytes, headers: Mapping[str, str], on_event: EventHandler
    ) -> tuple[int, bytes]:
        """Status and body (empty for an event stream) of one request. A kept connection that the server had closed is
        replaced without notice. OSError when connecting fails, ConnectionLost when the response is cut short."""
        request = self._target.request(path, body, headers)
        while True:
            kept = bool(self._idle)
            connection = self._idle.pop() if kept else await self._connect()
            try:
                status = await connection.exchange(request, on_event)
            except ConnectionLost:
                connection.close()
                if kept and not connection.heard:
                    continue
                raise
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.close()
            return status, connection.body

    async def _connect(self) -> SseConnection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(SseConnection, self._target.host, self._target.port, ssl=self._tls)
        return connection

    def close(self) -> None:
        """Drop all idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
