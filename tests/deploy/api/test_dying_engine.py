"""Engines that die in the middle of answers of every API: a client is sent what it would have been sent anyway."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fake_engine import INFO, serving
from tiny_tokenizer import tiny

from deploy.api.app import create_app
from deploy.config.api import ApiConfig
from workers.processes.client import OutputMailbox
from workers.processes.failover import FailoverEngine
from workers.protocol.front import EngineFault
from workers.protocol.messages import EngineStats, Request, RequestOutput
from workers.protocol.plan import TopLogprobs
from workers.protocol.request import unpack_tokens

TEXT = "def read_lines(path):\n    with open(path) as file: Grüße aus Köln, 東京タワー 👩‍🚀 STOP and END of it all\n"
IDS = tiny().encode(TEXT, add_special_tokens=False)


class ScriptedClient:
    """An engine that says `IDS`, from behind what is done of a request, and dies after so many tokens of all."""

    def __init__(self, dies_after: int) -> None:
        self.info, self.stats, self.selftest = INFO, EngineStats(), None
        self.fault: str | None = None
        self.died_of_an_error = self.fault_is_lasting = False
        self.on_fault: list[Callable[[str], None]] = []
        self.on_charges: list[Any] = []
        self.asked: list[Request] = []
        self._left = dies_after
        self._mailboxes: dict[str, OutputMailbox] = {}

    def generate(self, request: Request, mailbox: OutputMailbox) -> None:
        self.asked.append(request)
        self._mailboxes[request.request_id] = mailbox
        asyncio.get_running_loop().create_task(self._say(request, mailbox))

    async def _say(self, request: Request, mailbox: OutputMailbox) -> None:
        most = min(len(IDS), request.sampling.max_tokens)
        for at in range(len(unpack_tokens(request.done)), most):
            for _ in range(20):  # whoever reads has the time to read every output by itself
                await asyncio.sleep(0)
            if self.fault is not None or request.request_id not in self._mailboxes:
                return
            finish = "length" if at == most - 1 else None
            logprobs = (TopLogprobs(-0.5, (IDS[at],), (-0.5,)),) if request.sampling.logprobs >= 0 else ()
            cached = 64 if not at else 0
            mailbox.put(RequestOutput(request.request_id, (IDS[at],), finish, logprobs, cached, at=at))
            self._left -= 1
            if self._left == 0:
                self.die()

    def die(self) -> None:
        self.fault = "rank 0 was ended by SIGKILL"
        for mailbox in self._mailboxes.values():
            mailbox.fail(EngineFault(self.fault))
        for callback in self.on_fault:
            callback(self.fault)

    def abandon(self, request_id: str) -> None:
        self._mailboxes.pop(request_id, None)

    async def close(self) -> None:
        pass


class Engines:
    """One engine after the other; each dies after the number of tokens that is its own, the last one does not."""

    def __init__(self, *deaths: int, starts: bool = True) -> None:
        self._deaths, self._starts = [*deaths, 10**9], starts
        self.clients: list[ScriptedClient] = []
        self.failover = FailoverEngine(self._next(), self._start, 30.0)  # type: ignore[arg-type]

    def _next(self) -> ScriptedClient:
        self.clients.append(ScriptedClient(self._deaths[len(self.clients)]))
        return self.clients[-1]

    async def _start(self) -> ScriptedClient:
        await asyncio.sleep(0.02)
        if not self._starts:
            raise EngineFault("no room")
        return self._next()


def answer(engines: Engines, path: str, body: dict[str, Any]) -> str:
    """The whole body of an answer, but for ids and times."""
    app = create_app(engines.failover, tiny(), ApiConfig())
    with serving(app) as port:
        answered = httpx.post(f"http://127.0.0.1:{port}{path}", json=body, timeout=60, trust_env=False)
    assert answered.status_code == 200, answered.text
    return re.sub(r"[0-9a-f]{24,}|(?<=\"created\":)\d+|(?<=_at\":)[\d.]+", "ID", answered.text)


USER = [{"role": "user", "content": "Go on."}]
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "def f(x):", "max_tokens": 30, "logprobs": 1}),
    "choices": ("/v1/completions", {"prompt": "def f(x):", "max_tokens": 30, "n": 2, "temperature": 1}),
    "a stop string": ("/v1/completions", {"prompt": "def f(x):", "max_tokens": 200, "stop": ["STOP"]}),
    "chat": (
        "/v1/chat/completions",
        {"messages": USER, "max_tokens": 30, "stream_options": {"include_usage": True}},
    ),
    "messages": ("/v1/messages", {"messages": USER, "max_tokens": 30}),
    "responses": ("/v1/responses", {"input": "Go on.", "max_output_tokens": 30}),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("asked", ASKED)
def test_answers_of_engines_that_die_are_those_of_one_that_lives(asked: str, stream: bool) -> None:
    """Byte for byte, though two die in the middle of an answer: ids and times alone are others."""
    path, body = ASKED[asked]
    body = {**body, "model": "tiny", "stream": stream}
    if not stream:
        body.pop("stream_options", None)
    engines = Engines(7, 9)
    found, expected = answer(engines, path, body), answer(Engines(), path, body)
    assert len(engines.clients) == 3
    assert [len(unpack_tokens(one.done)) for one in engines.clients[1].asked + engines.clients[2].asked].count(0) == 0
    if asked == "choices":  # whose event comes first is open
        found, expected = ("\n".join(sorted(text.split("\n"))) for text in (found, expected))
    assert found == expected
    assert engines.failover.streams == 0


@pytest.mark.parametrize("stream", [True, False])
def test_where_no_engine_follows_answers_end_as_they_always_did(stream: bool) -> None:
    engines = Engines(7, starts=False)
    app = create_app(engines.failover, tiny(), ApiConfig())
    body = {"model": "tiny", "prompt": "def f(x):", "max_tokens": 30, "stream": stream}
    with serving(app) as port:
        answered = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60, trust_env=False)
        health = httpx.get(f"http://127.0.0.1:{port}/health", timeout=60, trust_env=False)
    assert answered.status_code == (200 if stream else 503)
    why = "rank 0 was ended by SIGKILL; it could not be started again: no room"
    assert f"the engine is down: {why}" in answered.text
    assert "[DONE]" not in answered.text
    assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_down")
