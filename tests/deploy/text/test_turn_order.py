"""Chats whose turns come in an order that a template refuses are written as near to it as it allows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import with_special
from tool_templates import GLM, MISTRAL_STRICT

from deploy.text.chat import ChatTemplateError
from deploy.text.turn_order import in_strict_order

TOKENIZER = with_special("[THINK]", "[/THINK]")
TOOL: Any = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def says(text: str, *calls: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        made = [{"id": c, "type": "function", "function": {"name": "f", "arguments": "{}"}} for c in calls]
        message["tool_calls"] = made
    return message


def result(text: str, call: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": call}


def written(messages: list[dict[str, Any]]) -> str:
    text = TOKENIZER.render_chat(messages, tools=[TOOL], template=MISTRAL_STRICT)
    return text[text.index("[/MODEL_SETTINGS]") + len("[/MODEL_SETTINGS]") :]


CALL = "[TOOL_CALLS]f[ARGS]{}"
END = "<|eos|>"
CHATS: list[tuple[list[dict[str, Any]], str]] = [
    ([user("a"), says("b"), user("c")], f"[INST]a[/INST]b{END}[INST]c[/INST]"),
    ([user("a"), user("b")], "[INST]a\n\nb[/INST]"),
    ([user("a"), says("b"), system("s"), user("c")], f"[INST]a[/INST]b{END}[INST]s\n\nc[/INST]"),
    (
        [user("a"), says("b"), says("c", "1"), result("r", "1"), says("d"), user("e")],
        f"[INST]a[/INST]b\n\nc{CALL}{END}[TOOL_RESULTS]r[/TOOL_RESULTS]d{END}[INST]e[/INST]",
    ),
    (
        [user("a"), says("", "1"), result("r", "1"), user("b")],
        f"[INST]a[/INST]{CALL}{END}[TOOL_RESULTS]r[/TOOL_RESULTS][No answer came.]{END}[INST]b[/INST]",
    ),
    ([user("a"), says("", "1"), user("b")], f"[INST]a[/INST]{CALL}{END}[No answer came.]{END}[INST]b[/INST]"),
    ([user("a"), says(""), user("b")], "[INST]a\n\nb[/INST]"),
    ([says("a"), user("b")], f"[INST][Nothing was asked.][/INST]a{END}[INST]b[/INST]"),
]


@pytest.mark.parametrize(("messages", "expected"), CHATS)
def test_turns_are_brought_into_the_order_of_the_template(messages: list[dict[str, Any]], expected: str) -> None:
    assert written(messages) == expected
    headed = TOKENIZER.render_chat([system("s"), *messages], tools=[TOOL], template=MISTRAL_STRICT)
    assert "[SYSTEM_PROMPT]s[/SYSTEM_PROMPT]" in headed
    assert headed.endswith(expected)


def test_a_template_that_takes_any_order_gets_what_was_said() -> None:
    given = [user("a"), user("b"), says("c"), system("s"), user("d")]
    assert TOKENIZER.render_chat(given, template=GLM).startswith("[gMASK]<sop><|user|>a<|user|>b<|assistant|>")


def test_what_is_said_of_the_order_is_what_the_template_said() -> None:
    odd = {"role": "wizard", "content": "x"}
    with pytest.raises(ChatTemplateError, match="must alternate"):
        TOKENIZER.render_chat([user("a"), user("b"), odd], template=MISTRAL_STRICT)


def test_a_message_that_a_chat_goes_on_with_may_be_empty() -> None:
    assert in_strict_order([user("a"), says("")], goes_on=True) == [user("a"), says("")]
    assert in_strict_order([user("a"), says("")]) == [user("a")]


MESSAGES = st.one_of(
    st.builds(user, st.text("ab", min_size=1, max_size=3)),
    st.builds(system, st.text("ab", min_size=1, max_size=3)),
    st.builds(says, st.text("ab", max_size=3)),
    st.builds(says, st.text("ab", max_size=3), st.sampled_from("12")),
    st.builds(result, st.text("ab", min_size=1, max_size=3), st.sampled_from("12")),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(MESSAGES, max_size=9), st.text("cd", min_size=1))
def test_every_chat_can_be_written_and_nothing_that_was_said_is_lost(given_: list[dict[str, Any]], last: str) -> None:
    text = written([*given_, user(last)])
    place = 0
    for message in [*given_[1:], user(last)]:
        place = text.index(message["content"], place) + len(message["content"])
    assert text.count(CALL) == sum(len(message.get("tool_calls", ())) for message in given_)
