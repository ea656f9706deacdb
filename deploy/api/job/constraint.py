"""What a request says its answer must look like: OpenAI's `response_format`, vLLM's guided fields beside it, tools that
must be called, and how long its reasoning may be."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import msgspec

from deploy.api.http.errors import ApiError, invalid, unsupported
from deploy.api.job.bodies import FORMS, ChatBody, GenerationBody
from deploy.api.job.model import Reading
from deploy.api.job.tools import NamedTool
from deploy.parsing.call_grammar import AllowedTool, CannotBind
from deploy.parsing.reasoning import CLOSE, OPEN
from deploy.parsing.registry import CALL_GRAMMARS, REASONING_PARSERS
from deploy.parsing.schema_types import types_of
from deploy.text.tokenizer import Tokenizer
from workers.protocol.front import ModelInfo
from workers.protocol.grammar import Grammar


async def requested_grammar(
    body: GenerationBody, tokenizer: Tokenizer | None, info: ModelInfo, reading: Reading | None = None
) -> Grammar | None:
    """The constraint of a request, None without one. 400 for several of them, for one that is none, and for what would
    not be enforced to the letter. `reading`: how the answer is read. Behind reasoning that the answer begins with the
    constraint begins, unless the request says where."""
    inside = reading is not None and reading.where == "inside"
    grammar = await _form(body, tokenizer, info, CLOSE if inside else None)
    if not isinstance(body, ChatBody):
        return grammar
    if grammar is None and (binding := bound_tools(body)):
        check_possible("tools", tokenizer, info)
        assert tokenizer is not None
        assert reading is not None
        begin_after = one_token(CLOSE, tokenizer, "tools") if inside else ()
        grammar = await asyncio.to_thread(call_grammar, body, binding, reading, tokenizer, begin_after)
    return bounded(grammar, body, reading, tokenizer)


async def _form(
    body: GenerationBody, tokenizer: Tokenizer | None, info: ModelInfo, behind: str | None
) -> Grammar | None:
    """The constraint that the fields about an answer's form say."""
    asked = [name for name in FORMS if getattr(body, name) is not None]
    asked = [name for name in asked if name != "response_format" or body.response_format != {"type": "text"}]
    if len(asked) > 1:
        raise invalid(f"{asked[0]} and {asked[1]}: only one of them can be given", asked[1], "conflicting_parameters")
    if not asked:
        if body.guided_begin_after is not None:
            raise invalid(f"guided_begin_after: goes with one of {', '.join(FORMS)}", "guided_begin_after")
        return None
    [name] = asked
    if isinstance(body, ChatBody) and body.tools and body.tool_choice != "none":
        raise invalid(f"{name}: goes with tools only where tool_choice is none", name, "conflicting_parameters")
    try:
        grammar = _response_format(body.response_format or {}) if name == "response_format" else _guided(name, body)
    except RecursionError:
        raise invalid(f"{name}: it is nested too deeply", name, "invalid_grammar") from None
    check_possible(name, tokenizer, info)
    assert tokenizer is not None
    begin = body.guided_begin_after or behind
    begin_after = () if begin is None else one_token(begin, tokenizer, "guided_begin_after")
    if (problem := await asyncio.to_thread(problem_of, grammar)) is not None:
        raise invalid(f"{name}: {problem}", name, "invalid_grammar")
    return Grammar(grammar.kind, grammar.text, grammar.strict, begin_after)


def _response_format(value: dict[str, Any]) -> Grammar:
    kind = value.get("type")
    if kind == "json_object":
        return Grammar("json")
    if kind == "structural_tag":
        return Grammar("structural_tag", json.dumps(value, ensure_ascii=False))
    if kind != "json_schema":
        if not isinstance(kind, str):
            raise invalid("response_format: an object with a type is expected", "response_format")
        raise unsupported(f"a response_format of type {kind[:64]!r}", "response_format")
    given = value.get("json_schema")
    if not isinstance(given, dict) or not isinstance(given.get("schema"), (dict, bool)):
        raise invalid("response_format.json_schema: an object with a name and a schema is expected", "response_format")
    strict = given.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise invalid("response_format.json_schema.strict: true or false is expected", "response_format")
    return Grammar("json_schema", json.dumps(given["schema"], ensure_ascii=False), bool(strict))


