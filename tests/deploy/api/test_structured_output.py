"""Structured output: how a request asks for it, what is refused and where, and that answers keep to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from demo_server import demo
from fake_engine import INFO, FakeEngine, PushEngine, RequestFailed, out, say, serving
from tiny_tokenizer import tiny

from deploy.api.app import create_app
from deploy.api.http.errors import ApiError
from deploy.api.job.bodies import FORMS
from deploy.api.job.chat_bodies import ChatBody
from deploy.api.job.constraint import requested_grammar
from deploy.api.job.model import Reader
from deploy.config.api import ApiConfig
from tests.workers.grammar.grammar_walk import takes
from workers.protocol.grammar import Grammar
from workers.protocol.messages import Request

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["list", "dict", "set"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "ab"}}


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(say([10, 11]))


@pytest.fixture(scope="module")
def port(engine: FakeEngine) -> Iterator[int]:
    with serving(create_app(engine, tiny())) as port:
        yield port


def ask(port: int, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 5, **fields}
    return httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=30)


ASKED: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Grammar("json")),
    ({"response_format": {"type": "json_object", "schema": {}}}, Grammar("json")),
    (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        Grammar("json_schema", json.dumps(SCHEMA), False),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        Grammar("json_schema", json.dumps(SCHEMA), True),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        Grammar("json_schema", json.dumps(SCHEMA), False),
    ),
    ({"guided_json": SCHEMA}, Grammar("json_schema", json.dumps(SCHEMA))),
    ({"guided_json": json.dumps(SCHEMA)}, Grammar("json_schema", json.dumps(SCHEMA))),
    ({"guided_regex": "[ab]+"}, Grammar("regex", "[ab]+")),
    ({"guided_choice": ["é", 'b"']}, Grammar("choice", '["é", "b\\""]')),
    ({"guided_grammar": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"')),
    ({"structural_tag": TAG}, Grammar("structural_tag", json.dumps(TAG))),
    ({"response_format": TAG}, Grammar("structural_tag", json.dumps(TAG))),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", json.dumps(SCHEMA))),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Grammar("json_schema", json.dumps(SCHEMA))),
    ({"structured_outputs": {"regex": "[ab]+", "disable_fallback": True}}, Grammar("regex", "[ab]+")),
    ({"structured_outputs": {"choice": ["é", 'b"'], "json": None}}, Grammar("choice", '["é", "b\\""]')),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Grammar("ebnf", 'root ::= "a"')),
    ({"structured_outputs": {"json_object": True, "whitespace_pattern": None}}, Grammar("json")),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, Grammar("structural_tag", json.dumps(TAG))),
    ({"structured_outputs": {}}, None),
    ({"structured_outputs": {"json_object": False, "disable_any_whitespace": False}}, None),
    ({"structured_outputs": {"regex": None}, "guided_regex": "a"}, Grammar("regex", "a")),
    (
        {"structured_outputs": {"regex": "a"}, "guided_begin_after": "<think>"},
        Grammar("regex", "a", begin_after=tuple(tiny().encode("<think>", add_special_tokens=False))),
    ),
    (
        {"guided_regex": "a", "guided_begin_after": "<think>"},
        Grammar("regex", "a", begin_after=tuple(tiny().encode("<think>", add_special_tokens=False))),
    ),
]


@pytest.mark.parametrize(("fields", "grammar"), ASKED)
def test_the_engine_is_asked_for_what_the_request_says(
    port: int, engine: FakeEngine, fields: dict[str, Any], grammar: Grammar | None
) -> None:
    answer = ask(port, ignore_eos=True, **fields)
    assert answer.status_code == 200, answer.text
    sampling = engine.requests[-1].sampling
    assert sampling.grammar == grammar
    assert (1 in sampling.stop_ids) == (grammar is not None)  # a complete grammar ends, whatever is ignored


@pytest.mark.parametrize("field", ["guided_grammar", "structured_outputs"])
def test_a_grammar_may_be_in_the_syntax_of_lark(port: int, engine: FakeEngine, field: str) -> None:
    lark = 'start: "<" start* ">" | WORD\nWORD: /[a-z]+/'
    answer = ask(port, **{field: lark if field == "guided_grammar" else {"grammar": lark}})
    assert answer.status_code == 200, answer.text
    grammar = engine.requests[-1].sampling.grammar
    assert grammar is not None
    assert all(takes(grammar, text) for text in ("ab", "<>", "<<a><>b>"))
    assert not any(takes(grammar, text) for text in ("", "A", "<a", "a>"))


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex", "only one of them"),
    ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice", "only one of them"),
    ({"response_format": {"type": "xml"}}, "response_format", "'xml' is not supported"),
    ({"response_format": {}}, "response_format", "with a type"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "a name and a schema"),
    ({"response_format": "text"}, "response_format", "dictionary"),
    ({"guided_json": {"type": "strange"}}, "guided_json", "#: type 'strange'"),
    ({"guided_json": '{"type": '}, "guided_json", "no JSON"),
    (
        {"guided_json": {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}},
        "guided_json",
        "#/properties/a: uniqueItems is not supported",
    ),
    ({"guided_regex": "(a"}, "guided_regex", "position 1: the parenthesis"),
    ({"guided_regex": "(?=a)b"}, "guided_regex", "position 1: lookahead"),
    ({"guided_regex": "(" * 99 + "a" + ")" * 99}, "guided_regex", "nested"),
    ({"guided_regex": "a" * (1 << 17) + "b"}, "guided_regex", "longer than"),
    ({"guided_grammar": 'root ::= "a" b'}, "guided_grammar", "line 1, column"),
    ({"guided_choice": []}, "guided_choice", "list of strings"),
    ({"guided_choice": [""]}, "guided_choice", "none of them empty"),
    ({"guided_choice": [1]}, "guided_choice.0", "string"),
    ({"structural_tag": {"type": "structural_tag", "format": {"type": "xx"}}}, "structural_tag", "not recognized"),
    ({"structural_tag": {"structures": []}}, "structural_tag", "format"),
    ({"guided_grammar": 'start: "a" b'}, "guided_grammar", "b is not defined"),
    ({"structured_outputs": {"grammar": 'start: "a" b'}}, "structured_outputs", "in the syntax of Lark: b is not"),
    ({"structured_outputs": {"grammar": 'root ::= "a" b'}}, "structured_outputs", "line 1, column"),
    ({"structured_outputs": {"json": {"type": "strange"}}}, "structured_outputs", "#: type 'strange'"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "an object or a string"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "list of strings"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "only one of them"),
    ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "structured_outputs", "only one of them"),
    (
        {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
        "structured_outputs",
        "whitespace_pattern is not",
    ),
    ({"structured_outputs": {"json": {}, "disable_any_whitespace": True}}, "structured_outputs", "disable_any_wh"),
    ({"structured_outputs": "json"}, "structured_outputs", "dictionary"),
    ({"guided_begin_after": "<think>"}, "guided_begin_after", "goes with"),
    ({"guided_regex": "a", "guided_begin_after": "the quick"}, "guided_begin_after", "one token"),
]


@pytest.mark.parametrize(("fields", "param", "text"), REFUSED)
def test_what_cannot_be_enforced_is_refused_by_name(
    port: int, engine: FakeEngine, fields: dict[str, Any], param: str, text: str
) -> None:
    engine.requests.clear()
    answer = ask(port, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert text in error["message"]
    assert ".cc" not in error["message"]
    assert not engine.requests


def test_without_a_tokenizer_it_is_refused() -> None:
    with serving(create_app(FakeEngine(say([10])), None)) as port:
        answer = ask(port, prompt=[5], guided_regex="a")
    assert answer.status_code == 400
    assert "no tokenizer" in answer.json()["error"]["message"]


def test_behind_reasoning(engine: FakeEngine) -> None:
    """A model that always thinks is free to; `</think>` must be one token, here `<think>` stands in for it."""
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "guided_regex": "a"}
    with serving(create_app(engine, tiny(), ApiConfig(reasoning_parser="deepseek_r1"))) as port:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        said = httpx.post(url, json={**chat, "guided_begin_after": "<think>"}, timeout=30)
        assert said.status_code == 200, said.text
        think = tuple(tiny().encode("<think>", add_special_tokens=False))
        assert engine.requests[-1].sampling.grammar == Grammar("regex", "a", begin_after=think)
        close = tiny().encode("</think>", add_special_tokens=False)
        said = httpx.post(url, json=chat, timeout=30)
        if len(close) == 1:
            assert engine.requests[-1].sampling.grammar == Grammar("regex", "a", begin_after=tuple(close))
        else:
            assert (said.status_code, said.json()["error"]["param"]) == (400, "guided_regex")


async def test_it_holds_alone_where_no_tool_may_be_called() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "guided_regex": "a", "tools": tools}
    body = ChatBody.model_validate({**chat, "tool_choice": "none"})
    assert (await requested_grammar(body, tiny(), INFO)).grammar == Grammar("regex", "a")


FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
STRICT = {"type": "function", "function": {**FUNCTION["function"], "strict": True}}
ASKED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5, "stop": ["x"], "logprobs": True, "top_logprobs": 2, "parallel_tool_calls": False},
    {"tool_choice": "none"},
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "nobody knows"}},
    {"guided_json": {}},
    {"guided_regex": ""},
    {"guided_choice": []},
    {"guided_grammar": ""},
    {"structural_tag": {}},
    {"guided_begin_after": ""},
    {"max_reasoning_tokens": 5},
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"tools": [FUNCTION]},
    {"tools": [STRICT]},
    {"tools": [FUNCTION], "tool_choice": "none"},
    {"tools": [FUNCTION], "guided_regex": "a"},
]


@pytest.mark.parametrize("fields", ASKED)
async def test_what_is_not_looked_at_constrains_nothing(fields: dict[str, Any]) -> None:
    """No grammar and no error is lost where a body says that nothing in it constrains the answer."""
    body = ChatBody.model_validate({"model": "tiny", "messages": [{"role": "user", "content": "x"}], **fields})
    reading = Reader(tiny(), ApiConfig(tool_parser="deepseek_v3")).reading(body, "")
    try:
        found: Any = (await requested_grammar(body, tiny(), INFO, reading)).grammar
    except ApiError as error:
        found = error
    assert found is None or body.constrained
    assert set(fields).isdisjoint(FORMS) or body.constrained
    plain = {"temperature", "stop", "logprobs", "top_logprobs", "parallel_tool_calls"}
    assert not (set(fields) <= plain and body.constrained)


async def valid_answers(width: int, count: int, rows: int) -> list[str]:
    """Answers of schema-bound requests of all samplers, with others beside them, each checked."""
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    async with demo(width, max_rows=rows) as client:

        async def bound(seed: int) -> str:
            messages = [{"role": "user", "content": f"Describe thing number {seed}."}]
            answer = await client.chat.completions.create(
                model="demo",
                messages=messages,  # type: ignore[arg-type]
                response_format=form,  # type: ignore[arg-type]
                seed=seed,
                temperature=(0.0, 0.7, 1.0)[seed % 3],
                max_tokens=400,
            )
            text = answer.choices[0].message.content or ""
            assert answer.choices[0].finish_reason == "stop", text
            jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(text))
            return text

        async def free(seed: int) -> None:
            await client.completions.create(model="demo", prompt="def f(", seed=seed, max_tokens=60)

        wanted = [bound(seed) for seed in range(count)]
        beside = [free(seed) for seed in range(count // 4)]
        return list((await asyncio.gather(*wanted, *beside))[:count])  # type: ignore[arg-type]


@pytest.mark.long
async def test_the_demo_model_gives_valid_json_at_every_width() -> None:
    assert await valid_answers(3, 6, 16) == await valid_answers(1, 6, 16)


@pytest.mark.long
async def test_the_demo_model_gives_valid_json_200_times() -> None:
    """There are more requests than rows. A step of many rows costs little more than one of few."""
    assert await valid_answers(3, 200, 64) == await valid_answers(1, 200, 64)


def first_stop(text: str, stops: list[str]) -> tuple[str, str]:
    """Return the text before the stop that ends first, and that stop; of those that end together the longest."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, ""


