"""The layer between Ray Serve and a replica's front: routers' records in, one request id out, answers under guard.

Written for Ray 2.60.0 and the uvicorn in it: how a connection is found is private to both. Where it cannot be found a
line is logged, and its answers go without a guard.
"""

from __future__ import annotations

from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.api.generation.journaling import OPEN
from deploy.api.http.body import BODY
from deploy.api.http.errors import failure_of
from deploy.routing.arrivals import ROUTING_HEADER, Arrivals, RoutingRecord
from deploy.serve.journal import Journal
from deploy.serve.journals import Journals
from deploy.serve.stream_watchdog import StreamWatchdog
from deploy.text.handed import HandedPrompts
from kernels.private_api import PrivateApi

REPLICA_HEADER = "x-latentserve-replica"
"""Header of every answer with the name of its replica, as logs and metrics have it."""
_ROUTING_RECORD = ROUTING_HEADER.encode()
_CONNECTION: Final = PrivateApi(
    "ray",
    (),
    "answers are not guarded: where their front dies they break",
)


class UnderServe:
    """ASGI middleware."""

    def __init__(
        self,
        app: ASGIApp,
        replica: str,
        arrivals: Arrivals,
        watchdog: StreamWatchdog | None,
        handed: HandedPrompts | None = None,
        journals: Journals | None = None,
    ) -> None:
        """`replica`: its name, which every answer carries. `handed`: prompts that routers encoded. `journals`: keeps
        those of answers, where there may be another front to go on with them."""
        self._app, self._arrivals, self._watchdog, self._handed = app, arrivals, watchdog, handed
        self._journals = journals
        self._replica = (REPLICA_HEADER.encode(), replica.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as an application of the ASGI specification."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = _routing_record_of(scope)
        arrival = self._arrivals.arrive(record)
        if self._handed is not None:
            self._handed.arrive(None if record is None else record.ticket)
        held: int | None = None
        under_guard = _Answer(scope, receive, self._journals) if self._journals is not None else None

        async def watched(message: Message) -> None:
            nonlocal held
            if message["type"] == "http.response.start":
                if under_guard is not None:
                    under_guard.begins()
                # Serve adds the request id itself; two of them would reach clients as one wrong one.
                headers = [header for header in message.get("headers", ()) if header[0] != b"x-request-id"]
                await send({**message, "headers": [*headers, self._replica]})
                if under_guard is not None and under_guard.journal is not None:
                    return
                if self._watchdog is not None and _is_stream(headers) and (fd := connection_of(receive)) is not None:
                    held = self._watchdog.hold(fd, failure_of(scope["path"]))
                return
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            self._arrivals.leave(arrival)
            if self._watchdog is not None:
                self._watchdog.release(held)
            if under_guard is not None:
                under_guard.end()


class _Answer:
    """The answer to one request, and its journal from where it is known what it is."""

    def __init__(self, scope: Scope, receive: Receive, journals: Journals) -> None:
        self._scope, self._receive, self._journals = scope, receive, journals
        self.journal: Journal | None = None
        self._cycle: Any = None
        scope[BODY], scope[OPEN] = b"", self._open

    def _open(self, checksum: int, choices: int, ordinary: bool) -> Journal | None:
        self._cycle = cycle_of(self._receive)
        self.journal = (
            None if self._cycle is None else self._journals.begin(self._scope, self._cycle, checksum, ordinary)
        )
        return self.journal

    def begins(self) -> None:
        """The answer begins to be written, with a journal or without."""
        if self.journal is None and self._journals.lingering and (cycle := cycle_of(self._receive)) is not None:
            self._journals.release_before(cycle.transport)

    def end(self) -> None:
        """The answer is complete, or its client left."""
        if self.journal is not None:
            self._journals.end(self.journal, self._cycle)


def _routing_record_of(scope: Scope) -> RoutingRecord | None:
    for name, value in scope["headers"]:
        if name == _ROUTING_RECORD:
            return RoutingRecord.parse(value.decode("latin-1"))
    return None


def _is_stream(headers: list[tuple[bytes, bytes]]) -> bool:
    kinds = dict(headers)
    return kinds.get(b"content-type", b"").startswith(b"text/event-stream") and b"content-length" not in kinds


def cycle_of(receive: Any) -> Any:
    """Uvicorn's object of the request that `receive` is of; it has the transport of the connection. None behind Serve's
    own proxy, and for connections whose bytes are not those that are written.

    Serve hands the request on inside objects of its own, which hold the receive channel of uvicorn's request, which
    knows its transport.
    """
    if hasattr(receive, "_receive_asgi_messages"):  # from Serve's proxy
        return None
    cycle = getattr(getattr(receive, "_receive", None), "__self__", None)
    transport = getattr(cycle, "transport", None)
    if transport is None:
        _CONNECTION.lost("transport of a connection where a request's receive channel had it")
        return None
    return cycle if transport.get_extra_info("sslcontext") is None else None


def connection_of(receive: Any) -> int | None:
    """File descriptor of the connection a request came over; None where `cycle_of` finds none."""
    cycle = cycle_of(receive)
    connection = None if cycle is None else cycle.transport.get_extra_info("socket")
    return None if connection is None else int(connection.fileno())
