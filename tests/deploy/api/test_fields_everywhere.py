"""Every known field at every endpoint that generates: it reaches the engine's request, or it is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fake_engine import INFO, FakeEngine, say, serving
from tiny_tokenizer import with_special
from tool_templates import KIMI

from deploy.api.anthropic.bodies import MessagesBody
from deploy.api.app import create_app
from deploy.api.job.bodies import SHARED, CompletionBody
from deploy.api.job.chat_bodies import ChatBody
from deploy.api.job.unsupported import AT, ELSEWHERE, UNSUPPORTED, refused_at
from deploy.api.responses.bodies import ResponsesBody
from deploy.config.api import ApiConfig
from deploy.config.cache_salts import CacheSalts
from deploy.parsing.registry import MARKERS
from workers.protocol.messages import Request
from workers.protocol.request import TABLE, sequence_seeds

TOKENIZER = with_special(*MARKERS["kimi_k2"], "<think>", "</think>")
TURNS = [{"role": "user", "content": "Hi"}]
OFF = {"chat_template_kwargs": {"thinking": False}}
BODIES: dict[str, tuple[str, type[Any], dict[str, Any]]] = {
    "completions": ("/v1/completions", CompletionBody, {"prompt": "Hi", "max_tokens": 60}),
    "chat": ("/v1/chat/completions", ChatBody, {"messages": TURNS, "max_tokens": 60, **OFF}),
    "messages": ("/v1/messages", MessagesBody, {"messages": TURNS, "max_tokens": 60}),
    "responses": ("/v1/responses", ResponsesBody, {"input": "Hi", "max_output_tokens": 60, **OFF}),
}
SAID = "one two three four"


def _sampling(name: str, wanted: Any) -> Callable[[Request, dict[str, Any]], bool]:
    return lambda request, answer: bool(getattr(request.sampling, name) == wanted)


def _grammar(kind: str) -> Callable[[Request, dict[str, Any]], bool]:
    return lambda request, answer: request.sampling.grammar is not None and request.sampling.grammar.kind == kind


ASKED: dict[str, tuple[Any, Callable[[Request, dict[str, Any]], bool]]] = {
    "temperature": (0.5, _sampling("temperature", 0.5)),
    "top_k": (7, _sampling("top_k", 7)),
    "top_p": (0.25, _sampling("top_p", 0.25)),
    "min_p": (0.25, _sampling("min_p", 0.25)),
    "presence_penalty": (0.5, _sampling("presence_penalty", 0.5)),
    "frequency_penalty": (0.5, _sampling("frequency_penalty", 0.5)),
    "repetition_penalty": (1.5, _sampling("repetition_penalty", 1.5)),
    "seed": (77, lambda request, answer: [request.sampling.seed] == sequence_seeds(77, tuple(request.prompt))),
    "logit_bias": ({"5": 2.0}, _sampling("logit_bias", ((5, 2.0),))),
    "min_tokens": (3, _sampling("min_tokens", 3)),
    "stop_token_ids": ([5], lambda request, answer: 5 in request.sampling.stop_ids),
    "ignore_eos": (True, _sampling("stop_ids", ())),
    "priority": (3, lambda request, answer: request.priority == 3),
    "cache_salt": ("mine", lambda request, answer: request.salt == CacheSalts().salt("", "mine")),
    "guided_json": ({"type": "boolean"}, _grammar("json_schema")),
    "guided_regex": ("a+", _grammar("regex")),
    "guided_choice": (["a"], _grammar("choice")),
    "guided_grammar": ('root ::= "a"', _grammar("ebnf")),
    "structured_outputs": ({"regex": "a+"}, _grammar("regex")),
    "structural_tag": (
        {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"type": "boolean"}}},
        _grammar("structural_tag"),
    ),
    "response_format": ({"type": "json_object"}, _grammar("json")),
    "stop": (["three"], lambda request, answer: "two" in _said(answer) and "three" not in _said(answer)),
}


def _said(answer: dict[str, Any]) -> str:
    """Return the model's text, without what comes back of the request."""
    for choice in answer.get("choices", ()):
        return str(choice.get("text") or choice["message"]["content"])
    return str(answer.get("content") or answer["output"])


