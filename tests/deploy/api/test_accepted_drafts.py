"""Which tokens were drafts that stood: told to those who ask, token by token, however outputs were merged or parsed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fake_engine import INFO, FakeEngine, PushEngine, out, serving
from tiny_tokenizer import tiny
from tool_templates import GLM

from deploy.api.app import create_app
from deploy.config.api import ApiConfig

IDS = tiny().encode(" fox jumps over the lazy dog", add_special_tokens=False)
STEPS = (1, 3, 2, 1)
"""Tokens of each step."""
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "tiny", "prompt": "hi"}
ASKED = {"return_accepted_drafts": True}


def script(request: Any) -> Iterator[Any]:
    left = list(IDS)
    for count in STEPS:
        step, left = left[:count], left[count:]
        yield out(*step)
    yield out(1, finish="stop")


WANTED = [place < count - 1 for count in STEPS for place in range(count)]


def answers(path: str, body: dict[str, Any], engine: FakeEngine, config: ApiConfig | None = None) -> Iterable[Any]:
    """The choices of the answer, or of all events."""
    with serving(create_app(engine, tiny(), config)) as port:
        text = httpx.post(f"http://127.0.0.1:{port}{path}", json=body).text
    if not body.get("stream"):
        return json.loads(text)["choices"]
    events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
    return [event["choices"][0] for event in events]


@pytest.mark.parametrize("kind", [FakeEngine, PushEngine])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)])
def test_each_token_says_whether_it_was_a_draft(path: str, body: dict[str, Any], stream: bool, kind: type) -> None:
    assert len(IDS) >= sum(STEPS)
    whole = {**body, **ASKED, "stream": stream, "return_token_ids": True, "max_tokens": 100}
    choices = answers(path, whole, kind(script))
    ids = [token for choice in choices for token in choice.get("token_ids", [])]
    found = [draft for choice in choices for draft in choice.get("accepted_drafts", [])]
    assert ids == [*IDS[: sum(STEPS)], 1]
    assert found == [*WANTED, False]


@pytest.mark.parametrize("stream", [False, True])
def test_text_that_is_parsed_keeps_them(stream: bool) -> None:
    engine = FakeEngine(script, replace(INFO, max_context=1024))
    body = {**CHAT, **ASKED, "stream": stream, "max_tokens": 100}
    choices = answers("/v1/chat/completions", body, engine, ApiConfig(chat_template=GLM))
    assert [draft for choice in choices for draft in choice.get("accepted_drafts", [])] == [*WANTED, False]


@pytest.mark.parametrize("stream", [False, True])
def test_nobody_else_hears_of_it(stream: bool) -> None:
    for choice in answers("/v1/completions", {**TEXT, "stream": stream, "max_tokens": 100}, FakeEngine(script)):
        assert "accepted_drafts" not in choice
