"""Spans of requests, in OpenTelemetry's terms: what each stage took, and ids, counts and ends; never a prompt or an
output.

Off unless an endpoint is given; then nothing here is imported. The packages are the extra `tracing`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Mapping
from typing import Final

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import kernels
from workers.protocol.messages import RequestOutput

CLOSE_S = 3.0
"""Seconds that spans still have to leave when a replica ends."""
INCOMING: Final = ("traceparent", "tracestate")
"""Headers of W3C's Trace Context, level 1: the span of the client that a request belongs to."""
OUTGOING: Final = b"traceresponse"
"""The answer's header, of level 2: the span that the request has become."""
Attributes = Mapping[str, str | int | float | bool]


def exporter_for(endpoint: str) -> SpanExporter:
    """Sends spans to a collector by OTLP over HTTP. `endpoint`: its base URL."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    url = endpoint.rstrip("/")
    exporter: SpanExporter = OTLPSpanExporter(endpoint=url if url.endswith("/v1/traces") else f"{url}/v1/traces")
    return exporter


class Tracing:
    """Exporter of the spans of a front. There is one per process."""

    def __init__(self, exporter: SpanExporter, replica: str = "") -> None:
        """The service's name and more come from OpenTelemetry's own environment (OTEL_SERVICE_NAME,
        OTEL_RESOURCE_ATTRIBUTES), and so does which share of the traces is kept (OTEL_TRACES_SAMPLER)."""
        about = {"service.name": "latentserve", "service.version": kernels.__version__}
        if replica:
            about["service.instance.id"] = replica
        # What the environment says comes last, so that it stands.
        resource = Resource(about).merge(Resource.create()) if _named() else Resource.create(about)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("latentserve", kernels.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def request(self, name: str, headers: Mapping[str, str]) -> RequestTrace:
        """The span of a request that comes in with these headers."""
        context = self._propagator.extract(headers)
        return RequestTrace(self._tracer, self._tracer.start_span(name, context, SpanKind.SERVER))

    def flush(self, timeout_s: float = CLOSE_S) -> None:
        """Send all spans that have ended."""
        self._provider.force_flush(int(timeout_s * 1000))

    def close(self) -> None:
        """Send what there is, for a few seconds at the most."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(CLOSE_S)


def _named() -> bool:
    from os import environ

    return bool(environ.get("OTEL_SERVICE_NAME") or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", ""))


class RequestTrace:
    """One HTTP request: a span of its own, and one for each stage below it. Times are of the host's clock, ns."""

    def __init__(self, tracer: trace.Tracer, span: Span) -> None:
        self._tracer, self._span = tracer, span
        self._context = trace.set_span_in_context(span)
        self.begun = time.time_ns()
        self.on = span.is_recording()
        """Whether anybody will see it: a client may have said that its trace is not kept."""

    @property
    def traceresponse(self) -> bytes:
        """The value of the answer's header."""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}".encode()

    def stage(self, name: str, start: int, end: int, attributes: Attributes, failed: bool = False) -> None:
        """A stage that is over."""
        span = self._tracer.start_span(name, self._context, start_time=start, attributes=attributes)
        if failed:
            span.set_status(Status(StatusCode.ERROR))
        span.end(max(start, end))

    def sequence(self, choice: int, outputs: AsyncIterator[RequestOutput]) -> SequenceTrace:
        """Begin the trace of one of its sequences, which is handed to the engine now."""
        return SequenceTrace(self, choice, outputs)

    def end(self, name: str, attributes: Attributes, failed: bool) -> None:
        """The request is over."""
        self._span.update_name(name)
        self._span.set_attributes(dict(attributes))
        if failed:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


class SequenceTrace:
    """The outputs of one sequence on their way to its reader, who gets them as they are, and the spans they make."""

    def __init__(self, request: RequestTrace, choice: int, outputs: AsyncIterator[RequestOutput]) -> None:
        self._request, self._choice, self._outputs = request, choice, outputs
        self._handed = time.time_ns()
        self._first = self._last = self._queued = 0
        self._count = self._drafts = 0

    def __aiter__(self) -> SequenceTrace:
        return self

    async def __anext__(self) -> RequestOutput:
        output = await self._outputs.__anext__()
        self._last = time.time_ns()
        if not self._count:
            self._first, self._queued = self._last, int(output.queued * 1e9)
        self._count += 1
        self._drafts += sum(output.drafts)
        return output

    async def aclose(self) -> None:
        """Close what the outputs come from."""
        if (close := getattr(self._outputs, "aclose", None)) is not None:
            await close()

    def end(self, reason: str, prompt_tokens: int, cached_tokens: int, generated: int) -> None:
        """End the sequence's trace, for this reason, with its three stages, as far as it came."""
        stage, of = self._request.stage, {"latentserve.choice": self._choice}
        failed = reason in ("error", "refused")
        if not self._count:
            stage("queue", self._handed, time.time_ns(), {**of, "latentserve.finish_reason": reason}, failed)
            return
        admitted = min(self._handed + self._queued, self._first)
        stage("queue", self._handed, admitted, of)
        prompt = {"latentserve.prompt_tokens": prompt_tokens, "latentserve.cached_tokens": cached_tokens}
        stage("prefill", admitted, self._first, {**of, **prompt})
        decoded: dict[str, str | int] = {
            "latentserve.generated_tokens": generated,
            "latentserve.accepted_drafts": self._drafts,
            "latentserve.outputs": self._count,
            "latentserve.finish_reason": reason,
        }
        stage("decode", self._first, self._last, {**of, **decoded}, failed)
