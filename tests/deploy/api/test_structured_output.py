"""How a request says what its answer must look like, what is refused and where, and that answers keep to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from demo_server import demo
from fake_engine import INFO, FakeEngine, say, serving
from tiny_tokenizer import tiny

from deploy.api.app import create_app
from deploy.api.constraint import requested_grammar
from deploy.api.errors import ApiError
from deploy.api.protocol import ChatBody
from deploy.config.api import ApiConfig
from workers.protocol.grammar import Grammar

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
            assert (said.status_code, said.json()["error"]["param"]) == (400, "guided_begin_after")


async def test_it_does_not_go_with_calls_of_tools() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "guided_regex": "a", "tools": tools}
    with pytest.raises(ApiError, match="tool_choice is none"):
        await requested_grammar(ChatBody.model_validate(chat), tiny(), INFO)
    body = ChatBody.model_validate({**chat, "tool_choice": "none"})
    assert await requested_grammar(body, tiny(), INFO) == Grammar("regex", "a")


async def valid_answers(width: int, count: int) -> list[str]:
    """Answers of schema-bound requests of all samplers, with others beside them, each checked."""
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    async with demo(width) as client:

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
    assert await valid_answers(3, 6) == await valid_answers(1, 6)


@pytest.mark.long
async def test_the_demo_model_gives_valid_json_200_times() -> None:
    assert await valid_answers(3, 200) == await valid_answers(1, 200)
