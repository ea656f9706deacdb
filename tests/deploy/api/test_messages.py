"""Anthropic's API: its own client against a real server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import jsonschema
import pytest
from demo_server import demo_engine, served
from fake_engine import INFO, EngineFault, FakeEngine, out, say, serving
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from tiny_tokenizer import tiny, with_special
from tool_templates import DEEPSEEK_V31, GLM, KIMI

from deploy.api.anthropic.format import SIGNATURE
from deploy.api.app import create_app
from deploy.config.api import ApiConfig
from deploy.parsing.registry import MARKERS
from workers.protocol.grammar import Grammar

LARGE = replace(INFO, max_context=4096, vocab_size=1024)
TOKENIZER = with_special(*MARKERS["kimi_k2"], "<think>", "</think>")
TOOL: Any = {
    "name": "get_weather",
    "description": "The weather now.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ASK: Any = [{"role": "user", "content": "Weather in Köln?"}]
CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Köln"}<|tool_call_end|><|tool_calls_section_end|>'
)
SAID = f"Hm.</think>I look.{CALL}"
THINK: Any = {"type": "enabled", "budget_tokens": 2000}


class Served:
    """A model that has something to say."""

    def __init__(self, text: str = SAID, template: str = KIMI, width: int = 1, **config: Any) -> None:
        self.ids = TOKENIZER.encode(text, add_special_tokens=False)
        self.engine = FakeEngine(say(self.ids, width=width), LARGE)
        self.app = create_app(self.engine, TOKENIZER, ApiConfig(chat_template=template, **config))

    @contextmanager
    def client(self, key: str = "none") -> Iterator[anthropic.Anthropic]:
        with (
            serving(self.app) as port,
            anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key=key, max_retries=0) as client,
        ):
            yield client

    @property
    def prompt(self) -> str:
        return TOKENIZER.decode(self.engine.requests[-1].prompt, skip_special_tokens=False)


def ask(client: anthropic.Anthropic, **body: Any) -> anthropic.types.Message:
    return client.messages.create(**{"model": "tiny", "max_tokens": 3000, "messages": ASK, **body})


def streamed(client: anthropic.Anthropic, **body: Any) -> tuple[anthropic.types.Message, list[Any]]:
    """The message that the client puts together, and the events."""
    with client.messages.stream(**{"model": "tiny", "max_tokens": 3000, "messages": ASK, **body}) as stream:
        events = list(stream)
        return stream.get_final_message(), events


def content_of(message: anthropic.types.Message) -> list[Any]:
    return [block.model_dump(exclude_none=True) for block in message.content]


def test_thinking_text_and_tools_streamed_and_not() -> None:
    for width in (1, 7, 1000):
        served = Served(width=width)
        with served.client() as client:
            answer = ask(client, tools=[TOOL], thinking=THINK)
            assert content_of(answer) == [
                {"type": "thinking", "thinking": "Hm.", "signature": SIGNATURE},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "functions.get_weather:0", "name": "get_weather", "input": {"city": "Köln"}},
            ]
            assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("tool_use", None, "assistant")
            final, events = streamed(client, tools=[TOOL], thinking=THINK)
            assert content_of(final) == content_of(answer)
            assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", answer.usage.output_tokens)
            assert answer.usage.output_tokens == len(served.ids) + 1
            thinking = TOKENIZER.encode("Hm.</think>", add_special_tokens=False)
            assert answer.usage.output_tokens_details is not None
            assert answer.usage.output_tokens_details.thinking_tokens == len(thinking)
            assert answer.usage.cache_read_input_tokens == 64
            assert answer.usage.input_tokens + 64 == len(served.engine.requests[-1].prompt)
            kinds = [event.type for event in events if event.type.startswith(("message", "content"))]
            assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
            assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
            begun = next(event for event in events if event.type == "message_start").message
            assert (begun.id[:4], begun.usage.input_tokens) == ("msg_", answer.usage.input_tokens)


def test_why_an_answer_ends() -> None:
    with Served("I look at it.").client() as client:
        off: Any = {"thinking": {"type": "disabled"}}
        assert ask(client, **off).stop_reason == "end_turn"
        assert ask(client, max_tokens=2, **off).stop_reason == "max_tokens"
        for answer in (ask(client, stop_sequences=["at"]), streamed(client, stop_sequences=["at"])[0]):
            assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "at")
            assert content_of(answer) == [{"type": "text", "text": "I look "}]
    with Served("").client() as client:
        assert ask(client).content == []
        assert streamed(client)[0].content == []


HISTORY: Any = [
    {"role": "user", "content": [{"type": "text", "text": "Weather", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "functions.get_weather:0", "name": "get_weather", "input": {"city": "Köln"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "functions.get_weather:0", "content": "Rain."},
            {"type": "text", "text": "Well?"},
        ],
    },
]


def test_what_the_model_sees() -> None:
    served = Served()
    with served.client() as client:
        ask(client, messages=HISTORY, tools=[TOOL], system=[{"type": "text", "text": "Be brief."}])
        assert "system<|im_middle|>Be brief.<|im_end|>" in served.prompt
        assert "Weather<|im_end|>" in served.prompt
        assert f"<think>Hm.</think>I look.{CALL}" in served.prompt
        assert "## Return of functions.get_weather:0\nRain.<|im_end|>" in served.prompt
        assert served.prompt.index("Rain.") < served.prompt.index("Well?")
        assert served.prompt.endswith("<think></think>")
        assert '"name": "get_weather"' in served.prompt
        ask(client, messages=[*ASK, {"role": "assistant", "content": "It"}], tools=[TOOL], tool_choice={"type": "none"})
        assert served.prompt.endswith("<|im_middle|>It")
        assert "get_weather" not in served.prompt
        count = client.messages.count_tokens(model="tiny", messages=HISTORY, tools=[TOOL], system="Be brief.")
        ask(client, messages=HISTORY, tools=[TOOL], system="Be brief.")
        assert count.input_tokens == len(served.engine.requests[-1].prompt)
        ask(client, extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 7})
        sampling = served.engine.requests[-1].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.9, 7, 3000)


def test_what_binds_the_answer() -> None:
    served = Served()
    close = tuple(TOKENIZER.encode("</think>", add_special_tokens=False))

    def asked(**body: Any) -> Grammar | None:
        ask(client, **body)
        return served.engine.requests[-1].sampling.grammar

    with served.client() as client:
        assert asked() is None
        bounded = asked(thinking={"type": "enabled", "budget_tokens": 1024})
        assert bounded is not None
        assert (bounded.kind, bounded.begin_after, bounded.most_before) == ("free", close, 1024)
        assert asked(thinking={"type": "adaptive"}) is None
        for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
            grammar = asked(tools=[TOOL], tool_choice=choice)
            assert grammar is not None
            assert (grammar.kind, grammar.begin_after) == ("structural_tag", ())
            assert ("plus" in grammar.text) == (choice["type"] == "any")
        one = asked(tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True})
        assert one is not None
        assert "plus" not in one.text
        assert asked(tools=[TOOL | {"strict": True}]) is not None
        bound = Grammar("json_schema", '{"type": "boolean"}')
        assert asked(output_config={"format": FORM}) == bound
        older = {"output_format": FORM}
        assert asked(extra_body=older) == bound
        assert asked(extra_body=older, output_config={"format": FORM, "effort": "low"}) == bound


FORM = {"type": "json_schema", "schema": {"type": "boolean"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0"),
    ({"messages": [{"role": "system", "content": [{"type": "image"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages.0"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages.0"),
    ({"system": 5}, "system"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": ""}}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "odd"}}}}, "output_config"),
    ({"output_config": {"effort": 5}}, "output_config.effort"),
    ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
    ({"output_format": {"type": "text"}}, "output_format.type"),
    ({"output_format": {"type": "json_schema", "schema": {"type": "odd"}}}, "output_format"),
    ({"output_format": FORM, "output_config": {"format": {**FORM, "schema": {}}}}, "output_format"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"temperature": 1.5}, "temperature"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"max_tokens": 5000}, "messages"),
]


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with serving(Served().app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        yield client


BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 30, "messages": ASK}


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_what_is_wrong_is_told_by_name(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = http.post("/v1/messages", json=BODY | fields)
    assert answer.status_code == 400, answer.text
    assert set(answer.json()) == {"type", "error"}
    assert answer.json()["type"] == "error"
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_tools_that_anthropic_defines_are_left_out_and_named() -> None:
    served = Served()
    kinds = ["web_search_20250305", "bash_20250124", "memory_20250818"]
    own = [{"type": kind, "name": kind.partition("_2")[0]} for kind in kinds]
    with served.client() as client:
        told = client.messages.with_raw_response.create(
            model="tiny", max_tokens=3000, messages=ASK, tools=[*own, TOOL, own[0]]
        )
        assert told.headers["x-latentserve-ignored-tools"] == ", ".join(kinds)
        assert told.parse().stop_reason == "tool_use"
        assert "get_weather" in served.prompt
        assert "web_search" not in served.prompt
        prompt = served.prompt
        plain = client.messages.with_raw_response.create(model="tiny", max_tokens=3000, messages=ASK, tools=[TOOL])
        assert "x-latentserve-ignored-tools" not in plain.headers
        assert served.prompt == prompt
        counted = [
            client.messages.count_tokens(model="tiny", messages=ASK, tools=tools) for tools in ([TOOL], [*own, TOOL])
        ]
        assert counted[0] == counted[1]
        with pytest.raises(anthropic.BadRequestError, match="web_search"):
            ask(client, tools=[*own, TOOL], tool_choice={"type": "tool", "name": "web_search"})


def test_errors_are_those_that_the_client_knows() -> None:
    served = Served(api_keys=("sesame",))
    with served.client("sesame") as client:
        assert ask(client).role == "assistant"
        with pytest.raises(anthropic.NotFoundError) as missing:
            ask(client, model="other")
        assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
        served.engine.script = lambda request: [out(served.ids[0]), EngineFault("rank 1 is silent")]
        with pytest.raises(anthropic.APIStatusError, match="rank 1 is silent"):
            streamed(client)
        served.engine.script = lambda request: [EngineFault("rank 1 is silent")]
        with pytest.raises(anthropic.APIStatusError) as down:
            ask(client)
        assert (down.value.status_code, down.value.body["error"]["type"]) == (503, "overloaded_error")  # type: ignore
    with served.client("wrong") as client, pytest.raises(anthropic.AuthenticationError):
        ask(client)


@pytest.mark.parametrize("stream", [False, True])
def test_the_client_s_own_loop_with_tools(stream: bool) -> None:
    """It asks for a thread first, whose refusal it knows, and goes on without one."""
    served = Served(f"I look.{CALL}")
    cities: list[str] = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather now."""
        cities.append(city)
        served.ids[:] = TOKENIZER.encode("It rains.", add_special_tokens=False)
        served.engine.script = say(served.ids)
        return "Rain"

    with served.client() as client:
        runner = client.beta.messages.tool_runner(
            model="tiny", max_tokens=3000, messages=ASK, tools=[get_weather], stream=stream
        )
        last: Any = None
        for turn in runner:
            last = turn.get_final_message() if stream else turn
        assert [block.text for block in last.content if block.type == "text"] == ["It rains."]
        assert cities == ["Köln"]
        assert "Return of functions.get_weather:0\nRain" in served.prompt
        with pytest.raises(anthropic.BadRequestError) as refused:
            client.beta.messages.create(
                model="tiny", max_tokens=9, messages=ASK, extra_body={"thread": {"type": "create"}}
            )
    assert refused.value.body["error"]["details"] == {"error_code": "thread_unsupported_request"}  # type: ignore[index]


