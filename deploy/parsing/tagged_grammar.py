"""Arguments that stand one by one between tags, as structural tags: each value so that what `schema_types` makes of its
text is valid for the schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from deploy.parsing.call_grammar import (
    AllowedTool,
    CannotBind,
    Tag,
    either,
    free_until,
    json_of,
    optional,
    sequence,
    text,
    text_of,
)
from deploy.parsing.schema_types import target_of, types_of, types_of_argument
from workers.grammar.schema import SchemaError, form_as_text

Write = Callable[[Tag, Tag, bool], Tag]
"""An argument: its name, its value with what ends it, and whether that is a string as it is, else JSON."""

_WORDS: Final = frozenset(("integer", "number", "boolean", "null"))
"""Types whose JSON holds no string. To look for the end in strings makes a grammar much larger."""
_NEVER: Final = 6
"""Characters of the end that strings in JSON do not hold: with all of them compiling takes several times as long."""
_MOST_REFERENCES: Final = 32
_STRING: Final = frozenset(("string",))
_SAYS_NOTHING: Final = frozenset(("title", "description", "default", "examples", "$comment", "deprecated"))
_OF_ARGUMENTS: Final = frozenset(
    ("type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id")
)
_KEY = re.compile(r"[^\s<>\"｜](?:[^\n\r\t<>\"｜]{0,254}[^\s<>\"｜])?")
_ANY_KEY: Final = {"type": "regex", "pattern": "[A-Za-z_][A-Za-z0-9_]{0,63}"}


def arguments(tool: AllowedTool, end: str, write: Write, says: bool) -> list[Tag]:
    """The arguments of a call in the order of the schema. `end` ends a value. `says`: the format says whether a value
    is a string. CannotBind."""
    if tool.schema is None:
        ways = _values(True, types_of(True), {}, end, says)
        anything = either([write(_ANY_KEY, value, raw) for value, raw in ways])
        return [{"type": "star", "content": anything}]
    beyond = sorted(tool.schema.keys() - _OF_ARGUMENTS - _SAYS_NOTHING)
    if beyond:
        raise CannotBind(f"{beyond[0]} of all arguments together would not be enforced in the calls of this model")
    properties, required = tool.schema.get("properties", {}), tool.schema.get("required", ())
    around = {name: tool.schema[name] for name in ("$defs", "definitions") if name in tool.schema}
    written = []
    for name, schema in properties.items():
        if _KEY.fullmatch(name) is None:
            raise CannotBind(f"the argument's name {name[:64]!r} cannot be written in the calls of this model")
        types = types_of_argument(tool.schema, name)
        if tool.held_to is not None:
            ways = [(sequence(text_of(tool.held_to, end), text(end)), True)]
        else:
            ways = _values(_resolved(schema, tool.schema), types, around, end, says)
        argument = either([write(text(name), value, raw) for value, raw in ways])
        written.append(argument if name in required else optional(argument))
    return written


def _resolved(schema: Any, root: Any) -> Any:
    """`schema`, or what it leads to where it says nothing else."""
    for _ in range(_MOST_REFERENCES):
        said = schema.keys() - _SAYS_NOTHING if isinstance(schema, Mapping) else None
        if said == {"$ref"}:
            schema = target_of(schema, root)
        elif said == {"allOf"} and len(schema["allOf"]) == 1:
            [schema] = schema["allOf"]
        else:
            return schema
    raise CannotBind("references that lead in a circle are not supported in the calls of this model")


def _values(
    schema: Any, types: frozenset[str], around: Mapping[str, Any], end: str, says: bool
) -> list[tuple[Tag, bool]]:
    """The ways to write a value of one of `types`, and whether it stands there as a string that is no JSON."""
    if types == _STRING:
        return [(value, True) for value in _strings(schema, around, end)]
    loose = [(free_until(end), True)] if "string" in types and _is_loose(schema) else []
    if loose and (not says or types == _STRING):
        return loose
    if loose:
        types -= _STRING
        schema = {"type": sorted(types - {"integer"} if "number" in types else types)}
    said = schema if isinstance(schema, Mapping) else {}
    whole = {**said, **_reached(said, around)}
    if _refers_to_root(whole):
        raise CannotBind("a reference to the schema of all arguments (#) is not supported in the calls of this model")
    without = () if types <= _WORDS else (end[:_NEVER],)
    return [*loose, (sequence(json_of(whole, without), text(end)), False)]


def _strings(schema: Any, root: Mapping[str, Any], end: str) -> list[Tag]:
    """The ways to write a value that is a string whatever it looks like. `root` holds what references lead to."""
    schema = _resolved(schema, root)
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        good = [value for value in values if isinstance(value, str) and end not in value]
        if not good:
            raise CannotBind("none of the strings of an enum can be written in the calls of this model")
        # As one way: what stands around a value would be written once for each.
        return [sequence(either([text(value) for value in good]), text(end))]
    for name in ("anyOf", "oneOf"):
        if name in schema:
            return [way for option in schema[name] for way in _strings(option, root, end)]
    try:
        form = form_as_text(schema, end[0])
    except SchemaError as error:
        raise CannotBind(f"the form of a string cannot be kept in the calls of this model: {error}") from None
    return [free_until(end) if form is None else sequence({"type": "regex", "pattern": form}, text(end))]


def _is_loose(schema: Any) -> bool:
    """Whether it says types and nothing else, strings among them: then any text makes a value that is valid."""
    if not isinstance(schema, Mapping):
        return True
    said = schema.keys() - _SAYS_NOTHING
    if said <= {"type"}:
        return True
    return said == {"anyOf"} and all(_is_loose(option) for option in schema["anyOf"])


def _refers_to_root(value: Any) -> bool:
    return bool(re.search(r'"\$ref": "#"', json.dumps(value)))


def _reached(schema: Mapping[str, Any], around: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The definitions that references of a schema lead to, by themselves or by others: every value has its own."""
    found: dict[str, dict[str, Any]] = {}
    left: list[Any] = [schema]
    while left:
        for reference in re.findall(r'"\$ref": ("(?:[^"\\]|\\.)*")', json.dumps(left.pop())):
            steps: list[str] = [*json.loads(reference).split("/"), "", ""]
            kind, name = steps[1], steps[2]
            definitions = around.get(kind)
            if isinstance(definitions, Mapping) and name in definitions and name not in found.get(kind, {}):
                found.setdefault(kind, {})[name] = definitions[name]
                left.append(definitions[name])
    return found
