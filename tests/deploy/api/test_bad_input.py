"""Every bad input has its status and OpenAI's error envelope; nothing a client sends is a 500."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Annotated, Any

import httpx
import orjson
import pytest
from fake_engine import FakeEngine, out, say, serving
from fastapi import Query
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import AfterValidator, create_model
from tiny_tokenizer import tiny

from deploy.api.app import create_app
from deploy.api.http import body
from deploy.api.http.body import validate
from deploy.api.http.errors import ApiError
from deploy.api.job.chat_bodies import ChatBody
from deploy.api.job.unsupported import UNSUPPORTED as UNSUPPORTED_FIELDS
from deploy.api.openai.completions import parse_prompts
from deploy.config.api import ApiConfig
from deploy.text.chat import MOST_MESSAGES
from workers.protocol.messages import EngineStats
from workers.protocol.request import TABLE as PARAMETERS

LIMIT = 64 * 1024
ROOM = EngineStats(slots=10, queue_limit=6)
JSON = {"content-type": "application/json"}
BASE: dict[str, Any] = {"model": "tiny", "prompt": "hi"}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    engine = FakeEngine(say([30, 31]))
    engine.stats = ROOM
    return engine


@pytest.fixture(scope="module")
def url(engine: FakeEngine) -> Iterator[str]:
    config = ApiConfig(max_body_bytes=LIMIT, max_n=8, max_logprobs=5)
    with serving(create_app(engine, tiny(), config)) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, headers=JSON) as client:
        yield client


def check(answer: httpx.Response, status: int, param: str | None, code: str | None) -> str:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.headers["x-request-id"]
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert error["param"] == param
    assert error["code"] == code
    return error["message"]


TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
CALL: dict[str, Any] = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@dataclass(frozen=True)
class Bad:
    body: dict[str, Any]
    param: str | None
    code: str | None = "invalid_value"
    status: int = 400
    says: str = ""
    path: str = "/v1/completions"


def completion(param: str, value: Any, code: str | None = "invalid_value", **more: Any) -> Bad:
    return Bad({**BASE, param: value}, more.pop("where", param), code, **more)


def chat(param: str, value: Any, code: str | None = "invalid_value", **more: Any) -> Bad:
    return Bad({**CHAT, param: value}, more.pop("where", param), code, path="/v1/chat/completions", **more)


def without(body: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in names}


PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"]
TYPE, UNSUPPORTED, LONG = "invalid_type", "unsupported_parameter", "context_length_exceeded"
TABLE = [
    Bad(without(BASE, "model"), "model", "missing_required_parameter"),
    Bad(without(BASE, "prompt"), "prompt", "missing_required_parameter"),
    completion("prompt", None, "missing_required_parameter"),
    completion("model", None, "missing_required_parameter"),
    completion("model", 5, TYPE),
    completion("model", "gpt-5", "model_not_found", status=404, says="gpt-5"),
    completion("model", "", "model_not_found", status=404),
    # prompts
    *[completion("prompt", empty, "empty_prompt") for empty in ("", [], [""], ["a", ""], [[]], [[1], []])],
    *[completion("prompt", odd, TYPE) for odd in (5, True, {"a": 1}, [1, "a"], [1.0], [True], [[1], "a"])],
    *[completion("prompt", odd, TYPE) for odd in ([["a"]], [None], [[True]], [*[5] * 300, 5.0])],
    *[completion("prompt", [[5], [wrong]], None, says=str(wrong)) for wrong in (512, -1, 2**40)],
    completion("prompt", [2**70], TYPE),
    completion("prompt", [5] * 256, LONG, says="257"),
    completion("prompt", "fox " * 8000, LONG, says="at least"),
    Bad({**BASE, "prompt": [5] * 200, "max_tokens": 57}, "prompt", LONG, says="256 tokens, but 257"),
    Bad({**BASE, "prompt": ["a"] * 9, "n": 2}, "prompt", None, says="18 sequences; one request may have at most 16"),
    # numbers
    completion("max_tokens", 0, None),
    completion("max_tokens", -1),
    chat("max_tokens", 0),
    *[completion("max_tokens", value, TYPE) for value in ("5", 1.5, 5e300, True, [5], 2**70)],
    completion("max_tokens", 2**62, LONG, where="prompt"),
    *[completion("n", value) for value in (0, -1)],
    completion("n", 9, None, says="at most 8"),
    completion("n", "2", TYPE),
    *[completion("temperature", value) for value in (-0.1, 2.1)],
    *[completion("temperature", value, TYPE) for value in ("1", True, [1])],
    *[completion(row.name, row.kind(row.parameter.asked[0] - 1)) for row in PARAMETERS],
    *[completion(row.name, row.parameter.asked[1] + 0.1) for row in PARAMETERS if row.parameter.asked[1] is not None],
    *[completion("top_p", value) for value in (-0.1, 1.1)],
    *[completion("top_k", value) for value in (-2,)],
    completion("top_k", 2.5, TYPE),
    *[completion("min_p", value) for value in (-0.1, 1.1)],
    *[completion("presence_penalty", value) for value in (-2.1, 2.1)],
    *[completion("frequency_penalty", value) for value in (-2.1, 2.1)],
    *[completion("repetition_penalty", value) for value in (0, -1, 11, 1e-45)],
    *[completion("seed", value) for value in (2**63,)],
    *[completion("seed", value, TYPE) for value in (2**64, -(2**63) - 1, 1.5, "1")],
    *[completion("min_tokens", value) for value in (-1,)],
    completion("min_tokens", 17, None, says="16"),
    *[completion("priority", value) for value in (2**31, -(2**31) - 1)],
    completion("logprobs", -1),
    completion("logprobs", 6, None, says="at most 5"),
    completion("logprobs", True, TYPE),
    Bad({**BASE, "max_tokens": 0, "logprobs": 1}, "max_tokens", None, says="with echo or prompt_logprobs"),
    Bad({**BASE, "max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens", None, says="more than the 0"),
    Bad({**BASE, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "conflicting_parameters", says="stream"),
    completion("prompt_logprobs", -1),
    completion("prompt_logprobs", 21, None),
    completion("prompt_logprobs", True, TYPE),
    chat("prompt_logprobs", 1, UNSUPPORTED, says="outside of /v1/completions"),
    # stops
    completion("stop", ["x"] * 17, None, says="16"),
    *[completion("stop", value, None) for value in ("", ["a", ""], "x" * 513)],
    *[completion("stop", value) for value in (5, [5], {"a": "b"})],
    *[completion("stop_token_ids", value, None) for value in ([512], [-1])],
    Bad({**BASE, "stop_token_ids": ["a"]}, "stop_token_ids.0", TYPE),
    completion("stop_token_ids", [5] * 257),
    # biases
    *[completion("logit_bias", {key: 1}, None) for key in ("a", "", "-1", "512", "1.0", "1" * 5000, "\u0663")],
    *[completion("logit_bias", {"5": bias}, None) for bias in (-100.5, 101)],
    Bad({**BASE, "logit_bias": {"5": "1"}}, "logit_bias.5", TYPE),
    completion("logit_bias", [5], TYPE),
    # flags
    *[completion(flag, value, TYPE) for flag in ("stream", "echo", "ignore_eos") for value in (1, "true")],
    completion("stream_options", {"include_usage": True}, None),
    Bad({**BASE, "stream": True, "stream_options": 5}, "stream_options", TYPE),
    Bad({**BASE, "stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", TYPE),
    # what is not there
    completion("suffix", "end", UNSUPPORTED),
    completion("best_of", 2, UNSUPPORTED),
    completion("structured_outputs", {"json": {"not": {}}}, "invalid_grammar", says="not is not supported"),
    completion("structured_outputs", {"json": {}, "whitespace_pattern": " "}, UNSUPPORTED),
    completion("guided_json", {"not": {}}, "invalid_grammar", says="not is not supported"),
    completion("guided_regex", "(a", "invalid_grammar"),
    completion("guided_json", 5, "invalid_value", says="object or a string"),
    chat("tools", [TOOL], UNSUPPORTED, says="chat template"),
    chat("tools", [{"type": "function", "function": {"name": "f", "strict": 1}}], says="strict"),
    chat("tool_choice", "required", None, says="there must be tools"),
    chat("tool_choice", {"type": "function", "function": {"name": "f"}}, None, says="there must be tools"),
    chat("tool_choice", "any", None, says="there must be tools"),
    *[chat("tool_choice", choice) for choice in (5, "all", {"type": "function", "function": {}})],
    *[
        chat("tool_choice", {"type": "allowed_tools", "allowed_tools": allowed}, says='"allowed_tools": {"mode"')
        for allowed in (None, {}, {"mode": "auto", "tools": []}, {"mode": "none", "tools": [{}]}, {"mode": "auto"})
    ],
    chat(
        "tool_choice",
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}},
        None,
        says="there must be tools",
    ),
    *[chat("tools", tools) for tools in (5, [5], [{"type": "function"}], [{"type": "x", "function": {"name": "f"}}])],
    *[chat("tools", [{"type": "function", "function": f}]) for f in ({}, {"name": ""}, {"name": "f", "parameters": 5})],
    chat("tools", [TOOL] * 1025, says="1025"),
    completion("tools", [TOOL], UNSUPPORTED),
    completion("tool_choice", "required", UNSUPPORTED),
    chat("parallel_tool_calls", "no", TYPE),
    chat("max_reasoning_tokens", 5, None, says="--reasoning-parser"),
    chat("max_reasoning_tokens", 0),
    completion("max_reasoning_tokens", 5, UNSUPPORTED),
    chat("functions", [{}], UNSUPPORTED),
    chat("response_format", {"type": "xml"}, UNSUPPORTED),
    *[chat("response_format", value, "invalid_type") for value in ("json", 5)],
    chat("modalities", ["audio"], UNSUPPORTED),
    chat("chat_template", "{{ 1 }}", UNSUPPORTED),
    # messages
    Bad(without(CHAT, "messages"), "messages", "missing_required_parameter", path="/v1/chat/completions"),
    chat("messages", []),
    *[chat("messages", value, TYPE) for value in ("hi", 5, {"role": "user"})],
    chat("messages", ["hi"], TYPE, where="messages.0"),
    chat("messages", [{"content": "hi"}], "missing_required_parameter", where="messages.0.role"),
    chat("messages", [{"role": "user"}], "missing_required_parameter", where="messages.0.content"),
    chat("messages", [{"role": "user", "content": None}], "missing_required_parameter", where="messages.0.content"),
    *[
        chat("messages", [{"role": "user", "content": content}], where="messages.0.content")
        for content in (5, {"text": "hi"}, ["hi"], [{}], [{"type": "text"}], [{"type": "text", "text": 5}])
    ],
    chat("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], UNSUPPORTED),
    chat("messages", [{"role": 5, "content": "hi"}], TYPE, where="messages.0.role"),
    chat("messages", [{"role": "wizard", "content": "hi"}], where="messages.0", says="wizard"),
    chat("messages", [{"role": "function", "name": "f", "content": "hi"}], UNSUPPORTED),
    chat("messages", [{"role": "tool", "content": "hi", "tool_call_id": "a"}], UNSUPPORTED, says="chat template"),
    chat("messages", [{"role": "tool", "content": "hi"}], where="messages.0", says="tool_call_id"),
    chat("messages", [{"role": "user", "content": "hi", "tool_calls": [CALL]}], where="messages.0", says="assistant"),
    chat("messages", [{"role": "assistant", "tool_calls": [CALL]}], UNSUPPORTED, says="chat template"),
    *[
        chat("messages", [{"role": "assistant", name: [0] * 9000}, *CHAT["messages"]], where=f"messages.0.{name}")
        for name in ("tool_calls", "content")
    ],
    *[
        chat("messages", [{"role": "assistant", "tool_calls": calls}], where="messages.0.tool_calls")
        for calls in (5, [5], [{}], [{"id": 5, **CALL["function"]}])
    ],
    chat("chat_template_kwargs", {"loud": True}, None, where="messages", says="may be loud"),
    chat("messages", [{"role": "user", "content": "東 " * 300}], LONG),
    chat("top_logprobs", 2, None, says="logprobs is true"),
    Bad({**CHAT, "logprobs": True, "top_logprobs": 6}, "top_logprobs", None, path="/v1/chat/completions"),
    chat("logprobs", 1, TYPE),
    chat("max_completion_tokens", 0),
    chat("max_completion_tokens", 300, LONG, where="messages"),
    chat("chat_template_kwargs", {"tokenize": True}, None, where="messages", says="tokenize"),
    chat("chat_template_kwargs", [], TYPE),
    chat("continue_final_message", True, None),
    # tokenizing
    Bad({}, "prompt", "missing_required_parameter", path="/tokenize"),
    Bad({"prompt": 5}, "prompt", TYPE, path="/tokenize"),
    Bad({"prompt": "a", "model": "b"}, "model", "model_not_found", 404, path="/tokenize"),
    Bad({"messages": []}, "messages", path="/tokenize"),
    Bad({}, "tokens", "missing_required_parameter", path="/detokenize"),
    Bad({"tokens": [512]}, "tokens", None, path="/detokenize"),
    Bad({"tokens": "abc"}, "tokens", TYPE, path="/detokenize"),
    Bad({"tokens": [2**70]}, "tokens.0", TYPE, path="/detokenize"),
]  # fmt: skip


@pytest.mark.parametrize("bad", TABLE, ids=lambda bad: f"{bad.path.split('/')[-1]}-{json.dumps(bad.body)[:60]}")
def test_bad_fields(http: httpx.Client, engine: FakeEngine, bad: Bad) -> None:
    engine.requests.clear()
    for stream in (False, True):
        body = (
            bad.body
            if not stream or "stream" in bad.body or bad.param == "stream_options"
            else {**bad.body, "stream": True}
        )
        message = check(http.post(bad.path, json=body), bad.status, bad.param, bad.code)
        assert bad.says in message
    assert engine.requests == []


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"  ", b"{", b"nonsense", b"[]", b"5", b"null", b'"x"', b"true", b'{"model": "tiny", "prompt": "x",}',
        b'{"model": "tiny", "prompt": "\xff\xfe"}', b'{"model": "tiny", "prompt": "\\ud800"}', b"\xef\xbb{}",
        b'{"model": "tiny", "prompt": "x", "temperature": NaN}', b'{"model": "tiny", "prompt": "x", "top_p": Infinity}',
        b'{"model": "tiny", "prompt": "x", "temperature": 1e999}', b"[" * 50_000,
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    ],
    ids=lambda raw: repr(raw[:40]),
)  # fmt: skip
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/responses"]
)
def test_bad_json(http: httpx.Client, path: str, raw: bytes) -> None:
    check(http.post(path, content=raw), 400, None, "invalid_json")


def test_deep_nesting_within_the_parser_s_bound(http: httpx.Client) -> None:
    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    assert http.post("/v1/completions", json={**BASE, "metadata": deep}).status_code == 200
    for name in ("messages", "chat_template_kwargs", "logit_bias"):
        assert http.post("/v1/chat/completions", json={**CHAT, name: deep}).status_code == 400
    assert http.post("/v1/chat/completions", json={**CHAT, "chat_template_kwargs": {"x": deep}}).status_code < 500
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": deep}}}
    call = {"id": "a", "function": {"name": "f", "arguments": {"x": deep}}}
    assert http.post("/v1/chat/completions", json={**CHAT, "tools": [tool]}).status_code == 400
    called = [*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}]
    assert http.post("/v1/chat/completions", json={**CHAT, "messages": called}).status_code == 400


@pytest.mark.parametrize(
    "path", ["/v1", "/v1/", "/v1/completions/", "/v1/embeddings", "/nowhere", "/%ff%fe", "/page/", "/page/no.js"]
)
def test_unknown_paths(http: httpx.Client, path: str) -> None:
    check(http.get(path), 404, None, "unknown_url")


def test_unknown_model_paths(http: httpx.Client) -> None:
    for name in ("other", "a/b", ""):
        check(http.get(f"/v1/models/{name}"), 404, "model", "model_not_found")


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/tiny", "/v1/models/other", "/health", "/metrics", "/selftest", "/live"]
)
def test_head_is_get_without_the_body(http: httpx.Client, path: str) -> None:
    got, head = http.get(path), http.head(path)
    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers["content-type"] == got.headers["content-type"]


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "PATCH"])
def test_wrong_methods(http: httpx.Client, method: str) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        answer = http.request(method, path)
        if method == "HEAD":
            assert (answer.status_code, answer.content) == (405, b"")
        else:
            check(answer, 405, None, "method_not_allowed")
        assert answer.headers["allow"] == "POST"
    for path in ("/v1/models", "/health"):
        answer = http.post(path)
        check(answer, 405, None, "method_not_allowed")
        assert sorted(answer.headers["allow"].split(", ")) == ["GET", "HEAD"]


def test_bad_parameters_of_a_query() -> None:
    """No endpoint has one yet; those that come answer in the envelope, too."""
    app = create_app(FakeEngine(say([30])), tiny())

    @app.get("/toy")
    async def toy(text: str, count: Annotated[int, Query(ge=1)] = 1) -> str:
        return text * count

    with serving(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        assert http.get("/toy?text=ab&count=2").json() == "abab"
        check(http.get("/toy"), 400, "text", "missing_required_parameter")
        check(http.get("/toy?text=ab&count=x"), 400, "count", "invalid_value")
        check(http.get("/toy?text=ab&count=0"), 400, "count", "invalid_value")


def test_huge_bodies(http: httpx.Client, url: str) -> None:
    big = json.dumps({**BASE, "prompt": "x" * LIMIT}).encode()
    for content in (big, iter([big])):  # with a length, and chunked
        check(http.post("/v1/completions", content=content), 413, None, "request_too_large")
    just = json.dumps({**BASE, "user": ""}).encode()
    padded = just[:-2] + b"x" * (LIMIT - len(just)) + just[-2:]
    assert len(padded) == LIMIT
    assert http.post("/v1/completions", content=padded).status_code == 200


def test_compressed_bodies(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", content=b"x", headers={"content-encoding": "gzip"})
    check(answer, 415, None, "unsupported_encoding")


@pytest.mark.parametrize(
    "kind",
    [
        None, "", "text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "multipart/form-data",
        "application/jsonp", "application/ld+json", "json", "application/json, text/plain", ";application/json", "*/*",
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/responses"]
)
def test_bodies_that_are_not_said_to_be_json(url: str, engine: FakeEngine, path: str, kind: str | None) -> None:
    """A page on another site may send any of these to a server on its visitor's machine, without asking first."""
    engine.requests.clear()
    body = json.dumps(CHAT if "chat" in path else {**BASE, "tokens": [5]})
    answer = httpx.post(url + path, content=body, headers={} if kind is None else {"content-type": kind})
    assert "Content-Type: application/json" in check(answer, 415, None, "unsupported_content_type")
    assert engine.requests == []


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/json ;x=y"])
def test_bodies_that_are_said_to_be_json(url: str, kind: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", content=json.dumps(BASE), headers={"content-type": kind})
    assert answer.status_code == 200


def test_api_keys(engine: FakeEngine) -> None:
    with (
        serving(create_app(engine, tiny(), ApiConfig(api_keys=("sesame", "ümlaut")))) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}") as http,
    ):
        for header in (
            None,
            "sesame",
            "Bearer",
            "Bearer wrong",
            "Basic sesame",
            "Bearer sesame2",
            b"Bearer \xff",
        ):
            headers = {} if header is None else {"authorization": header}
            for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("POST", "/tokenize")):
                answer = http.request(method, path, headers=headers, json=BASE if method == "POST" else None)
                check(answer, 401, None, "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
        for good in ("Bearer sesame", "bearer  sesame", "Bearer ümlaut".encode()):
            assert http.get("/v1/models", headers={"authorization": good}).status_code == 200
        assert http.get("/health").status_code == 200
        assert http.get("/metrics").status_code == 200


def test_pages_of_other_origins_come_in_where_they_are_named(engine: FakeEngine, url: str) -> None:
    asks = {"Origin": "https://app.example.com", "Access-Control-Request-Method": "POST"}
    asks["Access-Control-Request-Headers"] = "authorization,content-type"
    assert httpx.options(f"{url}/v1/completions", headers=asks).status_code == 405
    config = ApiConfig(api_keys=("sesame",), cors_origins=("https://app.example.com",))
    with serving(create_app(engine, tiny(), config)) as port:
        path = f"http://127.0.0.1:{port}/v1/completions"
        allowed = httpx.options(path, headers=asks)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://app.example.com"
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        assert httpx.options(path, headers={**asks, "Origin": "https://evil.example.com"}).status_code == 400
        answer = httpx.post(path, json=BASE, headers={"Origin": asks["Origin"], "Authorization": "Bearer sesame"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, asks["Origin"])
        shown = answer.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "x-latentserve-ignored-tools", "x-latentserve-not-enforced"} <= {*shown}
        refused = httpx.post(path, json=BASE, headers={"Origin": asks["Origin"]})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, asks["Origin"])


