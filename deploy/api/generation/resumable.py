"""Streams whose clients can resume them at any replica: the answer is made once more, and what came already is left
out.

Nothing is kept for this. Every event has an id that says what the request drew and how far each choice was told, so
whichever replica gets the request again makes the same tokens, and knows where to begin. Events depend on which tokens
came together, so those that made the last ones are put together again.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any, Final
from zlib import crc32

import msgspec
from msgspec.structs import replace
from starlette.types import Message, Send
from typing_extensions import override

from deploy.api.generation.choice import Choice
from deploy.api.generation.generate import Format, Generator, Stream
from deploy.api.generation.journaling import WritePiece
from deploy.api.http.draws import Place, Resume, event_id
from deploy.api.http.errors import invalid
from deploy.api.job.job import Branch, Job
from workers.processes.client import merge_outputs
from workers.protocol.messages import Request, RequestOutput
from workers.protocol.request import Prompt

_EVENT_END: Final = re.compile(rb"(?<=\n\n)")


class ResumableStream(Stream):
    """A stream whose events have ids."""

    def __init__(self, generator: Generator, endpoint: str, job: Job, form: Format, arrival: float) -> None:
        """400 where the request is not the one whose stream is to be resumed."""
        super().__init__(generator, endpoint, job, form, arrival)
        resume = job.draws.resume
        assert resume is not None
        if resume.error is not None:
            raise resume.error
        self._checksum = checksum(job, generator.engine.info.root)
        if resume.secret is not None and (resume.checksum != self._checksum or len(resume.places) != len(self.choices)):
            raise invalid(
                "last-event-id: it is of a stream that another request, or other weights, made; repeat the request as "
                "it was, or leave the header out to begin a new stream",
                "last-event-id",
                "invalid_event_id",
            )
        self._resume: Resume = resume
        self._told = list(resume.places) or [Place()] * len(self.choices)
        self._now = [Place()] * len(self.choices)
        self._closing = 0

    def _id(self) -> bytes:
        return (
            b"id: "
            + event_id(self.job.draws.secret, self.job.draws.created, self._checksum, self._told, self._closing)
            + b"\n"
        )

    @override
    def _write_piece(self) -> WritePiece | None:
        return None  # events are given their ids on the way

    @override
    async def run(self, choice: Choice, branch: Branch, send: Send) -> None:
        async def numbered(message: Message) -> None:
            if message["type"] == "http.response.body":
                body = self._new_events(choice, message["body"])
                if not body:
                    return
                message = {**message, "body": body}
            await send(message)

        await super().run(choice, branch, numbered)

    def _new_events(self, choice: Choice, body: bytes) -> bytes:
        """Give events their ids, but leave out those that came already."""
        found, now = [], self._now[choice.index]
        if choice.generated != now.tokens:
            now = Place(now.tokens, choice.generated, 0)
        last = self._resume.places[choice.index] if self._resume.places else Place()
        for event in _EVENT_END.split(body):
            if not event:
                continue
            now = Place(now.before, now.tokens, now.events + 1)
            if (now.tokens, now.events) > (last.tokens, last.events):
                self._told[choice.index] = now
                found.append(self._id() + event)
        self._now[choice.index] = now
        return b"".join(found)

    @override
    def ending(self, body: bytes) -> bytes:
        found = []
        for event in _EVENT_END.split(body):
            if event:
                self._closing += 1
                if self._closing > self._resume.closing:
                    found.append(self._id() + event)
        return b"".join(found)

    @override
    def _outputs(self, request: Request, choice: int) -> AsyncIterator[RequestOutput]:
        outputs = super()._outputs(request, choice)
        return put_together(outputs, self._resume.places[choice]) if self._resume.places else outputs


def checksum(job: Job, root: bytes) -> int:
    """Checksum of all that decides which tokens follow. `root`: that of the engine, which names its weights."""
    found = crc32(root)
    for prompt in job.prompts:
        found = crc32(Prompt.of(prompt.ids).packed, found)
    return crc32(msgspec.msgpack.encode([branch.sampling for branch in job.sequences]), found)


async def put_together(outputs: Any, place: Place) -> AsyncIterator[RequestOutput]:
    """Yield outputs of which one ends at `place.before` tokens and the next at `place.tokens`, as when they came for
    the first time."""
    at = 0
    waiting: list[RequestOutput] = []
    try:
        async for output in outputs:
            for part in _divided(output, [place.before - at, place.tokens - at]):
                at += len(part.tokens)
                waiting.append(part)
                if at <= place.before or at >= place.tokens or part.finish is not None:
                    yield waiting[0] if len(waiting) == 1 else merge_outputs(waiting)
                    waiting = []
    finally:
        if (close := getattr(outputs, "aclose", None)) is not None:
            await close()


def _divided(output: RequestOutput, cuts: list[int]) -> list[RequestOutput]:
    """An output in parts, which end at these numbers of its tokens where it has more."""
    ends = sorted({cut for cut in cuts if 0 < cut < len(output.tokens)})
    if not ends:
        return [output]
    parts = []
    for begin, end in zip([0, *ends], [*ends, len(output.tokens)], strict=True):
        first, last = begin == 0, end == len(output.tokens)
        parts.append(
            replace(
                output,
                tokens=output.tokens[begin:end],
                finish=output.finish if last else None,
                logprobs=output.logprobs[begin:end],
                accepted=output.drafts[begin:end],
                prompt=output.prompt if first else None,
                offered=output.offered if first else 0,
                at=output.at + begin,
            )
        )
    return parts