STOPS = [
    ['"size"'],  # the schema leads every text there
    ["e", '": '],
    ['ame": "', 'name": "x?'],
    ["ind", "}"],
    ["no such text", '"kind": "lisp"'],
]


async def stopped_answers(width: int) -> list[list[tuple[str, str | None, Any, int]]]:
    """Text, why it ended and at which stop, and tokens: of schema-bound requests without stops, then with each list;
    once as they are, and once streamed, all at the same time."""
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    async with demo(width, max_rows=60) as client:

        async def bound(
            stream: bool, seed: int, stops: list[str], *, include: bool = False
        ) -> tuple[str, str | None, Any, int]:
            asked: dict[str, Any] = {
                "model": "demo",
                "messages": [{"role": "user", "content": f"Describe thing number {seed}."}],
                "response_format": form,
                "seed": seed,
                "temperature": (0.0, 1.0)[seed % 2],
                "max_tokens": 400,
                "extra_body": {"include_stop_str_in_output": include},
            }
            if stops:
                asked["stop"] = stops
            if not stream:
                answer = await client.chat.completions.create(**asked)
                choice = answer.choices[0]
                reason = (choice.model_extra or {}).get("stop_reason")
                return choice.message.content or "", choice.finish_reason, reason, answer.usage.completion_tokens
            text, finish, reason, count = "", None, None, 0
            chunks = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
            async for chunk in chunks:
                for choice in chunk.choices:
                    assert finish is None
                    text += choice.delta.content or ""
                    finish, reason = choice.finish_reason, (choice.model_extra or {}).get("stop_reason")
                count = chunk.usage.completion_tokens if chunk.usage else count
            return text, finish, reason, count

        async def all_of_them(stream: bool) -> list[tuple[str, str | None, Any, int]]:
            wanted = [bound(stream, seed, stops) for stops in ([], *STOPS) for seed in range(4)]
            wanted += [bound(stream, seed, STOPS[0], include=True) for seed in range(4)]
            return list(await asyncio.gather(*wanted))

        return list(await asyncio.gather(*(all_of_them(stream) for stream in (False, True))))