@pytest.mark.parametrize("changed", [{"dtype": "float16"}, {"invariant": True}])
def test_the_fingerprint_follows_numeric_settings(engine: FakeEngine, changed: dict[str, Any]) -> None:
    before = {"dtype": "float32", "invariant": False}
    prints = [
        create_app(engine, tiny(), numerics=numerics).state.model.fingerprint
        for numerics in (before, dict(reversed(before.items())), before | changed)
    ]
    assert prints[0] == prints[1] != prints[2]


def test_the_fingerprint_follows_the_shards_that_auto_chose(engine: FakeEngine) -> None:
    """The settings say auto whatever the ranks have chosen, so the engine is asked."""
    before = create_app(engine, tiny(), numerics={}).state.model.fingerprint
    engine.info = replace(engine.info, cache_shards=2)
    assert create_app(engine, tiny(), numerics={}).state.model.fingerprint != before


def test_overload(engine: FakeEngine) -> None:
    """`queue_limit` is what may wait beyond the slots: more at once is 429, more than ever fits is 400."""
    app = create_app(engine, tiny(), ApiConfig(retry_after_s=7))
    script = engine.script
    engine.script = lambda request: [out(30), 60.0] if request.sampling.max_tokens == 50 else script(request)
    engine.stats = EngineStats(slots=2, queue_limit=4)
    with serving(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        assert http.post("/v1/completions", json={**BASE, "n": 6}).status_code == 200
        for path, body, param in (
            ("/v1/completions", {**BASE, "n": 7}, "n"),
            ("/v1/completions", {**BASE, "prompt": ["a"] * 7}, "prompt"),
            ("/v1/chat/completions", {**CHAT, "n": 7}, "n"),
        ):
            message = check(http.post(path, json=body), 400, param, None)
            assert "at most 6, what can run (2) and wait (4)" in message
        with http.stream("POST", "/v1/completions", json={**BASE, "n": 5, "max_tokens": 50, "stream": True}) as running:
            assert running.status_code == 200
            assert http.post("/v1/completions", json=BASE).status_code == 200
            for body in ({**BASE, "n": 2}, {**BASE, "prompt": ["a", "b"]}):
                answer = http.post("/v1/completions", json=body)
                check(answer, 429, None, "server_overloaded")
                assert answer.headers["retry-after"] == "7"
            engine.stats = EngineStats()  # nothing is known yet: the scheduler itself refuses
            assert http.post("/v1/completions", json={**BASE, "n": 3}).status_code == 200
        assert http.get("/health").status_code == 200
    engine.script, engine.stats = script, ROOM


def test_a_model_without_a_tokenizer(engine: FakeEngine) -> None:
    with serving(create_app(engine, None)) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        check(http.post("/v1/completions", json=BASE), 400, "prompt", "no_tokenizer")
        check(http.post("/v1/chat/completions", json=CHAT), 400, "messages", "no_tokenizer")
        check(http.post("/tokenize", json={"prompt": "a"}), 400, "prompt", "no_tokenizer")
        check(http.post("/detokenize", json={"tokens": [5]}), 400, "tokens", "no_tokenizer")
        ids = {**BASE, "prompt": [5, 6]}
        check(http.post("/v1/completions", json={**ids, "stop": "a"}), 400, "stop", None)
        choice = http.post("/v1/completions", json=ids).json()["choices"][0]
        assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("", [30, 31, 1], "stop")
        events = http.post("/v1/completions", json={**ids, "stream": True, "logprobs": None}).text.split("\n\n")
        parts = [json.loads(line.removeprefix("data: ")) for line in events[:-2]]
        assert [part["choices"][0]["token_ids"] for part in parts] == [[30], [31], [1]]


def test_the_description_of_the_api_holds_together(http: httpx.Client) -> None:
    description = http.get("/openapi.json").json()
    text = json.dumps(description)
    schemas = description["components"]["schemas"]
    for ref in set(re.findall(r'"#/components/schemas/([^"]+)"', text)):
        assert ref in schemas
    assert "0 is greedy" in schemas["CompletionBody"]["properties"]["temperature"]["description"]
    assert "/v1/chat/completions" in description["paths"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    *(row.name for row in PARAMETERS),
    "n",
    "seed",
    "stop",
    "stream",
    "logprobs",
    "top_logprobs",
    "stream_options",
    "logit_bias",
    "echo",
    "suffix",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "max_reasoning_tokens",
    "response_format",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structural_tag",
    "guided_begin_after",
    "stop_token_ids",
    "min_tokens",
    "priority",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "best_of",
    *UNSUPPORTED_FIELDS,
]


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(PATHS),
    st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4),
    st.booleans(),
)
@example("/v1/chat/completions", {"messages": [{"role": {}, "content": []}]}, True)
@example("/v1/completions", {"logit_bias": {"5": 1e300}}, True)
def test_random_fields_are_never_a_500(http: httpx.Client, path: str, fields: dict[str, Any], sound: bool) -> None:
    body = {**(BASE | CHAT if sound else {}), **fields}
    answer = http.post(path, content=json.dumps(body).encode("utf-8", "surrogatepass"))
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=80))
def test_random_bytes_are_never_a_500(http: httpx.Client, raw: bytes) -> None:
    # Now and then Hypothesis takes a request from some source file; no model has the name that it gives.
    assert http.post("/v1/completions", content=raw).status_code in (400, 404)


