"""From a job to an answer: asks the engine for every sequence and writes what comes, streamed or whole.

These are ASGI responses of our own: per output of the engine one dictionary, one joined byte string and one `send`.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deploy.api.generation.choice import Choice, Piece, joined
from deploy.api.generation.parsed_choice import ParsedChoice
from deploy.api.http.body import ClientDisconnected
from deploy.api.http.disconnect import CancelOnDisconnect
from deploy.api.http.errors import ApiError, from_engine
from deploy.api.job.job import Branch, Job
from deploy.api.limits.front import Front
from deploy.api.limits.meter import Meter
from deploy.api.openai.format import Format
from deploy.api.openai.prompt_scores import size_of
from deploy.text.tokenizer import Tokenizer
from workers.protocol.front import EngineFault, Refused, RequestFailed
from workers.protocol.messages import Request

if TYPE_CHECKING:  # what it needs is there only where spans are asked for
    from deploy.observability.tracing import RequestTrace

log = logging.getLogger("latentserve.api")

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
INTERVALS = 256
"""Intervals between outputs are handed to the metrics this many at a time."""


def _choice(job: Job, branch: Branch, tokenizer: Tokenizer | None) -> Choice:
    if job.reading is None:
        return Choice(job, branch, tokenizer)
    return ParsedChoice(job, branch, tokenizer, job.reading)


class Generation(Response):
    """The answer to one generating request; a subclass says how it is written."""

    def __init__(self, front: Front, endpoint: str, job: Job, form: Format, arrival: float) -> None:
        """`arrival` is `time.perf_counter()` when the request came in."""
        self.front, self.endpoint, self.job, self.form, self.arrival = front, endpoint, job, form, arrival
        self.choices = [_choice(job, branch, front.tokenizer) for branch in job.sequences]
        self.started = False
        """Whether the status line is out."""
        self.first_token_s: float | None = None
        self.trace: RequestTrace | None = None
        self.meter: Meter | None = None
        # What Starlette expects of a response.
        self.status_code = 200
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the job and write its answer."""
        record: dict[str, Any] = scope.setdefault("latentserve.log", {})
        self.trace = scope.get("latentserve.trace")
        if self.trace is not None:
            self.trace.stage("front", self.trace.begun, time.time_ns(), {"latentserve.sequences": len(self.choices)})
        try:
            prompt_tokens = sum(len(prompt.ids) for prompt in self.job.prompts)
            with self.front.running(scope, prompt_tokens, self.choices) as self.meter:
                async with CancelOnDisconnect(receive):
                    await self.write(send)
        except ClientDisconnected:
            record["disconnected"] = True
        except ApiError as error:
            await self._fail(error, scope, receive, send)
        except (EngineFault, Refused, RequestFailed) as error:
            await self._fail(from_engine(error, self.front.retry_after(len(self.choices))), scope, receive, send)
        except Exception:
            if not self.started:
                raise
            log.exception("defect while streaming")
            defect = ApiError(500, "internal error", kind="server_error", code="internal_error")
            await self._fail(defect, scope, receive, send)
        finally:
            record["prompt_tokens"] = sum(len(prompt.ids) for prompt in self.job.prompts)
            record["completion_tokens"] = sum(choice.generated for choice in self.choices)
            record["finish"] = ",".join(sorted({choice.finish or "none" for choice in self.choices}))
            if self.first_token_s is not None:
                record["first_token_s"] = round(self.first_token_s, 6)

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        scope["latentserve.log"]["error"] = error.message
        if not self.started:
            await error.response(scope["path"])(scope, receive, send)
        else:
            # The status is out: the stream ends with the error, and without [DONE].
            await send({"type": "http.response.body", "body": error.event(scope["path"]), "more_body": False})

    async def write(self, send: Send) -> None:
        """Run every choice and send the answer."""
        raise NotImplementedError

    async def emit(self, choice: Choice, text: Piece, send: Send) -> None:
        """New text of a choice, which may have ended; called for its every output that the short way does not cover."""
        raise NotImplementedError

    async def run_all(self, send: Send) -> None:
        """Run every choice to its end; the first error ends them all."""
        if len(self.choices) == 1:
            # In a task of its own every output resumes this alone, and not all that an application calls before it.
            await asyncio.create_task(self.run(self.choices[0], self.job.sequences[0], send))
            return
        try:
            async with asyncio.TaskGroup() as group:
                for choice, branch in zip(self.choices, self.job.sequences, strict=True):
                    group.create_task(self.run(choice, branch, send))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def run(self, choice: Choice, branch: Branch, send: Send) -> None:
        """One sequence: ask the engine, write what comes, leave its stream as soon as the sequence has ended."""
        metrics, clock = self.front.metrics, time.perf_counter
        prompt = self.job.prompts[branch.prompt].ids
        key = self.front.key
        place = self.front.keys.place(key, self.job.priority)
        request = Request(uuid.uuid4().hex, prompt, branch.sampling, *place)
        short = self.job.stream and not choice.detailed
        before, after = self.form.template(choice.index) if short and self.job.reading is None else (b"", b"")
        parsed = self.form.writer(choice.index) if short and self.job.reading is not None else None
        body, feed, dumps = "http.response.body", choice.feed, orjson.dumps
        intervals: list[float] = []
        first = last = 0.0
        reason = "error"
        first_tokens = 0
        queued: float | None = None
        outputs, traced = self.front.engine.generate(request), None
        if self.trace is not None:
            outputs = traced = self.trace.sequence(choice.index, outputs)
        metrics.request_started(self.endpoint, len(prompt))
        if key is not None:
            metrics.key_started(key.name, len(prompt))
        try:
            async for output in outputs:
                now = clock()
                text = feed(output)
                if first:
                    intervals.append(now - last)
                    if len(intervals) == INTERVALS:
                        metrics.token_intervals(intervals)
                        intervals.clear()
                else:
                    first, first_tokens, queued = now, choice.generated, output.queued
                    self._first(now)
                    await self.open(choice, send)
                last = now
                if short and choice.finish is None:
                    if text:
                        raw = before + dumps(text) + after if parsed is None else parsed(text)
                        await send({"type": body, "body": raw, "more_body": True})
                else:
                    await self.emit(choice, text, send)
                    if choice.finish is not None:
                        reason = choice.finish
                        return
            raise EngineFault("the engine ended a stream without saying why")
        except asyncio.CancelledError:
            reason = "cancelled"
            raise
        except Refused:
            reason = "refused"
            raise
        finally:
            if (close := getattr(outputs, "aclose", None)) is not None:
                await close()
            metrics.token_intervals(intervals)
            more = choice.generated - first_tokens if first else 0
            metrics.request_finished(
                self.endpoint,
                reason,
                clock() - self.arrival,
                choice.generated,
                choice.cached_tokens,
                (last - first) / more if more else None,
            )
            if traced is not None:
                traced.end(reason, len(prompt), choice.cached_tokens, choice.generated)
            if key is not None:
                metrics.key_finished(key.name, reason, choice.generated, queued)

    def _first(self, now: float) -> None:
        if self.meter is not None:
            self.meter.began()
        seconds = now - self.arrival
        if self.first_token_s is None:
            self.first_token_s = seconds
        self.front.metrics.first_token(seconds)

    async def rendered(self, render: Callable[..., bytes | None], *what: Any) -> bytes | None:
        """`render(*what)`, aside where prompts that are scored make it long."""
        async with self.front.lanes.turn(size_of(self.job)) as work:
            return await work(render, *what)

    async def open(self, choice: Choice, send: Send) -> None:
        """A choice's first token has come."""


