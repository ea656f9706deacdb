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
from tool_templates import DEEPSEEK_R1, DEEPSEEK_V31, GLM, HY4, KIMI, MISTRAL_STRICT

from deploy.api.app import create_app
from deploy.config.api import ApiConfig
from deploy.routing.request_features import FeatureReader
from deploy.text.effort import EFFORTS
from workers.protocol.request import NO_ROOT, pack_keys, page_keys, unpack_keys

TOKENIZER = with_special("<think>", "</think>", "[THINK]", "[/THINK]")
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
HY4_STRICT = (
    "{%- set effort = reasoning_effort or 'high' -%}{%- if effort not in ['no_think', 'low', 'high'] -%}"
    "{{ raise_exception('no such effort') }}{%- endif -%}reasoning_effort:{{ effort }};" + HY4
)
HY4_LAX = "reasoning_effort:{{ reasoning_effort or 'high' }};" + HY4
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


@pytest.mark.parametrize("template", [DEEPSEEK_V31, GRADED, PLAIN, DEEPSEEK_R1, MISTRAL_STRICT, HY4_STRICT])
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


CLEARS = (  # the line of GLM-4.7's and GLM-5's templates
    "{%- set ns = namespace(last_user_index=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{% set ns.last_user_index = loop.index0 -%}{%- endif %}{%- endfor %}{%- for m in messages -%}<|{{ m.role }}|>"
    "{%- if m.role == 'assistant' and ((clear_thinking is defined and not clear_thinking) or "
    "loop.index0 > ns.last_user_index) and m.reasoning_content -%}<think>{{ m.reasoning_content }}</think>"
    "{%- endif -%}{{ m.content }}{%- endfor -%}<|assistant|>{{ '</think>' if enable_thinking is false else '<think>' }}"
)
PRESERVES = CLEARS.replace(
    "(clear_thinking is defined and not clear_thinking)", "(preserve_thinking is defined and preserve_thinking is true)"
)
KEEPS_UNLESS_CLEARED = CLEARS.replace("clear_thinking is defined and not clear_thinking", "not clear_thinking")


def _edits(*edits: dict[str, Any]) -> dict[str, Any]:
    return {"context_management": {"edits": [{"type": "clear_tool_uses_20250919", "keep": {"value": 3}}, *edits]}}


def _clear(**keep: Any) -> dict[str, Any]:
    return _edits({"type": "clear_thinking_20251015", **keep})


@pytest.mark.parametrize("template", [CLEARS, PRESERVES, KEEPS_UNLESS_CLEARED, GLM])
async def test_earlier_thinking_stays_where_clients_say_so(template: str) -> None:
    """Kimi's clients say it as `keep`, GLM's as `clear_thinking`, Anthropic's as an edit of the context."""
    thought = "I look up at the sky."
    turns: list[dict[str, Any]] = [{"role": "user", "content": LONG}]
    said = {"role": "assistant", "content": "Blue.", "reasoning_content": thought}
    blocks = [{"type": "thinking", "thinking": thought, "signature": ""}, {"type": "text", "text": "Blue."}]
    last = {"role": "user", "content": "And now?"}
    chats = [*turns, said, last]
    own = template in (KEEPS_UNLESS_CLEARED, GLM)  # what the template does if it is not told
    knows = template != GLM
    with served(template) as (client, engine):
        for path, messages, fields, keeps in (
            *(
                ("chat/completions", chats, fields, keeps)
                for fields, keeps in (
                    ({}, own),
                    ({"thinking": {"type": "enabled", "keep": "all"}}, True),
                    ({"thinking": {"type": "enabled", "keep": None}}, own),
                    ({"thinking": {"type": "enabled", "clear_thinking": False}}, True),
                    ({"thinking": {"type": "disabled", "clear_thinking": True}}, not knows),
                    ({"clear_thinking": False, "reasoning_effort": "high"}, True),
                    ({"preserve_thinking": True}, True),
                    ({"reasoning": {"context": "all_turns"}}, True),
                    ({"reasoning": {"context": "current_turn", "effort": "high"}}, not knows),
                    ({"reasoning": {"context": "auto"}}, own),
                    ({"preserve_thinking": False}, not knows),
                )
            ),
            *(
                ("messages", [*turns, {"role": "assistant", "content": blocks}, last], fields, keeps)
                for fields, keeps in (
                    (_edits(), own),
                    (_clear(keep="all"), True),
                    ({**_clear(keep="all"), "thinking": {"type": "adaptive"}}, True),
                    (_clear(keep={"type": "all"}), True),
                    (_clear(keep={"type": "thinking_turns", "value": 1}), not knows),
                    (_clear(), not knows),
                    (_clear(keep={"type": "thinking_turns", "value": 2}), own),
                    ({"context_management": {"edits": "all"}}, own),
                    ({"context_management": {"edits": [None, {}]}}, own),
                )
            ),
        ):
            if knows is False:
                keeps = own
            body = {"model": "tiny", "messages": messages, "max_tokens": 9, **fields}
            answer = client.post(f"/v1/{path}", json=body)
            assert answer.is_success, (fields, answer.text)
            prompt = engine.requests[-1].prompt
            assert (thought in TOKENIZER.decode(prompt, skip_special_tokens=False)) is keeps, fields
            found = await FeatureReader(TOKENIZER, template).read(json.dumps(body).encode())
            assert found.keys(NO_ROOT) == unpack_keys(pack_keys(page_keys(prompt))), fields
            if path == "messages":
                counted = client.post("/v1/messages/count_tokens", json=body)
                assert counted.json()["input_tokens"] == len(prompt)


@pytest.mark.parametrize(
    "fields",
    [
        {"clear_thinking": "yes"},
        {"thinking": {"type": "enabled", "keep": "some"}},
        {"thinking": {"type": "enabled", "clear_thinking": 1}},
        {"preserve_thinking": 1},
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


@pytest.mark.parametrize("template", [HY4, HY4_LAX, HY4_STRICT])
def test_hy4_is_switched_off_by_its_own_word(template: str) -> None:
    """Its template has the effort `no_think` where others have `none`, and no other switch."""
    with served(template) as (client, engine):

        def prompt(**fields: Any) -> str:
            answer = chat(client, **fields)
            assert answer.is_success, (fields, answer.text)
            return TOKENIZER.decode(engine.requests[-1].prompt, skip_special_tokens=False)

        for fields in OFF[:-1]:
            text = prompt(**fields)
            assert text.endswith("<think></think>"), fields
            assert text.startswith("reasoning_effort:no_think;") == (template != HY4), fields
        for fields in (*ON[:-1], *OPEN):
            assert prompt(**fields).endswith("<think>"), fields
        own = prompt(chat_template_kwargs={"reasoning_effort": "no_think"})
        assert own == prompt(reasoning_effort="none")
