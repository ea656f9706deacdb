"""Every JSON-schema keyword that is enforced, against the jsonschema package; every other one is refused by name."""

from __future__ import annotations

import json
import random
from datetime import datetime
from typing import Any

import jsonschema
import pytest
from grammar_walk import matcher_of, takes, write
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.grammar.build import GrammarError, build
from workers.grammar.schema import FORMATS
from workers.protocol.grammar import Grammar

CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
INT, STR = {"type": "integer"}, {"type": "string"}

NODE: dict[str, Any] = {
    "type": "object",
    "properties": {"v": INT, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
}
ENFORCED: list[tuple[Any, list[Any], list[Any]]] = [
    # schema, valid values that can be written, and values that are not valid
    (True, [1, "a", None, {"x": [1]}], []),
    ({}, [1, {"a": 2}], []),
    ({"type": "integer"}, [1, -3, 0], [1.5, "a", None]),
    ({"type": "number"}, [1, -3.25], ["a"]),
    ({"type": "boolean"}, [True, False], [0, "true"]),
    ({"type": "null"}, [None], [0]),
    ({"type": ["integer", "null"]}, [1, None], ["a", 1.5]),
    ({"type": ["string", "integer"], "minimum": 5, "maxLength": 1}, ["a", 7], ["ab", 3]),
    ({"enum": [1, "a", None, [1, 2]]}, [1, "a", None], [2, "b", [1]]),
    ({"type": "string", "enum": ["a", 'é"\n']}, ["a", 'é"\n'], ["é"]),
    ({"const": "a"}, ["a"], ["b", 1]),
    ({**INT, "minimum": 3}, [3, 4, 100], [2, -1]),
    ({**INT, "maximum": 3}, [3, -7], [4, 100]),
    ({**INT, "exclusiveMinimum": 3, "exclusiveMaximum": 12}, [4, 11], [3, 12]),
    ({"type": "number", "minimum": 3.5, "maximum": 7}, [3.5, 5, 7], [3.4, 7.5]),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, [0.5], [0, 1]),
    ({**INT, "multipleOf": 5}, [5, 10], [3]),
    ({**STR, "minLength": 2, "maxLength": 3}, ["ab", "éé", "abc"], ["a", "abcd"]),
    ({**STR, "minLength": 2}, ["ab", "é" * 300], ["a"]),
    ({**STR, "maxLength": 299}, ["", "é" * 299], ["a" * 300]),
    ({**STR, "pattern": "^[a-z]+(-[0-9]{2})?$"}, ["ab", "ab-12"], ["a-1", "A", ""]),
    ({**STR, "pattern": "b"}, ["b", "abc", "é b"], ["a", ""]),
    ({"type": ["string", "null"], "pattern": "^a?$"}, ["", "a", None], ["b", 1]),
    ({"type": "array", "items": INT}, [[], [1, 2]], [["a"]]),
    ({"type": "array", "items": False}, [[]], [[1]]),
    ({"type": "array", "prefixItems": [INT, STR], "items": False}, [[1, "a"]], [[1, 2], [1, "a", 3]]),
    ({"type": "array", "prefixItems": [INT], "items": STR}, [[1, "a"]], [[1, 2]]),
    ({"type": "array", "items": INT, "minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[], [1, 2, 3]]),
    ({"type": "object", "properties": {"a": INT}}, [{}, {"a": 1}], [{"a": "x"}]),
    (
        {"type": "object", "properties": {"a": INT, "b": INT}, "required": ["b"]},
        [{"b": 1}, {"a": 1, "b": 2}],
        [{}, {"a": 1}],
    ),
    ({"type": "object", "properties": {"a": INT}, "additionalProperties": False}, [{}, {"a": 1}], [{"b": 1}]),
    ({"type": "object", "properties": {"a": INT}, "additionalProperties": STR}, [{"a": 1, "b": "x"}], [{"b": 1}]),
    ({"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": INT}, [{"a": 1}], [{}]),
    ({"anyOf": [INT, STR]}, [1, "a"], [None]),
    ({"oneOf": [INT, STR]}, [1, "a"], [None]),
    (
        {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": "a"}, "v": INT}, "required": ["k", "v"]},
                {"type": "object", "properties": {"k": {"const": "b"}, "v": STR}, "required": ["k", "v"]},
            ]
        },
        [{"k": "a", "v": 1}, {"k": "b", "v": "x"}],
        [{"k": "a", "v": "x"}],
    ),
    ({"allOf": [{**INT, "minimum": 2}]}, [2], [1]),
    ({"$defs": {"n": INT}, "$ref": "#/$defs/n"}, [1], ["a"]),
    ({"definitions": {"n": INT}, "type": "array", "items": {"$ref": "#/definitions/n"}}, [[1]], [["a"]]),
    (
        {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#"}}}},
        [{}, {"c": [{}, {"c": []}]}],
        [{"c": [1]}],
    ),
    (
        {"$defs": {"node": {**NODE, "required": ["v", "next"]}}, "$ref": "#/$defs/node"},
        [{"v": 1, "next": None}, {"v": 1, "next": {"v": 2, "next": None}}],
        [{"v": 1}, {"v": 1, "next": {"v": 2}}],
    ),
    ({"type": "array", "items": {"$ref": "#"}}, [[], [[], [[]]]], [1, [1]]),
    ({"type": "integer", "title": "T", "description": "d", "default": 1, "x-order": 2, "$id": "u"}, [1], ["a"]),
]


@pytest.mark.parametrize(("schema", "valid", "wrong"), ENFORCED, ids=lambda value: json.dumps(value)[:60])
@pytest.mark.parametrize(("strict", "quick"), [(True, True), (False, True), (False, False)])
def test_what_is_enforced(schema: Any, valid: list[Any], wrong: list[Any], strict: bool, quick: bool) -> None:
    grammar = Grammar("json_schema", json.dumps(schema), strict)
    validator = jsonschema.Draft202012Validator(schema)
    for value in valid:
        assert validator.is_valid(value)
        assert takes(grammar, json.dumps(value, ensure_ascii=False), quick), value
    for value in wrong:
        assert not validator.is_valid(value)
        assert not takes(grammar, json.dumps(value, ensure_ascii=False), quick), value
    rng = random.Random(1)
    texts = [text for text in (write(grammar, rng, quick=quick) for _ in range(12)) if text is not None]
    for text in texts:
        validator.validate(json.loads(text))


SLOW = ("date-time", "ipv4")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long if n in SLOW else ()) for n in sorted(FORMATS)]
)
def test_formats_are_enforced(name: str) -> None:
    """Formats that the package can check are checked, and all of them are tried with text that is of none."""
    grammar = Grammar("json_schema", json.dumps({"type": "string", "format": name}))
    assert not takes(grammar, '"{ \\""')
    assert not takes(grammar, '"""')
    rng = random.Random(2)
    for _ in range(8):
        if (text := write(grammar, rng)) is not None:
            value = json.loads(text)
            CHECKER.check(value, name)
            if name == "date-time":
                datetime.fromisoformat(value)


