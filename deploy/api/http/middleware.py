"""The outermost layer: gives every request an id, counts and logs its answer."""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.api.http.errors import ApiError
from deploy.observability.front_metrics import FrontMetrics
from deploy.observability.logs import FIELDS

log = logging.getLogger("latentserve.access")

_GOOD_ID = re.compile(rb"[A-Za-z0-9._:/+=@~-]{1,128}")
QUIET = frozenset({"/health", "/metrics", "/live"})
"""Polled all the time: good answers of these are logged at debug level."""


def request_id_of(scope: Scope) -> str:
    """The client's x-request-id if it is a sensible one (it goes into headers and logs), else a new id."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _GOOD_ID.fullmatch(value):
            return bytes(value).decode("ascii")
    return uuid.uuid4().hex


async def refuse_websocket(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer the request that was to become a WebSocket, as plain HTTP where the server knows how to."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1000})
        return
    request_id = request_id_of(scope)
    error = ApiError(
        400,
        "WebSockets are not supported by this server: send a POST with stream set to true and read server-sent events",
        code="websocket_unsupported",
        headers={"x-request-id": request_id},
    )
    # The types are those of HTTP messages with a prefix.
    await error.response()({**scope, "type": "websocket"}, receive, send)


class AccessLayer:
    """ASGI middleware. Leaves in the scope `latentserve.request_id`, and takes from it the fields that the routes left
    in `latentserve.log` and the headers of the answer that they left in `latentserve.headers`."""

    def __init__(self, app: ASGIApp, metrics: FrontMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        if scope["type"] == "websocket":
            await refuse_websocket(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = time.perf_counter()
        request_id = request_id_of(scope)
        record: dict[str, Any] = {}
        scope["latentserve.request_id"] = request_id
        scope["latentserve.log"] = record
        more: list[tuple[bytes, bytes]] = []
        scope["latentserve.headers"] = more
        status = 0
        header = (b"x-request-id", request_id.encode())

        async def with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), header, *more]}
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
