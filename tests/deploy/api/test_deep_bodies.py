"""Deeply nested values, as deep as a body may have them: refused or answered, never a failure, wherever they stand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fake_engine import INFO, FakeEngine, say, serving
from tiny_tokenizer import with_special
from tool_templates import KIMI

from deploy.api.app import create_app
from deploy.config.api import ApiConfig

TOKENIZER = with_special("<think>", "</think>")
ASK: Any = [{"role": "user", "content": "x"}]
DEEP = "deep"
OFF = {"chat_template_kwargs": {"thinking": False}}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    engine = FakeEngine(say([40]), replace(INFO, max_context=100_000, vocab_size=1024))
    app = create_app(engine, TOKENIZER, ApiConfig(chat_template=KIMI, stored_responses=3))
    with serving(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        yield client


def requests(deep: str) -> list[tuple[str, dict[str, Any]]]:
    """Bodies with `deep` in all places where anything may stand."""
    schema = {"type": "object", "properties": {"x": {"type": "string", "default": deep}}}
    function = {"name": "f", "parameters": schema}
    tool = {"type": "function", "function": function}
    chat, response = {"model": "tiny", "messages": ASK, **OFF}, {"model": "tiny", "input": "x", **OFF}
    message = {"model": "tiny", "max_tokens": 3, "messages": ASK}
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"a": deep}}]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    chats: list[dict[str, Any]] = [
        {"tools": [tool]},
        {"tools": [tool], "tool_choice": "required"},
        {"response_format": form},
        {"guided_json": schema},
        {"structural_tag": {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}},
    ]
    responses: list[dict[str, Any]] = [
        {"tools": [{"type": "function", **function}]},
        {"tools": [{"type": "function", **function}], "tool_choice": "required", "stream": True},
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}},
        {"metadata": deep},
        {"input": [{"role": "user", "content": "x", "more": deep}]},
    ]
    messages: list[dict[str, Any]] = [
        {"messages": [*ASK, call, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
        {"tools": [{"name": "f", "input_schema": schema}], "tool_choice": {"type": "any"}},
        {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    ]
    return [
        *(("/v1/chat/completions", chat | more) for more in chats),
        *(("/v1/responses", response | more) for more in responses),
        *(("/v1/messages", message | more) for more in messages),
    ]


@pytest.mark.parametrize("depth", [40, 250, 500, 800, 970, 990])
def test_nothing_is_nested_too_deeply_for_an_answer(http: httpx.Client, depth: int) -> None:
    deep = '{"a":' * depth + "1" + "}" * depth  # put in as text: clients cannot write it themselves
    for path, body in requests(DEEP):
        raw = json.dumps(body).replace(f'"{DEEP}"', deep)
        answer = http.post(path, content=raw, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400), (path, body.keys(), answer.text)
        assert depth > 40 or answer.status_code == 200 or "metadata" in body, answer.text
