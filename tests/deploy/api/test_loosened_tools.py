"""Tools that are not strict, with schemas as agents have them: what cannot be enforced is left to the model and named,
and many at once become a grammar."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import jsonschema
import pytest

from deploy.api.http.errors import ApiError
from deploy.api.job.tool_binding import MOST_WORK_OF_ALL, bind
from deploy.parsing.registry import CALL_GRAMMARS
from tests.workers.grammar.grammar_walk import matcher_of, takes, write
from workers.grammar.build import build
from workers.grammar.loosen import loosened, total_work
from workers.grammar.schema import check_schema
from workers.protocol.grammar import Grammar

KEYWORDS: list[tuple[dict[str, Any], list[str]]] = [
    ({"type": "string", "format": "uri"}, ["f.a format"]),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, ["f.a uniqueItems"]),
    ({"type": "string", "nullable": True}, ["f.a nullable"]),
    ({"allOf": [{"type": "string"}, {"maxLength": 3}]}, ["f.a.allOf.1 maxLength", "f.a allOf"]),
    ({"type": "string", "pattern": "^(?=.*x)y"}, ["f.a pattern"]),
    ({"$ref": "#/$defs/loop"}, ["f.$defs.loop $ref"]),
    ({"$ref": "https://example.org/schema"}, ["f.a $ref"]),
    ({"type": "object", "patternProperties": {"^x": {"type": "string"}}}, ["f.a patternProperties"]),
    ({"type": "array", "items": {"not": {"type": "null"}}}, ["f.a.items not"]),
    ({"oneOf": [{"type": "object"}, {"type": "object", "properties": {"b": {}}}]}, ["f.a oneOf"]),
    ({"type": "object", "properties": {"b": {}}, "required": ["c"]}, ["f.a required"]),
    ({"type": "string", "minLength": 3, "maxLength": 65_536}, ["f.a minLength", "f.a maxLength"]),
    ({"enum": ["x", "y"], "minLength": 1}, ["f.a minLength"]),
    ({"type": "string", "minLength": 5, "maxLength": 2}, ["f.a minLength"]),
    ({"type": "array", "items": {}, "minItems": 3, "maxItems": 1}, ["f.a minItems"]),
    ({"type": "array", "prefixItems": [{"type": "null"}], "items": False, "minItems": 2}, ["f.a minItems"]),
    ({"type": "integer", "minimum": 5, "maximum": 2}, ["f.a minimum"]),
    ({"type": "number", "exclusiveMinimum": 5, "maximum": 5}, ["f.a exclusiveMinimum"]),
    ({"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 6}, ["f.a exclusiveMinimum"]),
    ({"type": "object", "minProperties": 2}, ["f.a minProperties"]),
    ({"type": "object", "properties": {"b": {}}, "minProperties": 3, "maxProperties": 2}, ["f.a minProperties"]),
    (
        {"type": "object", "properties": {"b": {}, "c": {}}, "required": ["b", "c"], "maxProperties": 1},
        ["f.a maxProperties"],
    ),
    ({"type": ["integer", "number"]}, []),
    ({"type": "string", "enum": ["x", None]}, []),
    ({"properties": {"b": {"type": "integer"}}}, []),
    ({"type": "string", "description": "A word.", "default": "x", "examples": ["y"], "title": "T"}, []),
]


def function(schema: Any, strict: bool | None = None, name: str = "f") -> dict[str, Any]:
    return {"name": name, "parameters": schema, "strict": strict}


def parameters(schema: Any) -> dict[str, Any]:
    loop = {"loop": {"$ref": "#/$defs/loop"}} if "loop" in json.dumps(schema) else {}
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], **({"$defs": loop} if loop else {})}


def grammar_of(name: str, bound: Any) -> Grammar:
    tag = CALL_GRAMMARS[name](bound.tools, True, False)
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": tag}, separators=(",", ":")))


@pytest.mark.parametrize(("schema", "named"), KEYWORDS)
@pytest.mark.parametrize("name", ["kimi_k2", "glm"])
def test_what_is_not_enforced_is_named(name: str, schema: dict[str, Any], named: list[str]) -> None:
    bound = bind([function(parameters(schema))], CALL_GRAMMARS[name], all_bound=True)
    assert [*bound.not_enforced] == named
    build(grammar_of(name, bound))
    if named and "f.a maxLength" not in named:  # long texts are none of a strict schema's mistakes
        with pytest.raises(ApiError, match="the parameters of 'f'"):
            bind([function(parameters(schema), strict=True)], CALL_GRAMMARS[name], all_bound=True)


@pytest.mark.parametrize("name", ["kimi_k2", "glm", "deepseek_v32"])
def test_one_of_very_many_words(name: str) -> None:
    schema = parameters({"enum": [f"value {n}" for n in range(3000)]})
    bound = bind([function(schema)], CALL_GRAMMARS[name], all_bound=True)
    assert not [*bound.not_enforced]
    build(grammar_of(name, bound))


@pytest.mark.parametrize(("schema", "named"), KEYWORDS)
def test_what_is_left_is_enforced_and_allows_no_more_than_was_named(schema: dict[str, Any], named: list[str]) -> None:
    """Texts that the rest of a schema allows are valid for the schema but for the keywords that are named."""
    found, _ = loosened(schema, 48, within_text=True)
    if found is True or "$ref" in schema:
        return
    check_schema(found, 48, within_text=True)
    without = {keyword for said in named for keyword in (said.rpartition(" ")[2],)}
    rest = _without(schema, without)
    written = 0
    for seed in range(25):
        text = write(Grammar("json_schema", json.dumps(found)), random.Random(seed))
        if text is not None:
            jsonschema.Draft202012Validator(rest).validate(json.loads(text))
            written += 1
    assert written


def _without(schema: Any, keywords: set[str]) -> Any:
    if isinstance(schema, list):
        return [_without(item, keywords) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {name: _without(value, keywords) for name, value in schema.items() if name not in keywords}


def test_what_a_format_of_calls_cannot_write_is_named() -> None:
    """Arguments between tags are bound one by one."""
    schema = {
        "type": "object",
        "properties": {"tree": {"type": "array", "items": {"$ref": "#"}}, "size": {"type": "integer"}},
        "minProperties": 1,
    }
    assert bind([function(schema)], CALL_GRAMMARS["kimi_k2"], all_bound=True).not_enforced == ()
    bound = bind([function(schema)], CALL_GRAMMARS["glm"], all_bound=True)
    assert bound.not_enforced == ("f minProperties", "f.tree schema")
    grammar = grammar_of("glm", bound)
    call = "<tool_call>f<arg_key>size</arg_key><arg_value>{}</arg_value></tool_call>"
    assert takes(grammar, call.format("5"))
    assert not takes(grammar, call.format('"x"'))


@pytest.mark.parametrize("schema", [{"type": "array"}, {"anyOf": [{"type": "object"}, {"type": "null"}]}])
def test_what_is_no_object_is_any(schema: dict[str, Any]) -> None:
    bound = bind([function(schema)], CALL_GRAMMARS["kimi_k2"], all_bound=True)
    assert bound.not_enforced == ("f parameters",)
    assert takes(grammar_of("kimi_k2", bound), KIMI_CALL.format('{"x": []}'))


KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)

JUNK: list[Any] = [
    1,
    "x",
    None,
    [],
    {},
    True,
    False,
    {"type": []},
    {"type": "x"},
    {"$ref": 1},
    {"enum": 1},
    {"items": 5},
]


@pytest.mark.parametrize("seed", range(60))
def test_no_schema_is_refused(seed: int) -> None:
    """A schema that a client sends may be any: what is left of it passes the check."""
    draw = random.Random(seed)
    names = ["type", "properties", "items", "required", "anyOf", "oneOf", "allOf", "$defs", "$ref", "enum", "const",
             "minLength", "maxLength", "pattern", "format", "minimum", "multipleOf", "additionalProperties", "not",
             "prefixItems", "minProperties", "minItems", "if"]  # fmt: skip

    def made(depth: int) -> Any:
        if depth == 0 or draw.random() < 0.2:
            return draw.choice(JUNK)
        kind = draw.random()
        if kind < 0.2:
            return [made(depth - 1) for _ in range(draw.randrange(3))]
        return {
            name: draw.choice(["object", "string", ["string", "null"]]) if name == "type" else made(depth - 1)
            for name in draw.sample(names, draw.randrange(1, 5))
        }

    schema = {"type": "object", "properties": {"a": made(4), "b": made(3)}}
    for name in ("kimi_k2", "deepseek_v32"):
        bound = bind([function(schema)], CALL_GRAMMARS[name], all_bound=True)
        [tool] = bound.tools
        if tool.schema is not None:
            check_schema(dict(tool.schema), 48, within_text=True)
        assert bound.not_enforced or tool.schema is not None
        build(grammar_of(name, bound))


def agents_tools(count: int) -> list[dict[str, Any]]:
    """Functions as servers of tools describe them."""
    every: dict[str, Any] = {
        "query": {"type": "string", "description": "What to look for, in the syntax of the search. " * 6},
        "url": {"type": "string", "format": "uri"},
        "since": {"type": "string", "format": "date-time"},
        "labels": {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "maxItems": 20},
        "page": {"type": "integer", "minimum": 1, "default": 1},
        "per_page": {"type": "integer", "minimum": 1, "maximum": 100},
        "sort": {"type": "string", "enum": ["created", "updated", "comments"]},
        "order": {"anyOf": [{"type": "string", "enum": ["asc", "desc"]}, {"type": "null"}]},
        "filters": {
            "type": "object",
            "properties": {"field": {"type": "string"}, "nested": {"type": "array", "items": {"$ref": "#/$defs/when"}}},
            "required": ["field"],
        },
        "options": {"type": "object", "additionalProperties": {"type": "string"}},
        "email": {"type": "string", "format": "email"},
        "body": {"type": "string", "maxLength": 65_536},
        "draft": {"type": "boolean"},
    }
    when = {"type": "object", "properties": {"after": {"type": "string"}, "days": {"type": "integer"}}}
    tools = []
    for number in range(count):
        chosen = random.Random(number).sample(sorted(every), 9)
        properties = {
            "owner": {"type": "string", "description": "An account. " * 9, "minLength": 1, "maxLength": 100},
            "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]+$"},
            **{name: every[name] for name in chosen},
        }
        schema = {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "properties": properties,
            "required": ["owner", "name"],
            "additionalProperties": False,
            "$defs": {"when": when},
        }
        tools.append(function(schema, name=f"search_things_{number}"))
    return tools


@pytest.mark.parametrize("name", sorted(CALL_GRAMMARS))
def test_sixty_tools_become_a_grammar(name: str) -> None:
    """The grammar compiles within the bound: characters that are counted cost most of that, so few are."""
    begin = time.process_time()
    bound = bind(agents_tools(60), CALL_GRAMMARS[name], all_bound=True)
    assert all(tool.schema is not None for tool in bound.tools)
    assert sum(total_work(tool.schema) for tool in bound.tools) <= 2 * MOST_WORK_OF_ALL
    matcher_of(grammar_of(name, bound))
    assert time.process_time() - begin < 10
    assert "search_things_7.name pattern" not in bound.not_enforced


def test_a_few_tools_keep_their_lengths() -> None:
    bound = bind(agents_tools(2), CALL_GRAMMARS["kimi_k2"], all_bound=True)
    assert not any("owner" in said for said in bound.not_enforced)
