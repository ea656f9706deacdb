"""Metrics and logs of the front."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import httpx
import pytest
from fake_engine import FakeEngine, Refused, say, serving
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tiny_tokenizer import tiny

from deploy.api.app import create_app
from deploy.config.api import ApiConfig
from deploy.config.application import LogConfig
from deploy.observability.front_metrics import (
    ACCEPTANCE,
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    TOKEN_BUCKETS,
    WORKER_COUNTERS,
    WORKER_GAUGES,
    FrontMetrics,
)
from deploy.observability.logs import LOGGERS, configure
from workers.graphs.stats import GraphStats
from workers.protocol.messages import EngineStats
from workers.rank.step_reads import STEP_READS
from workers.scheduler.results import Counters

IDS = tiny().encode("the fox", add_special_tokens=False)
BODY = {"model": "tiny", "prompt": "a very secret prompt", "max_tokens": 50}


@pytest.fixture
def logs() -> Iterator[io.StringIO]:
    loggers = [logging.getLogger(name) for name in (*LOGGERS, "latentserve.access")]
    before = [(logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
    stream = io.StringIO()
    configure(LogConfig(access=True), stream)
    yield stream
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


def samples(text: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.name.startswith("latentserve_")
        assert family.documentation
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_what_is_counted() -> None:
    engine = FakeEngine(say(IDS))
    with serving(create_app(engine, tiny())) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        for stream in (False, True):
            assert http.post("/v1/completions", json={**BODY, "stream": stream, "n": 2}).status_code == 200
        http.post("/v1/completions", json={**BODY, "n": 0})
        http.get("/made/up/path")
        engine.script = lambda request: [Refused("full", overloaded=True)]
        http.post("/v1/completions", json=BODY)
        engine.stats = EngineStats(running=3, waiting=2, pages_free=7, drafts_offered=10, drafts_accepted=8, slots=64)
        answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found = samples(answer.text)
    prompt = len(tiny().encode(str(BODY["prompt"])))
    assert found["latentserve_requests_total{endpoint=completions,reason=stop}"] == 4
    assert found["latentserve_requests_total{endpoint=completions,reason=refused}"] == 1
    assert found["latentserve_requests_in_flight"] == 0
    assert found["latentserve_prompt_tokens_total"] == 5 * prompt
    assert found["latentserve_generated_tokens_total"] == 4 * (len(IDS) + 1)
    assert found["latentserve_cached_tokens_total"] == 4 * 64
    assert found["latentserve_time_to_first_token_seconds_count"] == 4
    assert found["latentserve_inter_token_seconds_count"] == 4 * len(IDS)
    assert found["latentserve_time_per_output_token_seconds_count"] == 4
    assert found["latentserve_request_seconds_count"] == 5
    assert found["latentserve_http_responses_total{path=/v1/completions,status=200}"] == 2
    assert found["latentserve_http_responses_total{path=/v1/completions,status=400}"] == 1
    assert found["latentserve_http_responses_total{path=/v1/completions,status=429}"] == 1
    assert found["latentserve_http_responses_total{path=unknown,status=404}"] == 1
    assert found["latentserve_engine_running"] == 3
    assert found["latentserve_engine_drafts_accepted_total"] == 8


@settings(deadline=None)
@given(st.lists(st.one_of(st.floats(0, 10), st.sampled_from(TOKEN_BUCKETS)), max_size=40))
def test_intervals_are_counted_as_prometheus_client_counts_them(seconds: list[float]) -> None:
    metrics, registry = FrontMetrics(), CollectorRegistry()
    theirs = Histogram("latentserve_inter_token_seconds", "Theirs.", buckets=TOKEN_BUCKETS, registry=registry)
    for value in seconds:
        theirs.observe(value)
    for begin in range(0, len(seconds), 7):
        metrics.token_intervals(seconds[begin : begin + 7])
    ours, expected = samples(generate_latest(metrics.registry).decode()), samples(generate_latest(registry).decode())
    for name, value in expected.items():
        if not name.endswith("_created"):
            assert ours[name] == pytest.approx(value), name


def test_every_engine_figure_is_rendered() -> None:
    fields = set(EngineStats.__struct_fields__) - {"prefix_keys", "host_keys", "disk_keys", "key_root", "worker"}
    computed = {"prefill_backlog_seconds"}  # from others
    assert fields | computed == set(GAUGES) | set(COUNTERS) | set(HISTOGRAMS) | {ACCEPTANCE[0]}
    assert set(GraphStats(step_reads=dict.fromkeys(STEP_READS, 0.0)).figures()) == set(WORKER_GAUGES) | set(
        WORKER_COUNTERS
    )
    metrics = FrontMetrics()
    metrics.watch_engine(EngineStats)
    found = samples(metrics.render().decode())
    assert {f"latentserve_engine_{name}" for name in (*GAUGES, *WORKER_GAUGES)} <= set(found)
    unlabelled = [name for name, (_, label) in WORKER_COUNTERS.items() if label is None]
    assert {f"latentserve_engine_{name}_total" for name in (*COUNTERS, *unlabelled)} <= set(found)


def test_histograms_and_labels_of_the_engine() -> None:
    counters = Counters()
    for seconds in (0.0009, 0.001, 0.0011, 0.7, 3.0):
        counters.count_step(5, 0, seconds)
    counters.count_step(3, 100, 0.02)
    graphs = GraphStats(replays=5, rows=25)
    graphs.eager["no graphs"] = 1
    metrics = FrontMetrics()
    metrics.watch_engine(lambda: counters.into(EngineStats(worker=graphs.figures())))
    found = samples(metrics.render().decode())
    seconds, rows = "latentserve_engine_step_seconds", "latentserve_engine_step_decode_rows"
    below = [found[f"{seconds}_bucket{{kind=decode,le={le}}}"] for le in ("0.001", "0.002", "0.5", "1.0", "+Inf")]
    assert below == [2, 3, 3, 4, 5]
    assert found[f"{seconds}_sum{{kind=decode}}"] == pytest.approx(3.703)
    assert found[f"{seconds}_count{{kind=decode}}"] == 5
    assert found[f"{seconds}_count{{kind=mixed}}"] == 1
    assert found[f"{rows}_sum{{kind=decode}}"] == 25
    assert found[f"{rows}_bucket{{kind=mixed,le=4.0}}"] == 1
    assert found["latentserve_engine_step_prefill_tokens_sum{kind=mixed}"] == 100
    assert found["latentserve_engine_graph_replays_total"] == 5
    assert found["latentserve_engine_graph_eager_steps_total{reason=no graphs}"] == 1


def test_logs_are_json_with_ids_and_without_prompts(logs: io.StringIO) -> None:
    engine = FakeEngine(say(IDS))
    config = ApiConfig(api_keys=("sesame-key",))
    with serving(create_app(engine, tiny(), config)) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        headers = {"x-request-id": "mine-1", "authorization": "Bearer sesame-key"}
        http.post("/v1/completions", json={**BODY, "stream": True}, headers=headers)
        http.post("/v1/completions", json={**BODY, "n": 0}, headers=headers)
        http.get("/health")
    text = logs.getvalue()
    assert "secret" not in text
    assert "sesame-key" not in text
    lines = [json.loads(line) for line in text.splitlines()]
    good, bad = lines  # and nothing of /health, which is polled
    assert good["request_id"] == "mine-1"
    assert good["message"] == "request"
    assert (good["status"], good["route"], good["method"]) == (200, "/v1/completions", "POST")
    assert good["prompt_tokens"] == len(tiny().encode(str(BODY["prompt"])))
    assert good["completion_tokens"] == len(IDS) + 1
    assert good["finish"] == "stop"
    assert 0 < good["first_token_s"] <= good["seconds"]
    assert {"time", "level", "logger"} <= set(good)
    assert bad["status"] == 400
    assert "disconnected" not in good


def test_a_defect_is_a_500_that_tells_nothing(logs: io.StringIO) -> None:
    def broken(request):
        raise ZeroDivisionError("secret inside")

    engine = FakeEngine(broken)
    with serving(create_app(engine, tiny())) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        answer = http.post("/v1/completions", json=BODY)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal_error"
        assert answer.headers["x-request-id"]
        assert "secret" not in answer.text
        # The server closes the connection of a defect.
        found = samples(httpx.get(f"http://127.0.0.1:{port}/metrics").text)
    assert found["latentserve_http_responses_total{path=/v1/completions,status=500}"] == 1
    assert found["latentserve_requests_in_flight"] == 0
