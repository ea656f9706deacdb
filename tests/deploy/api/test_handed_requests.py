"""From the router to the front: a long chat is encoded once, and its ids are those of transformers."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, say
from transformers import AutoTokenizer

from deploy.api.app import create_app
from deploy.config.cache_salts import SHARED
from deploy.routing.arrivals import ROUTING_HEADER, Arrivals
from deploy.routing.request_features import FeatureReader
from deploy.routing.router import IngressRouter
from deploy.serve.replica import EngineReplica
from deploy.serve.under_serve import UnderServe
from deploy.text.handed import EncodedPrompt, HandedPrompts
from deploy.text.tokenizer import Tokenizer
from workers.config import DEMO_MODEL
from workers.protocol.front import ModelInfo

MESSAGES = [
    {"role": "system", "content": "You write Python. " * 20},
    *({"role": ("user", "assistant")[i % 2], "content": f"def f{i}(x):\n    return x + {i}\n" * 9} for i in range(25)),
]


class Cluster:
    """A router and a front without Ray: a handle's calls are those of the one replica."""

    def __init__(self) -> None:
        self.replica = SimpleNamespace(handed=HandedPrompts())
        self.tokenizer = Tokenizer.load(DEMO_MODEL)
        assert self.tokenizer is not None
        self.encoded: list[str] = []
        """What the front encoded itself."""
        encode = self.tokenizer.encode
        self.tokenizer.encode = lambda text, special=True: self.encoded.append(text) or encode(text, special)
        self.engine = FakeEngine(say([40]), ModelInfo("demo", 1 << 17, self.tokenizer.size, (), 1, 0))
        app = create_app(self.engine, self.tokenizer, handed=self.replica.handed)
        self.front = UnderServe(app, "me", Arrivals(), None, self.replica.handed)
        self.router = object.__new__(IngressRouter)
        self.router._reader = FeatureReader(Tokenizer.load(DEMO_MODEL))
        self.router._engine, self.router._prompts, self.router._handing = self, self, True
        self.router._salts, self.router._key_header = SHARED, b"x-session-id"
        self.sent = 0

    @asynccontextmanager
    async def choose_replica(self, features: Any, receipt: dict[str, str], _reserve: bool):
        self.sent += 1
        receipt["routing_record"] = f"r/{self.sent}/{features.tokens}/1"
        name = SimpleNamespace(to_full_id_str=lambda: "me")
        yield SimpleNamespace(_replica=SimpleNamespace(replica_id=name))

    async def remote(self, *given: Any, to: Any) -> None:
        await EngineReplica.take_prompt(self.replica, *given, to)

    async def ask(self, path: str, body: dict[str, Any], routed: str | None = None) -> tuple[int, ...]:
        """The ids that the engine is asked to continue. `routed`: another routing record than the router's."""
        raw = json.dumps({"model": "demo", **body}).encode()
        headers = {"content-type": "application/json"}
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(self.router.__serve_build_asgi_app__()), base_url="http://router"
        ) as http:
            told = (await http.post("/internal/route", content=raw, headers=headers)).json()
        record = told["request_headers"][ROUTING_HEADER] if routed is None else routed
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.front), base_url="http://front") as http:
            answer = await http.post(path, content=raw, headers={**headers, ROUTING_HEADER: record}, timeout=60)
        assert answer.status_code == 200, answer.text
        return tuple(self.engine.requests[-1].prompt)


def oracle(messages: list[dict[str, str]]) -> tuple[int, ...]:
    text = AutoTokenizer.from_pretrained(DEMO_MODEL).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    return tuple(AutoTokenizer.from_pretrained(DEMO_MODEL)(text, add_special_tokens=False)["input_ids"])


CHAT = "/v1/chat/completions"


async def test_a_long_chat_is_encoded_by_its_router_alone() -> None:
    cluster = Cluster()
    asked = {"messages": MESSAGES, "max_tokens": 1}
    ids = oracle(MESSAGES)
    assert len(ids) > 1024
    assert await cluster.ask(CHAT, asked) == ids
    assert cluster.encoded == []
    assert await cluster.ask(CHAT, asked) == ids  # which the router remembers
    assert cluster.encoded == []


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "def f(x): return x + 1\n" * 200, "max_tokens": 1}),
        ("/v1/messages", {"messages": MESSAGES[1:], "system": "Be brief.", "max_tokens": 1}),
        ("/v1/responses", {"input": MESSAGES[1]["content"] * 30, "max_output_tokens": 1}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a b " * 900}]}], "max_tokens": 1}),
    ],
)
async def test_every_api_takes_what_was_handed_over(path: str, asked: dict[str, Any]) -> None:
    cluster, alone = Cluster(), Cluster()
    assert await cluster.ask(path, asked) == await alone.ask(path, asked, routed="")
    assert (cluster.encoded, len(alone.encoded)) == ([], 1)


async def test_a_router_that_reads_a_body_otherwise_gives_no_wrong_ids() -> None:
    cluster = Cluster()

    async def remote(ticket: str, digest: bytes, packed: bytes, to: Any) -> None:
        other = EncodedPrompt.of("another text", False, [5] * 2000)
        await EngineReplica.take_prompt(cluster.replica, ticket, other.digest, other.packed, to)

    cluster.remote = remote
    assert await cluster.ask(CHAT, {"messages": MESSAGES, "max_tokens": 1}) == oracle(MESSAGES)
    assert len(cluster.encoded) == 1


@pytest.mark.parametrize("routed", ["", "r/2/9/1", "x/1/9/1"])
async def test_requests_without_the_ticket_are_encoded(routed: str) -> None:
    cluster = Cluster()
    assert await cluster.ask(CHAT, {"messages": MESSAGES, "max_tokens": 1}, routed) == oracle(MESSAGES)
    assert len(cluster.encoded) == 1
