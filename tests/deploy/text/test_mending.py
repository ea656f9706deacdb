"""Arguments of calls that are no JSON object, and halves of surrogate pairs."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import tiny
from tool_templates import GLM, KIMI

from deploy.text.mending import object_of, with_whole_escapes, without_halves

OBJECTS: dict[str, dict[str, Any]] = {
    '{"a": 1}': {"a": 1},
    "": {},
    "  \n": {},
    # cut
    '{"a": "x", "b": "cu': {"a": "x", "b": "cu"},
    '{"a": "x\\': {"a": "x"},
    '{"a": "x\\u00e': {"a": "x"},
    '{"a": 1, "b': {"a": 1},
    '{"a": 1, "b":': {"a": 1},
    '{"a": {"b": [1, {"c": "d': {"a": {"b": [1, {"c": "d"}]}},
    "{": {},
    # commas that nothing follows
    '{"a": 1,}': {"a": 1},
    '{"a": [1, 2, ], "b": "x,}" , }': {"a": [1, 2], "b": "x,}"},
    # control characters within strings, and halves of pairs
    '{"a": "x\ny\tz"}': {"a": "x\ny\tz"},
    '{"a": "\\ud83d"}': {"a": "\ufffd"},
    '{"a": "\\ude00\\ud83d!"}': {"a": "\ufffd\ufffd!"},
    '{"a": "\\ud83d\\ude00"}': {"a": "\U0001f600"},
    '{"a": "\\\\ud83d"}': {"a": "\\ud83d"},
    '{"a": "\ud83d"}': {"a": "\ufffd"},
    # what stands around it
    '{"a": 1} and more': {"a": 1},
    '{"a": 1}}': {"a": 1},
    '[{"a": 1}]': {"a": 1},
    '"{\\"a\\": 1}"': {"a": 1},
    # nothing to be made of it
    "[1, 2]": {},
    "[]": {},
    "5": {},
    "null": {},
    "nonsense": {},
    "[" * 100_000: {},
    '{"a": ' * 100_000: {},
}


@pytest.mark.parametrize("text", OBJECTS, ids=lambda text: ascii(text[:40]))
def test_the_object_that_was_meant(text: str) -> None:
    assert object_of(text) == OBJECTS[text]


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text(max_size=5), values, max_size=4)


@given(objects, st.booleans(), st.data())
def test_objects_stay_and_their_beginnings_are_objects(value: dict[str, Any], ascii_only: bool, data: Any) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert object_of(text) == value
    cut = object_of(text[: data.draw(st.integers(0, len(text)))])
    assert cut.keys() <= value.keys()
    tiny().encode(json.dumps(cut, ensure_ascii=False))


@given(st.lists(st.sampled_from(["\\", "\\ud83d", "\\uDE00", "\\ude00", "\\u0041", '\\"', "x", "😀"]), max_size=9))
def test_escapes_are_whole(pieces: list[str]) -> None:
    """Text that Python's own parser takes, which leaves halves as they are, is taken by another parser afterwards."""
    raw = ('{"a": "' + "".join(pieces) + '"}').encode()
    try:
        value = json.loads(raw)
    except ValueError:
        return
    if r"\\u" in "".join(pieces):  # a backslash between the halves that is escaped itself
        return
    assert orjson.loads(with_whole_escapes(raw)) == {"a": without_halves(value["a"])}


@pytest.mark.parametrize("arguments", [*OBJECTS][:-2], ids=lambda text: ascii(text[:40]))
@pytest.mark.parametrize("template", [KIMI, GLM], ids=["text", "objects"])
def test_templates_get_the_text_or_the_object(template: str, arguments: str) -> None:
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": arguments}}
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    prompt = tiny().render_chat(chat, template=template)
    tiny().encode(prompt)
    if template == KIMI:
        text = arguments.replace("\ud83d", "\ufffd")
        assert f"<|tool_call_argument_begin|>{text}<|tool_call_end|>" in prompt
    else:
        assert prompt.count("<arg_key>") == len(OBJECTS[arguments])


def test_no_prompt_holds_half_a_pair() -> None:
    assert tiny().render_chat([{"role": "user", "content": "a\ud83db"}]) == tiny().render_chat(
        [{"role": "user", "content": "a\ufffdb"}]
    )
