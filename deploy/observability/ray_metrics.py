"""A replica's figures as metrics of Ray, whose metrics endpoint shows them for all replicas at once.

They carry the names of the replica's own /metrics (`deploy.observability.front_metrics`), which Ray leads with `ray_`,
and Serve's tags (application, deployment, replica).

Every series is a gauge that is set to what /metrics says, counters and the series of histograms among them. Ray's own
counters are passed on as growth, which is lost for good where a report does not arrive, and of its histograms' values
only the buckets arrive, so that their sums are guesses. A value that is set anew each time is exact, and whole again
with the next report. `rate`, `increase` and `histogram_quantile` work on gauges as on counters and histograms.
"""

from __future__ import annotations

from ray.serve.metrics import Gauge
from typing_extensions import override

from deploy.observability.front_metrics import FrontMetrics
from deploy.routing.arrivals import Arrivals

HEALTHY = ("latentserve_engine_healthy", "1 while the engine serves, 0 once it failed.")
STANDBY = ("latentserve_engine_standby_ready", "1 while a second engine stands by, ready to serve; 0 otherwise.")
"""Figures that only Ray's endpoint has: a replica that failed answers no more."""


class RayFrontMetrics(FrontMetrics):
    """The front's measurements and the engine's figures, mirrored. What happens to sequences is also told to
    `arrivals`, for routers."""

    def __init__(self, arrivals: Arrivals) -> None:
        super().__init__()
        self._arrivals = arrivals
        self._mirrored: dict[str, Gauge] = {}
        self._healthy = Gauge(*HEALTHY)
        self._standby = Gauge(*STANDBY)

    @override
    def request_started(self, endpoint: str, prompt_tokens: int) -> None:
        super().request_started(endpoint, prompt_tokens)
        self._arrivals.sequence_started(prompt_tokens)

    @override
    def first_token(self, seconds: float) -> None:
        super().first_token(seconds)
        self._arrivals.first_token()

    @override
    def request_finished(
        self, endpoint: str, reason: str, seconds: float, generated: int, cached: int, per_token: float | None
    ) -> None:
        super().request_finished(endpoint, reason, seconds, generated, cached, per_token)
        self._arrivals.sequence_finished()

    def report(self, fault: str | None, *, standby: bool = False) -> None:
        """Tell Ray what /metrics says now. `fault`: why the engine failed, if it has. `standby`: whether another one
        stands by."""
        self._healthy.set(float(fault is None))
        self._standby.set(float(standby))
        for family in self.registry.collect():
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                gauge = self._mirrored.get(sample.name)
                if gauge is None:
                    tags = tuple(sample.labels)
                    gauge = self._mirrored[sample.name] = Gauge(sample.name, family.documentation, tag_keys=tags)
                gauge.set(sample.value, sample.labels or None)
