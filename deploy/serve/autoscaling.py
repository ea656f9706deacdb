"""The number of replicas that the load asks for: more where prompts, requests or pages would not fit, fewer where they
fit with room to spare.

`replicas_for` is the rule, `ScalingPolicy` is what Serve's controller calls several times a second. Serve itself sees
to the bounds and the delays, and lets replicas that end finish their streams. Serve copies this module to the
controller, so it imports nothing of the project that runs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

    from deploy.config.autoscaling import AutoscalingConfig
    from workers.protocol.messages import EngineStats

MARGIN: Final = 1.25
"""Replicas end only where this many times the load would still fit. A load that changes by less never makes a replica
start and end again."""
REPORT_PERIOD_S: Final = 1.0
"""Seconds between two reports of a replica to the controller."""
SHORTEST_WINDOW_S: Final = 2.0
LONGEST_WINDOW_S: Final = 10.0
"""Seconds over which loads are averaged, as far as `upscale_delay_s` is that long: requests come and go in between, and
a moment without them is no break in the load."""
_EXACT: Final = 1e-9
"""What a quotient may lie above a whole number and mean that number."""

logger = logging.getLogger("ray.serve")  # the controller's own: Serve's lines on the number of replicas are there


@dataclass(frozen=True)
class ReplicaLoad:
    """What one replica has to do, and what it has room for."""

    requests: float
    """Requests that hold a slot or wait for one."""
    slots: float
    pages: float
    """Pages in use, without those that only the prefix cache holds."""
    pages_total: float
    backlog_s: float
    """Seconds that the prompt tokens queued there take to compute."""
    serving: float = 1.0
    """0 while its engine is being started again."""


@dataclass(frozen=True)
class Targets:
    """The load that a replica should have at the most; see `AutoscalingConfig`."""

    slots_used: float
    pages_used: float
    backlog_s: float


def load_of(stats: EngineStats, waiting: int, serving: bool) -> dict[str, float]:
    """The report of a replica, by field of `ReplicaLoad`. `stats`: its scheduler's newest figures, or the last ones of
    an engine that died. `waiting`: requests of its front that no engine has: those that go on elsewhere are in the
    reports of others."""
    requests, pages, backlog_s = waiting, 0, 0.0
    if serving:
        requests, pages = stats.running + stats.waiting, stats.pages_total - stats.pages_free
        backlog_s = stats.prefill_backlog_seconds
    return asdict(ReplicaLoad(requests, stats.slots, pages, stats.pages_total, backlog_s, float(serving)))


def asked_for(loads: Sequence[ReplicaLoad], targets: Targets, margin: float = 1.0) -> tuple[float, float, float]:
    """Replicas that `margin` times the load asks for: by slots, by pages and by the backlog of prompts.

    A backlog is of requests, and one request is computed at one place: it asks for no more replicas than there are
    requests."""
    slots, pages_total = max(load.slots for load in loads), max(load.pages_total for load in loads)
    requests = margin * sum(load.requests for load in loads)
    pages = margin * sum(load.pages for load in loads)
    backlog_s = margin * sum(load.backlog_s for load in loads)
    return (
        requests / (slots * targets.slots_used),
        pages / (pages_total * targets.pages_used),
        min(backlog_s / targets.backlog_s, requests),
    )


def fitting(loads: Sequence[ReplicaLoad], targets: Targets, least: int, most: int, margin: float = 1.0) -> int:
    """Replicas that `margin` times the load takes, from `least` to `most`.

    Where that is more than one, what runs and waits also has slots and pages in all of them but one: the streams of a
    replica that dies go on at the others. Of a single replica nothing could go on elsewhere."""
    number = max(least, math.ceil(max(asked_for(loads, targets, margin)) - _EXACT))
    if number > 1:
        full = Targets(slots_used=1.0, pages_used=1.0, backlog_s=math.inf)
        number = max(number, 1 + math.ceil(max(asked_for(loads, full, margin)) - _EXACT))
    return min(number, most)


def replicas_for(
    means: Sequence[ReplicaLoad],
    peaks: Sequence[ReplicaLoad],
    targets: Targets,
    *,
    now: int,
    running: int,
    least: int,
    most: int,
) -> int:
    """The number of replicas that there should be, from `least` to `most`: more where the mean load takes more, fewer
    where the peaks take fewer. `means`, `peaks`: of what each replica reported lately. `now`: the number that there
    should be so far, of which `running` run.

    Nothing is known of a replica that has not reported, or whose engine is away: until then none is taken away."""
    now = max(least, min(now, most))
    if not means:
        return now
    if (more := fitting(means, targets, least, most)) > now:
        return more
    if len(peaks) < running or not all(load.serving for load in peaks):
        return now
    return min(now, fitting(peaks, targets, least, most, MARGIN))


class ScalingPolicy:
    """A policy for Serve, which makes one of it for each deployment of an application."""

    def __init__(self, **targets: float) -> None:
        """`targets`: fields of `Targets`."""
        self._targets = Targets(**targets)
        self._told = 0

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number of replicas wanted, before Serve's delays, and what Serve keeps for the next call: nothing."""
        means, peaks = loads_in(context.raw_metrics or {})
        number = replicas_for(
            means,
            peaks,
            self._targets,
            now=context.target_num_replicas,
            running=context.current_num_replicas,
            least=context.capacity_adjusted_min_replicas,
            most=context.capacity_adjusted_max_replicas,
        )
        if number != context.target_num_replicas and number != self._told:
            more = number > context.target_num_replicas
            slots, pages, backlog = asked_for(means if more else peaks, self._targets)
            logger.info(
                f"The load asks for {number} replicas where there are to be {context.target_num_replicas}: "
                f"{slots:.2f} by slots, {pages:.2f} by pages, {backlog:.2f} by the backlog of prompts."
            )
        self._told = number
        return number, {}


