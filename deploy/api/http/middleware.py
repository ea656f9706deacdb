"""Layers around the endpoints. They give every request an id, count and log its answer, keep the time limit that its
client sets, and watch for clients that leave."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.api.http.body import ClientDisconnected
from deploy.api.http.draws import Draws, resume_of
from deploy.api.http.errors import ApiError, of_anthropic
from deploy.observability.front_metrics import FrontMetrics
from deploy.observability.logs import FIELDS

log = logging.getLogger("latentserve.access")

_GOOD_ID = re.compile(rb"[A-Za-z0-9._:/+=@~-]{1,128}")
QUIET = frozenset({"/health", "/metrics", "/live"})
"""Polled all the time: good answers of these are logged at debug level."""
IGNORED_TOOLS: Final = b"x-latentserve-ignored-tools"
"""The header that names tools of which a model is not told, and formats of tools that it is not held to."""
MOST_HEADER: Final = 1024
"""Most characters of it."""


def request_id_of(scope: Scope, draws: Draws) -> str:
    """The client's x-request-id if it is a sensible one (it goes into headers and logs), else one that is drawn."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _GOOD_ID.fullmatch(value):
            return bytes(value).decode("ascii")
    return draws.hex("request")


async def refuse_websocket(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer the request that was to become a WebSocket, as plain HTTP where the server knows how to."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1000})
        return
    request_id = request_id_of(scope, Draws())
    error = ApiError(
        400,
        "WebSockets are not supported by this server: send a POST with stream set to true and read server-sent events",
        code="websocket_unsupported",
        headers={"x-request-id": request_id},
    )
    # The types are those of HTTP messages with a prefix.
    await error.response()({**scope, "type": "websocket"}, receive, send)


class AccessLayer:
    """ASGI middleware. Leaves in the scope `latentserve.request_id` and `latentserve.draws`, unless somebody did who
    continues an answer, and takes from it the fields that the routes left in `latentserve.log` and the headers of the
    answer that they left in `latentserve.headers`."""

    def __init__(self, app: ASGIApp, metrics: FrontMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and note the answer in the log and the metrics."""
        if scope["type"] == "websocket":
            await refuse_websocket(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = time.perf_counter()
        resume = resume_of(scope)
        begun = Draws() if resume is None else Draws(resume.secret, resume.created)
        draws = scope.setdefault("latentserve.draws", begun)
        draws.resume = resume
        request_id = request_id_of(scope, draws)
        record: dict[str, Any] = {}
        scope["latentserve.request_id"] = request_id
        scope["latentserve.log"] = record
        more: list[tuple[bytes, bytes]] = []
        scope["latentserve.headers"] = more
        status = 0
        headers = [(b"x-request-id", request_id.encode())]
        if of_anthropic(scope["path"]):
            headers.append((b"request-id", request_id.encode()))  # by this name its clients tell of a request

        async def with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *headers, *more]}
            await send(message)

        try:
            await self._app(scope, receive, with_id)
        except Exception:
            status = 500  # the layer above answers and logs the traceback
            raise
        finally:
            self._note(scope, request_id, status, time.perf_counter() - begin, record)

    def _note(self, scope: Scope, request_id: str, status: int, seconds: float, record: dict[str, Any]) -> None:
        # The route's own path, or the label would have a value for everything a client may make up.
        route = getattr(scope.get("route"), "path", None) or "unknown"
        if status:
            self._metrics.http_response(route, status)
        level = logging.INFO
        if status >= 500:
            level = logging.ERROR
        elif route in QUIET:
            level = logging.DEBUG
        if log.isEnabledFor(level):
            fields = {
                "request_id": request_id,
                "method": scope["method"],
                "route": route,
                "status": status,
                "seconds": round(seconds, 6),
                **record,
            }
            log.log(level, "request", extra={FIELDS: fields})


def name_ignored_tools(scope: Scope, names: Iterable[str]) -> None:
    """Have the answer to the request of this scope name tools of which the model is not told, each once; no header
    where there are none. `names` are in characters that a header can hold."""
    if told := ", ".join(dict.fromkeys(names)):
        scope["latentserve.headers"].append((IGNORED_TOOLS, told[:MOST_HEADER].encode()))


HEADER = b"x-request-timeout-seconds"
"""Ray Serve's. It knows the same limit, ends the request without an envelope, and is therefore not waited for."""
EARLIER = 0.1
"""Share of the limit by which this layer is earlier than Ray Serve ..."""
EARLIER_S = 0.1
"""... and the most of it, in seconds."""


class DeadlineLayer:
    """ASGI middleware: 408 once the time of a request is over, or the same error as the last event of its stream."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the request's own time limit ends before."""
        limit = limit_of(scope) if scope["type"] == "http" else None
        if limit is None:
            await self._app(scope, receive, send)
            return
        stream = started = False

        async def noted(message: Message) -> None:
            nonlocal stream, started
            if message["type"] == "http.response.start":
                started, kind = True, dict(message.get("headers", ())).get(b"content-type", b"")
                stream = kind.startswith(b"text/event-stream")
            await send(message)

        timer = asyncio.timeout(limit - min(EARLIER * limit, EARLIER_S))
        try:
            async with timer:
                await self._app(scope, receive, noted)
        except TimeoutError:
            if not timer.expired():
                raise
            error = ApiError(
                408,
                f"the request took longer than the {limit:g} s that its header {HEADER.decode()} allows",
                code="request_timeout",
            )
            scope.get("latentserve.log", {})["error"] = error.message
            if stream:
                await send({"type": "http.response.body", "body": error.event(scope["path"]), "more_body": False})
            elif not started:
                await error.response(scope["path"])(scope, receive, send)


def limit_of(scope: Scope) -> float | None:
    """Seconds that the client gives its request; None without a header that says so."""
    for name, value in scope["headers"]:
        if name == HEADER:
            try:
                limit = float(value)
            except ValueError:
                return None
            return limit if 0 < limit < math.inf else None
    return None


class CancelOnDisconnect:
    """`async with CancelOnDisconnect(receive):` cancels the block when the client goes and raises ClientDisconnected.

    The body must have been read. Costs one waiting task per request, nothing per token.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._left = False
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        block = asyncio.current_task()
        assert block is not None
        self._block = block
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left = True
        self._block.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._watcher is not None
        self._watcher.cancel()
        # Ours, unless somebody else (a server that shuts down) asked for it too. A block that ended by itself in the
        # same turn still has the request to cancel pending: it must not hit what comes next.
        if self._left and self._block.uncancel() == 0 and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise ClientDisconnected from error
