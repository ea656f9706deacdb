"""Report of a load run: latency percentiles, throughput, errors by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from deploy.loadtest.load import LoadRun, RequestRecord
from deploy.loadtest.load_spec import Load, LoadSpec

if TYPE_CHECKING:
    from rich.console import Console

PERCENTILES = (50, 90, 99)
TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2e": "whole request",
}
"""Titles of the latencies."""


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Percentile of a sorted, non-empty sequence, linear between neighbours (the definition numpy uses)."""
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class Distribution:
    """Mean, percentiles and maximum of a latency, in milliseconds."""

    mean: float
    percentiles: tuple[float, ...]
    most: float

    @staticmethod
    def of(seconds: Sequence[float]) -> Distribution | None:
        """Compute the distribution of times in seconds; None if there are none."""
        if not seconds:
            return None
        ordered = sorted(value * 1e3 for value in seconds)
        return Distribution(
            sum(ordered) / len(ordered), tuple(percentile(ordered, p) for p in PERCENTILES), ordered[-1]
        )

    def report(self) -> dict[str, float]:
        """Return the figures for JSON."""
        values = {f"p{p}": value for p, value in zip(PERCENTILES, self.percentiles, strict=True)}
        return {name: round(value, 4) for name, value in {"mean": self.mean, **values, "max": self.most}.items()}


@dataclass(frozen=True)
class Limits:
    """Limits within which a user would call a request served well: a service level objective."""

    ttft_ms: float | None = None
    """Most milliseconds until the first token."""
    gap_ms: float | None = None
    """Most milliseconds between two events of its stream, every one of them."""

    @staticmethod
    def of(load: Load) -> Limits | None:
        """Return the limits of a load; None if it has none."""
        given = load.slo_ttft_ms, load.slo_gap_ms
        return None if given == (None, None) else Limits(*given)

    def kept(self, record: RequestRecord) -> bool:
        """Whether a finished request was served so."""
        first = record.arrivals[0] - record.sent
        gap = max((later - at for at, later in pairwise(record.arrivals)), default=0.0)
        return (self.ttft_ms is None or first * 1e3 <= self.ttft_ms) and (
            self.gap_ms is None or gap * 1e3 <= self.gap_ms
        )

    @override
    def __str__(self) -> str:
        first = [f"first token within {self.ttft_ms:g} ms"] if self.ttft_ms is not None else []
        gaps = [f"no gap above {self.gap_ms:g} ms"] if self.gap_ms is not None else []
        return ", ".join(first + gaps)


