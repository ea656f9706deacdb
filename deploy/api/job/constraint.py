"""Constraints of a request on its answer: OpenAI's `response_format`, vLLM's guided fields beside it, tools that must
be called, and the length of its reasoning."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from deploy.api.http.errors import invalid, unsupported
from deploy.api.job.bodies import FORMS, GenerationBody
from deploy.api.job.chat_bodies import ChatBody
from deploy.api.job.model import Reading
from deploy.api.job.tool_binding import Bound, bind, opened, said, wrong_tools
from deploy.api.job.tools import AllowedToolsChoice, NamedTool, may_answer
from deploy.parsing.call_grammar import CannotBind, Tag, either, json_of, text
from deploy.parsing.registry import CALL_GRAMMARS, REASONING_PARSERS
from deploy.text.tokenizer import Tokenizer
from workers.grammar.text_grammar import TextGrammar, TextGrammarError
from workers.protocol.front import ModelInfo
from workers.protocol.grammar import Grammar


@dataclass(frozen=True)
class Constraint:
    """Constraint on an answer."""

    grammar: Grammar | None
    """Grammar of the answer; None if it is free."""
    not_enforced: tuple[str, ...] = ()
    """See `Job`."""


UNCONSTRAINED: Final = Constraint(None)


async def requested_grammar(
    body: GenerationBody, tokenizer: Tokenizer | None, info: ModelInfo, reading: Reading | None = None
) -> Constraint:
    """The constraint of a request. 400 for several forms, for one that is none, and for what would not be enforced to
    the letter, unless it stands in the schema of a tool that is not strict. `reading`: how the answer is read. Behind
    reasoning that the answer begins with the constraint begins, unless the request says where.

    Where the model may call tools and the answer has a form, it is calls or of that form; where a call must be made,
    it is calls."""
    close = reading.reasoning.close if reading is not None and reading.reasoning and reading.where == "inside" else None
    form = await _form(body, tokenizer, info, close)
    if not isinstance(body, ChatBody):
        return Constraint(form)
    if (binding := bound_tools(body)) is None:
        return Constraint(bounded(form, body, reading, tokenizer))
    if body.guided_begin_after is not None and binding.must:
        raise invalid("guided_begin_after: does not go with calls that must be made", "guided_begin_after")
    check_possible("tools", tokenizer, info)
    assert tokenizer is not None
    assert reading is not None
    param = "tool_choice" if binding.must else "tools"
    begin_after = () if close is None else end_of_reasoning(close, tokenizer, param)
    found = await asyncio.to_thread(call_grammar, body, binding, reading, tokenizer, begin_after, form)
    return replace(found, grammar=bounded(found.grammar, body, reading, tokenizer))


async def _form(
    body: GenerationBody, tokenizer: Tokenizer | None, info: ModelInfo, close: str | None
) -> Grammar | None:
    """The constraint that the fields about an answer's form say. `close`: what ends the reasoning that the answer
    begins with; None where it begins with none."""
    asked = body.forms
    if len(asked) > 1:
        raise invalid(f"{asked[0]} and {asked[1]}: only one of them can be given", asked[1], "conflicting_parameters")
    if not asked:
        if body.guided_begin_after is not None:
            raise invalid(f"guided_begin_after: goes with one of {', '.join(FORMS)}", "guided_begin_after")
        return None
    [name] = asked
    try:
        grammar = _response_format(body.response_format or {}) if name == "response_format" else _guided(name, body)
    except RecursionError:
        raise invalid(f"{name}: it is nested too deeply", name, "invalid_grammar") from None
    check_possible(name, tokenizer, info)
    assert tokenizer is not None
    if body.guided_begin_after:
        begin_after = one_token(body.guided_begin_after, tokenizer, "guided_begin_after")
    else:
        begin_after = () if close is None else end_of_reasoning(close, tokenizer, name)
    if (problem := await asyncio.to_thread(problem_of, grammar)) is not None:
        raise invalid(f"{name}: {problem}", name, "invalid_grammar")
    return Grammar(grammar.kind, grammar.text, grammar.strict, begin_after)


def _response_format(value: dict[str, Any]) -> Grammar:
    kind = value.get("type")
    if kind == "json_object":
        if not (schema := value.get("schema")):
            return Grammar("json")
        if not isinstance(schema, dict):
            raise invalid("response_format.schema: a JSON schema is expected", "response_format")
        return Grammar("json_schema", json.dumps(schema, ensure_ascii=False), strict=False)
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
    if name == "structured_outputs":
        assert body.structured_outputs is not None
        [kind] = body.structured_outputs.given()
        return _form_of(kind, getattr(body.structured_outputs, "json_" if kind == "json" else kind), name)
    return _form_of(name.removeprefix("guided_"), getattr(body, name), name)


def _form_of(kind: str, value: Any, name: str) -> Grammar:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    match kind:
        case "json":
            return Grammar("json_schema", text)
        case "json_object":
            return Grammar("json")
        case "regex":
            return Grammar("regex", text)
        case "choice":
            return Grammar("choice", text)
        case "grammar":
            return Grammar("ebnf", _ebnf_of(text, name))
    return Grammar("structural_tag", text)


def _ebnf_of(grammar: str, name: str) -> str:
    """A grammar in EBNF, which has `::=` in every rule, or in Lark's syntax, which has it in none."""
    if "::=" in grammar:
        return grammar
    try:
        return TextGrammar("lark", grammar).ebnf()
    except TextGrammarError as error:
        raise invalid(
            f"{name}: as it has no ::=, it is read in the syntax of Lark: {error}", name, "invalid_grammar"
        ) from None


