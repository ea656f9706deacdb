"""Which bodies are worked on in the event loop: what takes long there is many values, not long texts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.requests import Request as HttpRequest

from deploy.api.http.body import Intake
from deploy.api.http.draws import Draws
from deploy.config.api import ApiConfig
from deploy.text.lane import aside, at_once

WORDS = "the quick brown fox jumps over the lazy dog " * 40


def chat(messages: list[Any], **more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages, **more}).encode()


def call(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


BODIES = {
    "short": (chat([{"role": "user", "content": "hello"}]), True),
    "a chat of 8k tokens": (chat([{"role": "user", "content": WORDS}] * 18), True),
    "one long text": (chat([{"role": "user", "content": WORDS * 60}]), False),
    "many short messages": (chat([{"role": "user", "content": "x"}] * 400), False),
    "a call of few arguments": (chat([call('{"a": 1}')]), True),
    "a call of many arguments": (chat([call(json.dumps([[]] * 9000))]), False),
    "many lists": (chat([], chat_template_kwargs={"a": [[]] * 2000}), False),
}


@pytest.mark.parametrize("name", BODIES)
async def test_long_texts_are_little_work_and_many_values_much(name: str) -> None:
    body, inline = BODIES[name]
    sent = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        return sent.pop() if sent else {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "headers": [(b"content-type", b"application/json")], "latentserve.draws": Draws()}
    async with Intake(ApiConfig()).reading(HttpRequest(scope, receive)) as incoming:
        assert incoming.raw == body
        assert incoming.work is (at_once if inline else aside)


def test_the_bodies_are_what_their_names_say() -> None:
    assert 25_000 < len(BODIES["a chat of 8k tokens"][0]) < 60_000
    assert all(len(BODIES[name][0]) < 16 * 1024 for name in ("many short messages", "many lists"))
