"""Spans of requests: their tree and times, what they say and what they never say, and where they go."""

from __future__ import annotations

import asyncio
import gzip
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from demo_server import demo_engine
from fake_engine import FakeEngine, PushEngine, Refused, RequestFailed, out, say, serving
from msgspec.structs import replace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send
from tiny_tokenizer import tiny

from deploy.api.app import create_app
from deploy.api.http.tracing import TracingLayer
from deploy.config import otlp
from deploy.config.api import ApiConfig
from deploy.config.application import ServeConfig
from deploy.config.keys import ApiKey
from deploy.config.otlp import endpoint_of
from deploy.observability.tracing import Tracing, exporter_for
from deploy.text.tokenizer import Tokenizer
from workers.config import DEMO_MODEL, EngineConfig

IDS = tiny().encode("the fox jumps over", add_special_tokens=False)
BODY = {"model": "tiny", "prompt": "a very secret prompt", "max_tokens": 50}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Spans:
    """Exported spans, by name."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracing = Tracing(self.exporter, "replica-1")

    def take(self, some: bool = True) -> dict[str, list[ReadableSpan]]:
        """Return the spans that were exported since the last call. With `some` the span of a request is waited for."""
        deadline = time.monotonic() + 60
        while some and not any("/" in span.name for span in self.exporter.get_finished_spans()):
            assert time.monotonic() < deadline
            self.tracing.flush()
            time.sleep(0.005)
        self.tracing.flush()
        found: dict[str, list[ReadableSpan]] = {}
        for span in self.exporter.get_finished_spans():
            found.setdefault(span.name, []).append(span)
        self.exporter.clear()
        return found


@contextmanager
def traced(engine: Any = None, tokenizer: Any = None, **settings: Any) -> Iterator[tuple[httpx.Client, Spans]]:
    spans = Spans()
    app = create_app(engine or FakeEngine(say(IDS)), tokenizer or tiny(), ApiConfig(**settings), tracing=spans.tracing)
    with serving(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        yield http, spans
    spans.tracing.close()


def said(found: dict[str, list[ReadableSpan]]) -> str:
    return json.dumps([span.to_json() for spans in found.values() for span in spans])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("engine_class", [FakeEngine, PushEngine])
def test_a_request_has_a_span_for_each_stage(engine_class: Callable[..., FakeEngine], stream: bool) -> None:
    def script(request: Any) -> Iterator[Any]:
        yield 0.02
        yield replace(out(IDS[0], cached=2), queued=0.01)
        yield 0.06
        yield out(IDS[1], IDS[2], IDS[3])
        yield out(1, finish="stop")

    with traced(engine_class(script)) as (http, spans):
        answer = http.post("/v1/completions", json={**BODY, "stream": stream, "n": 2}, headers={"x-request-id": "mine"})
        assert answer.status_code == 200
        found = spans.take()
    [root] = found["POST /v1/completions"]
    assert {name: len(each) for name, each in found.items() if name != root.name} == {
        "front": 1,
        "queue": 2,
        "prefill": 2,
        "decode": 2,
        "stream": 1,
    }
    assert root.parent is None
    for name, each in found.items():
        for span in each:
            assert span.start_time <= span.end_time
            if span is not root:
                assert span.parent is not None
                assert span.parent.span_id == root.context.span_id, name
                assert root.start_time <= span.start_time
                assert span.end_time <= root.end_time
    prompt = len(tiny().encode(str(BODY["prompt"])))
    for choice in range(2):
        queue, prefill, decode = (
            next(span for span in found[name] if span.attributes["latentserve.choice"] == choice)
            for name in ("queue", "prefill", "decode")
        )
        assert queue.end_time - queue.start_time == 10_000_000
        assert queue.end_time == prefill.start_time
        assert prefill.end_time == decode.start_time
        # A third less than the engine takes: where processors are busy, the first token is seen late.
        assert decode.end_time - decode.start_time >= 40_000_000
        assert prefill.attributes["latentserve.prompt_tokens"] == prompt
        assert prefill.attributes["latentserve.cached_tokens"] == 2
        assert decode.attributes["latentserve.generated_tokens"] == 5
        assert decode.attributes["latentserve.accepted_drafts"] == 2
        assert decode.attributes["latentserve.finish_reason"] == "stop"
    assert dict(root.attributes) == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "latentserve.request_id": "mine",
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.output_tokens": 10,
        "latentserve.finish_reasons": "stop",
        "latentserve.time_to_first_token_s": root.attributes["latentserve.time_to_first_token_s"],
    }
    assert root.resource.attributes["service.name"] == "latentserve"
    assert root.resource.attributes["service.instance.id"] == "replica-1"


def test_a_trace_goes_on_from_the_client_and_the_answer_names_its_span() -> None:
    with traced() as (http, spans):
        answer = http.post("/v1/completions", json=BODY, headers={"traceparent": PARENT, "tracestate": "vendor=1"})
        found = spans.take()
        [root] = found["POST /v1/completions"]
        assert f"{root.context.trace_id:032x}" == PARENT.split("-")[1]
        assert f"{root.parent.span_id:016x}" == PARENT.split("-")[2]
        assert root.context.trace_state.to_header() == "vendor=1"
        assert answer.headers["traceresponse"] == f"00-{PARENT.split('-')[1]}-{root.context.span_id:016x}-01"
        # Whoever is not traced is not traced here either.
        answer = http.post("/v1/completions", json=BODY, headers={"traceparent": PARENT[:-2] + "00"})
        assert answer.headers["traceresponse"].startswith(PARENT[:36])
        assert answer.headers["traceresponse"].endswith("-00")
        assert spans.take(some=False) == {}
        for wrong in ("", "x", PARENT[:-1], "00-" + "0" * 32 + PARENT[35:], "é" * 55):
            answer = http.post("/v1/completions", json=BODY, headers={"traceparent": wrong.encode()})
            assert answer.status_code == 200
            [root] = spans.take()["POST /v1/completions"]
            assert root.parent is None


@pytest.mark.parametrize(
    ("script", "status", "reason"),
    [
        (lambda request: [Refused("secret: full", overloaded=True)], 429, "refused"),
        (lambda request: [RequestFailed("secret: bad")], 500, "error"),
        (lambda request: [out(30), RequestFailed("secret: bad")], 500, "error"),
    ],
)
def test_what_fails_says_so_and_quotes_nothing(script: Any, status: int, reason: str) -> None:
    with traced(FakeEngine(script)) as (http, spans):
        assert http.post("/v1/completions", json=BODY).status_code == status
        found = spans.take()
        [root] = found["POST /v1/completions"]
        assert root.attributes["http.response.status_code"] == status
        assert root.status.status_code is (StatusCode.ERROR if status >= 500 else StatusCode.UNSET)
        last = found["decode" if "decode" in found else "queue"][0]
        assert last.attributes["latentserve.finish_reason"] == reason
        assert last.status.status_code is StatusCode.ERROR
        assert "secret" not in said(found)
        assert http.post("/v1/completions", json={**BODY, "logit_bias": {"secret": 1}}).status_code == 400
        assert http.get("/made/up/secret").status_code == 404
        found = spans.take()
        assert {*found} == {"POST /v1/completions", "GET unknown"}
        assert "secret" not in said(found)
        for path in ("/health", "/metrics", "/live"):
            http.get(path)
        assert spans.take(some=False) == {}


def test_no_span_holds_a_prompt_an_output_or_a_key() -> None:
    key = ApiKey(key="sesame", name="app")
    with traced(api_keys=(key,)) as (http, spans):
        for path, body in (
            ("/v1/completions", {**BODY, "echo": True, "logprobs": None, "user": "secret"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "secret"}], "stream": True}),
            ("/v1/messages", {"model": "tiny", "messages": [{"role": "user", "content": "secret"}], "max_tokens": 9}),
            ("/v1/responses", {"input": "secret"}),
            ("/tokenize", {"prompt": "secret"}),
        ):
            answer = http.post(path, json={**body, "model": "tiny"}, headers={"x-api-key": "sesame"})
            assert answer.status_code == 200, answer.text
        found = spans.take()
    assert len(found["decode"]) == 4
    assert found["POST /v1/completions"][0].attributes["latentserve.key"] == "app"
    for word in ("secret", "sesame", "fox"):
        assert word not in said(found)


HI = [{"role": "user", "content": "hi"}]
GENERATING = [
    ("/v1/completions", BODY),
    ("/v1/chat/completions", {"model": "tiny", "messages": HI, "max_tokens": 50}),
    ("/v1/messages", {"model": "tiny", "messages": HI, "max_tokens": 50}),
    ("/v1/responses", {"model": "tiny", "input": "hi", "max_output_tokens": 50}),
]


@pytest.mark.parametrize(("path", "body"), GENERATING)
def test_a_client_that_leaves_ends_its_spans(path: str, body: dict[str, Any]) -> None:
    with traced(FakeEngine(lambda request: [out(30), 60.0])) as (http, spans):
        with http.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200
        found: dict[str, list[ReadableSpan]] = {}
        deadline = time.monotonic() + 60
        while f"POST {path}" not in found:
            found |= spans.take()
            assert time.monotonic() < deadline
    assert found["decode"][0].attributes["latentserve.finish_reason"] == "cancelled"
    (span,) = found[f"POST {path}"]
    assert span.attributes["latentserve.disconnected"] is True
    assert span.attributes["http.response.status_code"] == 200
    assert span.status.status_code is not StatusCode.ERROR


@pytest.mark.parametrize(("path", "body"), GENERATING)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_it_is_answered_is_no_error(path: str, body: dict[str, Any], stream: bool) -> None:
    with traced(FakeEngine(lambda request: [60.0])) as (http, spans):
        with pytest.raises(httpx.ReadTimeout):
            http.post(path, json={**body, "stream": stream}, timeout=httpx.Timeout(60, read=0.2))
        (span,) = spans.take()[f"POST {path}"]
    assert span.attributes["latentserve.disconnected"] is True
    assert span.attributes["http.response.status_code"] == 499
    assert span.status.status_code is not StatusCode.ERROR


async def test_a_client_whose_task_ray_serve_cancels_has_left() -> None:
    spans = Spans()
    begun = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await asyncio.sleep(60)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    scope |= {"latentserve.request_id": "one", "latentserve.log": {}}
    call = asyncio.create_task(TracingLayer(app, spans.tracing)(scope, receive=None, send=None))
    await begun.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    (span,) = spans.take(some=False)["POST unknown"]
    assert span.attributes["latentserve.disconnected"] is True
    assert span.status.status_code is not StatusCode.ERROR


async def test_stages_of_a_real_engine() -> None:
    async with demo_engine(3) as engine:
        spans = Spans()
        app = create_app(engine, Tokenizer.load(DEMO_MODEL), ApiConfig(), tracing=spans.tracing)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            body = {
                "model": "demo",
                "prompt": "def read_lines(path):",
                "max_tokens": 40,
                "temperature": 0,
                "ignore_eos": True,
            }
            answer = await http.post("/v1/completions", json={**body, "return_accepted_drafts": True})
            assert answer.status_code == 200, answer.text
        found = spans.take()
        spans.tracing.close()
    [queue], [prefill], [decode] = found["queue"], found["prefill"], found["decode"]
    assert queue.end_time > queue.start_time
    assert prefill.end_time > prefill.start_time
    [choice] = answer.json()["choices"]
    assert decode.attributes["latentserve.accepted_drafts"] == sum(choice["accepted_drafts"]) > 0
    assert decode.attributes["latentserve.generated_tokens"] == 40


class Collector(ThreadingHTTPServer):
    """Takes spans by OTLP over HTTP, as any collector does."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), CollectorHandler)
        self.got: list[tuple[str, ExportTraceServiceRequest]] = []