def test_a_model_that_does_not_reason() -> None:
    engine = FakeEngine(say(tiny().encode("Hi.", add_special_tokens=False)), LARGE)
    with (
        serving(create_app(engine, tiny())) as port,
        anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key="x", max_retries=0) as client,
    ):
        assert content_of(ask(client)) == content_of(streamed(client)[0]) == [{"type": "text", "text": "Hi."}]
        with pytest.raises(anthropic.BadRequestError, match="--reasoning-parser"):
            ask(client, thinking=THINK)
        with pytest.raises(anthropic.BadRequestError, match="chat template"):
            ask(client, tools=[TOOL])


def test_calls_that_break_off_are_text() -> None:
    template, text = DEEPSEEK_V31, '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": b c}'
    with Served(text, template).client() as client:
        answer = ask(client, tools=[TOOL])
        assert (content_of(answer), answer.stop_reason) == ([{"type": "text", "text": 'f{"a": b c}'}], "end_turn")
        final, _ = streamed(client, tools=[TOOL])
        assert (content_of(final)[-1], final.stop_reason) == ({"type": "text", "text": 'f{"a": b c}'}, "end_turn")


def test_numbers_of_any_size_in_a_call() -> None:
    """Numbers come as the model wrote them."""
    text = CALL.replace('"Köln"', str(10**30))
    with Served(f"</think>{text}").client() as client:
        raw = client.messages.with_raw_response.create(model="tiny", max_tokens=3000, messages=ASK, tools=[TOOL])
        assert json.loads(raw.http_response.read())["content"][-1]["input"] == {"city": 10**30}


