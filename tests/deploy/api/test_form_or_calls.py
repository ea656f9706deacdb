"""An answer of a form, or calls of tools: one grammar of both, and nothing besides."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from fake_engine import INFO, FakeEngine, say, serving
from tiny_tokenizer import with_special
from tool_templates import DEEPSEEK_V31, GLM, KIMI

from deploy.api.app import create_app
from deploy.config.api import ApiConfig
from deploy.parsing.answer import AnswerParser
from deploy.parsing.events import Arguments, CallBegin, CallEnd, Content
from deploy.parsing.registry import CALL_GRAMMARS, MARKERS, TOOL_PARSERS
from tests.deploy.parsing.written_calls import WRITERS
from tests.workers.grammar.grammar_walk import EOS, allowed, matcher_of, takes
from workers.protocol.grammar import Grammar

ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
PAINT: dict[str, Any] = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "a b"]}, "size": {"type": "integer", "minimum": 1, "maximum": 40}},
    "required": ["color", "size"],
    "additionalProperties": False,
}
STOP: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"paint": PAINT, "stop": STOP}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": of}} for name, of in SCHEMAS.items()]
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": ANSWER}}
ASK = [{"role": "user", "content": "Paint it, or say what it is."}]
MARKED = sorted({marker for markers in MARKERS.values() for marker in markers})
TOKENIZER = with_special(*MARKERS["kimi_k2"], "<think>", "</think>")
CLOSE = tuple(TOKENIZER.encode("</think>", add_special_tokens=False))
BEGIN = tuple(TOKENIZER.encode(MARKERS["kimi_k2"][0], add_special_tokens=False))


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(say([10]), replace(INFO, max_context=4096, vocab_size=1024))


@pytest.fixture(scope="module")
def ports(engine: FakeEngine) -> Iterator[dict[str, int]]:
    """A server for every format of calls."""
    ports: dict[str, int] = {}
    from contextlib import ExitStack

    with ExitStack() as stack:
        for name in sorted(CALL_GRAMMARS):
            template = {"glm": GLM, "kimi_k2": KIMI}.get(name, DEEPSEEK_V31)
            config = ApiConfig(chat_template=template, tool_parser=name, reasoning_parser="none")
            ports[name] = stack.enter_context(serving(create_app(engine, TOKENIZER, config)))
        yield ports


def asked(port: int, engine: FakeEngine, path: str = "chat/completions", **fields: Any) -> Grammar:
    body = {"model": "tiny", "messages": ASK, "tools": TOOLS, "response_format": FORM, **fields}
    answer = httpx.post(
        f"http://127.0.0.1:{port}/v1/{path}",
        json={name: value for name, value in body.items() if value is not None},
        timeout=30,
    )
    assert answer.status_code == 200, answer.text
    grammar = engine.requests[-1].sampling.grammar
    assert grammar is not None
    return grammar


def drawn(grammar: Grammar, seed: int, prefix: str = "", most: int = 700) -> str | None:
    """A text at random, byte by byte, behind `prefix`; None where it does not end."""
    matcher, draw, text = matcher_of(grammar), random.Random(seed), bytearray(prefix.encode())
    assert matcher.accept_string(prefix)
    while len(text) < most:
        ids = allowed(matcher)
        assert ids, text
        if EOS in ids and (len(ids) == 1 or draw.random() < 0.5):
            return text.decode()
        good = [i for i in ids if i != EOS and not bytes([i]).isspace()] or [i for i in ids if i != EOS]
        chosen = draw.choice(good)
        assert matcher.accept_token(chosen)
        text.append(chosen)
    return None


Found = tuple[str, list[tuple[str, Any]]]


def read(name: str, text: str) -> Found:
    """Content and complete calls, as a client gets them."""
    numbers = iter(range(1000))
    parser = AnswerParser(None, TOOL_PARSERS[name](SCHEMAS, lambda: f"call_{next(numbers)}"), calls_or_content=True)
    content, names, written, ended = "", dict[int, str](), dict[int, str](), list[int]()
    for event in [*(event for char in text for event in parser.push(char)), *parser.finish()]:
        match event:
            case Content(said):
                content += said
            case CallBegin(index, _, called):
                names[index], written[index] = called, ""
            case Arguments(index, more):
                written[index] += more
            case CallEnd(index):
                ended.append(index)
    return content, [(names[index], json.loads(written[index])) for index in ended]


def kind_of(name: str, text: str) -> str:
    """Tell which of the two a text is; a jsonschema error where it is neither. Another oracle than the grammar says
    so."""
    content, calls = read(name, text)
    if not calls:
        jsonschema.Draft202012Validator(ANSWER).validate(json.loads(content))
        return "answer"
    assert content == ""
    for called, arguments in calls:
        jsonschema.Draft202012Validator(SCHEMAS[called]).validate(arguments)
    return "calls"


@cache
def call_of(name: str) -> str:
    return {"glm": "<tool_call>", "deepseek_v32": "<｜DSML｜"}.get(name, MARKERS[name][0])


def kinds(name: str, grammar: Grammar, count: int = 12) -> set[str]:
    """The kinds of answers that are drawn, of each as many as of the other where it is allowed at all."""
    found = set()
    for prefix in ("", "{", call_of(name)):
        if not matcher_of(grammar).accept_string(prefix):
            continue
        for seed in range(count):
            if (text := drawn(grammar, seed, prefix)) is not None:
                found.add(kind_of(name, text))
    return found


def allowed_tools(mode: str, *names: str) -> dict[str, Any]:
    named = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


def callable_by(name: str, grammar: Grammar) -> set[str]:
    """The tools that an answer may call."""
    called = {"paint": {"color": "red", "size": 3}, "stop": dict[str, Any]()}
    return {tool for tool, given in called.items() if takes(grammar, WRITERS[name]([(tool, given)]))}


@pytest.mark.parametrize("name", sorted(CALL_GRAMMARS))
def test_allowed_tools_are_called_alone(name: str, ports: dict[str, int], engine: FakeEngine) -> None:
    """Among words or none, and also where no tool is strict. Prompts are those of all tools."""

    def of(choice: Any, **fields: Any) -> Grammar:
        return asked(ports[name], engine, tool_choice=choice, response_format=None, **fields)

    both = of(allowed_tools("required", "paint", "stop"))
    prompt = engine.requests[-1].prompt
    assert callable_by(name, both) == {"paint", "stop"}
    for mode in ("auto", "required"):
        for tools in (TOOLS, [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]):
            some = of(allowed_tools(mode, "stop"), tools=tools)
            assert engine.requests[-1].prompt == prompt
            assert callable_by(name, some) == {"stop"}
            assert takes(some, "Just text.") == (mode == "auto")
    one = of(allowed_tools("required", "paint", "stop"), parallel_tool_calls=False)
    assert ("plus" in both.text, "plus" in one.text) == (True, False)
    error = httpx.post(
        f"http://127.0.0.1:{ports[name]}/v1/chat/completions",
        json={"model": "tiny", "messages": ASK, "tools": TOOLS, "tool_choice": allowed_tools("auto", "stop", "fly")},
    ).json()["error"]
    assert (error["param"], "'fly' is none of the tools" in error["message"]) == ("tool_choice", True)


@pytest.mark.parametrize("name", sorted(CALL_GRAMMARS))
def test_an_answer_is_of_the_form_or_calls(name: str, ports: dict[str, int], engine: FakeEngine) -> None:
    both = asked(ports[name], engine)
    assert kinds(name, both) == {"answer", "calls"}
    assert not takes(both, "Just text.")
    assert not takes(both, '{"city": "Bonn", "warm": true}')
    assert kinds(name, asked(ports[name], engine, tool_choice="required")) == {"calls"}
    named = {"type": "function", "function": {"name": "stop"}}
    assert kinds(name, asked(ports[name], engine, tool_choice=named)) == {"calls"}
    assert kinds(name, asked(ports[name], engine, tool_choice="none")) == {"answer"}
    assert kinds(name, asked(ports[name], engine, tool_choice=allowed_tools("required", "stop"))) == {"calls"}
    some = asked(ports[name], engine, tool_choice=allowed_tools("auto", "stop"))
    assert kinds(name, some) == {"answer", "calls"}
    assert callable_by(name, some) == {"stop"}


@pytest.mark.parametrize("lost", ["answer", "calls"])
def test_a_grammar_that_lacks_one_of_the_two_is_found(lost: str, ports: dict[str, int], engine: FakeEngine) -> None:
    tag = json.loads(asked(ports["glm"], engine).text)
    calls, answer = tag["format"]["elements"]
    for left in ({"answer": calls, "calls": answer}[lost],):
        text = json.dumps({"type": "structural_tag", "format": left})
        assert kinds("glm", Grammar("structural_tag", text)) == {"answer", "calls"} - {lost}


FORMS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"response_format": {"type": "json_object"}}, ['{"a": [1]}', "{}"], ["[1]", "Hi"]),
    ({"response_format": None, "guided_json": ANSWER}, ['{"city": "Rome", "warm": false}'], ["{}", "Rome"]),
    ({"response_format": None, "guided_regex": "[a-c]{2,3}"}, ["ab", "abc"], ["a", "abcd"]),
    ({"response_format": None, "guided_choice": ["yes", "no"]}, ["yes", "no"], ["maybe", ""]),
    ({"response_format": None, "guided_grammar": 'root ::= "x" [0-9]'}, ["x1"], ["x", "y1"]),
    (
        {"response_format": {"type": "structural_tag", "format": {"type": "const_string", "value": "so"}}},
        ["so"],
        ["or"],
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {
            "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}},
        ['{"a": 1}', '{"a": 1, "more": []}'],
        ["{}"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "good", "bad"), FORMS)
def test_every_form_goes_with_tools(
    fields: dict[str, Any], good: list[str], bad: list[str], ports: dict[str, int], engine: FakeEngine
) -> None:
    grammar = asked(ports["glm"], engine, **fields)
    call = "<tool_call>stop</tool_call>"
    assert read("glm", call) == ("", [("stop", {})])
    for text in (*good, call, call + call):
        assert takes(grammar, text), text
    for text in (*bad, "<tool_call>go</tool_call>", f"{good[0]}{call}"):
        assert not takes(grammar, text), text
    one = asked(ports["glm"], engine, **fields, parallel_tool_calls=False)
    assert takes(one, call)
    assert not takes(one, call + call)


def test_behind_reasoning_and_over_every_endpoint(engine: FakeEngine) -> None:
    """Anthropic's and OpenAI's newer endpoint ask for the same."""
    with serving(create_app(engine, TOKENIZER, ApiConfig(chat_template=KIMI))) as port:
        grammar = asked(port, engine)
        assert (grammar.kind, grammar.begin_after, grammar.begun_by) == ("structural_tag", CLOSE, BEGIN)
        flat = [{"type": "function", "strict": None, **tool["function"]} for tool in TOOLS]
        form = {"format": {"type": "json_schema", "name": "answer", "strict": True, "schema": ANSWER}}
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        answer = client.responses.create(model="tiny", input="Hi.", tools=flat, text=form)  # type: ignore[call-overload]
        assert answer.status in ("completed", "incomplete")
        assert engine.requests[-1].sampling.grammar == grammar
        output = {"format": {"type": "json_schema", "schema": ANSWER}}
        own = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
        over = asked(port, engine, "messages", max_tokens=50, tools=own, output_config=output, response_format=None)
        assert json.loads(over.text) == json.loads(grammar.text)
        required = asked(
            port,
            engine,
            "messages",
            max_tokens=50,
            tools=own,
            output_config=output,
            response_format=None,
            tool_choice={"type": "any"},
        )
        assert "Oslo" not in required.text
        assert "Oslo" in grammar.text


def test_markers_within_an_answer_of_the_form_are_text(ports: dict[str, int]) -> None:
    """A string in JSON may be about calls."""
    for name in sorted(CALL_GRAMMARS):
        for marker in MARKED:
            text = json.dumps({"a": f"{marker}stop</tool_call>"}, ensure_ascii=False)
            assert read(name, text) == (text, [])
            assert read(name, f" \n{text}") == (f" \n{text}", [])


def spoken(text: str) -> FakeEngine:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    return FakeEngine(say([*ids, 1]), replace(INFO, max_context=4096, vocab_size=1024))


@pytest.mark.parametrize("stream", [False, True])
def test_the_client_gets_either(stream: bool) -> None:
    answer = '{"city": "Rome", "warm": true}'
    for text, content, called in (
        (answer, answer, []),
        ("<tool_call>stop</tool_call>", None, ["stop"]),
    ):
        config = ApiConfig(chat_template=GLM, reasoning_parser="none")
        with serving(create_app(spoken(text), TOKENIZER, config)) as port:
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
            given: Any = {
                "model": "tiny",
                "messages": ASK,
                "tools": TOOLS,
                "response_format": FORM,
                "max_tokens": 200,
            }
            if stream:
                said, names = "", []
                for event in client.chat.completions.create(**given, stream=True):
                    delta = event.choices[0].delta
                    said += delta.content or ""
                    names += [call.function.name for call in delta.tool_calls or () if call.function.name]
                assert (said or None, names) == (content, called)
            else:
                message = client.chat.completions.create(**given).choices[0].message
                assert message.content == content
                assert [call.function.name for call in message.tool_calls or ()] == called


def test_formats_of_a_strict_form_that_are_not_enforced_beside_calls_are_named(
    ports: dict[str, int], engine: FakeEngine
) -> None:
    """Alone the form is enforced; an agent's type of output is strict whether it has tools or not."""
    schema = {**ANSWER, "properties": {**ANSWER["properties"], "link": {"type": "string", "format": "uri"}}}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
    body = {"model": "tiny", "messages": ASK, "response_format": form, "tools": TOOLS}
    answer = httpx.post(f"http://127.0.0.1:{ports['kimi_k2']}/v1/chat/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-latentserve-not-enforced"] == "response_format.link format"
    schema["properties"]["link"] = {"not": {}}
    with pytest.raises(AssertionError, match="not is not supported"):
        asked(ports["kimi_k2"], engine, response_format=form)
