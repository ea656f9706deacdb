"""Tools as a grammar of calls has them: with schemas that it enforces. Those of strict tools must be such; what others
say beyond that is left to the model, and named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from deploy.api.http.errors import ApiError, invalid
from deploy.parsing.call_grammar import AllowedTool, CannotBind, Tag
from deploy.parsing.schema_types import types_of
from workers.grammar.text_grammar import TextGrammar

NOTHING: Final[dict[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The arguments of a function that says nothing of them."""
_BY_NAME: Final = ("properties", "$defs", "definitions")
_OF_ARGUMENTS: Final = frozenset(("type", "properties", "required", "additionalProperties", "$defs", "definitions"))
MOST_WORK: Final = (1 << 10, 1 << 8, 1 << 5)
"""`total_work` of a string, of which the first is taken with which all of them are cheap enough: of tools that are not
strict, longer lengths are left to the model. Counting to 256 takes a tenth of a second to compile, and tools that bound
a text by 65,536 characters are many."""
MOST_WORK_OF_ALL: Final = 1 << 11
WriteCalls = Callable[[Sequence[AllowedTool], bool, bool], Tag]
"""Type of the functions in `CALL_GRAMMARS`."""


@dataclass(frozen=True)
class Bound:
    """Tools of a request."""

    tools: list[AllowedTool]
    strict: frozenset[str]
    """Names of those whose schemas must be enforced."""
    not_enforced: tuple[str, ...]
    """Requirements that are left to the model: tool and path in its schema, and a keyword."""

    def unbound(self) -> Bound | None:
        """Return this binding with any arguments for tools that are not strict; None if no tool has a schema without
        being strict."""
        freed = [tool.name for tool in self.tools if tool.schema is not None and tool.name not in self.strict]
        if not freed:
            return None
        tools = [AllowedTool(tool.name, None) if tool.name in freed else tool for tool in self.tools]
        kept = [each for each in self.not_enforced if not any(_is_of(each, name) for name in freed)]
        return Bound(tools, self.strict, (*kept, *(f"{name} parameters" for name in freed)))


def bind(
    functions: list[dict[str, Any]],
    write: WriteCalls,
    *,
    all_bound: bool,
    inputs: Mapping[str, TextGrammar] | None = None,
) -> Bound:
    """Functions of a request, of which the strict ones are bound to their schemas, and those that do not say whether
    they are as well where `all_bound`. 400 for a strict one that cannot be. `inputs`: what the one argument of
    functions is held to where calls can be, by name."""
    from workers.grammar.loosen import total_work

    inputs = inputs or {}
    schemas = {function["name"]: _schema_of(function) for function in functions}
    held = [function["name"] for function in functions if function["strict"] is None] if all_bound else []
    parts: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    for most_work in MOST_WORK:
        parts = {name: _enforced(schemas[name], most_work) for name in held}
        if sum(total_work(schema) for schema, _ in parts.values()) <= MOST_WORK_OF_ALL:
            break
    tools, not_enforced = [], []
    for function in functions:
        name, left_out = function["name"], list[str]()
        try:
            if name in inputs:
                tool, left_out = _held(name, schemas[name], inputs[name], write)
            elif function["strict"]:
                _check(name, schemas[name])
                tool = AllowedTool(name, _without_annotations(schemas[name]))
            elif name in parts:
                tool, left_out = _writable(name, *parts[name], write)
            else:
                tool = AllowedTool(name, None)
        except CannotBind as error:
            raise wrong_tools(str(error)) from None
        tools.append(tool)
        not_enforced += left_out
    strict = frozenset(function["name"] for function in functions if function["strict"]) - inputs.keys()
    return Bound(tools, strict, tuple(dict.fromkeys(not_enforced)))


def _held(name: str, schema: dict[str, Any], held_to: TextGrammar, write: WriteCalls) -> tuple[AllowedTool, list[str]]:
    """A tool whose one argument is a text of a grammar, or any text where that cannot be."""
    tool = AllowedTool(name, schema, held_to=held_to)
    try:
        write([tool], True, False)
    except CannotBind:
        return AllowedTool(name, schema), [said(name, next(iter(schema["properties"])), "format")]
    return tool, []


