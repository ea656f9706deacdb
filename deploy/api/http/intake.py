"""How requests come in: what their bodies may hold, how much memory they take, and whose turn it is.

Reading, validating, templating and tokenizing a large body takes long and much memory. Only so many bytes of large
bodies are held at one time, and only a few of them are worked on, while small ones pass by.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest

from deploy.api.http.body import ClientDisconnected, read_body
from deploy.api.http.memory import Budget
from deploy.config.api import ApiConfig
from deploy.text.lane import SMALL, Lanes, Worker


@dataclass(frozen=True)
class Incoming:
    """A body that has its turn."""

    raw: bytes
    work: Worker
    """Does what takes time in the body's size."""
    key: str = ""
    """Name of the API key that it came with."""


class Intake:
    """One per application."""

    def __init__(self, config: ApiConfig) -> None:
        self._config = config
        self._budget = Budget(max(config.max_held_bytes, config.max_body_bytes))
        self._lanes = Lanes()

    @asynccontextmanager
    async def reading(self, request: HttpRequest) -> AsyncIterator[Incoming]:
        """Read the body of `request` and wait for its turn; the block has it until all that is large is made of it.
        What it raises: see `read_body`."""
        key = request.scope.get("latentserve.key", "")
        with self._budget.account(key) as account:
            raw = await read_body(request, self._config, account)
            async with self._lanes.turn(len(raw), key) as work:
                if len(raw) > SMALL and await request.is_disconnected():
                    raise ClientDisconnected
                yield Incoming(raw, work, key)

    @asynccontextmanager
    async def with_more(self, incoming: Incoming, size: int) -> AsyncIterator[Incoming]:
        """The turn for a body to whose work `size` bytes come that the server has already."""
        if len(incoming.raw) > SMALL:  # it is worked on aside as it is
            yield incoming
            return
        async with self._lanes.turn(len(incoming.raw) + size, incoming.key) as work:
            yield Incoming(incoming.raw, work, incoming.key)
