"""A time limit that a client sets for its own request, and a word to it when the time is over."""

from __future__ import annotations

import asyncio
import math

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.api.http.errors import ApiError

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
        """See the ASGI specification."""
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