def test_what_is_answered_is_described(http: httpx.Client) -> None:
    described = http.get("/openapi.json").json()

    def problems(path: str, value: Any, kind: str, status: str = "200") -> list[str]:
        schema = described["paths"][path]["post"]["responses"][status]["content"][kind]["schema"]
        schema = schema.get("x-event-schema", schema)
        whole = {**schema, "components": described["components"]}
        return [error.message for error in Draft202012Validator(whole).iter_errors(value)]

    tools = {"max_tokens": 3000, "tools": [TOOL], "thinking": THINK}
    for body in (BODY | tools, BODY | {"stop_sequences": ["look"]}):
        answer = http.post("/v1/messages", json=body)
        assert problems("/v1/messages", answer.json(), "application/json") == []
        for event in http.post("/v1/messages", json=body | {"stream": True}).text.strip().split("\n\n"):
            name, data = event.split("\n")
            value = json.loads(data.removeprefix("data: "))
            assert name == f"event: {value['type']}"
            assert problems("/v1/messages", value, "text/event-stream") == []
        content = described["paths"]["/v1/messages"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        whole = {**content, "components": described["components"]}
        assert list(Draft202012Validator(whole).iter_errors(body)) == []
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        assert problems(path, http.post(path, json={}).json(), "application/json", "400") == []
    counted = http.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": ASK})
    assert problems("/v1/messages/count_tokens", counted.json(), "application/json") == []


VALUES = st.sampled_from(
    [None, True, 0, 1, -1, 0.5, "", "hi", [], ["hi"], [5], {}, [{"type": "text"}], {"type": "any"}, {"type": "enabled"}]
)
NAMES = ["messages", "system", "tools", "tool_choice", "thinking", "output_config", "stop_sequences", "max_tokens"]
NAMES += ["temperature", "top_k", "stream", "model", "metadata", "cache_control", "mcp_servers"]
TURNS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant"])},
        optional={"content": VALUES | st.lists(st.dictionaries(st.sampled_from(["type", "text", "input"]), VALUES))},
    ),
    max_size=3,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3), st.none() | TURNS)
