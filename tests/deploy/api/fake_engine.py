"""An engine that follows a script, and a real server around it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI
from msgspec.structs import replace

from workers.processes.client import OutputMailbox
from workers.protocol.front import EngineFault, ModelInfo, Refused, RequestFailed
from workers.protocol.messages import EngineStats, Request, RequestOutput
from workers.protocol.plan import TopLogprobs
from workers.protocol.report import SelfTestReport
from workers.protocol.scores import Scores

KEEP_ALIVE_S = 90
"""Seconds for which Ray Serve keeps a connection on which nothing comes. Clients give such a one up after 5 s; so does
uvicorn by itself, sometimes just when a client uses it once more."""

INFO = ModelInfo("tiny", max_context=256, vocab_size=512, eos_ids=(1,), max_width=4, created=1_700_000_000)

Step = RequestOutput | float | Exception
"""An output, seconds to wait, or an error to raise."""
Script = Callable[[Request], Iterable[Step]]


def out(
    *tokens: int, finish: str | None = None, cached: int = 0, logprobs: Iterable[TopLogprobs] = ()
) -> RequestOutput:
    return RequestOutput("", tokens, finish, tuple(logprobs), cached)


def say(ids: Iterable[int], *, width: int = 1, eos: int | None = 1, pause: float = 0.0) -> Script:
    """Say `ids`, `width` at a time, as far as max_tokens allows, then stop by `eos`."""
    sequence = [*ids] + ([eos] if eos is not None else [])

    def script(request: Request) -> Iterator[Step]:
        end = min(len(sequence), request.sampling.max_tokens)
        for begin in range(0, end, width):
            part = sequence[begin : min(begin + width, end)]
            last = begin + width >= end
            stopped = part[-1] in request.sampling.stop_ids
            yield out(*part, finish=("stop" if stopped else "length") if last else None, cached=0 if begin else 64)
            if pause:
                yield pause

    return script


def scores_of(request: Request) -> Scores | None:
    """Make scores for every token of the prompt but the first: minus its place, the second in rank behind a token
    40."""
    top, places = request.sampling.prompt_logprobs, range(1, len(request.prompt))
    if top < 0:
        return None
    best = [(40 + other, -0.25 - other) for other in range(top)]
    ids, values = array("I", [i for i, _ in best] * len(places)), array("f", [v for _, v in best] * len(places))
    chosen, ranks = array("f", [-float(place) for place in places]), array("I", [2] * len(places))
    return Scores(top, chosen.tobytes(), ranks.tobytes(), ids.tobytes(), values.tobytes())


class FakeEngine:
    """Follows `script` for every request; remembers what was asked and what was cancelled, and when."""

    def __init__(self, script: Script, info: ModelInfo = INFO) -> None:
        self.script = script
        self.info = info
        self.fault: str | None = None
        self.selftest: SelfTestReport | None = None
        self.stats = EngineStats(slots=64, queue_limit=512)
        self.requests: list[Request] = []
        self.cancelled: list[tuple[str, float]] = []
        self.health_checks = 0
        self.health_check_error: Exception | None = None
        self.health_check_delay = 0.0

    async def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        self.requests.append(request)
        done, scores = False, scores_of(request)
        try:
            for step in self.script(request):
                if isinstance(step, float):
                    await asyncio.sleep(step)
                elif isinstance(step, Exception):
                    done = True
                    raise step
                else:
                    done = step.finish is not None
                    yield step if scores is None else replace(step, prompt=scores)
                    scores = None
                    await asyncio.sleep(0)
        finally:
            if not done:
                self.cancelled.append((request.request_id, time.monotonic()))

    async def health_check(self) -> None:
        self.health_checks += 1
        await asyncio.sleep(self.health_check_delay)
        if self.health_check_error is not None:
            raise self.health_check_error


class PushEngine(FakeEngine):
    """Pushes the script's outputs into mailboxes at its own pace, as the real client does."""

    def generate(self, request: Request) -> OutputMailbox:
        self.requests.append(request)
        mailbox = OutputMailbox(lambda: self.cancelled.append((request.request_id, time.monotonic())))
        asyncio.get_running_loop().create_task(self._push(request, mailbox))
        return mailbox

    async def _push(self, request: Request, mailbox: OutputMailbox) -> None:
        for step in self.script(request):
            if isinstance(step, float):
                await asyncio.sleep(step)
            elif isinstance(step, Exception):
                mailbox.fail(step)
            else:
                mailbox.put(step)


@contextmanager
def serving(app: FastAPI, send_buffer: int | None = None) -> Iterator[int]:
    """The application behind a real server on a free port, which is given; `send_buffer` bytes a connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        access_log=False,
        lifespan="off",
        log_level="warning",
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started:
        assert thread.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        thread.join(60)
        listener.close()


__all__ = ["INFO", "EngineFault", "FakeEngine", "PushEngine", "Refused", "RequestFailed", "out", "say", "serving"]
