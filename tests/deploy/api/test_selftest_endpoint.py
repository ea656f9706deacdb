"""GET /selftest."""

from __future__ import annotations

import httpx
from fake_engine import FakeEngine, say, serving
from tiny_tokenizer import tiny

from deploy.api.app import create_app
from deploy.config.api import ApiConfig
from workers.protocol.report import BucketReport, SelfTestReport, StepTime

BUCKETS = (
    BucketReport(
        "decode", "4 x 3", 0.5, drafts=2, rows=3, accepted=1, logits_error=1e-6, step_time=StepTime(4, 3, 0.004)
    ),
)
REPORT = SelfTestReport("NVIDIA H200", 2, "", 1, 1 << 20, 1.5, 1e9, 0.75, BUCKETS)


def get(engine: FakeEngine, config: ApiConfig | None = None, **headers: str) -> httpx.Response:
    with serving(create_app(engine, tiny(), config)) as port:
        return httpx.get(f"http://127.0.0.1:{port}/selftest", headers=headers)


def test_what_was_found_at_the_start() -> None:
    engine = FakeEngine(say([5]))
    engine.selftest = REPORT
    answer = get(engine)
    assert answer.status_code == 200
    assert answer.json() == {
        "passed": True,
        "summary": "1 of 1 graphs compute what eager computes (0.8 s)",
        "device": "NVIDIA H200",
        "ranks": 2,
        "eager": "",
        "graphs": 1,
        "graph_bytes": 1048576,
        "capture_seconds": 1.5,
        "began": 1e9,
        "seconds": 0.75,
        "left_out": 0,
        "inherited": 0,
        "buckets": [
            {
                "passed": True,
                "kind": "decode",
                "bucket": "4 x 3",
                "seconds": 0.5,
                "problems": [],
                "drafts": 2,
                "rows": 3,
                "accepted": 1,
                "logits_error": 1e-6,
                "step_seconds": 0.004,
            }
        ],
    }


def test_a_replica_without_self_test_says_so() -> None:
    answer = get(FakeEngine(say([5])))
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "selftest_off"
    assert "engine.selftest is false" in answer.json()["error"]["message"]


def test_it_is_behind_the_api_key() -> None:
    engine, config = FakeEngine(say([5])), ApiConfig(api_keys=("sesame",))
    engine.selftest = REPORT
    assert get(engine, config).status_code == 401
    assert get(engine, config, authorization="Bearer sesame").status_code == 200


def test_a_failed_engine_answers_its_cause() -> None:
    engine = FakeEngine(say([5]))
    engine.selftest, engine.fault = REPORT, "rank 1 died"
    answer = get(engine)
    assert answer.status_code == 503
    assert "rank 1 died" in answer.json()["error"]["message"]
