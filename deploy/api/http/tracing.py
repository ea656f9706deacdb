"""Connects requests with their traces: a layer around the application that is installed only where spans are asked
for."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.api.http.errors import GONE
from deploy.api.http.middleware import QUIET
from deploy.observability.tracing import INCOMING, OUTGOING, Attributes, RequestTrace, Tracing

TRACE: Final = "latentserve.trace"
"""Key of the `RequestTrace` in the ASGI scope."""
_FROM_LOG: Final = {
    "key": "latentserve.key",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "finish": "latentserve.finish_reasons",
    "first_token_s": "latentserve.time_to_first_token_s",
    "disconnected": "latentserve.disconnected",
}
"""Fields of the access log that are attributes, too. Its `error` is not: it may quote the request."""


class TracingLayer:
    """ASGI middleware, within `AccessLayer`."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app, self._tracing = app, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer within a span of the request."""
        if scope["type"] != "http" or scope["path"] in QUIET:
            await self._app(scope, receive, send)
            return
        given = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        # The path is anything a client may make up; the route's own is known at the end.
        request = self._tracing.request(scope["method"], {name: given[name] for name in INCOMING if name in given})
        header, status, opened, chunks = (OUTGOING, request.traceresponse), 500, 0, 0
        if request.on:
            scope[TRACE] = request

        async def watched(message: Message) -> None:
            nonlocal status, opened, chunks
            if message["type"] == "http.response.start":
                status, opened = message["status"], time.time_ns()
                message = {**message, "headers": [*message.get("headers", ()), header]}
            else:
                chunks += 1
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:
            # Ray Serve cancels the task of a client that has left.
            scope["latentserve.log"]["disconnected"] = True
            raise
        finally:
            _end(request, scope, status, opened, chunks)


def _end(request: RequestTrace, scope: Scope, status: int, opened: int, chunks: int) -> None:
    record = scope.get("latentserve.log", {})
    if not opened and record.get("disconnected"):
        status = GONE  # nobody was there to be answered, which is no error of ours
    if opened and "finish" in record:
        request.stage("stream", opened, time.time_ns(), {"latentserve.chunks": chunks})
    route = getattr(scope.get("route"), "path", None) or "unknown"
    attributes: dict[str, str | int | float | bool] = {
        "http.request.method": scope["method"],
        "http.route": route,
        "http.response.status_code": status,
        "latentserve.request_id": scope["latentserve.request_id"],
    }
    attributes |= {name: record[field] for field, name in _FROM_LOG.items() if field in record}
    known: Attributes = attributes
    request.end(f"{scope['method']} {route}", known, status >= 500 or (status == 200 and "error" in record))
