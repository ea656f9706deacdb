"""Tools that must be called, and tools with valid arguments: what the engine is asked for, what is refused, and that
the demo model, which never saw a tool, calls them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from demo_server import demo_engine, openai_client
from fake_engine import INFO, FakeEngine, say, serving
from tiny_tokenizer import with_special
from tool_templates import DEEPSEEK_V31, GLM, KIMI

from deploy.api.app import create_app
from deploy.api.job.chat_bodies import ChatBody
from deploy.api.job.model import Reader
from deploy.config.api import ApiConfig
from deploy.parsing.events import CallEnd
from deploy.parsing.registry import CALL_GRAMMARS, MARKERS
from workers.protocol.front import Engine
from workers.protocol.grammar import Grammar

PAINT = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green", "a b"]},
        "size": {"type": "integer", "minimum": 1, "maximum": 40},
        "wet": {"type": ["boolean", "null"]},
    },
    "required": ["color", "size"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {"paint": PAINT, "stop": {"type": "object", "properties": {}, "additionalProperties": False}}


def tool(name: str, strict: bool | None = None, parameters: Any = None) -> Any:
    function = {"name": name, "parameters": parameters or SCHEMAS[name]}
    return {"type": "function", "function": function | ({} if strict is None else {"strict": strict})}


TOOLS = [tool("paint"), tool("stop")]
NAMED: Any = {"type": "function", "function": {"name": "stop"}}
ASK: Any = [{"role": "user", "content": "Paint it."}]
TOKENIZER = with_special(*MARKERS["kimi_k2"], "<think>", "</think>")
CLOSE = TOKENIZER.encode("</think>", add_special_tokens=False)
BEGIN = TOKENIZER.encode(MARKERS["kimi_k2"][0], add_special_tokens=False)


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(say([10]), replace(INFO, max_context=4096, vocab_size=1024))


@pytest.fixture(scope="module")
def port(engine: FakeEngine) -> Iterator[int]:
    with serving(create_app(engine, TOKENIZER, ApiConfig(chat_template=KIMI))) as port:
        yield port


def ask(port: int, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "messages": ASK, "tools": TOOLS, **fields}
    return httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=30)


def asked(port: int, engine: FakeEngine, **fields: Any) -> Grammar | None:
    answer = ask(port, **fields)
    assert answer.status_code == 200, answer.text
    return engine.requests[-1].sampling.grammar


def test_calls_that_must_be_made(port: int, engine: FakeEngine) -> None:
    """Calls come behind reasoning, if there is any: its tag ends it, or a call itself. The markers are special
    tokens."""
    grammar = asked(port, engine, tool_choice="required")
    assert grammar is not None
    assert (grammar.kind, grammar.begin_after, grammar.begun_by) == ("structural_tag", tuple(CLOSE), tuple(BEGIN))
    assert set(BEGIN) < set(grammar.spelled)
    assert "paint" in grammar.text
    named = asked(port, engine, tool_choice=NAMED, chat_template_kwargs={"thinking": False})
    assert named is not None
    assert (named.begin_after, named.begun_by) == ((), ())
    assert "paint" not in named.text
    assert asked(port, engine, tool_choice="any") == grammar
    one = asked(port, engine, tool_choice="required", parallel_tool_calls=False)
    assert one is not None
    assert "plus" in grammar.text
    assert "plus" not in one.text


def test_strict_tools_bind_the_calls_that_the_model_makes(port: int, engine: FakeEngine) -> None:
    assert asked(port, engine) is None
    assert asked(port, engine, tools=[tool("paint", strict=False)]) is None
    assert asked(port, engine, tools=[tool("paint", strict=True)], tool_choice="none") is None
    grammar = asked(port, engine, tools=[tool("paint", strict=True), tool("stop")])
    assert grammar is not None
    assert "dispatch" in grammar.text
    assert "maximum" in grammar.text
    shown = TOKENIZER.decode(engine.requests[-1].prompt, skip_special_tokens=False)
    assert '"paint"' in shown
    assert "strict" not in shown


UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


def test_what_would_not_be_enforced_is_refused_where_it_is_strict_and_else_left_to_the_model(
    port: int, engine: FakeEngine
) -> None:
    error = ask(port, tools=[tool("paint", strict=True, parameters=UNIQUE)]).json()["error"]
    assert (error["param"], error["code"]) == ("tools", "invalid_grammar")
    assert "the parameters of 'paint': #/properties/a: uniqueItems is not supported" in error["message"]
    for strict, named in ((None, "paint.a uniqueItems"), (False, None)):
        for stream in (False, True):
            tools = [tool("paint", strict=strict, parameters=UNIQUE)]
            answer = ask(port, tools=tools, tool_choice="required", stream=stream)
            assert answer.status_code == 200, answer.text
            assert answer.headers.get("x-latentserve-not-enforced") == named
            grammar = engine.requests[-1].sampling.grammar
            assert grammar is not None
            assert "uniqueItems" not in grammar.text
            assert ('"a"' in grammar.text) == (strict is None)
    assert "x-latentserve-not-enforced" not in ask(port, tool_choice="required").headers


def test_strings_may_have_a_form(port: int, engine: FakeEngine) -> None:
    forms = {"a": {"pattern": "^a+$"}, "b": {"minLength": 1, "maxLength": 40}, "c": {"format": "date"}}
    schema = {"type": "object", "properties": {name: {"type": "string", **form} for name, form in forms.items()}}
    grammar = asked(port, engine, tools=[tool("paint", strict=True, parameters=schema)], tool_choice="required")
    assert grammar is not None
    assert all(json.dumps(form)[1:-1].replace(" ", "") in grammar.text for form in forms.values())


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "there must be tools"),
        ({"tool_choice": {**NAMED, "function": {"name": "wipe"}}}, "tool_choice", "'wipe' is none of the tools"),
        ({"tools": [tool("stop", True, {"type": "array"})]}, "tools", '"type": "object" is expected'),
        ({"tools": [tool("stop", True, {"anyOf": [{"type": "object"}, {"type": "null"}]})]}, "tools", "is expected"),
        ({"tools": [{"type": "function", "function": {"name": "a b", "strict": True}}]}, "tools", "'a b'"),
        ({"tool_choice": "required", "guided_regex": "("}, "guided_regex", "is not closed"),
        (
            {"tool_choice": "required", "guided_regex": "a", "guided_begin_after": "</think>"},
            "guided_begin_after",
            "does not go with calls that must be made",
        ),
    ],
)
def test_wrong_choices(port: int, fields: dict[str, Any], param: str, says: str) -> None:
    error = ask(port, **fields).json()["error"]
    assert error["param"] == param
    assert says in error["message"]


def test_calls_in_the_reasoning_do_not_count_where_they_would_not_be_bound() -> None:
    reader = Reader(TOKENIZER, ApiConfig(tool_parser="glm", reasoning_parser="glm"))
    text = "Hm. <tool_call>f</tool_call></think>"
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    free = {"type": "function", "function": {"name": "f"}}
    for fields, calls in (
        ({"tools": [free]}, 1),
        ({"tools": [strict]}, 0),
        ({"tools": [free], "tool_choice": "required"}, 0),
        ({"tools": [free], "max_reasoning_tokens": 9}, 0),
        ({"tools": [free], "tool_choice": ALLOWED}, 0),
    ):
        body = ChatBody.model_validate({"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields})
        reading = reader.reading(body, "<think>")
        assert reading is not None
        one = reading.parser(lambda: "call_1")
        events = [*one.push(text), *one.finish()]
        assert sum(isinstance(event, CallEnd) for event in events) == calls


def test_the_reasoning_is_bounded(port: int, engine: FakeEngine) -> None:
    grammar = asked(port, engine, max_reasoning_tokens=7)
    assert grammar == Grammar("free", begin_after=tuple(CLOSE), begun_by=tuple(BEGIN), most_before=7)
    assert 1 not in engine.requests[-1].sampling.stop_ids or not asked(port, engine)
    off: Any = {"chat_template_kwargs": {"thinking": False}}
    assert asked(port, engine, max_reasoning_tokens=7, **off) is None
    bound = asked(port, engine, max_reasoning_tokens=7, tool_choice="required")
    assert bound is not None
    assert (bound.kind, bound.most_before) == ("structural_tag", 7)
    form = asked(port, engine, max_reasoning_tokens=7, tools=[], guided_regex="a")
    assert form == Grammar("regex", "a", begin_after=tuple(CLOSE), most_before=7)
    error = ask(port, max_reasoning_tokens=7, tools=[], guided_regex="a", guided_begin_after="<think>").json()["error"]
    assert (error["param"], error["code"]) == ("max_reasoning_tokens", "conflicting_parameters")


def test_a_model_that_opens_its_reasoning_itself(engine: FakeEngine) -> None:
    template = "<|assistant|>{# <think></think> #}{% if tools %}<arg_key>{% endif %}"
    with serving(create_app(engine, TOKENIZER, ApiConfig(chat_template=template))) as port:
        opened = tuple(TOKENIZER.encode("<think>", add_special_tokens=False))
        grammar = asked(port, engine, max_reasoning_tokens=7)
        assert grammar == Grammar("free", begin_after=tuple(CLOSE), most_before=7, opened_by=opened)
        error = ask(port, max_reasoning_tokens=7, tool_choice="required").json()["error"]
        assert (error["param"], error["code"]) == ("max_reasoning_tokens", "conflicting_parameters")


ALLOWED = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
}
Calls = list[tuple[str, Any]]


def called(calls: list[tuple[str, str]]) -> Calls:
    found = [(name, json.loads(arguments)) for name, arguments in calls]
    for name, arguments in found:
        jsonschema.Draft202012Validator(SCHEMAS[name]).validate(arguments)
    return found


async def streamed_calls(client: openai.AsyncOpenAI, given: Any) -> list[tuple[str, str]]:
    calls: dict[int, list[str]] = {}
    async for event in await client.chat.completions.create(**given, stream=True):
        for call in event.choices[0].delta.tool_calls or ():
            text = calls.setdefault(call.index, [call.function.name, ""])
            text[1] += call.function.arguments
    return [(name, arguments) for name, arguments in calls.values()]


async def answer(client: openai.AsyncOpenAI, **body: Any) -> Calls:
    """Return the calls of an answer, checked to be the same streamed and not. A model may call until no token is
    left."""
    given: Any = {"model": "demo", "messages": ASK, "tools": TOOLS, "max_tokens": 400, **body}
    whole, streamed = await asyncio.gather(client.chat.completions.create(**given), streamed_calls(client, given))
    [choice] = whole.choices
    one = body["tool_choice"] != "required" or not body.get("parallel_tool_calls", True)
    assert choice.finish_reason in (("tool_calls",) if one else ("tool_calls", "length")), choice
    calls = called([(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()])
    assert choice.message.content is None or choice.finish_reason == "length"
    assert called(streamed[: len(calls)]) == calls
    return calls


ALL: list[dict[str, Any]] = [
    {"tool_choice": "required", "seed": 6, "max_tokens": 250},
    {"tool_choice": "required", "seed": 4, "parallel_tool_calls": False},
    {"tool_choice": {"type": "function", "function": {"name": "paint"}}, "seed": 5},
    {"tool_choice": NAMED, "temperature": 0.0},
]


async def all_answers(width: int, names: list[str]) -> dict[str, list[Calls]]:
    """Get answers of all formats at once, by format: steps of one row cost nearly as much as those of many."""

    async def of(name: str, engine: Engine) -> list[Calls]:
        template = {"glm": GLM, "kimi_k2": KIMI}.get(name, DEEPSEEK_V31)
        settings = {"chat_template": template, "tool_parser": name, "reasoning_parser": "none"}
        async with openai_client(engine, **settings) as client:
            return list(await asyncio.gather(*(answer(client, **body) for body in ALL)))

    async with demo_engine(width) as engine:
        return dict(zip(names, await asyncio.gather(*(of(name, engine) for name in names)), strict=True))


async def check_demo(*names: str) -> dict[str, list[Calls]]:
    got = await all_answers(3, [*names])
    for name, (some, one, named, stop) in got.items():
        assert len(some) >= 1 or "deepseek" in name  # whose markers are many tokens of this model's
        assert len(one) == 1
        assert [name for name, _ in named] == ["paint"]
        assert stop == [("stop", {})]
    return got


@pytest.mark.long
async def test_the_demo_model_calls_what_it_must() -> None:
    await check_demo("glm")


@pytest.mark.long
async def test_the_demo_model_calls_what_it_must_in_every_format() -> None:
    """The demo model does so at every width, too."""
    got = await check_demo(*sorted(CALL_GRAMMARS))
    assert await all_answers(1, ["glm"]) == {"glm": got["glm"]}


@pytest.mark.parametrize(
    ("choice", "bound", "told"),
    [
        ({"type": "auto"}, False, True),
        ({"type": "none"}, False, False),
        ({"type": "required"}, True, True),
        ({"type": "any"}, True, True),
        ({"type": "function", "name": "stop"}, True, True),
        ({"type": "tool", "name": "stop"}, True, True),  # of Anthropic's clients
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_choices_and_tools_as_other_apis_write_them(choice: dict[str, Any], bound: bool, told: bool, path: str) -> None:
    flat = {"type": "function", "name": "stop", "parameters": SCHEMAS["stop"]}
    said = {"messages": ASK} if "chat" in path else {"input": "Paint it."}
    engine = FakeEngine(say([10]), replace(INFO, max_context=4096, vocab_size=1024))
    body = {
        "model": "tiny",
        **said,
        "tools": [flat],
        "tool_choice": choice,
        "chat_template_kwargs": {"thinking": False},
    }
    with serving(create_app(engine, TOKENIZER, ApiConfig(chat_template=KIMI))) as port:
        answer = httpx.post(f"http://127.0.0.1:{port}{path}", json=body)
    if (path, choice["type"]) == ("/v1/responses", "tool"):
        assert answer.status_code == 400
        return
    assert answer.status_code == 200, answer.text
    [request] = engine.requests
    assert (request.sampling.grammar is not None) is bound
    assert ('"stop"' in TOKENIZER.decode(request.prompt, skip_special_tokens=False)) is told
