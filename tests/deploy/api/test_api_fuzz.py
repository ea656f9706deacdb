"""Whatever is asked of a running front is answered as its description says: no 500, no hang, and every answer, error
and stream in the shape of its endpoint.

To run it for longer, from another seed: `python tests/deploy/api/test_api_fuzz.py --requests 100000 --seed 7`, with
`PYTHONPATH=.:tests:tests/deploy/text`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from typing import Any

import httpx
import pytest
from drawn_bodies import RICH, Drawing
from fake_engine import FakeEngine, serving
from test_openapi import problems, script
from tiny_tokenizer import tiny
from tool_templates import GLM

from deploy.api.app import create_app
from deploy.config.api import ApiConfig

SLOWEST_S = 20.0
"""No answer takes longer: the engine costs nothing."""
FRONTS: dict[str, dict[str, Any]] = {
    "a chat model with tools": {"chat_template": GLM, "stored_responses": 5},
    "little room": {"max_n": 2, "max_logprobs": 1, "max_json_items": 60, "max_json_depth": 6, "max_body_bytes": 2000},
    "no chat template": {},
    "no tokenizer": {},
}
ERRORS = {400, 404, 408, 413, 415, 429, 503}


def fuzz(kind: str, requests: int, seed: int) -> Counter[int]:
    """Ask a front so often; how often each status came. AssertionError with the request that has a wrong answer."""
    tokenizer = None if kind == "no tokenizer" else tiny()
    app = create_app(FakeEngine(script), tokenizer, ApiConfig(**FRONTS[kind]))
    seen: Counter[int] = Counter()
    with serving(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=SLOWEST_S) as http:
        described = http.get("/openapi.json").json()
        paths = list(RICH)
        assert {path for path, of in described["paths"].items() if "post" in of} == set(paths), "a path without bodies"
        for number in range(requests):
            rng = random.Random(f"{seed} {number}")
            drawing, path = Drawing(described, rng), paths[number % len(paths)]
            raw = drawing.raw(drawing.body(path))
            try:
                answer = http.post(path, content=raw, headers={"content-type": "application/json"})
                check(described, path, answer)
            except (AssertionError, httpx.HTTPError, ValueError) as error:
                raise AssertionError(f"{kind}, seed {seed}, request {number}: {path} {raw!r}: {error!r}") from error
            seen[answer.status_code] += 1
        assert http.get("/health").status_code == 200
    return seen


def check(described: dict[str, Any], path: str, answer: httpx.Response) -> None:
    """Hold an answer against the description."""
    status, known = answer.status_code, described["paths"][path]["post"]["responses"]
    assert status == 200 or status in ERRORS, f"{status}: {answer.text}"
    kind = answer.headers["content-type"].split(";")[0]
    schema = known[str(status)]["content"][kind]["schema"]
    if kind == "application/json":
        assert problems(described, schema, answer.json()) == [], answer.text
        return
    *events, rest = answer.text.split("\n\n")
    assert rest == ""
    assert events
    if events[-1] == "data: [DONE]":
        events.pop()
    for event in events:
        value = json.loads(event.split("data: ", 1)[1])
        assert problems(described, schema["x-event-schema"], value) == [], value
        assert "internal_error" not in event


def test_whatever_is_asked_is_answered_as_described() -> None:
    seen = fuzz("a chat model with tools", 800, seed=1)
    assert min(seen[200], seen[400]) > 100, "both what is right and what is wrong is drawn"


def test_fronts_that_lack_something() -> None:
    for kind in list(FRONTS)[1:]:
        assert fuzz(kind, 150, seed=2)[400] > 20


@pytest.mark.soak
@pytest.mark.parametrize("kind", FRONTS)
def test_more_of_it(kind: str) -> None:
    fuzz(kind, 4000, seed=3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    asked = parser.parse_args()
    for front in FRONTS:
        print(front, dict(fuzz(front, asked.requests, asked.seed)))
