"""Tools that must be called, or called with valid arguments: which those are, and what binds an answer to that."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from deploy.api.http.errors import ApiError, invalid
from deploy.api.job.bodies import ChatBody
from deploy.api.job.bounds import also_begun_by, problem_of
from deploy.api.job.reading import Reading
from deploy.api.job.tools import NamedTool
from deploy.parsing.call_grammar import AllowedTool, CannotBind
from deploy.parsing.registry import CALL_GRAMMARS
from deploy.parsing.schema_types import types_of
from deploy.text.tokenizer import Tokenizer
from workers.protocol.grammar import Grammar

NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The arguments of a function that says nothing of them."""


@dataclass(frozen=True)
class Binding:
    """What an answer is bound to."""

    functions: list[dict[str, Any]]
    """Those that it may call."""
    must: bool
    """It calls at least one, and says nothing besides."""
    one: bool
    """And no more than one."""


def bound_tools(body: ChatBody) -> Binding | None:
    """What `tools` and `tool_choice` bind the answer to; None where the model is free. 400 for a wrong choice."""
    choice, functions = body.tool_choice, [tool["function"] for tool in body.tools]
    if choice in ("none", "auto"):
        strict = choice == "auto" and any(function["strict"] for function in functions)
        return Binding(functions, must=False, one=False) if strict else None
    if not functions:
        raise invalid("tool_choice: there must be tools to choose from", "tool_choice")
    if isinstance(choice, NamedTool):
        name = choice.function.name
        functions = [function for function in functions if function["name"] == name]
        if not functions:
            raise invalid(f"tool_choice: {name[:64]!r} is none of the tools", "tool_choice")
    return Binding(functions, must=True, one=isinstance(choice, NamedTool) or not body.parallel_tool_calls)


def call_grammar(
    body: ChatBody, binding: Binding, reading: Reading, tokenizer: Tokenizer, begin_after: tuple[int, ...]
) -> Grammar:
    """The constraint; 400 for schemas that cannot be enforced. `begin_after`: see `Grammar`. In a thread."""
    assert reading.calls is not None, "a model whose calls cannot be read is given no tools"
    tools = [_allowed(function, binding.must) for function in binding.functions]
    try:
        tag = CALL_GRAMMARS[reading.calls](tools, binding.must, not binding.one)
        text = json.dumps({"type": "structural_tag", "format": tag}, ensure_ascii=False, separators=(",", ":"))
    except CannotBind as error:
        raise _wrong(str(error)) from None
    except RecursionError:
        raise _wrong("a schema is nested too deeply") from None
    grammar = Grammar(
        "structural_tag",
        text,
        begin_after=begin_after,
        begun_by=also_begun_by(reading, tokenizer) if begin_after else (),
        spelled=tuple(sorted(reading.kept)),
    )
    if (problem := problem_of(grammar)) is not None:
        raise _wrong(f"what all of them allow cannot be used, {problem}; give fewer tools, or simpler schemas")
    return grammar


def _allowed(function: dict[str, Any], must: bool) -> AllowedTool:
    name, strict = function["name"], function["strict"]
    schema = None
    if strict or (must and strict is None):
        schema = function.get("parameters")
        schema = NOTHING if schema is None else schema or {"type": "object"}
        _check(name, schema, strict=bool(strict))
    try:
        return AllowedTool(name, schema)
    except CannotBind as error:
        raise _wrong(str(error)) from None


def _check(name: str, schema: dict[str, Any], strict: bool) -> None:
    from workers.grammar.build import MOST_NESTED
    from workers.grammar.schema import SchemaError, check_schema

    instead = "" if strict else '; or set "strict": false in it, for arguments that are any JSON object'
    try:
        check_schema(schema, MOST_NESTED, within_text=True)
    except SchemaError as error:
        raise _wrong(f"the parameters of {name[:64]!r}: {error}{instead}") from None
    if types_of(schema) != {"object"}:
        raise _wrong(f'the parameters of {name[:64]!r}: "type": "object" is expected')


def _wrong(what: str) -> ApiError:
    return invalid(f"tools: {what}", "tools", "invalid_grammar")
