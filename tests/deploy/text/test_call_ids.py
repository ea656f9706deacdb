"""Chat templates that demand ids of their own form, or messages of one call: what clients send is written as far as
they take it, and equal chats are equal prompts."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import tiny
from tool_templates import MISTRAL_SHORT_IDS, ONE_CALL

from deploy.text.call_ids import with_short_ids

TOOL: Any = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
TOKENIZER = tiny()
BOTH = ONE_CALL.replace(
    "{%- set call =",
    "{%- if m.tool_calls[0].id | length != 9 -%}{{ raise_exception('nine') }}{%- endif -%}{%- set call =",
)
NINE = re.compile(r"[A-Za-z0-9]{9}")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def calls(*ids: str, content: str = "") -> dict[str, Any]:
    made = [
        {"id": i, "type": "function", "function": {"name": "f", "arguments": f'{{"n": {n}}}'}}
        for n, i in enumerate(ids)
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


def result(text: str, call: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": call}


def written(messages: list[dict[str, Any]], template: str = MISTRAL_SHORT_IDS) -> str:
    return TOKENIZER.render_chat(messages, tools=[TOOL], template=template)


def ids_in(messages: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    made = with_short_ids(messages)
    return (
        [call["id"] for message in made for call in message.get("tool_calls", ())],
        [message["tool_call_id"] for message in made if message["role"] == "tool"],
    )


FOREIGN = [
    "call_0a1b2c3d4e5f",
    "toolu_01AbCdEfGh",
    "functions.f:0",
    "0",
    "",
    "chatcmpl-tool-5f",
    "fc_1",
    "nine-char",
    "東京東京東京東京東",
]


@pytest.mark.parametrize("call_id", FOREIGN)
def test_ids_of_any_client_are_written(call_id: str) -> None:
    chat = [user("a"), calls(call_id), result("r", call_id), user("b")]
    text = written(chat)
    [called], [answered] = ids_in(chat)
    assert called == answered
    assert NINE.fullmatch(called)
    assert f'"id": "{called}"}}]' in text
    assert f'"call_id": "{called}"}}[/TOOL_RESULTS]' in text
    assert written(chat) == text
    assert written([*chat, {"role": "assistant", "content": "c"}, user("d")]).startswith(text.partition("[AVAIL")[0])


def test_own_ids_stay() -> None:
    assert ids_in([user("a"), calls("aB3dE6gH9", "000000000"), result("r", "000000000"), result("s", "aB3dE6gH9")]) == (
        ["aB3dE6gH9", "000000000"],
        ["000000000", "aB3dE6gH9"],
    )


def test_ids_that_are_used_again_and_results_of_no_call() -> None:
    chat = [
        user("a"),
        calls("0", "1"),
        result("r", "1"),
        result("s", "0"),
        calls("0", "1"),
        result("t", "0"),
        result("u", "1"),
    ]
    called, answered = ids_in(chat)
    assert len({*called}) == 4
    assert answered == [called[1], called[0], called[2], called[3]]
    lost = {"role": "tool", "content": "x"}
    assert NINE.fullmatch(ids_in([user("a"), lost])[1][0])
    assert "x" in written([user("a"), result("x", "who"), user("b")])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from(["", "0", "call_1", "abcdefghi", "functions.f:0"]), min_size=1, max_size=4), max_size=5
    )
)
def test_every_chat_keeps_its_pairs_and_its_beginning(turns: list[list[str]]) -> None:
    chat = [user("a")]
    for ids in turns:
        chat += [calls(*ids), *(result("r", call_id) for call_id in ids)]
    called, answered = ids_in(chat)
    assert called == answered
    assert len({*called}) == len(called)
    assert all(NINE.fullmatch(call_id) for call_id in called)
    for end in range(len(chat)):
        before, _ = ids_in(chat[:end])
        assert called[: len(before)] == before
    assert written(chat).count('"id": "') == len(called)


SEVERAL = [user("a"), calls("x", "y", "z", content="Well."), result("Y", "y"), result("X", "x"), user("b")]


@pytest.mark.parametrize("template", [ONE_CALL, BOTH], ids=["one call", "one call, short ids"])
def test_several_calls_are_said_one_after_the_other(template: str) -> None:
    text = written(SEVERAL, template)
    assert text.endswith(
        '<|user|>a<|assistant|>{"name": "f", "parameters": {"n": 0}}<|ipython|>X'
        '<|assistant|>{"name": "f", "parameters": {"n": 1}}<|ipython|>Y'
        '<|assistant|>{"name": "f", "parameters": {"n": 2}}<|user|>b'
    )
    one = written([user("a"), calls("x"), result("X", "x")], template)
    assert one.endswith('<|user|>a<|assistant|>{"name": "f", "parameters": {"n": 0}}<|ipython|>X')


def test_results_whose_ids_fit_no_call_come_in_turn() -> None:
    text = written([user("a"), calls("x", "y"), result("1", "p"), result("2", "q")], ONE_CALL)
    assert text.index('{"n": 0}') < text.index("<|ipython|>1") < text.index('{"n": 1}') < text.index("<|ipython|>2")
    text = written([user("a"), calls("x", "y"), result("1", "p"), result("2", "y")], ONE_CALL)
    assert text.index('{"n": 1}') < text.index("<|ipython|>2") < text.index("<|ipython|>1")
