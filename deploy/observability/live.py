"""Current state of one replica, as `/live` shows it: gauges as they are, and rates over the last seconds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Literal, Protocol

import msgspec
from pydantic import BaseModel, ConfigDict
from typing_extensions import override

from kernels.page import PAGE_TOKENS
from workers.protocol.front import Engine
from workers.protocol.messages import Distribution, EngineStats

PERIOD_S = 1.0
"""Seconds between two looks at a replica's figures, and for which an answer of `/live` is kept."""
WINDOW_S = 5.0
"""Seconds over which rates and means are taken, where figures were looked at often enough."""
SHORTEST_S = 0.2
"""No rate is taken over less: the scheduler reports every 0.1 s."""
NO_STEPS = Distribution()


class _Shown(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class StepFigures(_Shown):
    """Steps of one kind in the window."""

    per_second: float
    seconds: float
    """Mean time of a step on rank 0."""
    decode_rows: float
    """Mean number of decode rows."""
    prefill_tokens: float
    """Mean number of prompt tokens that a step feeds."""
    floor_bytes: float | None = None
    """For steps of decode rows alone: bytes that an average step reads of rank 0's memory at least. They are the
    weights, the experts that so many tokens choose if all are equally likely, and the cache of the rows' contexts. null
    where it is not known."""
    floor_seconds: float | None = None
    """Seconds that the device takes to read these bytes, at the bandwidth that it reports; null where it reports
    none."""


class ReplicaFigures(_Shown):
    """Load and throughput of a replica."""

    running: int
    """Requests that hold a slot."""
    waiting: int
    """Requests that wait for a slot or for pages."""
    slots: int
    """Requests that can run at once."""
    queue_limit: int
    """Requests that may wait beyond them."""
    prefill_backlog: int
    """Prompt tokens still to be computed."""
    pages_total: int
    """Pages of latent cache, 64 tokens each."""
    pages_free: int
    """Free ones, those that only the prefix cache holds included."""
    cache_shards: int
    """Ranks that share out these pages; 1 where each has all of them."""
    host_pages_total: int
    """Pages that host memory holds behind them; 0 where there is none."""
    host_pages: int
    """Of these, pages in use."""
    disk_pages_total: int
    """Pages that the disk holds behind host memory; 0 where there is none, or where it has failed."""
    disk_pages: int
    """Of these, pages in use."""
    width: int
    """Tokens that a decode row feeds in one step, as it pays at present: one more than it has drafts."""
    acceptance: list[float]
    """Probability, by draft position, that a draft is accepted if those before it are."""
    acceptance_falls: int
    """Number of times since the start that the acceptance of first drafts fell to half of what it was."""
    window_s: float
    """Seconds over which what follows is taken; 0 when nobody has looked before."""
    generated_tokens_per_s: float | None
    """null while `window_s` is 0, as the next three."""
    prompt_tokens_per_s: float | None
    """Prompt tokens of admitted requests a second, including those that the prefix cache had."""
    cached_tokens_per_s: float | None
    """Prompt tokens that the prefix cache had, those included that came back from host memory."""
    loaded_tokens_per_s: float | None
    """Tokens whose pages came back from host memory, from wherever they came there; null while `window_s` is 0."""
    read_tokens_per_s: float | None
    """Tokens whose pages came back from the disk; null while `window_s` is 0."""
    steps_per_s: float | None
    steps: dict[Literal["decode", "prefill", "mixed"], StepFigures]
    """The batch mix: decode rows alone, prompts alone, or both. A kind without a step in the window is left out."""
    drafts_accepted: float | None
    """Share of the drafts in the window that were accepted; null where none were verified."""
    graph_hit_rate: float | None
    """Share of the steps in the window that were replayed from graphs, on rank 0; null where there was no step."""
    eager_steps: dict[str, int]
    """Steps since the start of which nothing was replayed, by reason."""
    graph_portions_left: int
    """Portions of graphs that are still to be captured and proven; no step takes them before."""


class ReplicaState(_Shown):
    """State and health of one replica."""

    name: str
    """Name in logs, metrics and the header `x-latentserve-replica`; empty without Ray Serve."""
    state: Literal["starting", "serving", "failed", "silent"]
    """silent: it has not reported for several seconds."""
    cause: str = ""
    """Cause of its failure."""
    at: float
    """Time of the report, Unix time in seconds."""
    standby: Literal["ready", "away"] | None = None
    """Whether a second engine stands by for the one that serves; null where none is asked for."""
    figures: ReplicaFigures | None = None
    """null before it serves."""


class Replicas(Protocol):
    """Source of the states of the replicas behind an endpoint."""

    @property
    def own(self) -> str:
        """Name of the replica that answers."""

    async def states(self) -> list[ReplicaState]:
        """Return the states of all replicas, in the order of their names. It never fails, and takes two seconds at the
        most."""


class Window:
    """Samples of a scheduler's figures, from which rates are taken."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, EngineStats]] = deque()

    def sample(self, stats: EngineStats) -> None:
        """Keep the figures of now. Samples that are older than the window go, but for the one before this."""
        now = self._clock()
        if self._samples and stats.steps < self._samples[-1][1].steps:
            self._samples.clear()  # another scheduler, which counts from its own start
        if self._samples and now - self._samples[-1][0] < PERIOD_S / 2:
            return
        self._samples.append((now, msgspec.structs.replace(stats, prefix_keys=b"", host_keys=b"", disk_keys=b"")))
        while len(self._samples) > 2 and now - self._samples[0][0] > WINDOW_S:
            self._samples.popleft()

    def figures(self, stats: EngineStats) -> ReplicaFigures:
        """Return the figures to show now: `stats` against the oldest sample."""
        # Not against samples of the scheduler before this one.
        known = self._samples and self._samples[-1][1].steps <= stats.steps
        then, old = self._samples[0] if known else (self._clock(), stats)
        seconds = self._clock() - then
        return replica_figures(old, stats, seconds if seconds >= SHORTEST_S else 0.0)


def replica_figures(old: EngineStats, new: EngineStats, seconds: float) -> ReplicaFigures:
    """Compute figures from two reports of one scheduler that are `seconds` apart."""

    def rate(before: float, after: float) -> float | None:
        return max(after - before, 0.0) / seconds if seconds > 0 else None

    steps = {kind: _steps(kind, old, new, seconds) for kind in ("decode", "prefill", "mixed")} if seconds > 0 else {}
    offered = new.drafts_offered - old.drafts_offered
    return ReplicaFigures(
        running=new.running,
        waiting=new.waiting,
        slots=new.slots,
        queue_limit=new.queue_limit,
        prefill_backlog=new.prefill_backlog,
        pages_total=new.pages_total,
        pages_free=new.pages_free,
        cache_shards=new.cache_shards,
        host_pages_total=new.host_pages_total,
        host_pages=new.host_pages,
        disk_pages_total=new.disk_pages_total,
        disk_pages=new.disk_pages,
        width=new.width,
        acceptance=list(new.acceptance),
        acceptance_falls=new.acceptance_falls,
        window_s=seconds,
        generated_tokens_per_s=rate(old.generated_tokens, new.generated_tokens),
        prompt_tokens_per_s=rate(old.prompt_tokens, new.prompt_tokens),
        cached_tokens_per_s=rate(old.cached_tokens, new.cached_tokens),
        loaded_tokens_per_s=rate(old.host_loaded_pages * PAGE_TOKENS, new.host_loaded_pages * PAGE_TOKENS),
        read_tokens_per_s=rate(old.disk_loaded_pages * PAGE_TOKENS, new.disk_loaded_pages * PAGE_TOKENS),
        steps_per_s=rate(old.steps, new.steps),
        steps={kind: shown for kind, shown in steps.items() if shown is not None},  # type: ignore[misc]
        drafts_accepted=(new.drafts_accepted - old.drafts_accepted) / offered if offered > 0 else None,
        graph_hit_rate=_hit_rate(old, new),
        graph_portions_left=int(new.worker.get("graph_portions_left", {}).get("", 0)),
        eager_steps={reason: int(count) for reason, count in new.worker.get("graph_eager_steps", {}).items()},
    )


def _steps(kind: str, old: EngineStats, new: EngineStats, seconds: float) -> StepFigures | None:
    times, before = new.step_seconds.get(kind, NO_STEPS), old.step_seconds.get(kind, NO_STEPS)
    count = times.count - before.count
    if count <= 0:
        return None

    def mean(of: Callable[[EngineStats], dict[str, Distribution]]) -> float:
        return (of(new).get(kind, NO_STEPS).total - of(old).get(kind, NO_STEPS).total) / count

    floor_bytes, floor_seconds = _floor(old, new, count) if kind == "decode" else (None, None)
    return StepFigures(
        per_second=count / seconds,
        seconds=(times.total - before.total) / count,
        decode_rows=mean(lambda stats: stats.step_decode_rows),
        prefill_tokens=mean(lambda stats: stats.step_prefill_tokens),
        floor_bytes=floor_bytes,
        floor_seconds=floor_seconds,
    )


def _floor(old: EngineStats, new: EngineStats, steps: int) -> tuple[float | None, float | None]:
    """Bytes that a step of decode rows alone reads at the least, and in how many seconds; see `StepFigures`."""
    weights, experts, share, entry, bandwidth = (
        new.worker.get(f"step_{name}", {}).get("", 0.0)
        for name in ("weight_bytes", "expert_bytes", "expert_share", "entry_bytes", "bandwidth")
    )
    if not weights:
        return None, None
    tokens, context = ((getattr(new, name) - getattr(old, name)) / steps for name in ("decode_fed", "decode_context"))
    floor = weights + (1 - (1 - share) ** tokens) * experts + context * entry
    return floor, floor / bandwidth if bandwidth else None


def _hit_rate(old: EngineStats, new: EngineStats) -> float | None:
    def count(*names: str) -> float:
        return sum(sum(new.worker.get(name, {}).values()) - sum(old.worker.get(name, {}).values()) for name in names)

    hits, eager = count("graph_replays", "graph_mixed_steps"), count("graph_eager_steps")
    return hits / (hits + eager) if hits + eager > 0 else None


class OwnReplica(Replicas):
    """The `Replicas` of a front that stands alone. Looks at the figures when it is asked."""

    own = ""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._window = engine, Window()

    @override
    async def states(self) -> list[ReplicaState]:
        stats, fault = self._engine.stats, self._engine.fault
        figures = self._window.figures(stats)
        self._window.sample(stats)
        state: Literal["failed", "serving"] = "serving" if fault is None else "failed"
        return [ReplicaState(name=self.own, state=state, cause=fault or "", at=time.time(), figures=figures)]