class Served:
    def __init__(self) -> None:
        ids = TOKENIZER.encode(SAID, add_special_tokens=False)
        self.engine = FakeEngine(say(ids, eos=None), replace(INFO, max_context=4096, vocab_size=1024))
        self.app = create_app(self.engine, TOKENIZER, ApiConfig(chat_template=KIMI))
        self.http = httpx.Client()

    def ask(self, endpoint: str, **more: Any) -> httpx.Response:
        path, _, body = BODIES[endpoint]
        return self.http.post(path, json={"model": "tiny", **body, **more})


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    server = Served()
    with serving(server.app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as server.http:
        yield server


@pytest.mark.parametrize("endpoint", BODIES)
@pytest.mark.parametrize("name", ASKED)
def test_a_field_is_done_or_refused_by_name(served: Served, name: str, endpoint: str) -> None:
    value, done = ASKED[name]
    answer = served.ask(endpoint, **{name: value})
    if name in BODIES[endpoint][1].model_fields:
        assert answer.status_code == 200, answer.text
        assert done(served.engine.requests[-1], answer.json())
        plain = served.ask(endpoint)
        assert not done(served.engine.requests[-1], plain.json())
    else:
        _check_refused(endpoint, name, answer)


def _check_refused(endpoint: str, name: str, answer: httpx.Response) -> None:
    assert answer.status_code == 400, answer.text
    value = answer.json()
    error = value["error"]
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert name in error["message"]
    if endpoint == "messages":
        assert (value["type"], error["type"]) == ("error", "invalid_request_error")


@pytest.mark.parametrize("endpoint", BODIES)
def test_every_field_of_the_table_is_refused_unless_it_asks_for_nothing(served: Served, endpoint: Any) -> None:
    _, kind, body = BODIES[endpoint]
    known = UNSUPPORTED | ELSEWHERE | AT[endpoint]
    refused = refused_at(endpoint, kind.model_fields)
    assert refused.keys() | kind.model_fields.keys() >= known.keys()
    for name, (_, harmless) in refused.items():
        _check_refused(endpoint, name, served.ask(endpoint, **{name: ["something else"]}))
        assert name not in body
        for value in (None, *harmless):
            answer = served.ask(endpoint, **{name: value})
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("endpoint", BODIES)
def test_what_stream_options_ask_for_is_done_or_refused_by_name(served: Served, endpoint: str) -> None:
    """Clients of OpenAI's switch padding off, those of vLLM and SGLang ask for counts as they go."""
    padding = [{"include_obfuscation": given} for given in (None, False, True)]
    for options in ({}, *padding, {"include_usage": True, "chunk_include_usage": None}):
        answer = served.ask(endpoint, stream=True, stream_options=options)
        assert answer.status_code == 200, answer.text
    counts = served.ask(endpoint, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    refused: list[dict[str, Any]] = [{"chunk_include_usage": True}, {"include_obfuscation": "x"}]
    if "stream_options" in BODIES[endpoint][1].model_fields:
        assert counts.status_code == 200
        assert '"usage":null' not in counts.text
    else:
        refused.append({"continuous_usage_stats": True})
    for options in refused:
        answer = served.ask(endpoint, stream=True, stream_options=options)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream_options"), options
        assert answer.json()["error"]["code"] == "unsupported_parameter"
        assert str(*options) in answer.json()["error"]["message"]


@pytest.mark.parametrize("endpoint", BODIES)
def test_no_sampling_field_is_left_out_by_an_endpoint(endpoint: str) -> None:
    fields = BODIES[endpoint][1].model_fields
    assert fields.keys() >= {*SHARED, *(row.name for row in TABLE)}


def test_every_field_that_any_endpoint_has_is_known_to_all() -> None:
    """Every endpoint does or refuses what any other does. Fields that are left over have no say in an answer, or belong
    to a prompt."""
    own = {"messages", "input", "prompt", "model"}
    of_no_answer = {"metadata", "store", "stream_options", "parallel_tool_calls"}
    every = {name for _, kind, _ in BODIES.values() for name in kind.model_fields}
    for endpoint, (_, kind, _) in BODIES.items():
        refused = refused_at(endpoint)  # type: ignore[arg-type]
        assert sorted(every - kind.model_fields.keys() - refused.keys() - own - of_no_answer) == []


def test_values_out_of_range_name_the_field_in_the_shape_of_the_endpoint(served: Served) -> None:
    for endpoint in BODIES:
        answer = served.ask(endpoint, min_p=2)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "min_p"
        assert served.ask(endpoint, logit_bias={"x": 1}).json()["error"]["param"] == "logit_bias"
