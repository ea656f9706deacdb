"""Run the sequences of a job: the engine is asked for each, and its output is written as it comes, streamed or whole.

These are ASGI responses of our own: per output of the engine one dictionary, one joined byte string and one `send`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import orjson
from msgspec.structs import replace
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from deploy.api.generation.choice import Choice, Piece, choice_of, joined
from deploy.api.generation.journaling import OPEN, Journal, WritePiece, continued, opened
from deploy.api.http.body import ClientDisconnected
from deploy.api.http.errors import ApiError, from_engine
from deploy.api.http.middleware import CancelOnDisconnect
from deploy.api.job.job import Branch, Job
from deploy.api.limits.admission import Admission, Admitted
from deploy.config.cache_salts import CacheSalts
from deploy.observability.front_metrics import FrontMetrics
from deploy.text.lane import Lanes
from deploy.text.tokenizer import Tokenizer
from workers.protocol.front import Engine, EngineFault, Refused, RequestFailed
from workers.protocol.messages import Request, RequestOutput
from workers.protocol.request import pack_tokens

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
SILENCE_S = 5.0
"""A stream that has begun says that it waits when no token has come for so long."""
WAITING: Final = b": waiting for the next token\n\n"
"""The comment in which it says so."""
ENTRY_BYTES: Final = 64
"""Bytes that an entry of an answer takes while it is written, about."""
NOT_ENFORCED: Final = b"x-latentserve-not-enforced"
"""The header that names what of schemas is left to the model."""
MOST_NAMED: Final = 16
"""Keywords in that header."""
_NAMEABLE: Final = re.compile(r"[^!-~ ]|,")
"""Characters that an item of a list in a header must not contain."""


def _not_enforced(job: Job) -> list[tuple[bytes, bytes]]:
    """The header that names what the grammar of an answer leaves to the model; none where there is nothing."""
    if not (names := job.not_enforced):
        return []
    more = [f"and {len(names) - MOST_NAMED} more"] if len(names) > MOST_NAMED else []
    listed = ", ".join([*(_NAMEABLE.sub("?", name[:128]) for name in names[:MOST_NAMED]), *more])
    return [(NOT_ENFORCED, listed.encode("ascii"))]


def size_of(job: Job) -> int:
    """Estimate the bytes of answers that the log-probabilities of a job's prompts make."""
    if job.prompt_logprobs < 0:
        return 0
    places = sum(len(job.prompts[branch.prompt].ids) for branch in job.sequences)
    return places * (2 + job.prompt_logprobs) * ENTRY_BYTES


def data_event(payload: bytes) -> bytes:
    """A server-sent event."""
    return b"data: " + payload + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """A server-sent event with the name that `value` has as its type."""
    return b"event: " + str(value["type"]).encode() + b"\ndata: " + orjson.dumps(value) + b"\n\n"


class Format(Protocol):
    """The shapes of one endpoint."""

    def opening(self, choice: Choice) -> bytes | None:
        """The event that begins a choice's stream, if there is one."""

    def template(self, index: int) -> tuple[bytes, bytes]:
        """Return the bytes before and after the JSON string of the new text, for an ordinary event of choice
        `index`."""

    def writer(self, index: int) -> Callable[[Piece], bytes]:
        """Writes an ordinary event of choice `index` where its text is told apart."""

    def chunk(self, choice: Choice, text: Piece) -> bytes:
        """An event with everything the choice holds; takes its details and its end along."""

    def closing(self, choices: Sequence[Choice]) -> bytes:
        """Return the bytes that end a stream once all choices have ended."""

    def answer(self, choices: Sequence[Choice], texts: Sequence[Piece]) -> bytes:
        """The whole answer, not streamed."""