@dataclass(frozen=True)
class LoadReport:
    """A run, summed up. Only finished requests count towards latency and throughput."""

    requests: int
    finished: int
    duration: float
    """Seconds."""
    prompt_tokens: int
    generated_tokens: int
    events: int
    latencies: dict[str, Distribution | None]
    """ttft: request to first token; tpot: per output token after the first, a mean for each request; itl: between
    consecutive events of a stream (an event may carry several tokens); e2e: request to last token."""
    errors: dict[str, int]
    details: dict[str, str]
    """Example for every kind of error."""
    limits: Limits | None = None
    kept: int = 0
    """Requests that were served within the limits."""

    @staticmethod
    def of(run: LoadRun, limits: Limits | None = None) -> LoadReport:
        """Sum up `run`."""
        good = [record for record in run.records if not record.error and record.arrivals]
        bad = [record for record in run.records if record.error]
        silent = len(run.records) - len(good) - len(bad)
        errors = Counter(record.error for record in bad)
        if silent:
            errors["no tokens"] = silent
        return LoadReport(
            requests=len(run.records),
            finished=len(good),
            duration=run.duration,
            prompt_tokens=sum(record.prompt_tokens for record in good),
            generated_tokens=sum(record.tokens for record in good),
            events=sum(len(record.arrivals) for record in good),
            latencies={
                "ttft": Distribution.of([record.arrivals[0] - record.sent for record in good]),
                "tpot": Distribution.of(
                    [
                        (record.arrivals[-1] - record.arrivals[0]) / (record.tokens - 1)
                        for record in good
                        if record.tokens > 1
                    ]
                ),
                "itl": Distribution.of([later - at for record in good for at, later in pairwise(record.arrivals)]),
                "e2e": Distribution.of([record.arrivals[-1] - record.sent for record in good]),
            },
            errors=dict(errors.most_common()),
            details={record.error: record.detail for record in reversed(bad)},
            limits=limits,
            kept=sum(limits.kept(record) for record in good) if limits else 0,
        )

    @property
    def throughput(self) -> dict[str, float]:
        """Requests and tokens per second over the whole run."""
        per = 1 / self.duration if self.duration else 0.0
        return {
            "requests_per_s": round(self.finished * per, 3),
            "input_tokens_per_s": round(self.prompt_tokens * per, 1),
            "output_tokens_per_s": round(self.generated_tokens * per, 1),
        }

    @property
    def goodput(self) -> dict[str, float | None] | None:
        """Requests a second that were served within the limits, and their share of all that were sent."""
        if self.limits is None:
            return None
        return {
            "ttft_ms": self.limits.ttft_ms,
            "gap_ms": self.limits.gap_ms,
            "requests_per_s": round(self.kept / self.duration, 3) if self.duration else 0.0,
            "share": round(self.kept / self.requests, 4) if self.requests else 0.0,
        }

    def report(self, spec: LoadSpec) -> dict[str, Any]:
        """The JSON object that `bench http --json` prints."""
        return {
            "url": spec.url,
            "model": spec.model,
            "rate": spec.rate,
            "concurrency": None if spec.rate is not None else spec.in_flight,
            "sessions": len(spec.sessions) or None,
            "input": None if spec.sessions else spec.input,
            "output": spec.output,
            "requests": self.requests,
            "finished": self.finished,
            "duration_s": round(self.duration, 4),
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "tokens_per_event": round(self.generated_tokens / self.events, 3) if self.events else None,
            **self.throughput,
            "goodput": self.goodput,
            **{f"{name}_ms": value.report() if value else None for name, value in self.latencies.items()},
            "errors": self.errors,
            "error_examples": self.details,
        }

    def show(self, console: Console, spec: LoadSpec) -> None:
        """Tables for people."""
        from rich.table import Table

        console.print(f"{spec.model} at {spec.url}: {what_is_sent(spec)}", soft_wrap=True)
        table = Table("milliseconds", title_justify="left")
        for name in ("mean", *(f"p{p}" for p in PERCENTILES), "max"):
            table.add_column(name, justify="right")
        for name, title in TITLES.items():
            if (value := self.latencies[name]) is not None:
                table.add_row(title, *(f"{number:.2f}" for number in value.report().values()))
        if table.row_count:
            console.print(table)
        rates = self.throughput
        console.print(
            f"{self.finished} of {self.requests} requests finished in {self.duration:.2f} s: "
            f"{rates['requests_per_s']:.2f} requests/s, {rates['input_tokens_per_s']:,.0f} tok/s in, "
            f"{rates['output_tokens_per_s']:,.0f} tok/s out",
            soft_wrap=True,
        )
        if self.limits is not None and self.goodput is not None:
            console.print(
                f"{self.kept} of {self.requests} with {self.limits}: goodput {self.goodput['requests_per_s']:.2f} "
                "requests/s",
                soft_wrap=True,
            )
        for kind, count in self.errors.items():
            console.print(f"{count} x {kind}: {self.details.get(kind, '')}", markup=False, soft_wrap=True)


def what_is_sent(spec: LoadSpec) -> str:
    """Describe the load for people."""
    things = "sessions" if spec.sessions else "requests"
    pace = f"{spec.rate:g} {things}/s" if spec.rate is not None else f"concurrency {spec.in_flight}"
    if spec.sessions:
        return f"{pace}, {len(spec.sessions)} sessions of {spec.total} turns"
    return f"{pace}, {spec.input} tokens in, {spec.output} out"