class CollectorHandler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            raw = gzip.decompress(raw)
        assert isinstance(self.server, Collector)
        self.server.got.append((self.path, ExportTraceServiceRequest.FromString(raw)))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        pass


def test_spans_reach_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra `tracing` is not installed")
    collector = Collector()
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{collector.server_address[1]}/"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    tracing = Tracing(exporter_for(ApiConfig(otlp_endpoint=url).otlp_endpoint or ""))
    app = create_app(FakeEngine(say(IDS)), tiny(), ApiConfig(), tracing=tracing)
    with serving(app) as port:
        headers = {"traceparent": PARENT}
        assert httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=BODY, headers=headers).status_code == 200
    tracing.close()
    collector.shutdown()
    collector.server_close()
    assert {path for path, _ in collector.got} == {"/v1/traces"}
    resources = [resource for _, request in collector.got for resource in request.resource_spans]
    names = {
        each.value.string_value for one in resources for each in one.resource.attributes if each.key == "service.name"
    }
    assert names == {"mine"}
    spans = [span for one in resources for scope in one.scope_spans for span in scope.spans]
    assert sorted(span.name for span in spans) == [
        "POST /v1/completions",
        "decode",
        "front",
        "prefill",
        "queue",
        "stream",
    ]
    assert {span.trace_id.hex() for span in spans} == {PARENT.split("-")[1]}
    assert all(span.end_time_unix_nano >= span.start_time_unix_nano for span in spans)