def test_bodies_of_very_many_pieces_are_refused_before_all_are_looked_at() -> None:
    too_many = [CHAT["messages"][0]] * (MOST_MESSAGES + 1)
    with pytest.raises(ApiError, match="at most 8192") as found:
        validate(ChatBody, CHAT | {"messages": [*too_many, "no message"]})
    assert found.value.param == "messages"
    assert len(validate(ChatBody, CHAT | {"messages": too_many[1:]}).messages) == MOST_MESSAGES

    def check_count(prompts: int) -> None:
        raise OverflowError(prompts)

    with pytest.raises(OverflowError, match="300"):
        parse_prompts([["no id"]] * 300, check_count)


def test_garbage_is_not_looked_for_while_a_body_is_parsed_and_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage collection would take nearly all the time for a body of millions of short lists."""
    looked: list[bool] = []

    def loads(raw: bytes) -> Any:
        looked.append(gc.isenabled())
        return orjson.loads(raw)

    monkeypatch.setattr(body, "orjson", SimpleNamespace(loads=loads, JSONDecodeError=orjson.JSONDecodeError))
    assert body.parse_object(b'{"a": [[], []]}') == {"a": [[], []]}
    with pytest.raises(ApiError, match="not valid JSON"):
        body.parse_object(b'{"a": [')
    assert looked == [False, False]

    def look(value: int) -> int:
        looked.append(gc.isenabled())
        return value

    Looking = create_model("Looking", a=Annotated[int, AfterValidator(look)])
    assert body.validate(Looking, {"a": 1}).a == 1
    with pytest.raises(ApiError, match="a: "):
        body.validate(Looking, {"a": "x"})
    assert looked == [False] * 3
    assert gc.isenabled()