@dataclass(frozen=True)
class Binding:
    """Tools and calls that an answer is bound to."""

    functions: list[dict[str, Any]]
    """Functions that the answer may call."""
    must: bool
    """Whether it calls at least one function, and says nothing besides."""
    one: bool
    """Whether it calls no more than one function."""


def bound_tools(body: ChatBody) -> Binding | None:
    """Return the binding that `tools` and `tool_choice` ask for; None where the model is free. 400 for a wrong
    choice."""
    choice, functions = body.tool_choice, [tool["function"] for tool in body.tools]
    if choice == "none":
        return None
    if choice != "auto" and not functions:
        raise invalid("tool_choice: there must be tools to choose from", "tool_choice")
    named: frozenset[str] = frozenset()
    if isinstance(choice, NamedTool):
        named = frozenset([choice.function.name])
    elif isinstance(choice, AllowedToolsChoice):
        named = choice.allowed_tools.names
    if unknown := sorted(named - {function["name"] for function in functions}):
        raise invalid(f"tool_choice: {unknown[0][:64]!r} is none of the tools", "tool_choice")
    if named:
        functions = [function for function in functions if function["name"] in named]
    if may_answer(choice):
        bound = named or any(function["strict"] for function in functions) or (functions and body.formed)
        return Binding(functions, must=False, one=not body.parallel_tool_calls and body.formed) if bound else None
    return Binding(functions, must=True, one=isinstance(choice, NamedTool) or not body.parallel_tool_calls)


