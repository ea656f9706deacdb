"""Whatever the grammar of a format allows, its parser reads: calls of allowed tools, with arguments that are valid."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
import xgrammar as xgr
from hypothesis import given, settings
from hypothesis import strategies as st
from written_calls import MARKERS, WRITERS, Found, events_of, found

from deploy.parsing.call_grammar import AllowedTool, CannotBind
from deploy.parsing.registry import CALL_GRAMMARS, TOOL_PARSERS
from tests.workers.grammar.grammar_walk import EOS, allowed, matcher_of, takes
from workers.protocol.grammar import Grammar

FORMATS = sorted(WRITERS)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where."},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "5", "null"]},
        "mixed": {"enum": ["1", 2, None]},
        "exact": {"type": ["boolean", "null"]},
        "places": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "few": {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 10}]},
        "one": {"anyOf": [{"const": "a"}, {"type": "string"}]},
        "spot": {"$ref": "#/$defs/spot"},
        "ratio": {"type": "number"},
        "free": {},
    },
    "required": ["city", "days", "unit", "mixed"],
    "additionalProperties": False,
    "$defs": {
        "spot": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "label": {"type": "string"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
SCHEMAS: dict[str, Mapping[str, Any] | None] = {
    "get_weather": SCHEMA,
    "get": {"type": "object", "properties": {"city": {"type": "string"}}, "additionalProperties": False},
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
    "forms": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[^a-z]{1,3}$"},
            "size": {"type": "string", "minLength": 1, "maxLength": 4},
            "day": {"type": "string", "format": "date"},
            "list": {"type": "array", "items": {"type": "string", "pattern": "[^a-z]b?$"}, "maxItems": 2},
            "either": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]},
        },
        "required": ["name", "size", "day", "list", "either"],
        "additionalProperties": False,
    },
    "any.thing": None,
}
ENDS = {"glm": "</arg_value>", "deepseek_v32": "</｜DSML｜parameter>"}


def grammar_of(name: str, must: bool = True, parallel: bool = True, only: str | None = None) -> Grammar:
    tools = [AllowedTool(tool, schema) for tool, schema in SCHEMAS.items() if only in (None, tool)]
    tag = CALL_GRAMMARS[name](tools, must, parallel)
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": tag}))


def walk(matcher: xgr.GrammarMatcher, draw: random.Random, pieces: list[str], most: int = 1500) -> str | None:
    """A text at random, byte by byte, with pieces thrown in where they fit; None where it does not end."""
    text = bytearray()
    while len(text) < most:
        ids = allowed(matcher)
        ids = [i for i in ids if i == EOS or i < 128] or ids  # markers have other characters, too
        assert ids, text
        if EOS in ids and draw.random() < 0.5:
            return text.decode()
        piece = draw.choice(pieces)
        if draw.random() < 0.3 and matcher.accept_string(piece):
            text += piece.encode()
            continue
        good = [i for i in ids if i != EOS and (i > 32 or draw.random() < 0.1)] or [i for i in ids if i != EOS]
        if not good:
            return text.decode()
        chosen = draw.choice(good)
        assert matcher.accept_token(chosen)
        text.append(chosen)
    return None


def check(name: str, text: str, draw: random.Random, only: str | None = None) -> Found:
    """The calls in `text` are complete, of tools that are allowed, and valid."""
    schemas = {tool: schema or {} for tool, schema in SCHEMAS.items()}

    def events(pieces: list[str]) -> Any:
        ids = iter(range(10**6))
        return events_of(Both(TOOL_PARSERS[name](schemas, lambda: f"call_{next(ids)}")), pieces)

    whole = events([text])
    cut = draw.randrange(len(text) + 1)
    assert events([text[:cut], text[cut:]]) == whole
    answer = found(whole)
    assert not answer.broken, text
    for tool, arguments in answer.calls:
        assert only in (None, tool)
        jsonschema.Draft202012Validator(SCHEMAS[tool] or {"type": "object"}).validate(arguments)
    return answer


class Both:
    """A parser of calls alone, as `events_of` wants it."""

    def __init__(self, calls: Any) -> None:
        self.push, self.finish = calls.push, calls.finish


PIECES = ['"', '"}', "}", "null", "5", "true", '"a"', "[]", "\n", "</", "{}", "1e5", " "]
ARGUMENT = {"glm": "<arg_key>{}</arg_key><arg_value>", "deepseek_v32": '<｜DSML｜parameter name="{}" string="'}


def pieces_of(name: str) -> list[str]:
    """Return the pieces of which a text in this format is made."""
    every = (*SCHEMA["properties"], *(SCHEMAS["forms"] or {})["properties"])
    begun = [ARGUMENT.get(name, ', "{}": ').format(argument) for argument in every]
    return PIECES * 2 + begun * 3 + [ENDS[name]] * 15 if name in ENDS else PIECES * 2 + begun


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(FORMATS), st.sampled_from([None, *SCHEMAS]), st.booleans(), st.integers(0, 10**9))
def test_what_a_grammar_allows_is_calls(name: str, only: str | None, parallel: bool, seed: int) -> None:
    draw = random.Random(seed)
    matcher = matcher_of(grammar_of(name, True, parallel, only))
    text = walk(matcher, draw, pieces_of(name))
    if text is not None:
        answer = check(name, text, draw, only)
        assert answer.content == ""
        assert len(answer.calls) >= 1 if parallel else len(answer.calls) == 1


def within_text(name: str, seed: int) -> None:
    draw = random.Random(seed)
    grammar = grammar_of(name, must=False)
    begin = MARKERS[name][0]
    matcher = matcher_of(grammar)
    before = draw.choice(["", "I look. ", "a < b "])
    assert matcher.accept_string(before + begin)
    text = walk(matcher, draw, pieces_of(name))
    if text is not None:
        assert check(name, before + begin + text, draw).calls
    assert takes(grammar, "Just text, with {} and <b>.")


@settings(max_examples=6, deadline=None)
@given(st.sampled_from(FORMATS), st.integers(0, 10**9))
def test_calls_within_text(name: str, seed: int) -> None:
    within_text(name, seed)


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(st.sampled_from(FORMATS), st.integers(0, 10**9))
def test_more_calls_within_text(name: str, seed: int) -> None:
    within_text(name, seed)


WRITTEN: Any = [
    ("get_weather", {"city": "東京 & co", "days": 3, "unit": "5", "mixed": None, "note": "null and void", "free": "x"}),
    ("now", {}),
]


@pytest.mark.parametrize("name", FORMATS)
def test_what_models_write_is_allowed(name: str) -> None:
    text = WRITERS[name](WRITTEN)
    if name == "glm":
        assert takes(grammar_of(name), WRITERS[name](WRITTEN[1:]))
    assert takes(grammar_of(name), text)
    assert takes(grammar_of(name, must=False), f"Let me see. {text}")
    assert not takes(grammar_of(name, parallel=False), text)
    assert not takes(grammar_of(name, only="now"), text)
    assert not takes(grammar_of(name), f"Let me see. {text}")
    assert not takes(grammar_of(name), "No.")
    assert not takes(grammar_of(name), text.replace("get_weather", "get_whether"))
    assert not takes(grammar_of(name), WRITERS[name]([("get_weather", {**WRITTEN[0][1], "days": 33})]))
    assert not takes(grammar_of(name), WRITERS[name]([("get_weather", {"city": "x"})]))


_WITHOUT_SECTION = [
    ("deepseek_v3", "<｜tool▁calls▁begin｜>", ""),
    ("deepseek_v31", "<｜tool▁calls▁begin｜>", ""),
    ("deepseek_v32", "<｜DSML｜function_calls>\n", ""),
    ("deepseek_v32", "<｜DSML｜", "<｜｜DSML｜｜"),
    ("deepseek_v32", "<｜DSML｜", "<|DSML|"),
    ("kimi_k2", "<|tool_calls_section_begin|>", ""),
    ("kimi_k2", "tool_calls_section", "tool_call_section"),
]


@pytest.mark.parametrize(("name", "marker", "instead"), _WITHOUT_SECTION)
def test_calls_that_the_parser_reads_are_bound_or_ruled_out(name: str, marker: str, instead: str) -> None:
    """Calls that are not canonical are not left free by a grammar either."""
    text = WRITERS[name]([("get_weather", {"city": "x"})]).replace(marker, instead)
    assert check_reads(name, text) == 1
    assert not takes(grammar_of(name, must=False), f"Let me see. {text}")


def check_reads(name: str, text: str) -> int:
    """Return the number of calls that the parser finds."""
    return len(found(events_of(Both(TOOL_PARSERS[name]({"get_weather": SCHEMA}, lambda: "id")), [text])).calls)


REFERRED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"$ref": "#/$defs/name"},
        "size": {"allOf": [{"$ref": "#/$defs/size"}]},
        "either": {"anyOf": [{"$ref": "#/$defs/name"}, {"const": "other"}]},
        "maybe": {"anyOf": [{"$ref": "#/$defs/name"}, {"type": "null"}]},
    },
    "required": ["name", "size", "either", "maybe"],
    "additionalProperties": False,
    "$defs": {"name": {"type": "string", "pattern": "^[A-Z][a-z]{1,3}$"}, "size": {"type": "integer", "minimum": 1}},
}


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_whose_schemas_are_referred_to(name: str) -> None:
    """The grammar and the parser agree on what is a string without quotes."""
    tag = CALL_GRAMMARS[name]([AllowedTool("f", REFERRED)], True, True)
    grammar = Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": tag}))
    pieces = ["Ab", "5", '"Ab"', "null", "other", '"', *(f'"{key}": ' for key in REFERRED["properties"])]
    ends = [ENDS[name]] * 6 if name in ENDS else []
    read = 0
    for seed in range(40):
        text = walk(matcher_of(grammar), random.Random(seed), pieces + ends)
        if text is None:
            continue
        answer = found(events_of(Both(TOOL_PARSERS[name]({"f": REFERRED}, lambda: "id")), [text]))
        assert not answer.broken, text
        for _, arguments in answer.calls:
            jsonschema.Draft202012Validator(REFERRED).validate(arguments)
        read += len(answer.calls)
    assert read


@pytest.mark.parametrize("name", ["glm", "deepseek_v32"])
@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "object", "properties": {"a<b": {}}}, "name 'a<b'"),
        ({"type": "object", "properties": {}, "minProperties": 1}, "minProperties"),
        ({"type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#"}}}}, "reference"),
        (
            {"type": "object", "properties": {"a": {"const": "</arg_value></｜DSML｜parameter>"}}},
            "none of the strings",
        ),
    ],
)
def test_what_tags_cannot_write_is_told(name: str, schema: dict[str, Any], says: str) -> None:
    with pytest.raises(CannotBind, match=says):
        CALL_GRAMMARS[name]([AllowedTool("f", schema)], True, True)


def test_names_that_are_none_are_told() -> None:
    with pytest.raises(CannotBind, match="two words"):
        AllowedTool("two words", None)
    assert set(CALL_GRAMMARS) == set(TOOL_PARSERS)
