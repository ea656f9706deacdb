"""What a replica's HTTP front asks of an engine, and the mailbox in which a request's outputs wait for their reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from workers.protocol.messages import EngineStats, Request, RequestOutput
from workers.protocol.report import SelfTestReport


@dataclass(frozen=True)
class ModelInfo:
    """What the front must know of the loaded model."""

    name: str
    max_context: int
    """Most tokens a request may hold, prompt and generated ones together."""
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_width: int
    """Most tokens a decode row feeds in one step: 1 + drafts."""
    created: int
    """Unix time, seconds."""

    def __post_init__(self) -> None:
        if self.max_context < 2 or self.vocab_size < 1 or self.max_width < 1:
            raise ValueError(f"max_context, vocab_size and max_width must be positive: {self}")
        if not all(0 <= token < self.vocab_size for token in self.eos_ids):
            raise ValueError(f"end-of-sequence ids {self.eos_ids} outside the vocabulary of {self.vocab_size}")


class EngineFault(Exception):
    """The replica is going down; the text is the first cause."""

    def __init__(self, cause: str, lasting: bool = False) -> None:
        super().__init__(cause)
        self.lasting = lasting
        """Another start would end the same."""


class Refused(Exception):
    """The scheduler did not take the request."""

    def __init__(self, reason: str, overloaded: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.overloaded = overloaded
        """Trying again later may help; otherwise the request itself cannot be served."""


class RequestFailed(Exception):
    """The model could not compute this request; the replica goes on. The text is for whoever sent it."""


class Engine(Protocol):
    """One replica's engine as its front sees it. Everything happens on one asyncio loop."""

    @property
    def info(self) -> ModelInfo:
        """The loaded model."""

    @property
    def fault(self) -> str | None:
        """First cause of the replica's end, None while it lives."""

    @property
    def stats(self) -> EngineStats:
        """The newest figures of the scheduler."""

    @property
    def selftest(self) -> SelfTestReport | None:
        """What the self-test found when the replica started, None if it did not run."""

    def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        """The outputs of one request, the last with `finish` set. Outputs that wait for the reader may be merged.

        Closing the iterator early (`aclose`, where it has one) cancels the request. Raises `EngineFault`, `Refused`,
        `RequestFailed`.
        """

    async def probe(self) -> None:
        """Send a real token through every rank; raises `EngineFault`."""


def merge_outputs(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Consecutive outputs of one request as one."""
    return RequestOutput(
        request_id=outputs[0].request_id,
        tokens=tuple(token for output in outputs for token in output.tokens),
        finish=outputs[-1].finish,
        logprobs=tuple(logprob for output in outputs for logprob in output.logprobs),
        cached_tokens=max(output.cached_tokens for output in outputs),
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