REFUSED: list[tuple[Any, str]] = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": INT}, "contains"),
    ({"type": "array", "unevaluatedItems": False}, "unevaluatedItems"),
    ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "object", "dependentSchemas": {}}, "dependentSchemas"),
    ({"not": INT}, "not"),
    ({"type": "integer", "if": {}, "then": {}}, "if"),
    ({"type": "string", "contentEncoding": "base64"}, "contentEncoding"),
    ({"type": "string", "nullable": True}, "nullable"),
    ({"type": "string", "minimun": 3}, "minimun"),
    ({"minimum": 3}, "minimum"),
    ({"maxLength": 3}, "maxLength"),
    ({"properties": {}}, "properties"),
    ({"type": "string", "minimum": 3}, "minimum"),
    ({**STR, "pattern": "a", "maxLength": 3}, "maxLength beside pattern"),
    ({**STR, "pattern": 3}, "pattern must be a string"),
    ({**STR, "pattern": "(?=a)"}, "#/pattern: position 1: lookahead"),
    ({**STR, "format": "date", "minLength": 2}, "minLength beside format"),
    ({**STR, "format": "regex"}, "'regex'"),
    ({**STR, "format": "iri"}, "'iri'"),
    ({**STR, "format": "json-pointer"}, "'json-pointer'"),
    ({**STR, "format": "hostname"}, "'hostname'"),
    ({**INT, "multipleOf": 5, "minimum": 7}, "minimum beside multipleOf"),
    ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
    ({**INT, "multipleOf": 0.5}, "multipleOf"),
    ({"$defs": {"n": INT}, "$ref": "#/$defs/n", "minimum": 5}, "minimum beside $ref"),
    ({"$ref": "other.json"}, "references within the schema"),
    ({"$ref": "#/$defs/x"}, "leads nowhere"),
    ({"type": "array", "items": {"$ref": "#/items"}}, "references to $defs"),
    ({"$ref": "#"}, "#/$ref: # leads back to itself"),
    ({"anyOf": [{"$ref": "#"}, INT]}, "#/anyOf/0/$ref: # leads back to itself"),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, "$ref: #/$defs/b leads back"),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "#/properties/a/$ref: # leads back"),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#/items/$ref: # leads back"),
    ({"type": "array", "prefixItems": [INT, {"$ref": "#"}], "minItems": 2}, "#/prefixItems/1/$ref: # leads back"),
    ({"$defs": {"n": {"allOf": [{"$ref": "#/$defs/n"}]}}, **INT}, "#/$defs/n/allOf/0/$ref: #/$defs/n leads back"),
    ({"$defs": {"a": {"$id": "u", "type": "integer"}}, "type": "integer"}, "$id"),
    ({"anyOf": [INT], "type": "integer"}, "type beside anyOf"),
    ({"allOf": [INT, {"minimum": 4}]}, "minimum"),
    ({"allOf": [INT, INT]}, "allOf of more than one"),
    ({"oneOf": [INT, {"type": "number"}]}, "oneOf"),
    ({"type": "string", "enum": ["a", 1]}, "not of the type"),
    ({"type": "object", "required": ["b"]}, "'b'"),
    ({"type": "object", "properties": {"a": INT}, "patternProperties": {"^x": INT}}, "patternProperties"),
    ({"type": "object", "patternProperties": {"^x": INT, "y$": STR}}, "patternProperties"),
    ({"type": "object", "patternProperties": {"^x": INT}, "additionalProperties": STR}, "patternProperties"),
    ({"type": "object", "properties": {"a": {}}, "propertyNames": {"pattern": "^x"}}, "propertyNames"),
    ({"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames"),
    ({"type": "object", "properties": {"a": {"type": "array", "items": {"not": {}}}}}, "#/properties/a/items: not"),
    (False, "false allows no value"),
    ({"type": "object", "properties": {"a": False}}, "#/properties/a"),
    ({"type": "strange"}, "'strange'"),
    ({"type": []}, "empty list"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
    ({"type": "string", "minLength": 5, "maxLength": 3}, "minLength"),
    ({"type": "object", "properties": {'q"': STR, "a": INT}}, "needs escapes"),
    ({"type": "object", "properties": {"q\\": STR}, "additionalProperties": INT}, "needs escapes"),
    ({"enum": []}, "enum"),
    ([1], "object or true"),
]


@pytest.mark.parametrize(("schema", "text"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_what_is_not_enforced_is_refused_by_name(schema: Any, text: str) -> None:
    with pytest.raises(GrammarError) as caught:
        build(Grammar("json_schema", json.dumps(schema)))
    assert text in str(caught.value)
    assert ".cc" not in str(caught.value)


def test_schemas_are_not_nested_without_end() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(GrammarError, match="levels deep"):
        build(Grammar("json_schema", json.dumps(schema)))
    with pytest.raises(GrammarError, match="nested too deeply"):
        build(Grammar("json_schema", "[" * 60_000 + "]" * 60_000))


@pytest.mark.parametrize("schema", [{**STR, "format": "email"}, {**STR, "format": "uuid"}])
def test_within_a_tag_strings_have_no_form_of_xgrammar_s(schema: Any) -> None:
    """Such strings could hold control characters, which the text around them needs. Those with a form of ours
    cannot."""
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    with pytest.raises(GrammarError, match="within a structural tag"):
        build(Grammar("structural_tag", json.dumps(tag)))


@pytest.mark.parametrize("schema", [STR, {**STR, "maxLength": 3}, {**STR, "minLength": 1}])
def test_strings_hold_no_control_characters(schema: Any) -> None:
    grammar = Grammar("json_schema", json.dumps(schema))
    for char in "\t\n\x00\x1f":
        matcher = matcher_of(grammar)
        assert all(matcher.accept_token(token) for token in b'"')
        assert not matcher.accept_token(ord(char))


leaves = st.one_of(
    st.sampled_from([INT, STR, {"type": "boolean"}, {"type": "null"}, {"enum": ["a", 2, None]}, {"const": 7}]),
    st.builds(lambda a, b: {**INT, "minimum": min(a, b), "maximum": max(a, b)}, *[st.integers(-200, 200)] * 2),
    st.builds(lambda a, b: {"type": "number", "minimum": min(a, b), "maximum": max(a, b)}, *[st.integers(-99, 99)] * 2),
    st.builds(lambda a, b: {**STR, "minLength": min(a, b), "maxLength": max(a, b)}, *[st.integers(0, 5)] * 2),
    st.builds(lambda n: {**INT, "multipleOf": n}, st.integers(1, 12)),
)


def compound(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["a", "b", "a b", 'q"', "é"])
    properties = st.dictionaries(names, inner, max_size=3)
    return st.one_of(
        st.builds(
            lambda given, more, needed: {
                "type": "object",
                "properties": (named := given if more is False else {n: s for n, s in given.items() if n != 'q"'}),
                "required": sorted(named)[:needed],
                "additionalProperties": more,
            },
            properties,
            st.one_of(st.booleans(), inner),
            st.integers(0, 3),
        ),
        st.builds(
            lambda first, rest, a, b: {
                "type": "array",
                "prefixItems": first,
                "items": rest,
                "minItems": min(a, b),
                "maxItems": max(a, b, len(first)),
            },
            st.lists(inner, min_size=1, max_size=2),
            inner,
            st.integers(0, 3),
            st.integers(0, 3),
        ),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    )


@settings(max_examples=30, deadline=None)
@given(schema=st.recursive(leaves, compound, max_leaves=6), strict=st.booleans(), seed=st.integers(0, 10**6))
def test_whatever_is_written_is_valid(schema: Any, strict: bool, seed: int) -> None:
    grammar, rng = Grammar("json_schema", json.dumps(schema), strict), random.Random(seed)
    validator = jsonschema.Draft202012Validator(schema)
    for _ in range(4):
        if (text := write(grammar, rng)) is not None:
            validator.validate(json.loads(text))


NAMED_AS_KEYWORDS: dict[str, Any] = {
    "type": "object",
    "properties": {name: {**STR, "pattern": "^(ab*)?$"} for name in ("default", "enum", "examples", "const")},
    "required": ["default", "enum", "examples", "const"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("within", [False, True], ids=["alone", "within a tag"])
def test_properties_may_have_the_names_of_keywords(within: bool) -> None:
    """Properties with such names are enforced like others."""
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": NAMED_AS_KEYWORDS}}
    grammar = Grammar(
        *(("structural_tag", json.dumps(tag)) if within else ("json_schema", json.dumps(NAMED_AS_KEYWORDS)))
    )
    good = dict.fromkeys(NAMED_AS_KEYWORDS["required"], "abb")
    assert takes(grammar, json.dumps(good))
    for name in good:
        assert not takes(grammar, json.dumps({**good, name: "bb"})), name
