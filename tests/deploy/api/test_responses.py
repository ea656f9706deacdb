"""OpenAI's Responses API: the openai client against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from demo_server import demo_engine, openai_client
from fake_engine import INFO, EngineFault, FakeEngine, out, say, serving
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from openai.types.responses import ResponseErrorEvent
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from tiny_tokenizer import tiny, with_special
from tool_templates import DEEPSEEK_V31, GLM, KIMI

from deploy.api.app import create_app
from deploy.api.job.unsupported import refused_at
from deploy.api.responses.bodies import ResponsesBody
from deploy.api.responses.routes import ResponseStore
from deploy.config.api import ApiConfig
from deploy.parsing.registry import MARKERS
from workers.protocol.grammar import Grammar

LARGE = replace(INFO, max_context=4096, vocab_size=1024)
TOKENIZER = with_special(*MARKERS["kimi_k2"], "<think>", "</think>")
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather now.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Köln"}<|tool_call_end|><|tool_calls_section_end|>'
)
SAID = f"Hm.</think>I look.{CALL}"
OFF: Any = {"chat_template_kwargs": {"thinking": False}}


class Served:
    """A model that has something to say."""

    def __init__(self, text: str = SAID, template: str = KIMI, width: int = 1, **config: Any) -> None:
        self.ids = TOKENIZER.encode(text, add_special_tokens=False)
        self.engine = FakeEngine(say(self.ids, width=width), LARGE)
        self.app = create_app(self.engine, TOKENIZER, ApiConfig(chat_template=template, **config))

    @contextmanager
    def client(self) -> Iterator[openai.OpenAI]:
        with (
            serving(self.app) as port,
            openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client,
        ):
            yield client

    @property
    def prompt(self) -> str:
        return TOKENIZER.decode(self.engine.requests[-1].prompt, skip_special_tokens=False)


def ask(client: openai.OpenAI, **body: Any) -> openai.types.responses.Response:
    return client.responses.create(**{"model": "tiny", "input": "Weather in Köln?", **body})


def streamed(client: openai.OpenAI, **body: Any) -> tuple[Any, list[Any]]:
    """The response that the client puts together, and the events."""
    with client.responses.stream(**{"model": "tiny", "input": "Weather in Köln?", **body}) as stream:
        events = list(stream)
        return stream.get_final_response(), events


def output_of(response: Any) -> list[Any]:
    found = []
    for item in response.output:
        if item.type == "reasoning":
            found.append(("reasoning", "".join(part.text for part in item.content), item.status))
        elif item.type == "message":
            found.append(("message", "".join(part.text for part in item.content), item.status))
        else:
            found.append((item.type, item.name, json.loads(item.arguments), item.call_id, item.status))
    return found


WHOLE = [
    ("reasoning", "Hm.", "completed"),
    ("message", "I look.", "completed"),
    ("function_call", "get_weather", {"city": "Köln"}, "functions.get_weather:0", "completed"),
]


def test_reasoning_text_and_calls_streamed_and_not() -> None:
    for width in (1, 7, 1000):
        served = Served(width=width)
        with served.client() as client:
            answer = ask(client, tools=[TOOL], metadata={"a": "b"})
            assert output_of(answer) == WHOLE
            assert (answer.status, answer.output_text, answer.metadata) == ("completed", "I look.", {"a": "b"})
            assert (answer.tools[0].name, answer.tool_choice) == ("get_weather", "auto")
            final, events = streamed(client, tools=[TOOL])
            assert output_of(final) == WHOLE
            assert final.usage == answer.usage
            assert answer.usage is not None
            assert answer.usage.output_tokens == len(served.ids) + 1
            thinking = TOKENIZER.encode("Hm.</think>", add_special_tokens=False)
            assert answer.usage.output_tokens_details.reasoning_tokens == len(thinking)
            assert answer.usage.input_tokens == len(served.engine.requests[-1].prompt)
            assert answer.usage.input_tokens_details.cached_tokens == 64
            raw = list(client.responses.create(model="tiny", input="Hi", tools=[TOOL], stream=True))
            assert [event.sequence_number for event in raw] == list(range(len(raw)))
            kinds = [event.type for event in raw]
            assert kinds[:2] == ["response.created", "response.in_progress"]
            assert kinds[-1] == "response.completed"
            assert [kind for kind in kinds if "output_item" in kind] == 3 * [
                "response.output_item.added",
                "response.output_item.done",
            ]
            text = "".join(event.delta for event in raw if event.type == "response.output_text.delta")
            assert text == "I look."
            assert len({event.type for event in events}) > 8


def test_an_answer_that_is_cut() -> None:
    with Served("I look at it.").client() as client:
        cut: Any = {"model": "tiny", "input": "Hi", "max_output_tokens": 2, "extra_body": OFF}
        *_, last = client.responses.create(**cut, stream=True)
        assert last.type == "response.incomplete"
        for answer in (ask(client, **cut), last.response):
            assert answer.status == "incomplete"
            assert answer.incomplete_details.reason == "max_output_tokens"
            assert answer.output[-1].status == "incomplete"
    with Served("").client() as client:
        assert ask(client).output == streamed(client)[0].output == []


def test_calls_that_break_off_are_text() -> None:
    text = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": b c}'
    with Served(text, DEEPSEEK_V31).client() as client:
        assert output_of(ask(client, tools=[TOOL])) == [("message", 'f{"a": b c}', "completed")]
        events = list(client.responses.create(model="tiny", input="Hi", tools=[TOOL], stream=True))
        assert [event.item.status for event in events if event.type == "response.output_item.done"] == [
            "incomplete",
            "completed",
        ]
        assert output_of(events[-1].response) == [("message", 'f{"a": b c}', "completed")]


HISTORY: Any = [
    {"role": "developer", "content": "Be kind."},
    {"role": "user", "content": [{"type": "input_text", "text": "Weather"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
    {
        "type": "function_call",
        "call_id": "functions.get_weather:0",
        "name": "get_weather",
        "arguments": '{"city": "Köln"}',
    },
    {"type": "function_call_output", "call_id": "functions.get_weather:0", "output": "Rain."},
    {"role": "user", "content": "Well?"},
]


def test_what_the_model_sees() -> None:
    served = Served()
    with served.client() as client:
        ask(client, input=HISTORY, tools=[TOOL], instructions="Be brief.", extra_body=OFF)
        assert "system<|im_middle|>Be brief.\n\nBe kind.<|im_end|>" in served.prompt
        assert f"<think>Hm.</think>I look.{CALL}<|im_end|>" in served.prompt
        assert "## Return of functions.get_weather:0\nRain.<|im_end|>" in served.prompt
        assert served.prompt.endswith("<think></think>")
        assert '"name": "get_weather"' in served.prompt
        assert "strict" not in served.prompt
        ask(client, temperature=0.5, top_p=0.9, max_output_tokens=7, tools=[TOOL], tool_choice="none")
        sampling = served.engine.requests[-1].sampling
        assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.9, 7)
        assert "get_weather" not in served.prompt


def test_what_binds_the_answer() -> None:
    served = Served()

    def asked(**body: Any) -> Grammar | None:
        ask(client, **body)
        return served.engine.requests[-1].sampling.grammar

    with served.client() as client:
        assert asked(tools=[TOOL]) is None
        for choice in ("required", {"type": "function", "name": "get_weather"}):
            grammar = asked(tools=[TOOL], tool_choice=choice)
            assert grammar is not None
            assert ("plus" in grammar.text) == (choice == "required")
        assert asked(tools=[TOOL | {"strict": True}]) is not None
        form: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "boolean"}, "strict": True}}
        assert asked(text=form, extra_body=OFF) == Grammar("json_schema", '{"type": "boolean"}')
        assert ask(client, text=form, extra_body=OFF).text == ask(client, text=form, extra_body=OFF).text
        bounded = asked(extra_body={"max_reasoning_tokens": 9})
        assert bounded is not None
        assert (bounded.kind, bounded.most_before) == ("free", 9)


def test_going_on_from_a_response() -> None:
    served = Served(stored_responses=2)
    with served.client() as client:
        first = ask(client, tools=[TOOL], instructions="Be brief.")
        assert first.model_extra is not None
        gave: Any = [{"type": "function_call_output", "call_id": "functions.get_weather:0", "output": "Rain."}]
        second, _ = streamed(client, input=gave, tools=[TOOL], previous_response_id=first.id)
        assert second.previous_response_id == first.id
        assert f"Weather in Köln?<|im_end|><|im_assistant|>assistant<|im_middle|><think>Hm.</think>I look.{CALL}" in (
            served.prompt
        )
        assert "Rain." in served.prompt
        assert "Be brief." not in served.prompt  # instructions are those of one request
        third = ask(client, input="Well?", tools=[TOOL], previous_response_id=second.id, store=False)
        assert served.prompt.count("I look.") == 2
        with pytest.raises(openai.NotFoundError, match="not known"):
            ask(client, previous_response_id=third.id)
        ask(client)
        with pytest.raises(openai.NotFoundError, match="keeps the last 2"):  # the first had to go
            ask(client, previous_response_id=first.id)
        ask(client, tools=[TOOL], previous_response_id=second.id)


def test_a_response_that_is_kept_can_be_had_and_deleted() -> None:
    with Served(stored_responses=2).client() as client:
        for answer in (ask(client, tools=[TOOL]), streamed(client, tools=[TOOL])[0]):
            kept = client.responses.retrieve(answer.id)
            assert output_of(kept) == output_of(answer) == WHOLE
            assert (kept.usage, kept.created_at) == (answer.usage, answer.created_at)
            assert [item.id for item in kept.output] == [item.id for item in answer.output]
            assert client.responses.retrieve(answer.id, include=["reasoning.encrypted_content"]) == kept
            with pytest.raises(openai.BadRequestError, match="get it without stream") as refused:
                client.responses.retrieve(answer.id, stream=True)
            assert refused.value.param == "stream"
            raw = client.responses.with_raw_response.delete(answer.id)
            assert raw.http_response.json() == {"id": answer.id, "object": "response", "deleted": True}
            for gone in (client.responses.retrieve, client.responses.delete):
                with pytest.raises(openai.NotFoundError, match="keeps the last 2") as found:
                    gone(answer.id)
                assert found.value.code == "response_not_found"
            with pytest.raises(openai.NotFoundError, match="not known"):
                ask(client, previous_response_id=answer.id)
        unkept = ask(client, store=False)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(unkept.id)
    with Served().client() as client, pytest.raises(openai.NotFoundError, match="keeps none"):
        client.responses.retrieve(ask(client).id)


def test_nothing_is_kept_unless_it_is_asked_for() -> None:
    with Served().client() as client:
        answer = ask(client)
        assert answer.to_dict()["store"] is False
        with pytest.raises(openai.BadRequestError, match=r"api\.stored_responses") as found:
            ask(client, previous_response_id=answer.id)
        assert (found.value.param, found.value.code) == ("previous_response_id", "unsupported_parameter")


def test_the_store_is_bounded_in_bytes_and_time() -> None:
    now = [0.0]
    config = ApiConfig(stored_responses=9, stored_response_bytes=124, stored_response_s=10)
    store = ResponseStore(config, lambda: now[0])
    said: Any = [{"role": "user", "content": "x" * 20}]
    store.keep("a", said, {})
    now[0] = 5
    store.keep("b", said, {})
    assert json.loads(store.conversation("a")) == said
    store.keep("c", said, {})
    large: Any = [{"role": "user", "content": "x" * 200}]
    store.keep("too large", large, {})
    store.keep("too large a response", {"messages": [], "standing": []}, {"output": "x" * 200})
    known = [name for name in ("a", "b", "c", "too large", "too large a response") if name in store._kept]
    assert known == ["b", "c"]
    now[0] = 16
    with pytest.raises(Exception, match="not known"):
        store.conversation("c")
    assert (store._bytes, len(store._kept)) == (0, 0)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": 5}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"type": "wizard_call"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
    ({"input": [{"role": "user", "content": 5}]}, "input"),
    ({"input": [{"role": "wizard", "content": "x"}]}, "input.0"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input"),
    ({"tools": [{"type": "custom"}]}, "tools"),
    ({"tools": [{"type": "namespace", "name": "n"}]}, "tools"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"input": [], "instructions": "Be brief."}, "input"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "odd"}}}}, "text"),
    ({"text": {"verbosity": "loud"}}, "text"),
    ({"reasoning": {"effort": "huge"}}, "reasoning"),
    ({"truncation": "auto"}, "truncation"),
    ({"background": True}, "background"),
    ({"conversation": "c"}, "conversation"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 5000}, "input"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
]
BODY: dict[str, Any] = {"model": "tiny", "input": "Hi", "max_output_tokens": 9}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    app = Served(stored_responses=5).app
    with serving(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        yield client


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_what_is_wrong_is_told_by_name(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = http.post("/v1/responses", json=BODY | fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


def test_no_field_of_openai_s_client_is_forgotten() -> None:
    nothing_of_the_answer = {
        "access_programs", "background_options", "image", "max_tool_calls", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "safety_identifier", "service_tier", "stream_options", "user",
    }  # fmt: skip
    looked_at = {"include", "reasoning", "truncation"}
    known = ResponsesBody.model_fields.keys() | refused_at("responses").keys() | nothing_of_the_answer | looked_at
    assert sorted(ResponseCreateParamsBase.__annotations__.keys() - known) == []


def test_failures() -> None:
    served = Served()
    with served.client() as client:
        served.engine.script = lambda request: [out(served.ids[0]), EngineFault("rank 1 is silent")]
        with pytest.raises(openai.APIError, match="rank 1 is silent"):
            streamed(client)
        with pytest.raises(openai.InternalServerError, match="rank 1 is silent"):
            ask(client)
    with serving(create_app(served.engine, tiny())) as port:
        text = httpx.post(f"http://127.0.0.1:{port}/v1/responses", json=BODY | {"stream": True}).text
    *_, name, data = text.strip().split("\n")
    assert name == "event: error"
    error = ResponseErrorEvent.model_validate_json(data.removeprefix("data: "))
    assert (error.type, error.code) == ("error", "engine_down")
    assert "rank 1 is silent" in error.message
    engine = FakeEngine(say(tiny().encode("Hi.", add_special_tokens=False)), LARGE)
    with (
        serving(create_app(engine, tiny())) as port,
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0) as client,
    ):
        assert output_of(ask(client)) == output_of(streamed(client)[0]) == [("message", "Hi.", "completed")]


def test_what_is_answered_is_described(http: httpx.Client) -> None:
    described = http.get("/openapi.json").json()
    operation = described["paths"]["/v1/responses"]["post"]

    def problems(value: Any, schema: Any) -> list[str]:
        whole = {**schema.get("x-event-schema", schema), "components": described["components"]}
        return [error.message for error in Draft202012Validator(whole).iter_errors(value)]

    content = operation["responses"]["200"]["content"]
    for body in (BODY, BODY | {"tools": [TOOL], "max_output_tokens": 3000}):
        assert problems(body, operation["requestBody"]["content"]["application/json"]["schema"]) == []
        answer = http.post("/v1/responses", json=body).json()
        assert problems(answer, content["application/json"]["schema"]) == []
        for event in http.post("/v1/responses", json=body | {"stream": True}).text.strip().split("\n\n"):
            name, data = event.split("\n")
            value = json.loads(data.removeprefix("data: "))
            assert name == f"event: {value['type']}"
            assert problems(value, content["text/event-stream"]["schema"]) == []
    error = operation["responses"]["400"]["content"]["application/json"]["schema"]
    assert problems(http.post("/v1/responses", json={}).json(), error) == []


VALUES = st.sampled_from(
    [None, True, 0, 1, -1, 0.5, "", "hi", [], ["hi"], [5], {}, [{"type": "function"}], {"type": "function"}, "auto"]
)
NAMES = ["input", "instructions", "tools", "tool_choice", "text", "reasoning", "include", "previous_response_id"]
NAMES += ["store", "metadata", "stream", "model", "truncation", "top_p", "parallel_tool_calls", "chat_template_kwargs"]
ITEMS = st.lists(
    st.dictionaries(
        st.sampled_from(["type", "role", "content", "output", "call_id", "name", "arguments", "summary"]),
        VALUES
        | st.sampled_from(["message", "reasoning", "function_call", "function_call_output", "assistant", "user"]),
    ),
    max_size=3,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3), st.none() | ITEMS)
def test_nothing_that_a_client_sends_is_a_failure(
    http: httpx.Client, fields: dict[str, Any], items: list[Any] | None
) -> None:
    answer = http.post("/v1/responses", json={**BODY, **fields, **({} if items is None else {"input": items})})
    assert answer.status_code in (200, 400, 404), answer.text


@pytest.mark.long
async def test_the_demo_model_calls_a_tool_and_gives_json() -> None:
    schema = {
        "type": "object",
        "properties": {"color": {"enum": ["red", "green"]}, "size": {"type": "integer", "minimum": 1, "maximum": 40}},
        "required": ["color", "size"],
        "additionalProperties": False,
    }
    tool: Any = {"type": "function", "name": "paint", "parameters": schema, "strict": True}
    asked: Any = {"model": "demo", "max_output_tokens": 300, "input": "Paint it.", "temperature": 0.0}
    called = {**asked, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    async with (
        demo_engine(3) as engine,
        openai_client(engine, chat_template=GLM, reasoning_parser="none") as client,
    ):
        answer = await client.responses.create(**called)
        [call] = answer.output
        assert (answer.status, call.type) == ("completed", "function_call")
        jsonschema.Draft202012Validator(schema).validate(json.loads(call.arguments))
        async with client.responses.stream(**called) as stream:
            final = await stream.get_final_response()
        assert [item.arguments for item in final.output] == [call.arguments]
        text = await client.responses.create(**asked, text=form)
        jsonschema.Draft202012Validator(schema).validate(json.loads(text.output_text))
