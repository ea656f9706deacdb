"""Outbox of the front's messages to the scheduler, which gathers them for a moment: sequences that continue one prompt
travel together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec.structs import replace

from workers.channel.sockets import Sender
from workers.protocol.messages import Cancel, Request, Requests
from workers.protocol.plan import SamplingParams

Group = tuple[int, int, str, bytes, SamplingParams, bool]
"""Identity of the prompt, priority, name of the API key, salt of its pages, sampling but for the seed, and whether it
is continued."""


class Outbox:
    """Collects the requests of one iteration of the event loop and sends those that differ in their ids, their seeds
    and what is done of them alone, as the choices of a request do, as one message: their prompts are one object.
    Packing a prompt takes a millisecond for some hundred thousand tokens, so the loop turns between two prompts."""

    def __init__(self, sender: Sender, refuse: Callable[[Request, str], None]) -> None:
        """Prepare the outbox, in the running event loop. `refuse` is told of a request that cannot be sent, and why."""
        self._sender, self._refuse = sender, refuse
        self._loop = asyncio.get_running_loop()
        self._groups: dict[Group, dict[str, Request]] = {}
        self._group_of: dict[str, Group] = {}

    def ask(self, request: Request) -> None:
        """Send it, with others that come before the loop turns."""
        if not self._groups:
            self._loop.call_soon(self._send)
        # The request keeps its prompt alive, so no other prompt has this identity meanwhile.
        continued, shared = request.age_s is not None, replace(request.sampling, seed=0)
        group = (id(request.prompt), request.priority, request.key, request.salt, shared, continued)
        self._groups.setdefault(group, {})[request.request_id] = request
        self._group_of[request.request_id] = group

    def cancel(self, request_id: str) -> None:
        """Take a request back: forgotten where it has not left, else the scheduler is told."""
        group = self._group_of.pop(request_id, None)
        if group is None:
            self._sender.send(Cancel(request_id))
        else:
            del self._groups[group][request_id]

    def clear(self) -> None:
        """Send nothing of what has not left."""
        self._groups.clear()
        self._group_of.clear()

    def _send(self) -> None:
        """Send one group, the oldest."""
        if not self._groups:
            return  # cleared meanwhile
        requests = tuple(self._groups.pop(next(iter(self._groups))).values())
        for request in requests:
            del self._group_of[request.request_id]
        if self._groups:
            self._loop.call_soon(self._send)
        if not requests:
            return  # all were taken back
        try:
            message = Requests.of(requests)
        except OverflowError:
            for request in requests:
                self._refuse(request, "the prompt has a token id outside 0 ... 2^32 - 1")
        else:
            self._sender.send(message)
