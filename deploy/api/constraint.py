"""What a request says its answer must look like: OpenAI's `response_format`, and vLLM's guided fields beside it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from deploy.api.errors import ApiError, invalid, unsupported
from deploy.api.protocol import ChatBody, GenerationBody
from deploy.text.tokenizer import Tokenizer
from workers.protocol.front import ModelInfo
from workers.protocol.grammar import Grammar

FIELDS = ("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag")
"""Of which a request has one at most."""


async def requested_grammar(
    body: GenerationBody, tokenizer: Tokenizer | None, info: ModelInfo, behind: str | None = None
) -> Grammar | None:
    """The constraint of a request, None without one. 400 for several of them, for one that is none, and for what would
    not be enforced to the letter. `behind`: what ends the reasoning that the answer begins with; the constraint begins
    there unless the request says where."""
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
    grammar = _response_format(body.response_format or {}) if name == "response_format" else _guided(name, body)
    if tokenizer is None or not tokenizer.writes_bytes:
        raise _cannot(name, "this model has no tokenizer whose tokens are bytes of text")
    if not info.eos_ids:
        raise _cannot(name, "this model has no end-of-sequence id")
    begin_after = _begin_after(body.guided_begin_after or behind, tokenizer)
    if (problem := await asyncio.to_thread(_problem, grammar)) is not None:
        raise invalid(f"{name}: {problem}", name, "invalid_grammar")
    return Grammar(grammar.kind, grammar.text, grammar.strict, begin_after)


def _cannot(name: str, why: str) -> ApiError:
    return invalid(f"{name}: {why}, so structured output is not possible", name, "unsupported_parameter")


def _problem(grammar: Grammar) -> str | None:
    """What is wrong with a constraint. In a thread: the first one loads xgrammar."""
    from workers.grammar.build import GrammarError, build

    try:
        build(grammar)
    except GrammarError as error:
        return str(error)
    return None


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


def _begin_after(text: str | None, tokenizer: Tokenizer) -> tuple[int, ...]:
    if text is None:
        return ()
    ids = tokenizer.encode(text[:256], add_special_tokens=False)
    if len(ids) != 1:
        raise invalid(
            f"guided_begin_after: must be one token of the model's vocabulary, as the end of reasoning often is; "
            f"{text[:64]!r} is {len(ids)}",
            "guided_begin_after",
        )
    return tuple(ids)
