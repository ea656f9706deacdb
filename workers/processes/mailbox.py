"""Mailbox in which a request's outputs wait for their reader, and the outbox of the front's messages to the scheduler,
which gathers them for a moment: sequences that continue one prompt travel together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from workers.channel.sockets import Sender
from workers.protocol.messages import Cancel, Request, RequestOutput, Requests
from workers.protocol.plan import SamplingParams

Group = tuple[int, int, str, bytes, SamplingParams, bool]
"""Identity of the prompt, priority, name of the API key, salt of its pages, sampling but for the seed, and whether it
is continued."""


def merge_outputs(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Consecutive outputs of one request as one."""
    return RequestOutput(
        request_id=outputs[0].request_id,
        tokens=tuple(token for output in outputs for token in output.tokens),
        finish=outputs[-1].finish,
        logprobs=tuple(logprob for output in outputs for logprob in output.logprobs),
        cached_tokens=max(output.cached_tokens for output in outputs),
        accepted=tuple(draft for output in outputs for draft in output.drafts),
        prompt=outputs[0].prompt,
        queued=max(output.queued for output in outputs),
        offered=sum(output.offered for output in outputs),
        at=outputs[0].at,
    )


class OutputMailbox:
    """Outputs of one request on their way to one reader; an async iterator for `Engine.generate` to return.

    A reader that lags (a slow consumer holds its stream up) finds everything that arrived meanwhile merged into one
    output, so a slow stream costs one event, not a queue of them.
    """

    def __init__(self, on_abandon: Callable[[], None]) -> None:
        """`on_abandon` is called once if the reader leaves before the end; it cancels the request."""
        self._on_abandon = on_abandon
        self._ready: list[RequestOutput] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    def put(self, output: RequestOutput) -> None:
        """Add an output; on the reader's loop."""
        if not self._closed:
            self._ready.append(output)
            self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream with `error`, after what is already in the box."""
        if self._error is None and not self._closed:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> OutputMailbox:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._ready:
            if self._closed:
                raise StopAsyncIteration
            if self._error is not None:
                self._closed = True
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        # Merged here, once, and not as they come: a reader that lags by thousands must not cost quadratic time.
        output = self._ready[0] if len(self._ready) == 1 else merge_outputs(self._ready)
        self._ready.clear()
        if output.finish is not None:
            self._closed = True
        return output

    async def aclose(self) -> None:
        """The reader leaves. Cancels the request unless its end was read."""
        if not self._closed:
            self._closed = True
            self._ready.clear()
            self._on_abandon()


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
