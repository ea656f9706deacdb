"""What a request draws follows from its secret alone, so that another front draws the same."""

from __future__ import annotations

import re

import httpx
import pytest
from fake_engine import FakeEngine, say
from tiny_tokenizer import tiny

from deploy.api.app import create_app
from deploy.api.http.draws import Draws
from deploy.config.api import ApiConfig

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n' * 2
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
TEMPLATE = "{{ tools[0].function.name if tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
BODIES = {
    "/v1/completions": {"prompt": ["a", "a"], "n": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL], "n": 2},
    "/v1/messages": {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    },
    "/v1/responses": {"input": "Hi", "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}]},
}


@pytest.mark.parametrize("path", BODIES)
async def test_an_answer_is_written_again_of_the_same_secret_and_not_of_the_same_request_id(path: str) -> None:
    ids = tiny().encode("Well. " + CALL, add_special_tokens=False)
    engine = FakeEngine(say(ids))
    app = create_app(engine, tiny(), ApiConfig(chat_template=TEMPLATE, tool_parser="hermes"))
    known = Draws(created=1_700_000_000.5)
    limit = {"max_output_tokens" if path.endswith("responses") else "max_tokens": 150}
    found = []
    for draws in (known, Draws(known.secret, known.created), None):

        async def drawn(scope, receive, send, draws=draws) -> None:
            await app(scope if draws is None else {**scope, "latentserve.draws": draws}, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(drawn), base_url="http://x") as client:
            headers = {"x-request-id": "mine"}
            answer = await client.post(path, json={"model": "tiny", **limit, **BODIES[path]}, headers=headers)
        assert answer.status_code == 200, answer.text
        seeds = [request.sampling.seed for request in engine.requests]
        engine.requests.clear()
        assert len(set(seeds)) == len(seeds), "each sequence has a seed of its own"
        found.append((answer.content, seeds))
    assert found[0] == found[1]
    if path != "/v1/completions":
        drawn_ids = [set(re.findall(rb"call_[0-9a-f]{24}", answer)) for answer, _ in found]
        assert len(drawn_ids[0]) == 2 * BODIES[path].get("n", 1), "each call has an id of its own"
        assert not drawn_ids[0] & drawn_ids[2]
    assert not set(found[0][1]) & set(found[2][1])