def test_a_collector_that_is_away_harms_no_request() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra `tracing` is not installed")
    tracing = Tracing(exporter_for("http://127.0.0.1:9"))
    with serving(create_app(FakeEngine(say(IDS)), tiny(), ApiConfig(), tracing=tracing)) as port:
        assert httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=BODY).status_code == 200


def test_a_collector_that_hangs_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a collector holds up neither requests, of which more spans come than are kept, nor the end of the
    replica."""
    go_on, hung = threading.Event(), threading.Event()

    class Hangs(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            hung.set()
            go_on.wait(120)
            return SpanExportResult.SUCCESS

    monkeypatch.setattr("deploy.observability.tracing.CLOSE_S", 0.2)
    tracing = Tracing(Hangs())
    for _ in range(5000):
        tracing.request("earlier", {}).end("earlier", {}, failed=False)
    assert hung.wait(60)
    with serving(create_app(FakeEngine(say(IDS)), tiny(), ApiConfig(), tracing=tracing)) as port:
        assert httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=BODY).status_code == 200
    tracing.close()
    assert not go_on.is_set(), "it still hangs, and close has come back"
    go_on.set()


def test_without_an_endpoint_nothing_of_it_is_there() -> None:
    """It costs nothing by construction: no layer, no import."""
    code = (
        "import sys, deploy.api.app, deploy.config.application; from deploy.config.api import ApiConfig\n"
        "assert ApiConfig().otlp_endpoint is None\n"
        "sys.exit(any(name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter')) for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    app = create_app(FakeEngine(say(IDS)), tiny())
    assert [layer.cls.__name__ for layer in app.user_middleware] == ["AccessLayer", "DeadlineLayer"]
    with serving(app) as port:
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=BODY, headers={"traceparent": PARENT})
        assert "traceresponse" not in answer.headers


def test_where_spans_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "_exporter_installed", lambda: True)
    assert ApiConfig(otlp_endpoint="http://collector:4318").otlp_endpoint == "http://collector:4318"
    for wrong in ("collector:4318", "grpc://collector:4317", "http://", "http://host:x", ""):
        with pytest.raises(ValidationError, match="is not the URL of a collector"):
            ApiConfig(otlp_endpoint=wrong)
    monkeypatch.setattr(otlp, "_exporter_installed", lambda: False)
    with pytest.raises(ValidationError, match=r"pip install 'latentserve\[tracing\]'"):
        ApiConfig(otlp_endpoint="http://collector:4318")
    given = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}
    assert endpoint_of(given) == "http://collector:4318"
    for off in ({}, {**given, "OTEL_SDK_DISABLED": "true"}, {**given, "OTEL_TRACES_EXPORTER": "none"}):
        assert endpoint_of(off) is None


def test_the_environment_names_a_collector_where_the_settings_do_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from deploy.serve.application import with_collector

    given = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}
    config = ServeConfig(engine=EngineConfig(model="demo"))
    assert with_collector(config, {}) is config
    monkeypatch.setattr(otlp, "_exporter_installed", lambda: False)
    assert with_collector(config, given) is config
    assert "pip install" in caplog.text
    monkeypatch.setattr(otlp, "_exporter_installed", lambda: True)
    assert with_collector(config, given).api.otlp_endpoint == "http://collector:4318"
    own = ServeConfig(engine=EngineConfig(model="demo"), api=ApiConfig(otlp_endpoint="http://other:4318"))
    assert with_collector(own, given) is own