def _schema_of(function: dict[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters")
    return NOTHING if schema is None else schema or {"type": "object"}


def opened(schema: Any) -> Any:
    """A schema whose objects have other properties than those that it names, unless it says otherwise. Structural tags
    take them for closed."""
    if isinstance(schema, list):
        return [opened(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for name, value in schema.items():
        if name in ("enum", "const", "default", "examples"):
            made[name] = value
        elif name in _BY_NAME and isinstance(value, dict):
            made[name] = {key: opened(item) for key, item in value.items()}
        else:
            made[name] = opened(value)
    named = schema.get("type")
    if "properties" in schema and "additionalProperties" not in schema and "object" in (named or ()):
        made["additionalProperties"] = True
    return made


def said(name: str, path: str, keyword: str) -> str:
    """Describe in words a requirement that is left to the model."""
    return f"{name}.{path} {keyword}" if path else f"{name} {keyword}"


def wrong_tools(what: str) -> ApiError:
    """400 for the field `tools`."""
    return invalid(f"tools: {what}", "tools", "invalid_grammar")


def _check(name: str, schema: dict[str, Any]) -> None:
    from workers.grammar.build import MOST_NESTED
    from workers.grammar.schema import SchemaError, check_schema

    try:
        check_schema(schema, MOST_NESTED, within_text=True)
    except SchemaError as error:
        raise wrong_tools(f"the parameters of {name[:64]!r}: {error}") from None
    if types_of(schema) != {"object"}:
        raise wrong_tools(f'the parameters of {name[:64]!r}: "type": "object" is expected')


def _enforced(schema: dict[str, Any], most_work: int) -> tuple[Any, list[tuple[str, str]]]:
    """The part of a schema that grammars can enforce, true where that is nothing, and what is left out."""
    from workers.grammar.build import MOST_NESTED
    from workers.grammar.loosen import loosened

    try:
        return loosened(schema, MOST_NESTED, within_text=True, arguments=True, most_work=most_work)
    except RecursionError:
        return True, []


def _writable(
    name: str, schema: Any, left_out: list[tuple[str, str]], write: WriteCalls
) -> tuple[AllowedTool, list[str]]:
    """A tool with the part of its schema that calls of this model can be held to, and all that is left to the model.
    CannotBind for its name alone."""
    free = AllowedTool(name, None)
    if schema is True or types_of(schema) != {"object"}:
        return free, [said(name, "", "parameters")]
    kept, more = schema, list[tuple[str, str]]()
    if not _can_write(name, schema, write):
        kept, more = _writable_part(name, schema, write)
    if kept is None:
        return free, [said(name, "", "parameters")]
    return AllowedTool(name, kept), [said(name, path, keyword) for path, keyword in [*left_out, *more]]


def _writable_part(
    name: str, schema: dict[str, Any], write: WriteCalls
) -> tuple[dict[str, Any] | None, list[tuple[str, str]]]:
    """Argument by argument; None where that is nothing."""
    left_out = [("", keyword) for keyword in sorted(schema.keys() - _OF_ARGUMENTS)]
    kept = {keyword: value for keyword, value in schema.items() if keyword in _OF_ARGUMENTS}
    properties: Mapping[str, Any] = kept.get("properties", {})
    around = {keyword: value for keyword, value in kept.items() if keyword not in ("properties", "required")}
    written: dict[str, Any] = {}
    for argument, value in properties.items():
        if _can_write(name, {**around, "properties": {argument: value}}, write):
            written[argument] = value
        elif _can_write(name, {**around, "properties": {argument: True}}, write):
            written[argument] = True
            left_out.append((argument, "schema"))
        else:
            return None, []  # its very name cannot be written where others are
    kept["properties"] = written
    return (kept, left_out) if _can_write(name, kept, write) else (None, [])


def _can_write(name: str, schema: dict[str, Any], write: WriteCalls) -> bool:
    try:
        write([AllowedTool(name, schema)], True, False)
    except CannotBind:
        return False
    return True


def _without_annotations(schema: Any) -> Any:
    """A schema without what says nothing to a grammar: descriptions make most of the schemas of many tools."""
    from workers.grammar.schema import ANNOTATIONS

    if isinstance(schema, list):
        return [_without_annotations(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for name, value in schema.items():
        if name in ("enum", "const"):
            made[name] = value
        elif name in _BY_NAME and isinstance(value, Mapping):
            made[name] = {key: _without_annotations(item) for key, item in value.items()}
        elif name not in ANNOTATIONS and not name.startswith("x-"):
            made[name] = _without_annotations(value)
    return made


def _is_of(left_out: str, name: str) -> bool:
    return left_out.startswith((f"{name} ", f"{name}."))
