"""/openapi.json describes what is accepted and what is answered: real requests and answers are held against it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import INFO, EngineFault, FakeEngine, out, say, serving
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from sampling_page import PAGE, written
from tiny_tokenizer import tiny
from tool_templates import GLM

from deploy.api.app import create_app
from deploy.api.http.openapi import OPEN_PATHS
from deploy.api.job.bodies import GenerationBody
from deploy.config.api import ApiConfig
from workers.protocol.plan import TopLogprobs
from workers.protocol.report import SelfTestReport
from workers.protocol.request import TABLE

FOX = tiny().encode(" fox", add_special_tokens=False)
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
BASE: dict[str, Any] = {"model": "tiny", "prompt": "hi"}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def script(request: Any) -> Iterator[Any]:
    for token in (*FOX, 40):
        scores = [TopLogprobs(-0.5, (token, 41), (-0.5, float("-inf")))] if request.sampling.logprobs >= 0 else []
        yield out(token, logprobs=scores)
    yield out(*FOX, finish="length", logprobs=scores * len(FOX))


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(script)


@pytest.fixture(scope="module")
def http(engine: FakeEngine) -> Iterator[httpx.Client]:
    with serving(create_app(engine, tiny())) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        yield client


@pytest.fixture(scope="module")
def described(http: httpx.Client) -> dict[str, Any]:
    return http.get("/openapi.json").json()


def problems(described: dict[str, Any], schema: dict[str, Any], value: Any) -> list[str]:
    whole = {**schema, "components": described["components"]}
    Draft202012Validator.check_schema(whole)
    return [error.message for error in Draft202012Validator(whole).iter_errors(value)]


def body_problems(described: dict[str, Any], path: str, body: Any) -> list[str]:
    content = described["paths"][path]["post"]["requestBody"]["content"]
    return problems(described, content["application/json"]["schema"], body)


def check_answer(described: dict[str, Any], method: str, path: str, answer: httpx.Response) -> None:
    known = described["paths"][path][method]["responses"]
    assert str(answer.status_code) in known, (path, answer.status_code)
    kind = answer.headers["content-type"].split(";")[0]
    content = known[str(answer.status_code)]["content"]
    assert kind in content, (path, kind)
    if kind == "text/event-stream":
        *events, done, rest = answer.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        for event in events:
            value = json.loads(event.removeprefix("data: "))
            assert problems(described, content[kind]["schema"]["x-event-schema"], value) == [], value
    elif kind == "application/json":
        assert problems(described, content[kind]["schema"], answer.json()) == [], answer.text


ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    (CHATS, {**CHAT, "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": []}]}),
    *[(COMPLETIONS, {**BASE, "prompt": prompt}) for prompt in ("x", ["x", "y"], [5, 6], [[5], [6, 7]])],
    *[(COMPLETIONS, {**BASE, "stop": stop}) for stop in ("x", ["x", "y"], [], None)],
    *[(COMPLETIONS, {**BASE, "logprobs": count}) for count in (0, 1, 2)],
    (COMPLETIONS, {**BASE, "echo": True, "n": 2, "stream": True, "return_token_ids": True}),
    (COMPLETIONS, {**BASE, "stream": True, "logprobs": 1, "stream_options": {"include_usage": True}}),
    *[(COMPLETIONS, {**BASE, "echo": True, "logprobs": 2, "max_tokens": 0, "stream": on}) for on in (False, True)],
    (COMPLETIONS, {**BASE, "prompt": ["x", "y z"], "prompt_logprobs": 2, "max_tokens": 0, "n": 2}),
    (COMPLETIONS, {**BASE, "prompt": "a b c", "prompt_logprobs": 0, "echo": True, "logprobs": 2}),
    (COMPLETIONS, {**BASE, "stream": True, "stream_options": {"include_usage": None, "nobody_knows": 1}}),
    (COMPLETIONS, {**BASE, "logit_bias": {"5": 1, "6": -0.5}, "seed": -1, "user": "me"}),
    (CHATS, {**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}]}),
    (CHATS, {**CHAT, "messages": [{"role": "developer", "content": "x"}, *CHAT["messages"]]}),
    (CHATS, {**CHAT, "logprobs": True, "top_logprobs": 2}),
    (CHATS, {**CHAT, "logprobs": True, "top_logprobs": 2, "stream": True, "stream_options": {"include_usage": True}}),
    (CHATS, {**CHAT, "stream": True, "n": 2, "return_token_ids": True}),
    (CHATS, {**CHAT, "stream": True, "return_accepted_drafts": True}),
    (COMPLETIONS, {**BASE, "return_accepted_drafts": True, "logprobs": 1}),
    (COMPLETIONS, {**BASE, "return_accepted_drafts": True, "stream": True, "stream_options": {"include_usage": True}}),
    (CHATS, {**CHAT, "chat_template_kwargs": {"x": {"y": None}}, "max_completion_tokens": 4}),
    (CHATS, {**CHAT, "tools": [], "tool_choice": "none", "parallel_tool_calls": None}),
    (CHATS, {**CHAT, "messages": [{"role": "assistant", "content": "x", "tool_calls": [], "reasoning_content": "y"}]}),
    ("/tokenize", {"prompt": "", "return_token_strs": True}),
    ("/tokenize", {"prompt": "a", "model": None}),
    ("/tokenize", {"messages": CHAT["messages"], "add_generation_prompt": None}),
    ("/detokenize", {"tokens": []}),
    ("/detokenize", {"tokens": [5, 6], "model": "tiny"}),
]


@pytest.mark.parametrize(("path", "body"), ACCEPTED)
def test_what_is_accepted_is_described(
    http: httpx.Client, described: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert body_problems(described, path, body) == []
    check_answer(described, "post", path, answer)


REFUSED: list[tuple[str, dict[str, Any]]] = [
    *[(COMPLETIONS, {**BASE, "prompt": prompt}) for prompt in (None, 5, [], [""], [None], ["a", 5], [[]], [-1])],
    *[(COMPLETIONS, {**BASE, "max_tokens": count}) for count in (-1, "5", 1.5)],
    *[(COMPLETIONS, {**BASE, "stop": stop}) for stop in (5, [5], {})],
    (COMPLETIONS, {"prompt": "x"}),
    (COMPLETIONS, {**BASE, "model": None}),
    (COMPLETIONS, {**BASE, "stream": 1}),
    (COMPLETIONS, {**BASE, "logit_bias": {"5": "1"}}),
    (COMPLETIONS, {**BASE, "temperature": 2.5}),
    (CHATS, {**CHAT, "messages": []}),
    (CHATS, {**CHAT, "messages": [{"role": "wizard", "content": "x"}]}),
    (CHATS, {**CHAT, "messages": [{"role": "user", "content": None}]}),
    (CHATS, {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    (CHATS, {**CHAT, "messages": [{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}]}),
    (CHATS, {**CHAT, "messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}),
    (CHATS, {**CHAT, "tools": [{"type": "function"}]}),
    (CHATS, {**CHAT, "tool_choice": "all"}),
    (CHATS, {**CHAT, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}),
    (CHATS, {**CHAT, "tool_choice": {"type": "function", "function": {}}}),
    (CHATS, {**CHAT, "top_logprobs": True}),
    ("/tokenize", {"prompt": 5}),
    ("/detokenize", {"tokens": ["a"]}),
]


@pytest.mark.parametrize(("path", "body"), REFUSED)
def test_what_is_not_described_is_refused_as_described(
    http: httpx.Client, described: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert body_problems(described, path, body) != []
    check_answer(described, "post", path, answer)


VALUES = st.sampled_from([None, True, False, 0, 1, 2, -1, 0.5, "", "hi", [], ["hi"], [5], [[5]], {}, {"5": 1}])
NAMES = [
    *(row.name for row in TABLE), "prompt", "messages", "max_tokens", "n", "seed", "stop", "stream", "stream_options",
    "logit_bias", "logprobs", "top_logprobs", "echo",
    "min_tokens", "stop_token_ids", "priority", "chat_template_kwargs", "add_special_tokens", "return_token_ids",
    "return_accepted_drafts", "nobody_knows", "tokens", "tools", "tool_choice", "parallel_tool_calls",
    "max_reasoning_tokens", "prompt_logprobs",
]  # fmt: skip


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    st.sampled_from([COMPLETIONS, CHATS, "/tokenize", "/detokenize"]),
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3),
)
@example(COMPLETIONS, {"seed": None, "stop": None, "stream_options": None})
def test_random_requests_and_their_answers_are_described(
    http: httpx.Client, described: dict[str, Any], path: str, fields: dict[str, Any]
) -> None:
    body = {**(BASE if path == COMPLETIONS else CHAT if path == CHATS else {"prompt": "a"}), **fields}
    answer = http.post(path, json=body)
    check_answer(described, "post", path, answer)
    assert answer.status_code == 400 or body_problems(described, path, body) == []


TOOLS = [{"type": "function", "function": {"name": "f", "description": "F.", "parameters": {"type": "object"}}}]
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "done", "name": "f"}


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, marks=pytest.mark.long),
        {"stream": True, "stream_options": {"include_usage": True}},
        pytest.param({"logprobs": True}, marks=pytest.mark.long),
    ],
)
def test_answers_with_calls_and_reasoning_are_described(more: dict[str, Any]) -> None:
    said = "Hm.</think>Now.<tool_call>f<arg_key>a</arg_key><arg_value>b</arg_value></tool_call>"
    info = replace(INFO, max_context=1024)
    body = {**CHAT, "messages": [*CHAT["messages"], CALLED, RESULT], "tools": TOOLS, **more}
    for text in (said, said[len("Hm.</think>Now.") :], said[:-4]):
        engine = FakeEngine(say(tiny().encode("</think>" * ("Hm" not in text) + text, add_special_tokens=False)), info)
        app = create_app(engine, tiny(), ApiConfig(chat_template=GLM))
        with serving(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
            described = http.get("/openapi.json").json()
            answer = http.post(CHATS, json=body)
            assert answer.status_code == 200, answer.text
            assert body_problems(described, CHATS, body) == []
            check_answer(described, "post", CHATS, answer)


def test_answers_to_questions_without_a_body(
    http: httpx.Client, described: dict[str, Any], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in ("/v1/models", "/health", "/metrics", "/live"):
        check_answer(described, "get", path, http.get(path))
    check_answer(described, "get", "/v1/models/{model_id}", http.get("/v1/models/tiny"))
    check_answer(described, "get", "/v1/models/{model_id}", http.get("/v1/models/other"))
    check_answer(described, "get", "/selftest", http.get("/selftest"))
    report = SelfTestReport("cpu", 1, "no graphs", 0, 0, 0.0, 1.0, 2.0, ())
    monkeypatch.setattr(engine, "selftest", report)
    check_answer(described, "get", "/selftest", http.get("/selftest"))
    check_answer(described, "get", "/live", http.get("/live"))
    check_answer(described, "get", "/live", http.get("/live?selftest=perhaps"))
    monkeypatch.setattr(engine, "fault", "rank 0 is gone")
    for path in ("/v1/models", "/health"):
        check_answer(described, "get", path, http.get(path))
    check_answer(described, "post", COMPLETIONS, http.post(COMPLETIONS, json=BASE))


def test_errors_of_every_status_are_described(
    http: httpx.Client, described: dict[str, Any], engine: FakeEngine
) -> None:
    assert body_problems(described, COMPLETIONS, BASE) == []
    others = ("/tokenize", "/detokenize", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses")
    for path in (COMPLETIONS, CHATS, *others):
        check_answer(described, "post", path, http.post(path, content=b"{}"))
        check_answer(described, "post", path, http.post(path, json={"model": "other", "prompt": "x", "tokens": []}))
        check_answer(described, "post", path, http.post(path, json={"x": "y" * 9_000_000}))
    engine.script = lambda request: [out(FOX[0]), EngineFault("rank 1 is silent")]
    try:
        *_, error, _ = http.post(CHATS, json={**CHAT, "stream": True}).text.split("\n\n")
    finally:
        engine.script = script
    schema = {"$ref": "#/components/schemas/ErrorAnswer"}
    assert problems(described, schema, json.loads(error.removeprefix("data: "))) == []


def test_every_reference_leads_somewhere_and_nothing_of_the_framework_s_is_left(described: dict[str, Any]) -> None:
    text = json.dumps(described)
    schemas = described["components"]["schemas"]
    assert {*re.findall(r'"#/components/schemas/([^"]+)"', text)} <= schemas.keys()
    assert "HTTPValidationError" not in text
    for operations in described["paths"].values():
        assert not any("422" in operation["responses"] for operation in operations.values())


def test_what_needs_no_key_is_one_list_in_code_and_docs(engine: FakeEngine) -> None:
    app = create_app(engine, tiny(), ApiConfig(api_keys=("sesame",)))
    with serving(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        described = http.get("/openapi.json").json()
        found = set()
        for path, methods in paths_of(app):
            for method in methods:
                answer = http.request(method, path.replace("{model_id:path}", "tiny").replace("{name}", "app.js"))
                if answer.status_code != 401:
                    found.add(path)
                    assert answer.status_code == 200
        assert found == set(OPEN_PATHS)
    for path, operations in described["paths"].items():
        for operation in operations.values():
            assert ("security" in operation) == (path not in OPEN_PATHS)
            assert ("401" in operation["responses"]) == (path not in OPEN_PATHS)
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
    [listed] = re.findall(r"No API key is asked for by (.*?)\.\s", page, re.DOTALL)
    assert sorted(re.findall(r"`(/[^`]*)`", listed)) == sorted(OPEN_PATHS)


def test_the_page_of_the_api_lists_every_path_of_it(described: dict[str, Any]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
    listed = re.findall(r"`(?:GET |POST )?(/[^`?]*)", "".join(re.findall(r"^\| (`[A-Z]+ /.*?) \|", page, re.MULTILINE)))
    assert sorted(re.sub(r"{.*?}", "{}", path) for path in described["paths"]) == sorted(
        re.sub(r"{.*?}", "{}", path) for path in listed
    )


def test_the_page_of_the_api_lists_every_field_of_generation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
    [listed] = re.findall(r"^Both generating endpoints take (.*?)\n\n", page, re.MULTILINE | re.DOTALL)
    named = {name.split(".")[0] for name in re.findall(r"`(\w[\w.]*)`", listed)} | {row.name for row in TABLE}
    assert named >= GenerationBody.model_fields.keys() - {"model"}


def test_the_page_of_the_api_has_the_table_of_sampling_parameters() -> None:
    """`python -m tests.sampling_page` writes it."""
    page = PAGE.read_text()
    assert written(page) == page
    assert all(f"| `{row.name}` |" in page for row in TABLE)


def paths_of(app: Any) -> list[tuple[str, list[str]]]:
    """Every path of the application, with its methods; those of FastAPI's own pages, too."""
    described = [(path, [*operations]) for path, operations in app.openapi()["paths"].items()]
    own = [(route.path, [*route.methods]) for route in app.routes if hasattr(route, "methods")]
    return [(path.replace("{model_id}", "{model_id:path}"), methods) for path, methods in [*described, *own]]
