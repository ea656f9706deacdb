"""JSON that is legal and seldom: every endpoint reads it as what it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, say, serving
from test_messages import TOKENIZER
from tool_templates import KIMI

from deploy.api.app import create_app
from deploy.config.api import ApiConfig
from workers.protocol.messages import Request

ASK = [{"role": "user", "content": "q"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "q", "max_tokens": 3},
    "/v1/chat/completions": {"messages": ASK, "max_tokens": 3},
    "/v1/messages": {"messages": ASK, "max_tokens": 3},
    "/v1/responses": {"input": "q", "max_output_tokens": 3},
}


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(say(TOKENIZER.encode("Fine.", add_special_tokens=False)))


@pytest.fixture(scope="module")
def http(engine: FakeEngine) -> Iterator[httpx.Client]:
    app = create_app(engine, TOKENIZER, ApiConfig(chat_template=KIMI))
    with serving(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        yield client


def sent(http: httpx.Client, engine: FakeEngine, path: str, raw: str | bytes) -> Request:
    """The request that a body becomes."""
    answer = http.post(path, content=raw, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text
    return engine.requests[-1]


@pytest.mark.parametrize("path", BODIES)
def test_numbers_without_a_fraction_are_integers(http: httpx.Client, engine: FakeEngine, path: str) -> None:
    more = {"top_k": 20, "seed": 7, "min_tokens": 1, "priority": 2, "temperature": 1}
    plain = json.dumps({"model": "tiny", **BODIES[path], **more})
    expected = sent(http, engine, path, plain).sampling
    for written in ("{}.0", "{}.000", "{}e0", "{}0.0E-1"):
        odd = {"model": "tiny"} | {
            name: f"<{written.format(value)}>" if type(value) is int else value
            for name, value in {**BODIES[path], **more}.items()
        }
        raw = json.dumps(odd).replace('"<', "").replace('>"', "")
        assert json.loads(raw) == json.loads(plain)
        assert sent(http, engine, path, raw).sampling == expected
    for wrong in ("2.5", "1e-1", "true", '"2"', "1e300"):
        raw = plain.replace('"top_k": 20', f'"top_k": {wrong}')
        answer = http.post(path, content=raw, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_k")


def test_bounds_within_objects_may_be_written_with_a_fraction(http: httpx.Client, engine: FakeEngine) -> None:
    for path, fields in (
        ("/v1/chat/completions", '"thinking": {"type": "enabled", "budget_tokens": 64.0}'),
        ("/v1/chat/completions", '"reasoning": {"max_tokens": 64.0}'),
        ("/v1/messages", '"thinking": {"type": "enabled", "budget_tokens": 64.0}'),
        ("/v1/responses", '"reasoning": {"max_tokens": 64.0}'),
    ):
        raw = json.dumps({"model": "tiny", **BODIES[path]})[:-1] + f", {fields}}}"
        grammar = sent(http, engine, path, raw).sampling.grammar
        assert grammar is not None
        assert grammar.most_before == 64


@pytest.mark.parametrize("path", [*BODIES, "/tokenize"])
def test_a_mark_of_the_byte_order_is_no_part_of_a_body(http: httpx.Client, path: str) -> None:
    raw = json.dumps({"model": "tiny", **BODIES.get(path, {"prompt": "q"})}).encode()
    answer = http.post(path, content=b"\xef\xbb\xbf" + raw, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text
    twice = http.post(path, content=b"\xef\xbb\xbf" * 2 + raw, headers={"Content-Type": "application/json"})
    assert twice.status_code == 400


def test_of_a_name_that_comes_twice_the_last_value_holds(http: httpx.Client, engine: FakeEngine) -> None:
    raw = '{"model": "x", "top_k": 3, "messages": [], "m\\u006fdel": "tiny", "messages": [{"role": "tool",'
    raw += ' "role": "user", "content": "no", "c\\u006fntent": "yes"}], "top_k": 5}'
    request = sent(http, engine, "/v1/chat/completions", raw)
    assert request.sampling.top_k == 5
    assert "yes" in TOKENIZER.decode(list(request.prompt), skip_special_tokens=False)