def loads_in(metrics: Mapping[str, Mapping[Any, Sequence[Any]]]) -> tuple[list[ReplicaLoad], list[ReplicaLoad]]:
    """Mean and peak of the load of each replica of which enough is known. `metrics`: samples of the time that counts,
    by field of `ReplicaLoad` and replica, as Serve collects them; others that it collects by itself are ignored."""
    names = ReplicaLoad.__dataclass_fields__
    samples: dict[Any, dict[str, list[float]]] = {}
    for name in names:
        for replica, series in metrics.get(name, {}).items():
            if series:
                samples.setdefault(replica, {})[name] = [sample.value for sample in series]
    means, peaks = [], []
    for values in samples.values():
        if len(values) < len(names) or not min(max(values["slots"]), max(values["pages_total"])):
            continue
        same = {"slots": max(values["slots"]), "pages_total": max(values["pages_total"])}
        same["serving"] = min(values["serving"])
        means.append(ReplicaLoad(**{name: sum(each) / len(each) for name, each in values.items()} | same))
        peaks.append(ReplicaLoad(**{name: max(each) for name, each in values.items()} | same))
    return means, peaks


def serve_options(settings: AutoscalingConfig) -> dict[str, Any]:
    """Options of a deployment whose replicas follow the load, in place of `num_replicas`."""
    import warnings

    from ray.serve.config import AutoscalingConfig as ServeAutoscaling
    from ray.serve.config import AutoscalingPolicy

    policy = AutoscalingPolicy(
        policy_function=ScalingPolicy,
        policy_kwargs=asdict(Targets(settings.slots_used, settings.pages_used, settings.backlog_s)),
    )
    with warnings.catch_warnings():  # Ray 2.60.0 announces another way to give the period, which does nothing yet
        warnings.simplefilter("ignore", DeprecationWarning)
        config = ServeAutoscaling(
            min_replicas=settings.min_replicas,
            max_replicas=settings.max_replicas,
            upscale_delay_s=settings.upscale_delay_s,
            downscale_delay_s=settings.downscale_delay_s,
            metrics_interval_s=REPORT_PERIOD_S,
            look_back_period_s=min(max(settings.upscale_delay_s, SHORTEST_WINDOW_S), LONGEST_WINDOW_S),
            policy=policy,
        )
    return {"autoscaling_config": config}
