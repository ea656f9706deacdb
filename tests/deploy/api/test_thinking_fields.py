"""Fields that say whether and how hard a model is to think mean one thing on all endpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fake_engine import INFO, FakeEngine, say, serving
from tiny_tokenizer import with_special
from tool_templates import DEEPSEEK_R1, DEEPSEEK_V31, GLM, KIMI, MISTRAL_STRICT

from deploy.api.app import create_app
from deploy.config.api import ApiConfig
from deploy.routing.request_features import FeatureReader
from deploy.text.effort import EFFORTS
from workers.protocol.prompt import NO_ROOT, pack_keys, page_keys, unpack_keys

TOKENIZER = with_special("<think>", "</think>", "[THINK]", "[/THINK]")
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
GRADED = "{{ reasoning_effort }}<think></think>" + GLM
LONG = "the quick brown fox jumps over the lazy dog. " * 30


@contextmanager
def served(template: str, **config: Any) -> Iterator[tuple[httpx.Client, FakeEngine]]:
    engine = FakeEngine(
        say(TOKENIZER.encode("Hm.</think>Fine.", add_special_tokens=False)), replace(INFO, max_context=4096)
    )
    app = create_app(engine, TOKENIZER, ApiConfig(chat_template=template, **config))
    with serving(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        yield client, engine


def chat(client: httpx.Client, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": LONG}]
    return client.post("/v1/chat/completions", json={"model": "tiny", "messages": messages, **fields})


ON: list[dict[str, Any]] = [
    *({"reasoning_effort": effort} for effort in ("minimal", "low", "medium", "high", "xhigh", "max")),
    {"reasoning": {"effort": "high"}},
    {"reasoning": {"enabled": True}},
    {"reasoning": {"effort": None, "enabled": True, "exclude": False}},
    {"thinking": {"type": "enabled"}},
    {"thinking": {"type": "enabled", "budget_tokens": 2000}},
    {"thinking": True},
    {"enable_thinking": True},
    {"chat_template_kwargs": {"thinking": True, "enable_thinking": True}, "reasoning_effort": "none"},
]
OFF: list[dict[str, Any]] = [
    {"reasoning_effort": "none"},
    {"reasoning": {"effort": "none"}},
    {"reasoning": {"enabled": False}},
    {"reasoning": False},
    {"thinking": {"type": "disabled"}},
    {"thinking": False},
    {"enable_thinking": False},
    {"enable_thinking": False, "reasoning_effort": "high"},
    {"chat_template_kwargs": {"thinking": False, "enable_thinking": False}, "reasoning_effort": "high"},
]
OPEN: list[dict[str, Any]] = [
    {},
    {"reasoning_effort": None},
    {"reasoning_effort": "auto"},
    {"reasoning_effort": "default"},
    {"reasoning": {}},
    {"thinking": {"type": "adaptive"}},
    {"thinking": {"type": "auto"}},
]


@pytest.mark.parametrize("template", [DEEPSEEK_V31, GLM, KIMI])
def test_a_template_s_switch_is_set(template: str) -> None:
    def prompt_with(**kwargs: Any) -> list[int]:
        text = TOKENIZER.render_chat([{"role": "user", "content": LONG}], template=template, extra=kwargs)
        return TOKENIZER.encode(text, add_special_tokens=False)

    on, off = prompt_with(thinking=True, enable_thinking=True), prompt_with(thinking=False, enable_thinking=False)
    assert on != off
    with served(template) as (client, engine):
        for fields, expected in (
            *((fields, on) for fields in ON),
            *((fields, off) for fields in OFF),
            *((fields, prompt_with()) for fields in OPEN),
        ):
            answer = chat(client, **fields)
            assert answer.is_success, (fields, answer.text)
            assert list(engine.requests[-1].prompt) == expected, fields
        for effort, expected in (("high", on), ("none", off)):
            body = {"model": "tiny", "input": LONG, "reasoning": {"effort": effort, "summary": "auto"}}
            answer = client.post("/v1/responses", json=body)
            assert answer.json()["reasoning"]["effort"] == effort
            assert list(engine.requests[-1].prompt) == expected
        counted = client.post("/tokenize", json={"messages": [{"role": "user", "content": LONG}], **ON[3]})
        assert counted.json()["tokens"] == on


@pytest.mark.parametrize("template", [DEEPSEEK_V31, GRADED, PLAIN, DEEPSEEK_R1, MISTRAL_STRICT])
@pytest.mark.parametrize("fields", [*ON[3:8], *OFF[:4], *OPEN])
async def test_routers_make_the_same_prompt(template: str, fields: dict[str, Any]) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": LONG}], **fields}
    found = await FeatureReader(TOKENIZER, template).read(json.dumps(body).encode())
    with served(template) as (client, engine):
        if chat(client, **fields).is_success:
            assert found.keys(NO_ROOT) == unpack_keys(pack_keys(page_keys(engine.requests[-1].prompt)))


def test_a_template_that_knows_degrees_is_told_them() -> None:
    with served(GRADED) as (client, engine):
        for effort in EFFORTS:
            assert chat(client, reasoning_effort=effort).is_success
            prompt = TOKENIZER.decode(engine.requests[-1].prompt, skip_special_tokens=False)
            assert prompt.startswith("<think>" if effort in ("auto", "default") else f"{effort}<think>")
        body = {"model": "tiny", "max_tokens": 99, "messages": [{"role": "user", "content": "Hi"}]}
        client.post("/v1/messages", json={**body, "output_config": {"effort": "max"}})
        assert TOKENIZER.decode(engine.requests[-1].prompt, skip_special_tokens=False).startswith("max<think>")


def test_a_template_that_takes_two_efforts_is_told_the_nearest() -> None:
    """Mistral Small 4 has no switch but the effort, of which it takes none and high."""
    with served(MISTRAL_STRICT) as (client, engine):

        def told(path: str = "chat/completions", **fields: Any) -> str:
            question = [{"role": "user", "content": "Hi"}]
            body = {"model": "tiny", "input": "Hi"} if path == "responses" else {"model": "tiny", "messages": question}
            if path == "messages":
                body["max_tokens"] = 3000
            answer = client.post(f"/v1/{path}", json={**body, **fields})
            assert answer.is_success, (fields, answer.text)
            prompt = TOKENIZER.decode(engine.requests[-1].prompt, skip_special_tokens=False)
            return str(
                json.loads(prompt.split("[MODEL_SETTINGS]")[1].split("[/MODEL_SETTINGS]")[0])["reasoning_effort"]
            )

        for fields in ON[:-1]:
            assert told(**fields) == "high", fields
        for fields in (*OFF[:-1], *OPEN):
            assert told(**fields) == "none", fields
        for effort in ("minimal", "low", "medium", "high", "xhigh", "max"):
            assert told("responses", reasoning={"effort": effort}) == "high"
            assert told("messages", output_config={"effort": effort}, thinking={"type": "adaptive"}) == "high"
            assert told("messages", output_config={"effort": effort}) == "none"
        assert told("responses", reasoning={"effort": "none"}) == "none"
        assert told("messages", output_config={"effort": "of tomorrow"}, thinking={"type": "adaptive"}) == "none"
        assert told("messages", thinking={"type": "enabled", "budget_tokens": 1024}) == "high"
        assert told("messages", thinking={"type": "disabled"}) == told("messages") == "none"


def test_an_effort_that_a_template_only_knows_above_a_level_is_no_switch() -> None:
    """It writes the same for none as for high, so thinking cannot be switched off."""
    with served("{{ '!' if reasoning_effort == 'max' }}" + DEEPSEEK_R1) as (client, _):
        for effort in ("low", "high", "max"):
            assert chat(client, reasoning_effort=effort).is_success
        assert chat(client, reasoning_effort="none").json()["error"]["code"] == "unsupported_value"


def test_a_model_that_always_thinks_is_not_told_to_stop() -> None:
    with served(DEEPSEEK_R1) as (client, _):
        for fields in (*ON[:8], *OPEN):
            assert chat(client, **fields).is_success, fields
        for fields in OFF[:7]:
            error = chat(client, **fields).json()["error"]
            assert (error["param"], error["code"]) == (next(iter(fields)), "unsupported_value")
            assert "always reasons" in error["message"]


def test_a_model_that_does_not_think_takes_what_clients_send_by_themselves() -> None:
    with served(PLAIN) as (client, _):
        for fields in (
            *({"reasoning_effort": e} for e in ("none", "minimal", "low", "medium", "auto")),
            *OFF[:7],
            *OPEN,
        ):
            assert chat(client, **fields).is_success, fields
        for fields in ({"reasoning_effort": "high"}, {"thinking": {"type": "enabled"}}, {"enable_thinking": True}):
            error = chat(client, **fields).json()["error"]
            assert (error["param"], error["code"]) == (next(iter(fields)), "unsupported_value")


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "huge"},
        {"reasoning_effort": 3},
        {"reasoning": "high"},
        {"reasoning": {"effort": ["high"]}},
        {"reasoning": {"enabled": "yes"}},
        {"reasoning": {"max_tokens": 0}},
        {"reasoning": {"effort": "high", "exclude": True}},
        {"thinking": {"type": "enabled", "budget": "high"}},
        {"thinking": {"type": "sometimes"}},
        {"thinking": {}},
        {"thinking": "on"},
        {"enable_thinking": 1},
        {"thinking_budget": -1},
        {"thinking_token_budget": True},
    ],
)
def test_values_that_nobody_knows_are_refused_by_name(fields: dict[str, Any]) -> None:
    with served(GLM) as (client, _):
        answer = chat(client, **fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(fields)))
        completion = client.post("/v1/completions", json={"model": "tiny", "prompt": "x", **fields})
        assert (completion.status_code, completion.json()["error"]["param"]) == (400, next(iter(fields)))


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_budget": 9},
        {"thinking_token_budget": 9},
        {"thinking": {"type": "enabled", "budget_tokens": 9}},
        {"reasoning": {"max_tokens": 9}},
        {"reasoning": {"budget_tokens": 9}},
        {"thinking": {"type": "enabled", "budget": 9}},
    ],
)
def test_every_bound_of_the_reasoning_is_one(fields: dict[str, Any]) -> None:
    with served(KIMI) as (client, engine):
        assert chat(client, max_reasoning_tokens=9).is_success
        expected = engine.requests[-1].sampling.grammar
        assert expected is not None
        assert chat(client, **fields).is_success
        assert engine.requests[-1].sampling.grammar == expected
