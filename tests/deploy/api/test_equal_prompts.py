"""A router and a replica make the same prompt of the same request, or prefixes are looked for where they are not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tiny_tokenizer import tiny, without_template
from tool_templates import GLM, KIMI, KIMI_K25

from deploy.api.http.errors import ApiError
from deploy.api.job.chat_bodies import ROLES, ChatBody
from deploy.api.job.job import parse_generation
from deploy.api.job.model import render_messages
from deploy.config.api import ApiConfig
from deploy.routing.request_features import FeatureReader
from deploy.text.chat import MOST_MESSAGES, MOST_TEMPLATE_VARIABLES
from deploy.text.encoders import ENCODERS
from deploy.text.tokenizer import ChatTemplateError
from workers.protocol.request import NO_ROOT, pack_keys, page_keys, unpack_keys

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ tone or '' }}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
V32 = without_template(ENCODERS["deepseek_v32"], "<｜User｜>", "<｜Assistant｜>", "</think>")
LONG = "the quick brown fox jumps over the lazy dog. " * 8
texts = st.sampled_from(["", "hi", "<|user|>" + LONG, LONG, LONG[3:], "\u6771\u4eac" * 30])
parts = st.lists(texts.map(lambda text: {"type": "text", "text": text}), max_size=3)
functions = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g"])},
    optional={"description": texts, "parameters": st.sampled_from([{}, {"type": "object"}]), "more": texts},
)
tools = st.lists(functions.map(lambda function: {"type": "function", "function": function}), max_size=2)
arguments = st.sampled_from(['{"a": 1}', "{}", "{", {"b": [LONG]}, "", [1], None, '{"a": "\\ud83d', '{"a": "\ud83d"}'])
ids = st.sampled_from(["x", "functions.f:0", ""])
calls = st.lists(
    st.builds(lambda i, a: {"id": i, "function": {"name": "f", "arguments": a}}, ids, arguments), max_size=2
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(ROLES), "content": texts | parts},
    optional={"name": texts, "tool_call_id": ids | texts, "reasoning_content": texts, "reasoning": texts},
) | st.fixed_dictionaries({"role": st.just("assistant"), "tool_calls": calls}, optional={"content": texts | st.none()})
flags = st.sampled_from([True, False, None])
bodies = st.fixed_dictionaries(
    {"model": st.just("tiny"), "messages": st.lists(messages, min_size=1, max_size=4)},
    optional={
        "add_generation_prompt": flags,
        "continue_final_message": flags,
        "add_special_tokens": flags,
        "chat_template_kwargs": st.sampled_from([None, {}, {"tone": "dry"}, {"tone": None}]),
        "n": st.integers(1, 3),
        "tools": tools | st.none(),
        "tool_choice": st.sampled_from(["auto", "none", None]),
        "reasoning_effort": st.sampled_from([None, "none", "low", "max", "auto"]),
        "reasoning": st.sampled_from([None, {}, {"effort": "none"}, {"enabled": True}, False]),
        "thinking": st.sampled_from(
            [None, {"type": "enabled"}, {"type": "disabled"}, {"type": "adaptive"}, True, False]
        ),
        "enable_thinking": flags,
    },
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(body=bodies)
@example(body={"model": "tiny", "messages": [{"role": "developer", "content": LONG}]})
@example(body={"model": "tiny", "messages": [{"role": "system", "content": LONG}], "thinking": None})
@example(
    body={
        "model": "tiny",
        "messages": [{"role": "system", "content": LONG}],
        "add_generation_prompt": False,
        "thinking": {"type": "enabled"},
    }
)
@example(
    body={
        "model": "tiny",
        "messages": [{"role": "system", "content": ""}, {"role": "assistant", "content": ""}],
        "thinking": {"type": "enabled"},
    }
)
@pytest.mark.parametrize(
    ("control", "template"),
    [
        (False, TEMPLATE),
        pytest.param(False, KIMI, marks=pytest.mark.long),
        pytest.param(False, GLM, marks=pytest.mark.long),
        (False, KIMI_K25),
        (False, None),
        (True, TEMPLATE),
        (True, KIMI),
        pytest.param(True, GLM, marks=pytest.mark.long),
    ],
)
async def test_a_router_asks_for_the_prompt_that_its_replica_makes(
    control: bool, template: str | None, body: dict[str, Any]
) -> None:
    """Chats without a template are written by the encoder of DeepSeek V3.2."""
    tokenizer = V32 if template is None else tiny()
    config = ApiConfig(chat_template=template, control_tokens_in_text=control)
    raw = json.dumps(body).encode()
    ask = await FeatureReader(tokenizer, template, control).read(raw)
    try:
        parsed = parse_generation(raw, ChatBody)
        ids = tokenizer.encode(render_messages(tokenizer, config, parsed), parsed.add_special_tokens)
    except ApiError:
        return
    assert ask.keys(NO_ROOT) == unpack_keys(pack_keys(page_keys(ids)))
    assert ask.rows == (body.get("n", 1) if ids else 1)


@pytest.mark.parametrize(
    "more",
    [
        {"chat_template_kwargs": dict.fromkeys(map(str, range(MOST_TEMPLATE_VARIABLES + 1)), 1)},
        {"messages": [{"role": "user", "content": "hi"}] * (MOST_MESSAGES + 1)},
    ],
)
async def test_a_router_does_not_render_what_its_replica_refuses(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def render(*arguments: Any, **options: Any) -> str:
        raise AssertionError(arguments)

    monkeypatch.setattr(tiny(), "render_chat", render)
    raw = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **more}).encode()
    assert (await FeatureReader(tiny()).read(raw)).keys(NO_ROOT) == []


async def test_a_router_renders_a_long_chat_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    threads: list[int] = []

    def render(*arguments: Any, **options: Any) -> str:
        threads.append(threading.get_ident())
        raise ChatTemplateError("no")

    monkeypatch.setattr(tiny(), "render_chat", render)
    for count in (1, MOST_MESSAGES):
        raw = json.dumps({"messages": [{"role": "user", "content": "hi"}] * count}).encode()
        await FeatureReader(tiny()).read(raw)
    assert [thread == threading.get_ident() for thread in threads] == [True, False]
