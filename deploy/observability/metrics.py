"""A replica's figures as metrics of Ray, whose metrics endpoint shows them for all replicas at once.

They carry the names of the replica's own /metrics (`deploy.metrics`), which Ray leads with `ray_`, and Serve's tags
(application, deployment, replica).
"""

from __future__ import annotations

from typing import Any

from ray.serve.metrics import Counter, Gauge, Histogram

from deploy.arrivals import Arrivals
from deploy.metrics import COUNTERS, FIRST_TOKEN_BUCKETS, GAUGES, REQUEST_BUCKETS, TOKEN_BUCKETS, FrontMetrics
from workers.messages import EngineStats


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

    def request_started(self, endpoint: str, prompt_tokens: int) -> None:
        """See `FrontMetrics`."""
        super().request_started(endpoint, prompt_tokens)
        self._arrivals.sequence_started(prompt_tokens)
        self._sequences += 1

    def first_token(self, seconds: float) -> None:
        """See `FrontMetrics`."""
        super().first_token(seconds)
        self._arrivals.first_token()
        self._ray_first.observe(seconds)

    def request_finished(
        self, endpoint: str, reason: str, seconds: float, generated: int, cached: int, per_token: float | None
    ) -> None:
        """See `FrontMetrics`."""
        super().request_finished(endpoint, reason, seconds, generated, cached, per_token)
        self._arrivals.sequence_finished()
        self._sequences -= 1
        self._ray_requests.inc(1, {"endpoint": endpoint, "reason": reason})
        self._ray_request.observe(seconds)
        if per_token is not None:
            self._ray_per_token.observe(per_token)

    def http_response(self, path: str, status: int) -> None:
        """See `FrontMetrics`."""
        super().http_response(path, status)
        self._ray_responses.inc(1, {"path": path, "status": str(status)})

    def report(self) -> None:
        """Pass on what is not passed on as it happens."""
        self._ray_in_flight.set(self._sequences)


class RayEngineMetrics:
    """The scheduler's figures, mirrored. It counts since its start; what is reported of a counter is its growth."""

    def __init__(self) -> None:
        self._gauges: dict[str, Any] = {
            name: Gauge(f"latentserve_engine_{name}", text) for name, text in GAUGES.items()
        }
        self._counters: dict[str, Any] = {
            name: Counter(f"latentserve_engine_{name}_total", text) for name, text in COUNTERS.items()
        }
        self._healthy = Gauge("latentserve_engine_healthy", "1 while the engine serves, 0 once it failed.")
        self._last = EngineStats()

    def report(self, stats: EngineStats, fault: str | None) -> None:
        """Report the newest figures."""
        self._healthy.set(float(fault is None))
        for name, gauge in self._gauges.items():
            gauge.set(float(getattr(stats, name)))
        for name, counter in self._counters.items():
            if (growth := getattr(stats, name) - getattr(self._last, name)) > 0:
                counter.inc(growth)
        self._last = stats


def _histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
    return Histogram(name, text, boundaries=list(buckets))