def test_nothing_that_a_client_sends_is_a_failure(
    http: httpx.Client, fields: dict[str, Any], turns: list[Any] | None
) -> None:
    body = {"max_tokens": 5, **fields, **({} if turns is None else {"messages": turns})}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = http.post(path, json=BODY | body)
        assert answer.status_code in (200, 400, 404), answer.text
        if answer.status_code != 200:
            assert answer.json()["type"] == "error"


@pytest.mark.long
async def test_the_demo_model_calls_a_tool() -> None:
    schema = {
        "type": "object",
        "properties": {"color": {"enum": ["red", "green"]}, "size": {"type": "integer", "minimum": 1, "maximum": 40}},
        "required": ["color", "size"],
        "additionalProperties": False,
    }
    asked: Any = {
        "model": "demo",
        "max_tokens": 300,
        "messages": [{"role": "user", "content": "Paint it."}],
        "tools": [{"name": "paint", "input_schema": schema}],
        "tool_choice": {"type": "tool", "name": "paint"},
        "extra_body": {"temperature": 0.0},
    }
    async with (
        demo_engine(3) as engine,
        served(engine, chat_template=GLM) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0) as client,
    ):
        answer = await client.messages.create(**asked)
        [call] = answer.content
        assert (answer.stop_reason, call.type) == ("tool_use", "tool_use")
        jsonschema.Draft202012Validator(schema).validate(call.input)
        async with client.messages.stream(**asked) as stream:
            final = await stream.get_final_message()
        assert [block.input for block in final.content] == [call.input]
        greedy: Any = {"temperature": 0.0}
        text = await client.messages.create(model="demo", max_tokens=9, messages=asked["messages"], extra_body=greedy)
        assert text.stop_reason == "max_tokens"