def call_grammar(
    body: ChatBody,
    binding: Binding,
    reading: Reading,
    tokenizer: Tokenizer,
    begin_after: tuple[int, ...],
    form: Grammar | None = None,
) -> Constraint:
    """The constraint; 400 for strict schemas that cannot be enforced. `begin_after`: see `Grammar`. `form`: what the
    answer is where it is not calls, unless it must be. In a thread."""
    assert reading.calls is not None, "a model whose calls cannot be read is given no tools"
    write, parallel = CALL_GRAMMARS[reading.calls], not binding.one
    choice = form is not None and not binding.must
    bound = bind([*binding.functions], write, all_bound=binding.must or choice, inputs=body.inputs)
    form_tag, form_left = form_as_tag(form, body.forms[0]) if form is not None and choice else (None, [])

    def grammar_of(bound: Bound) -> Grammar:
        tag = write(bound.tools, binding.must or choice, parallel)
        if form_tag is not None:
            tag = either([tag, form_tag])
        return Grammar(
            "structural_tag",
            json.dumps({"type": "structural_tag", "format": tag}, ensure_ascii=False, separators=(",", ":")),
            begin_after=form.begin_after if form is not None and choice else begin_after,
            begun_by=also_begun_by(reading, tokenizer) if begin_after and not body.guided_begin_after else (),
            spelled=tuple(sorted(reading.kept)),
        )

    try:
        grammar = grammar_of(bound)
        problem = problem_of(grammar)
        if problem is not None and (free := bound.unbound()) is not None:
            # Too much, or something that only the library knows: whatever need not be bound is left to the model.
            bound, grammar = free, grammar_of(free)
            problem = problem_of(grammar)
    except CannotBind as error:
        raise wrong_tools(str(error)) from None
    except RecursionError:
        raise wrong_tools("a schema is nested too deeply") from None
    if problem is not None:
        what = "they and the form of the answer" if choice else "all of them"
        raise wrong_tools(f"what {what} allow cannot be used, {problem}; give fewer tools, or simpler schemas")
    return Constraint(grammar, (*bound.not_enforced, *form_left))


def form_as_tag(form: Grammar, name: str) -> tuple[Tag, list[str]]:
    """Return what a checked format allows besides calls, and, if the format is not strict, the parts that are left to
    the model. 400 where a strict format cannot be enforced there. `name` is the name of its field."""
    match form.kind:
        case "json":
            return json_of({"type": "object"}), []
        case "json_schema":
            return _schema_as_tag(form, name)
        case "regex":
            return {"type": "regex", "pattern": form.text}, []
        case "choice":
            return either([text(choice) for choice in json.loads(form.text)]), []
        case "ebnf":
            return {"type": "grammar", "grammar": form.text}, []
    tag: Tag = json.loads(form.text)["format"]
    return tag, []


def _schema_as_tag(form: Grammar, name: str) -> tuple[Tag, list[str]]:
    from workers.grammar.build import MOST_NESTED
    from workers.grammar.loosen import loosened

    schema = json.loads(form.text)
    if form.strict:
        # It was checked by itself. What is enforced there and not beside calls, as most formats, is left to the model.
        found, left_out = loosened(schema, MOST_NESTED, within_text=True)
        return _json_or_any(found), [said(name, path, keyword) for path, keyword in left_out]
    found, left_out = loosened(schema, MOST_NESTED, within_text=True)
    return _json_or_any(opened(found)), [said(name, path, keyword) for path, keyword in left_out]


def _json_or_any(schema: Any) -> Tag:
    return json_of({} if schema is True else schema)


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
    """Return what is wrong with a constraint; None if nothing is. Call it in a thread: the first call loads
    xgrammar."""
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


def end_of_reasoning(close: str, tokenizer: Tokenizer, param: str) -> tuple[int, ...]:
    """The id of the token that ends reasoning, `close`; 400 where that is several, as the field `param` asks
    for something that is enforced behind it."""
    ids = tokenizer.encode(close, add_special_tokens=False)
    if len(ids) != 1:
        raise invalid(
            f"{param}: is enforced from the end of the model's reasoning on, {close!r}, which has to be one token of "
            f"its vocabulary and is {len(ids)}; ask it not to think (reasoning_effort: none), or leave {param} out",
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
    close = end_of_reasoning(reading.reasoning.close, tokenizer, name)
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
    opened_by = one_token(reading.reasoning.open, tokenizer, name)
    return Grammar("free", begin_after=close, begun_by=begun_by, most_before=most, opened_by=opened_by)


def also_begun_by(reading: Reading, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The token that ends reasoning without its closing tag, and begins calls, if the model has one."""
    marker = reading.reasoning.also_closed_by if reading.reasoning is not None else None
    if marker is None or reading.calls is None:
        return ()
    ids = tokenizer.encode(marker, add_special_tokens=False)
    return tuple(ids) if len(ids) == 1 else ()
