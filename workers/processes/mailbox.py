"""Mailbox in which a request's outputs wait for their reader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from workers.protocol.messages import RequestOutput


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