@dataclass(frozen=True)
class Generator:
    """Answers jobs; one per application."""

    engine: Engine
    tokenizer: Tokenizer | None
    metrics: FrontMetrics
    admission: Admission
    lanes: Lanes
    """Turns for answers that are long to write."""
    salts: CacheSalts
    """Of cached pages."""
    resumable: type[Stream] | None = None
    """How streams are written whose clients ask that they can be resumed."""

    def answer(self, endpoint: str, job: Job, form: Format, arrival: float) -> Generation:
        """The answer to a request, in the shape of `form`, streamed or whole. `arrival` is `time.perf_counter()` when
        the request came in. 400 for a stream that cannot be resumed."""
        made: type[Generation] = Stream if job.stream else Whole
        if job.stream and job.draws.resume is not None and self.resumable is not None:
            made = self.resumable
        return made(self, endpoint, job, form, arrival)


class Generation(Response):
    """The answer to one generating request; a subclass says how it is written."""

    def __init__(self, generator: Generator, endpoint: str, job: Job, form: Format, arrival: float) -> None:
        self.generator, self.endpoint, self.job, self.form, self.arrival = generator, endpoint, job, form, arrival
        self.choices = [choice_of(job, branch, generator.tokenizer) for branch in job.sequences]
        self.started = False
        """Whether the status line is out."""
        self.first_token_s: float | None = None
        self.trace: RequestTrace | None = None
        self.journal: Journal | None = None
        self.admitted = Admitted()
        """Hears how the sequences go."""
        # What Starlette expects of a response.
        self.status_code = 200
        self.background = None

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the job and write its answer."""
        record: dict[str, Any] = scope.setdefault("latentserve.log", {})
        self.trace = scope.get("latentserve.trace")
        if self.trace is not None:
            self.trace.stage("front", self.trace.begun, time.time_ns(), {"latentserve.sequences": len(self.choices)})
        try:
            prompt_tokens = sum(len(prompt.ids) for prompt in self.job.prompts)
            with self.generator.admission.running(scope, prompt_tokens, self.choices) as self.admitted:
                if (opening := scope.get(OPEN)) is not None:
                    self.journal = opened(opening, self.job, self._ordinary())
                async with CancelOnDisconnect(receive):
                    await self.write(send)
        except ClientDisconnected:
            record["disconnected"] = True
        except ApiError as error:
            await self._fail(error, scope, receive, send)
        except (EngineFault, Refused, RequestFailed) as error:
            retry_after_s = self.generator.admission.retry_after(len(self.choices))
            await self._fail(from_engine(error, retry_after_s), scope, receive, send)
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

    def _ordinary(self) -> bool:
        return self.job.stream and len(self.choices) == 1 and not self.choices[0].detailed

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
        metrics, clock = self.generator.metrics, time.perf_counter
        prompt = self.job.prompts[branch.prompt].ids
        place = self.admitted.place(self.job.priority)
        salt = self.generator.salts.salt(place[1], self.job.cache_salt)
        request = Request(uuid.uuid4().hex, prompt, branch.sampling, *place, salt=salt)
        journal = self.journal
        fed = None if journal is None else journal.feeder(choice.index)
        write = self._write_piece()
        short = self.job.stream and not choice.detailed
        before, after = self.form.template(choice.index) if short and self.job.reading is None else (b"", b"")
        parsed = self.form.writer(choice.index) if short and self.job.reading is not None else None
        body, feed, dumps = "http.response.body", choice.feed, orjson.dumps
        intervals: list[float] = []
        first = last = 0.0
        reason = "error"
        first_tokens = 0
        queued: float | None = None
        outputs, traced = self._outputs(request, choice.index), None
        if self.trace is not None:
            outputs = traced = self.trace.sequence(choice.index, outputs)
        metrics.request_started(self.endpoint, len(prompt))
        self.admitted.started(len(prompt))
        try:
            async for output in outputs:
                now = clock()
                if fed is not None:
                    fed(output)
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
                        if write is None or not write(raw):
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
            self.admitted.finished(reason, choice.generated, queued)

    def _write_piece(self) -> WritePiece | None:
        """Return what writes an ordinary event to the client, past all layers between: they look at how an answer
        begins and ends, and nothing that lies in between concerns them. None where something has to see every event."""
        return None if self.journal is None or self.trace is not None else self.journal.write_piece

    def _outputs(self, request: Request, choice: int) -> AsyncIterator[RequestOutput]:
        """What the engine says to a request, behind what was said to it when another front had it."""
        engine, journal = self.generator.engine, self.journal
        if journal is None or journal.age_s is None:
            return engine.generate(request)
        done = pack_tokens([token for output in journal.outputs(choice) for token in output.tokens])
        return continued(journal, choice, engine, replace(request, done=done, age_s=journal.age_s))

    def _first(self, now: float) -> None:
        self.admitted.began()
        seconds = now - self.arrival
        if self.first_token_s is None:
            self.first_token_s = seconds
        self.generator.metrics.first_token(seconds)

    async def rendered(self, render: Callable[..., bytes | None], *what: Any) -> bytes | None:
        """`render(*what)`, aside where prompts that are scored make it long."""
        async with self.generator.lanes.turn(size_of(self.job)) as work:
            return await work(render, *what)

    async def open(self, choice: Choice, send: Send) -> None:
        """A choice's first token has come."""