@pytest.mark.long
async def test_stop_strings_cut_the_same_text_at_every_width_streamed_or_not() -> None:
    plain, streamed = await stopped_answers(1)
    assert streamed == plain
    whole = [text for text, *_ in plain[:4]]
    for text, (_, finish, reason, _) in zip(whole, plain[:4], strict=True):
        jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(text))
        assert (finish, reason) == ("stop", None)
    want = [first_stop(text, stops) for stops in STOPS for text in whole]
    want += [(before + stop, stop) for before, stop in (first_stop(text, STOPS[0]) for text in whole)]
    for (text, finish, reason, tokens), (before, stop) in zip(plain[4:], want, strict=True):
        assert (text, finish, reason) == (before, "stop", stop or None)
        assert not stop or tokens < 400
        if stop:
            with pytest.raises(json.JSONDecodeError):
                json.loads(text)
    assert {stop for _, stop in want} > {"", '"size"'}
    for width in (2, 3, 4):
        assert await stopped_answers(width) == [plain, plain], f"width {width}"


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_before_a_dead_end_is_the_end(width: int, stream: bool) -> None:
    """The engine sends the tokens that stand, and then why there are no more."""
    ids = tiny().encode("the fox STOP over", add_special_tokens=False)

    def script(request: Request) -> Iterator[Any]:
        for begin in range(0, len(ids), width):
            yield out(*ids[begin : begin + width])
        yield RequestFailed("it allows no token", dead_end=True)

    with serving(create_app(PushEngine(script), tiny())) as port:
        cut = ask(port, stop=["STOP"], stream=stream, guided_regex="[a-z STOP]+", max_tokens=99)
        stuck = ask(port, stop=["STAY"], stream=stream, guided_regex="[a-z STOP]+", max_tokens=99)
    assert cut.status_code == 200
    if not stream:
        choice = cut.json()["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("the fox ", "stop", "STOP")
        assert (stuck.status_code, stuck.json()["error"]["code"]) == (400, "grammar_stuck")
        return
    cut_events, stuck_events = (
        [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        for answer in (cut, stuck)
    )
    assert "".join(event["choices"][0]["text"] for event in cut_events) == "the fox "
    assert cut_events[-1]["choices"][0]["finish_reason"] == "stop"
    shown = "".join(event["choices"][0]["text"] for event in stuck_events if "choices" in event)
    assert shown == "the fox STOP over"
    assert stuck_events[-1]["error"]["code"] == "grammar_stuck"
