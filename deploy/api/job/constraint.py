"""What a request says its answer must look like: OpenAI's `response_format`, vLLM's guided fields beside it, tools that
must be called, and how long its reasoning may be."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from deploy.api.http.errors import invalid, unsupported
from deploy.api.job.bodies import ChatBody, GenerationBody
from deploy.api.job.bounds import bounded, check_possible, one_token, problem_of
from deploy.api.job.call_constraint import bound_tools, call_grammar
from deploy.api.job.reading import Reading
from deploy.parsing.reasoning import CLOSE
from deploy.text.tokenizer import Tokenizer
from workers.protocol.front import ModelInfo
from workers.protocol.grammar import Grammar

FIELDS = ("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag")
"""Of which a request has one at most."""


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
    asked = [name for name in FIELDS if getattr(body, name) is not None]
    asked = [name for name in asked if name != "response_format" or body.response_format != {"type": "text"}]
    if len(asked) > 1:
        raise invalid(f"{asked[0]} and {asked[1]}: only one of them can be given", asked[1], "conflicting_parameters")
    if not asked:
        if body.guided_begin_after is not None:
            raise invalid(f"guided_begin_after: goes with one of {', '.join(FIELDS)}", "guided_begin_after")
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