def _guided(name: str, body: GenerationBody) -> Grammar:
    value = getattr(body, name)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    match name:
        case "guided_json":
            return Grammar("json_schema", text)
        case "guided_regex":
            return Grammar("regex", text)
        case "guided_choice":
            return Grammar("choice", text)
        case "guided_grammar":
            return Grammar("ebnf", text)
    return Grammar("structural_tag", text)


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


def check_possible(name: str, tokenizer: Tokenizer | None, info: ModelInfo) -> None:
    """400 where no answer of this model can be bound, as the field `name` wants it."""
    why = ""
    if tokenizer is None or not tokenizer.writes_bytes:
        why = "this model has no tokenizer whose tokens are bytes of text"
    elif not info.eos_ids:
        why = "this model has no end-of-sequence id"
    if why:
        raise invalid(f"{name}: {why}, so structured output is not possible", name, "unsupported_parameter")


def problem_of(grammar: Grammar) -> str | None:
    """What is wrong with a constraint. In a thread: the first one loads xgrammar."""
    from workers.grammar.build import GrammarError, build

    try:
        build(grammar)
    except GrammarError as error:
        return str(error)
    return None


def one_token(text: str, tokenizer: Tokenizer, param: str) -> tuple[int, ...]:
    """The id of the token that `text` is; 400 where it is not one, as the field `param` needs it."""
    ids = tokenizer.encode(text[:256], add_special_tokens=False)
    if len(ids) != 1:
        raise invalid(
            f"{param}: {text[:64]!r} must be one token of the model's vocabulary, as the end of reasoning often is; it "
            f"is {len(ids)}",
            param,
        )
    return tuple(ids)


def bounded(
    grammar: Grammar | None, body: ChatBody, reading: Reading | None, tokenizer: Tokenizer | None
) -> Grammar | None:
    """The constraint with the bound of the reasoning that stands before it, `max_reasoning_tokens`."""
    most, name = body.max_reasoning_tokens, "max_reasoning_tokens"
    if most is None:
        return grammar
    if reading is None or reading.reasoning is None or tokenizer is None:
        raise invalid(
            f"{name}: it is not known how this model reasons; leave it out, or start the server with "
            f"--reasoning-parser ({', '.join(REASONING_PARSERS)})",
            name,
        )
    if reading.where == "outside":
        return grammar
    close = one_token(CLOSE, tokenizer, name)
    if reading.where == "inside":
        if grammar is not None and grammar.begin_after != close:
            raise invalid(f"{name}: does not go with guided_begin_after", name, "conflicting_parameters")
        bound = grammar or Grammar("free", begin_after=close, begun_by=also_begun_by(reading, tokenizer))
        return msgspec.structs.replace(bound, most_before=most)
    if grammar is not None:
        raise invalid(
            f"{name}: this model decides itself whether to reason, and does not where its answer is bound to a form or "
            "to strict tools: leave it out",
            name,
            "conflicting_parameters",
        )
    begun_by = also_begun_by(reading, tokenizer)
    opened_by = one_token(OPEN, tokenizer, name)
    return Grammar("free", begin_after=close, begun_by=begun_by, most_before=most, opened_by=opened_by)


def also_begun_by(reading: Reading, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The token that ends reasoning without its closing tag, and begins calls, if the model has one."""
    marker = reading.reasoning.also_closed_by if reading.reasoning is not None else None
    if marker is None or reading.calls is None:
        return ()
    ids = tokenizer.encode(marker, add_special_tokens=False)
    return tuple(ids) if len(ids) == 1 else ()
