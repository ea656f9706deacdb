"""Notice that a client left while its request is being worked on."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive

from deploy.api.http.body import ClientDisconnected


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
