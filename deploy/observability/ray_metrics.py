"""A replica's figures as metrics of Ray, whose metrics endpoint shows them for all replicas at once.

They carry the names of the replica's own /metrics (`deploy.observability.front_metrics`), which Ray leads with `ray_`,
and Serve's tags (application, deployment, replica).
"""

from __future__ import annotations

from typing import Any

from ray.serve.metrics import Counter, Gauge, Histogram
from typing_extensions import override

from deploy.observability.front_metrics import (
    ACCEPTANCE,
    COUNTERS,
    FIRST_TOKEN_BUCKETS,
    GAUGES,
    HISTOGRAMS,
    KEY_GENERATED,
    KEY_LIMITED,
    KEY_PROMPT,
    KEY_QUEUE,
    KEY_REQUESTS,
    KEY_SEQUENCES,
    QUEUE_BUCKETS,
    REQUEST_BUCKETS,
    TOKEN_BUCKETS,
    WORKER_COUNTERS,
    WORKER_GAUGES,
    FrontMetrics,
    cumulative,
)
from deploy.routing.arrivals import Arrivals
from workers.protocol.messages import STEP_BUCKETS, EngineStats

PREFIX = "latentserve_engine_"


class RayFrontMetrics(FrontMetrics):
    """The front's measurements, mirrored. Intervals between tokens stay on /metrics: too many to pass on one by one.

    What happens to sequences is also told to `arrivals`, for routers.
    """

    def __init__(self, arrivals: Arrivals) -> None:
        super().__init__()
        self._arrivals = arrivals
        self._ray_requests = Counter(
            "latentserve_requests_total",
            "Sequences ended, by endpoint and reason.",
            tag_keys=("endpoint", "reason"),
        )
        self._ray_in_flight = Gauge("latentserve_requests_in_flight", "Sequences handed to the engine and not ended.")
        self._ray_first = _histogram(
            "latentserve_time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN_BUCKETS
        )
        self._ray_per_token = _histogram(
            "latentserve_time_per_output_token_seconds", "Mean of a sequence after its first output.", TOKEN_BUCKETS
        )
        self._ray_request = _histogram(
            "latentserve_request_seconds", "From arrival to the end of a sequence.", REQUEST_BUCKETS
        )
        self._ray_responses = Counter(
            "latentserve_http_responses_total", "HTTP answers by path and status.", tag_keys=("path", "status")
        )
        self._sequences = 0
        self._ray_key_requests = _key_counter(*KEY_REQUESTS)
        self._ray_key_prompt = _key_counter(*KEY_PROMPT)
        self._ray_key_generated = _key_counter(*KEY_GENERATED)
        self._ray_key_limited = _key_counter(*KEY_LIMITED)
        self._ray_key_sequences = Gauge(*KEY_SEQUENCES[:2], tag_keys=KEY_SEQUENCES[2])
        self._ray_key_queue = Histogram(*KEY_QUEUE[:2], boundaries=list(QUEUE_BUCKETS), tag_keys=KEY_QUEUE[2])
        self._by_key: dict[str, int] = {}

    @override
    def request_started(self, endpoint: str, prompt_tokens: int) -> None:
        super().request_started(endpoint, prompt_tokens)
        self._arrivals.sequence_started(prompt_tokens)
        self._sequences += 1

    @override
    def first_token(self, seconds: float) -> None:
        super().first_token(seconds)
        self._arrivals.first_token()
        self._ray_first.observe(seconds)

    @override
    def request_finished(
        self, endpoint: str, reason: str, seconds: float, generated: int, cached: int, per_token: float | None
    ) -> None:
        super().request_finished(endpoint, reason, seconds, generated, cached, per_token)
        self._arrivals.sequence_finished()
        self._sequences -= 1
        self._ray_requests.inc(1, {"endpoint": endpoint, "reason": reason})
        self._ray_request.observe(seconds)
        if per_token is not None:
            self._ray_per_token.observe(per_token)

    @override
    def key_started(self, key: str, prompt_tokens: int) -> None:
        super().key_started(key, prompt_tokens)
        self._by_key[key] = self._by_key.get(key, 0) + 1
        self._ray_key_prompt.inc(prompt_tokens, {"key": key})

    @override
    def key_finished(self, key: str, reason: str, generated: int, queued: float | None) -> None:
        super().key_finished(key, reason, generated, queued)
        self._by_key[key] -= 1
        self._ray_key_requests.inc(1, {"key": key, "reason": reason})
        _grow(self._ray_key_generated, generated, {"key": key})
        if queued is not None:
            self._ray_key_queue.observe(queued, {"key": key})

    @override
    def key_limited(self, key: str, limit: str) -> None:
        super().key_limited(key, limit)
        self._ray_key_limited.inc(1, {"key": key, "limit": limit})

    @override
    def http_response(self, path: str, status: int) -> None:
        super().http_response(path, status)
        self._ray_responses.inc(1, {"path": path, "status": str(status)})

    def report(self) -> None:
        """Pass on what is not passed on as it happens."""
        self._ray_in_flight.set(self._sequences)
        for key, count in self._by_key.items():
            self._ray_key_sequences.set(count, {"key": key})


