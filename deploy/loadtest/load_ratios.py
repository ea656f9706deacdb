"""Comparison of two endpoints under the same load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deploy.loadtest.load_report import PERCENTILES, TITLES, LoadReport, what_is_sent
from deploy.loadtest.load_spec import LoadSpec

if TYPE_CHECKING:
    from rich.console import Console

RATES = {
    "requests_per_s": "requests/s",
    "input_tokens_per_s": "tok/s in",
    "output_tokens_per_s": "tok/s out",
}


def figures(report: LoadReport) -> dict[str, float]:
    """Every figure by name: milliseconds, the less the better; then what is done a second, the more the better."""
    found: dict[str, float] = {}
    for name, latency in report.latencies.items():
        if latency is not None:
            found |= {f"{name}_{statistic}_ms": value for statistic, value in latency.report().items()}
    found |= report.throughput
    if report.goodput is not None:
        found["goodput_requests_per_s"] = report.goodput["requests_per_s"] or 0.0
    return found


def ratios(first: LoadReport, second: LoadReport) -> dict[str, float | None]:
    """Divide each figure that both reports have: the second's by the first's. None where the first's is 0."""
    one, other = figures(first), figures(second)
    return {name: round(other[name] / one[name], 4) if one[name] else None for name in one if name in other}


def show_ratios(console: Console, specs: Sequence[LoadSpec], reports: Sequence[LoadReport]) -> None:
    """A table for people."""
    from rich.table import Table

    first, second = reports
    console.print(f"{what_is_sent(specs[0])}, each endpoint in turn", soft_wrap=True)
    for number, (spec, report) in enumerate(zip(specs, reports, strict=True), 1):
        console.print(
            f"{number}: {spec.model} at {spec.url}, {report.finished} of {report.requests} requests finished",
            markup=False,
            soft_wrap=True,
        )
    table = Table("", title_justify="left")
    for name in ("1", "2", "2 / 1"):
        table.add_column(name, justify="right")
    one, other, over = figures(first), figures(second), ratios(first, second)
    statistics = ("mean", *(f"p{p}" for p in PERCENTILES), "max")
    titles = {f"{name}_{s}_ms": f"{title}, {s}, ms" for name, title in TITLES.items() for s in statistics}
    titles |= RATES | {"goodput_requests_per_s": f"goodput, requests/s ({first.limits})"}
    for name, title in titles.items():
        if name in over:
            ratio = over[name]
            table.add_row(title, f"{one[name]:,.2f}", f"{other[name]:,.2f}", "-" if ratio is None else f"{ratio:.3f}")
    console.print(table)
    for number, report in enumerate(reports, 1):
        for kind, count in report.errors.items():
            text = f"{number}: {count} x {kind}: {report.details.get(kind, '')}"
            console.print(text, markup=False, soft_wrap=True)