def test_turns_of_the_system_stand_where_they_were_said() -> None:
    turns = [*ASK, {"role": "assistant", "content": "Hm."}, {"role": "system", "content": "Be brief."}, *ASK]
    served = Served("Fine.")
    with served.client() as client:
        ask(client, messages=turns)
        said = served.prompt
        assert said.index("Hm.") < said.index("Be brief.") < said.rindex("Weather")
        counted = client.messages.count_tokens(model="tiny", messages=turns)
        assert counted.input_tokens == len(served.engine.requests[-1].prompt)


OF_OTHER_SERVERS: Any = [
    {"type": "thinking", "thinking": "Hm.", "signature": "EqQBCg"},
    {"type": "redacted_thinking", "data": "EmwKAhgB"},
    {"type": "text", "text": "I look.", "cache_control": {"type": "ephemeral"}, "citations": None},
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
    {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
    {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Bonn"}},
]
SHOWN: Any = [
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}},
    {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA"}},
    {"type": "document", "title": "Notes", "source": {"type": "text", "media_type": "text/plain", "data": "A note."}},
    {"type": "tool_reference", "tool_name": "get_weather"},
    {
        "type": "search_result",
        "title": "Found",
        "source": "https://x",
        "content": [{"type": "text", "text": "So it is."}],
    },
]


def test_what_a_model_cannot_see_is_words_in_its_history() -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": SHOWN}
    turns = [
        {"role": "user", "content": [*SHOWN, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": OF_OTHER_SERVERS},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]
    served = Served("Fine.")
    with served.client() as client:
        assert content_of(ask(client, messages=turns, tools=[TOOL]))
        for words in (
            "[An image was here, which this model cannot see.]",
            "[A document was here, which this model cannot read.]",
            "Notes",
            "A note.",
            "[The tool get_weather can be called.]",
            "So it is.",
            "[Part of the reasoning was withheld.]",
            "[The server called its tool web_search.]",
            "[The server's tool gave a result: web_search.]",
            "And now?",
        ):
            assert words in served.prompt, words
        assert served.prompt.count("[An image was here") == 2
        client.messages.count_tokens(model="tiny", messages=turns, tools=[TOOL])


@pytest.mark.parametrize("kind", ["image", "document", "container_upload"])
def test_what_the_newest_turn_shows_is_refused_if_it_cannot_be_seen(http: httpx.Client, kind: str) -> None:
    block = {"type": kind, "source": {"type": "url", "url": "https://x/y"}}
    turns = [{"role": "user", "content": [block, {"type": "text", "text": "What is it?"}]}]
    answer = http.post("/v1/messages", json={**BODY, "messages": turns})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    text = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "A note."}}
    assert http.post("/v1/messages", json={**BODY, "messages": [{"role": "user", "content": [text]}]}).is_success


def test_thinking_is_signed_and_its_signature_comes_back() -> None:
    served = Served("Hm.</think>Fine.")
    with served.client() as client:
        message, events = streamed(client, thinking=THINK)
        signed = [
            event.delta.signature
            for event in events
            if getattr(event, "delta", None)
            and event.type == "content_block_delta"
            and event.delta.type == "signature_delta"
        ]
        assert len(signed) == 1
        assert signed[0]
        assert message.content[0].signature == signed[0] == ask(client, thinking=THINK).content[0].signature
        turns = [*ASK, {"role": "assistant", "content": content_of(message)}, *ASK]
        assert ask(client, messages=turns, thinking=THINK).content


@pytest.mark.parametrize(
    "fields",
    [
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        {"output_config": {"effort": "high"}},
        {"thinking": {"type": "adaptive", "display": "summarized"}, "output_config": {"effort": "max"}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}, "max_tokens": 2000},
        {"thinking": {"type": "disabled"}},
        {"thinking": {"type": "disabled", "budget_tokens": 0}},
        {"thinking": {"type": "adaptive", "budget_tokens": -1}},
        {"cache_control": {"type": "ephemeral"}, "metadata": {"user_id": "x"}, "service_tier": "auto"},
        {"system": [{"type": "text", "text": "Hm.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]},
        {"tools": [{**TOOL, "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}]},
    ],
)
def test_what_agents_send_is_taken(http: httpx.Client, fields: dict[str, Any]) -> None:
    beta = {
        "anthropic-beta": "context-management-2025-06-27,interleaved-thinking-2025-05-14",
        "anthropic-version": "2023-06-01",
    }
    for path in ("/v1/messages?beta=true", "/v1/messages/count_tokens?beta=true"):
        answer = http.post(path, json={**BODY, **fields}, headers=beta)
        assert answer.is_success, answer.text
        assert answer.headers["request-id"] == answer.headers["x-request-id"]


def test_system_turns_change_tools_and_the_effort() -> None:
    """As the betas mid-conversation-system and inline-tools have it."""
    served = Served(template="{{ reasoning_effort }}" + KIMI)
    other = {**TOOL, "name": "get_time"}
    turns = [
        {
            "role": "system",
            "content": [
                {"type": "text", "text": "New tools."},
                {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": other}},
                {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "get_weather"}},
            ],
        },
        {"role": "system", "content": "For this turn alone.", "clear_at": "next_user_message"},
        {"role": "system", "output_config": {"effort": "max"}},
    ]
    back = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "get_weather"}}
    with served.client() as client:
        ask(client, messages=[*ASK, *turns], tools=[TOOL], thinking={"type": "adaptive"})
        assert served.prompt.startswith("max")
        assert ('"get_time"' in served.prompt, '"get_weather"' in served.prompt) == (True, False)
        for words in ("New tools.", "[The tool get_time can be called from here on.]", "For this turn alone."):
            assert words in served.prompt
        assert "[The tool get_weather can no longer be called.]" in served.prompt
        said = {"role": "assistant", "content": [{"type": "fallback", "to": {}}, {"type": "text", "text": "Yes."}]}
        more = [*ASK, *turns, said, {"role": "system", "content": [back]}, *ASK]
        ask(client, messages=more, tools=[TOOL], thinking={"type": "between_tools"})
        assert "For this turn alone." not in served.prompt
        assert "Yes." in served.prompt
        assert all(f'"{name}"' in served.prompt for name in ("get_time", "get_weather"))
        counted = client.messages.count_tokens(model="tiny", messages=more, tools=[TOOL], thinking={"type": "adaptive"})
        assert counted.input_tokens == len(served.engine.requests[-1].prompt)


def test_a_tool_that_comes_back_is_the_one_that_was_defined() -> None:
    served = Served()
    other = {**TOOL, "name": "get_time"}

    def change(kind: str, name: str, definition: Any = None) -> dict[str, Any]:
        tool = {"type": "tool_reference", "name": name}
        tool = tool if definition is None else {"type": "tool_definition", "definition": definition}
        return {"role": "system", "content": [{"type": kind, "tool": tool}]}

    newer = {**TOOL, "description": "The newer one."}
    turns = [change("tool_addition", "get_time", other), change("tool_addition", "get_weather", newer)]
    turns += [change("tool_removal", name) for name in ("get_time", "get_weather")]
    with served.client() as client:
        ask(client, messages=[*ASK, *turns], tools=[TOOL])
        assert not any(f'"{name}"' in served.prompt for name in ("get_time", "get_weather"))
        turns += [change("tool_addition", name) for name in ("get_time", "get_weather")]
        ask(client, messages=[*ASK, *turns], tools=[TOOL])
        assert all(f'"{name}"' in served.prompt for name in ("get_time", "get_weather"))
        assert "The newer one." in served.prompt


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_what_is_wrong_beside_system_turns_is_told(http: httpx.Client, path: str) -> None:
    addition = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": TOOL}}
    change = {"role": "system", "content": [addition]}
    for tools, status in ((None, 200), ([TOOL], 200), ("x", 400), ({}, 400), (5, 400)):
        answer = http.post(path, json={**BODY, "messages": [*ASK, change], "tools": tools})
        assert answer.status_code == status, (tools, answer.text)
    config = {"role": "system", "output_config": {"effort": "low", "format": FORM}}
    answer = http.post(path, json={**BODY, "messages": [*ASK, config]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert "output_config.format" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "block", ["tool", {"type": 5}, {"type": "tool_definition", "definition": {"name": ["x"]}}, None]
)
def test_changes_of_tools_that_are_none_end_no_conversation(http: httpx.Client, block: Any) -> None:
    change = {"role": "system", "content": [{"type": "tool_addition", "tool": block}, 5], "output_config": "x"}
    answer = http.post("/v1/messages", json={**BODY, "messages": [*ASK, change, *ASK], "output_config": None})
    assert answer.status_code in (200, 400), answer.text


def test_a_summary_in_place_of_an_answer_is_refused(http: httpx.Client) -> None:
    error = http.post("/v1/messages", json={**BODY, "compaction": {"type": "summary"}}).json()["error"]
    assert (error["param"], error["code"]) == ("compaction", "unsupported_parameter")
    assert http.post("/v1/messages/count_tokens", json={**BODY, "compaction": {"type": "summary"}}).is_success


def test_too_long_is_said_as_agents_know_it(http: httpx.Client) -> None:
    long = [{"role": "user", "content": "the quick brown fox " * 3000}]
    error = http.post("/v1/messages", json={**BODY, "messages": long}).json()["error"]
    assert error["type"] == "invalid_request_error"
    assert re.fullmatch(r"prompt is too long: \d+ tokens > 4096 maximum", error["message"])
    error = http.post("/v1/messages", json={**BODY, "max_tokens": 4090}).json()["error"]
    assert error["type"] == "invalid_request_error"
    assert re.match(r"input length and `max_tokens` exceed context limit: \d+ \+ 4090 > 4096, ", error["message"])