class RayEngineMetrics:
    """The scheduler's figures, mirrored. It counts since its start; what is reported of a counter is its growth.

    Histograms come as counts of buckets, and Ray takes none: each series of a histogram is a gauge with the name and
    the `le` that Prometheus knows it by, so `histogram_quantile` works on it as on any other.
    """

    def __init__(self) -> None:
        self._gauges = {name: Gauge(PREFIX + name, text) for name, text in (GAUGES | WORKER_GAUGES).items()}
        self._counters = {name: Counter(f"{PREFIX}{name}_total", text) for name, text in COUNTERS.items()}
        self._worker = {
            name: Counter(f"{PREFIX}{name}_total", text, tag_keys=(label,) if label else ())
            for name, (text, label) in WORKER_COUNTERS.items()
        }
        self._histograms = {
            name: (
                Gauge(f"{PREFIX}{name}_bucket", text, tag_keys=("kind", "le")),
                Gauge(f"{PREFIX}{name}_sum", text, tag_keys=("kind",)),
                Gauge(f"{PREFIX}{name}_count", text, tag_keys=("kind",)),
            )
            for name, text in HISTOGRAMS.items()
        }
        name, text, label = ACCEPTANCE
        self._acceptance = Gauge(PREFIX + name, text, tag_keys=(label,))
        self._healthy = Gauge(f"{PREFIX}healthy", "1 while the engine serves, 0 once it failed.")
        self._last = EngineStats()

    def report(self, stats: EngineStats, fault: str | None) -> None:
        """Report the newest figures."""
        last, self._last = self._last, stats
        self._healthy.set(float(fault is None))
        for name in GAUGES:
            self._gauges[name].set(float(getattr(stats, name)))
        for position, share in enumerate(stats.acceptance, start=1):
            self._acceptance.set(share, {ACCEPTANCE[2]: str(position)})
        for name in WORKER_GAUGES:
            self._gauges[name].set(stats.worker.get(name, {}).get("", 0.0))
        for name, counter in self._counters.items():
            _grow(counter, getattr(stats, name) - getattr(last, name))
        for name, counter in self._worker.items():
            label = WORKER_COUNTERS[name][1]
            before = last.worker.get(name, {})
            for of, value in stats.worker.get(name, {}).items():
                _grow(counter, value - before.get(of, 0.0), {label: of} if label else None)
        for name, (buckets, total, count) in self._histograms.items():
            for kind, part in getattr(stats, name).items():
                for bound, below in cumulative(STEP_BUCKETS[name], part.counts):
                    buckets.set(below, {"kind": kind, "le": bound})
                total.set(part.total, {"kind": kind})
                count.set(part.count, {"kind": kind})


def _grow(counter: Any, growth: float, tags: dict[str, str] | None = None) -> None:
    if growth > 0:  # Ray refuses 0
        counter.inc(growth, tags)


def _key_counter(name: str, text: str, labels: tuple[str, ...]) -> Any:
    return Counter(f"{name}_total", text, tag_keys=labels)


def _histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
    return Histogram(name, text, boundaries=list(buckets))