class Stream(Generation):
    """Server-sent events, one HTTP chunk each. The status line waits for the first token, so that whatever goes wrong
    before it is answered with a status of its own."""

    @override
    async def write(self, send: Send) -> None:
        comments = asyncio.create_task(self._comment(send))
        comments.add_done_callback(_heard)
        try:
            await self.run_all(send)
        finally:
            comments.cancel()
        await self._start(send)
        last = self.ending(self.form.closing(self.choices))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def ending(self, body: bytes) -> bytes:
        """Return what ends the stream, made of the events that do."""
        return body

    async def _comment(self, send: Send) -> None:
        """Send a comment, which clients ignore, whenever a stream that has begun gets no token for a while. Where its
        engine has died it may wait for the next one longer than a proxy, or a client, waits for a silent connection."""
        while True:
            made = sum(choice.generated for choice in self.choices)
            await asyncio.sleep(SILENCE_S)
            if self.started and made == sum(choice.generated for choice in self.choices):
                await send({"type": "http.response.body", "body": WAITING, "more_body": True})

    async def _start(self, send: Send) -> None:
        if not self.started:
            self.started = True
            await send(
                {"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS, *_not_enforced(self.job)]}
            )

    @override
    async def open(self, choice: Choice, send: Send) -> None:
        await self._start(send)
        if (opening := await self.rendered(self.form.opening, choice)) is not None:
            await send({"type": "http.response.body", "body": opening, "more_body": True})

    @override
    async def emit(self, choice: Choice, text: Piece, send: Send) -> None:
        # Ids that are asked for are sent as they come; log-probabilities wait for the text they belong to.
        ids = choice.token_ids and (self.generator.tokenizer is None or (self.job.token_ids and self.job.logprobs < 0))
        if text or ids or choice.finish is not None:
            await self._start(send)
            await send({"type": "http.response.body", "body": self.form.chunk(choice, text), "more_body": True})


def _heard(ended: asyncio.Task[None]) -> None:
    """Take note of how a task ended: where a client has left, whoever writes the answer finds it out, too."""
    if not ended.cancelled():
        ended.exception()


class Whole(Generation):
    """Generation whose answer is one JSON object at the end."""

    def __init__(self, generator: Generator, endpoint: str, job: Job, form: Format, arrival: float) -> None:
        super().__init__(generator, endpoint, job, form, arrival)
        self._pieces: list[list[Piece]] = [[] for _ in self.choices]

    @override
    async def emit(self, choice: Choice, text: Piece, send: Send) -> None:
        if text:
            self._pieces[choice.index].append(text)

    @override
    async def write(self, send: Send) -> None:
        await self.run_all(send)
        body = await self.rendered(self.form.answer, self.choices, [joined(pieces) for pieces in self._pieces])
        assert body is not None
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += _not_enforced(self.job)
        self.started = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})
