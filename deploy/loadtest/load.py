"""Drives an OpenAI-compatible endpoint with streamed requests and records when each token event arrived."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from deploy.loadtest.batch_mix import MixPoint, watched
from deploy.loadtest.load_spec import LoadSpec
from deploy.loadtest.sessions import Session
from deploy.loadtest.sse_client import ConnectionLost, SseClient, Target


@dataclass
class RequestRecord:
    """Request as its client saw it. Times are perf_counter seconds."""

    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    """Times of all events that carried tokens."""
    prompt_tokens: int = 0
    """Prompt tokens as the endpoint counted them, or as they were sent where it does not say."""
    tokens: int = 0
    """Generated, as the endpoint counted them; the number of events where it does not say."""
    error: str = ""
    """Kind of failure; empty when the request finished."""
    detail: str = ""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class _Reader:
    """Reads the events of one response into its record."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self.finished = False
        self.answer: list[str] = []
        """Text of the answer, in pieces."""

    def __call__(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.finished = True
            return
        record = self._record
        try:
            chunk = _decode(data)
        except msgspec.MsgspecError:
            record.error, record.detail = "unreadable event", data[:200].decode(errors="replace")
            return
        if chunk.error is not None:
            record.error, record.detail = "error event", _message(chunk.error)
            return
        if chunk.usage is not None:
            record.prompt_tokens, record.tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
        if not chunk.choices:
            return
        delta = chunk.choices[0].delta
        # A chat stream opens with an event that carries the role alone.
        told = delta is not None and (delta.content or delta.reasoning_content or chunk.choices[0].token_ids)
        if delta is None or told or chunk.choices[0].finish_reason:
            record.arrivals.append(now)
        if delta is not None and delta.content:
            self.answer.append(delta.content)


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


async def _one(client: SseClient, spec: LoadSpec, body: bytes) -> tuple[RequestRecord, str]:
    """A request, and what a chat was answered."""
    record = RequestRecord()
    reader = _Reader(record)
    headers = {"Authorization": f"Bearer {spec.api_key}"} if spec.api_key else {}
    record.sent = time.perf_counter()
    try:
        async with asyncio.timeout(spec.timeout_s):
            status, answer = await client.send(spec.path, body, headers, reader)
    except TimeoutError:
        record.error, record.detail = "timeout", f"no end after {spec.timeout_s:.0f} s"
    except ConnectionLost as error:
        record.error, record.detail = "connection lost", str(error)
    except OSError as error:
        record.error, record.detail = "cannot connect", str(error)
    else:
        if status != 200:
            record.error, record.detail = f"HTTP {status}", _error_of(answer)
        elif not record.error and not reader.finished:
            record.error, record.detail = (
                "no event stream" if answer else "stream ended early",
                answer[:200].decode(errors="replace"),
            )
    if not record.prompt_tokens and not record.error and not (spec.text or spec.api == "chat"):
        record.prompt_tokens = spec.input
    if not record.tokens:
        record.tokens = len(record.arrivals)
    return record, "".join(reader.answer)


def _error_of(answer: bytes) -> str:
    try:
        return _message(json.loads(answer)["error"])
    except (ValueError, KeyError, TypeError):
        return answer[:200].decode(errors="replace")


@dataclass(frozen=True)
class LoadRun:
    """Run of a load: its requests, and the seconds from the first one sent to the end of the last."""

    records: list[RequestRecord]
    duration: float
    mix: tuple[MixPoint, ...] = ()
    """Composition of the endpoint's steps during the run, where that was watched and the endpoint reports it."""

    def __add__(self, other: LoadRun) -> LoadRun:
        """Join two runs, one after the other; without what was watched."""
        return LoadRun(self.records + other.records, self.duration + other.duration)


Job = Callable[[], Coroutine[Any, Any, None]]
"""Sends a request, or the turns of a session one after the other."""


async def run_load(spec: LoadSpec, done: Callable[[RequestRecord], None], *, watch: bool = False) -> LoadRun:
    """Send every request of `spec`; `done` is told of each as it ends. Failures are records, never exceptions. `watch`:
    ask the endpoint meanwhile what its steps compute."""
    client = SseClient(Target(spec.url))
    try:
        for index in range(spec.warmup):
            record, _ = await _one(client, spec, spec.body(-1 - index))
            if record.error:
                return LoadRun([record], 0.0)
        records: list[RequestRecord] = []

        async def one(body: bytes) -> tuple[RequestRecord, str]:
            record, answer = await _one(client, spec, body)
            records.append(record)
            done(record)
            return record, answer

        jobs = _jobs(spec, one)
        mix: list[MixPoint] = []
        async with watched(spec.url, spec.api_key, mix) if watch else nullcontext():
            begin = time.perf_counter()
            if spec.rate is None:
                await _closed_loop(spec.in_flight, iter(jobs))
            else:
                await _open_loop(spec.rate, spec.seed, jobs)
            duration = time.perf_counter() - begin
        return LoadRun(records, duration, tuple(mix))
    finally:
        client.close()


def _jobs(spec: LoadSpec, one: Callable[[bytes], Coroutine[Any, Any, tuple[RequestRecord, str]]]) -> list[Job]:
    """Everything that is to be sent. Bodies are made before the clock starts, but for those that hold answers."""

    async def alone(body: bytes) -> None:
        await one(body)

    async def turns(session: Session) -> None:
        messages: list[dict[str, str]] = []
        for turn in session:
            messages += turn.messages
            record, answer = await one(spec.session_turn(messages, turn.output))
            if record.error:
                return  # whoever gets no answer does not go on
            messages.append({"role": "assistant", "content": answer})

    if spec.sessions:
        return [partial(turns, session) for session in spec.sessions]
    return [partial(alone, spec.body(index)) for index in range(spec.total)]


async def _closed_loop(concurrency: int, jobs: Iterator[Job]) -> None:
    async def worker() -> None:
        for job in jobs:
            await job()

    await asyncio.gather(*(worker() for _ in range(concurrency)))


async def _open_loop(rate: float, seed: int, jobs: list[Job]) -> None:
    """Poisson arrivals: exponential gaps, measured from the start so that lateness does not add up."""
    rng = random.Random(seed)
    loop = asyncio.get_running_loop()
    due = loop.time()
    tasks = []
    for job in jobs:
        if (wait := due - loop.time()) > 0:
            await asyncio.sleep(wait)
        tasks.append(loop.create_task(job()))
        due += rng.expovariate(rate)
    await asyncio.gather(*tasks)
