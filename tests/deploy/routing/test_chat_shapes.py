"""Bodies of /v1/messages and /v1/responses get the page hashes that their replicas compute."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from typing import Any

import pytest

from deploy.api.anthropic.bodies import parse_messages
from deploy.api.http.body import parse_object, validate
from deploy.api.job.chat_bodies import ChatBody
from deploy.api.job.model import render_messages
from deploy.api.responses.bodies import chat_of, messages_of, parse_response, tools_of
from deploy.config.api import ApiConfig
from deploy.routing.request_features import FeatureReader
from deploy.text.tokenizer import Tokenizer
from tests.deploy.api.drawn_bodies import RICH, Drawing
from tests.deploy.text.tool_templates import GLM
from workers.config import DEMO_MODEL
from workers.protocol.request import NO_ROOT, pack_keys, page_keys, unpack_keys

LONG = "".join(f"def function_{i}(x):\n    return x + {i}\n\n" for i in range(40))
CONFIG = ApiConfig(chat_template=GLM)
CHATS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.load(DEMO_MODEL)
    assert found is not None
    return found


def lengthened(value: Any) -> Any:
    """The same with texts that fill pages."""
    if isinstance(value, dict):
        texts = {"text", "content", "thinking", "output", "system", "instructions", "description", "input"}
        return {
            name: f"{name} {LONG}{item}" if name in texts and isinstance(item, str) else lengthened(item)
            for name, item in value.items()
        }
    return [lengthened(item) for item in value] if isinstance(value, list) else value


def replicas_ids(tokenizer: Tokenizer, path: str, raw: bytes) -> list[int]:
    if path == MESSAGES:
        _, chat, _ = parse_messages(raw)
    elif path == CHATS:
        chat = validate(ChatBody, parse_object(raw))
    else:
        body = parse_response(raw)
        chat = chat_of(body, messages_of(body.input), tools_of(body))
    return tokenizer.encode(render_messages(tokenizer, CONFIG, chat), chat.add_special_tokens)


OTHERS: list[tuple[str, dict[str, Any]]] = [
    (MESSAGES, {"max_tokens": 5, "system": "a", "messages": [{"role": "user", "content": "b"}]}),
    (MESSAGES, {"max_tokens": 5, "system": "a", "messages": [{"role": "assistant", "content": "so it begins"}]}),
    (
        MESSAGES,
        {"max_tokens": 5, "thinking": {"type": "enabled"}, "messages": [{"role": "user", "content": "b"}]},
    ),
    (
        MESSAGES,
        {
            "max_tokens": 5,
            "messages": [{"role": "user", "content": "b"}],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "none"},
        },
    ),
    (
        MESSAGES,
        {
            "max_tokens": 5,
            "messages": [{"role": "user", "content": "b"}],
            "tools": [
                {"type": "web_search_20250305", "name": "web_search"},
                {"type": "custom", "name": "f", "input_schema": {"type": "object"}},
            ],
        },
    ),
    (RESPONSES, {"input": "b"}),
    (RESPONSES, {"input": [{"role": "developer", "content": "c"}, {"role": "user", "content": "b"}]}),
    (RESPONSES, {"input": [{"role": "system", "content": "c"}], "instructions": "a"}),
]
IMAGE: dict[str, Any] = {"type": "image_url", "image_url": {"url": "x"}}
CALL: dict[str, Any] = {"id": "c", "type": "custom", "custom": {"name": "f", "input": "x = 1"}}
USED: dict[str, Any] = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
EARLIER: list[tuple[str, dict[str, Any]]] = [
    (
        CHATS,
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]},
                {"role": "assistant", "content": [{"type": "spell"}], "tool_calls": [CALL]},
                {"role": "tool", "content": {"wet": True}},
                {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
                {"role": "function", "name": "f", "content": [{"type": "flight"}]},
                {"role": "user", "content": "b"},
            ]
        },
    ),
    (
        MESSAGES,
        {
            "max_tokens": 5,
            "system": "a",
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": [{"type": "oracle"}, USED]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": {"wet": True}}]},
            ],
        },
    ),
    (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image"}]},
                {"type": "oracle_call", "id": "o"},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": None},
                {"type": "function_call_output", "call_id": "c", "output": [{"type": "flight"}]},
                {"role": "user", "content": "b"},
            ]
        },
    ),
]
"""Conversations whose earlier turns hold what is no text."""
BODIES = [*EARLIER, *((path, body) for path in (MESSAGES, RESPONSES) for body in RICH[path]), *OTHERS]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_body_is_rendered_as_its_replica_renders_it(
    tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    raw = json.dumps(lengthened({"model": "demo", **body})).encode()
    ids = replicas_ids(tokenizer, path, raw)
    ask = await FeatureReader(tokenizer, CONFIG.chat_template).read(raw)
    # A chat that nothing marks as Anthropic's may end otherwise: what its template asks about thinking is not known.
    marked = path in (CHATS, RESPONSES) or body.keys() & {"system", "thinking", "tools"}
    keys = ask.keys(NO_ROOT)
    assert keys == unpack_keys(pack_keys(page_keys(ids)))[: len(keys)]
    assert len(keys) >= len(page_keys(ids)) - (not marked) > 3
    assert ask.tokens == pytest.approx(len(ids), abs=0 if marked else 8)


async def test_what_only_a_replica_knows_is_not_guessed(tokenizer: Tokenizer) -> None:
    raw = json.dumps({"model": "demo", "input": LONG, "previous_response_id": "resp_1"}).encode()
    ask = await FeatureReader(tokenizer, CONFIG.chat_template).read(raw)
    assert (ask.keys(NO_ROOT), ask.rows) == ([], 1)
    assert ask.tokens > 100


async def test_broken_bodies_are_sent_on_as_something(tokenizer: Tokenizer) -> None:
    reader, rng = FeatureReader(tokenizer, CONFIG.chat_template), random.Random(1)
    drawing = Drawing({"components": {"schemas": {}}}, rng)
    for path in (MESSAGES, RESPONSES, "/v1/chat/completions"):
        for _ in range(150):
            body = deepcopy(rng.choice(RICH[path]))
            for _ in range(rng.randint(1, 3)):
                body = drawing.broken(body)
            assert (await reader.read(drawing.raw(body))).tokens >= 0