class Stream(Generation):
    """Server-sent events, one HTTP chunk each. The status line waits for the first token, so that whatever goes wrong
    before it is answered with a status of its own."""

    async def write(self, send: Send) -> None:
        """See `Generation`."""
        await self.run_all(send)
        await self._start(send)
        await send({"type": "http.response.body", "body": self.form.closing(self.choices), "more_body": False})

    async def _start(self, send: Send) -> None:
        if not self.started:
            self.started = True
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})

    async def open(self, choice: Choice, send: Send) -> None:
        """See `Generation`."""
        await self._start(send)
        if (opening := await self.rendered(self.form.opening, choice)) is not None:
            await send({"type": "http.response.body", "body": opening, "more_body": True})

    async def emit(self, choice: Choice, text: Piece, send: Send) -> None:
        """See `Generation`."""
        # Ids that are asked for are sent as they come; log-probabilities wait for the text they belong to.
        ids = choice.token_ids and (self.front.tokenizer is None or (self.job.token_ids and self.job.logprobs < 0))
        if text or ids or choice.finish is not None:
            await self._start(send)
            await send({"type": "http.response.body", "body": self.form.chunk(choice, text), "more_body": True})


class Whole(Generation):
    """One JSON object at the end."""

    def __init__(self, front: Front, endpoint: str, job: Job, form: Format, arrival: float) -> None:
        super().__init__(front, endpoint, job, form, arrival)
        self._pieces: list[list[Piece]] = [[] for _ in self.choices]

    async def emit(self, choice: Choice, text: Piece, send: Send) -> None:
        """See `Generation`."""
        if text:
            self._pieces[choice.index].append(text)

    async def write(self, send: Send) -> None:
        """See `Generation`."""
        await self.run_all(send)
        body = await self.rendered(self.form.answer, self.choices, [joined(pieces) for pieces in self._pieces])
        assert body is not None
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        self.started = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})
