"""A page about one load run: its figures, and plots of them as SVG. One file that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import pairwise

from deploy.loadtest.batch_mix import MixPoint
from deploy.loadtest.load import LoadRun, RequestRecord
from deploy.loadtest.load_report import PERCENTILES, TITLES, LoadReport, what_is_sent
from deploy.loadtest.load_spec import LoadSpec

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 12, 40
"""Margins of a plot, in which its axes are written."""
MOST_POINTS = 400
"""Most points of a line: more than one can see."""
BINS = 120

Point = tuple[float, float]
Line = tuple[str, Sequence[Point]]

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --faint: #8a94a3; --back: #fff; --a: #0b63c5; --b: #c2410c;
  --c: #0f766e }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaf0; --faint: #7c8794; --back: #12161c; --a: #6cb2ff; --b: #ff9a62; --c: #4fd1c1 }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); margin: 2rem auto;
  max-width: 700px; padding: 0 1rem }
h1 { font-size: 1.3rem } h2 { font-size: 1.05rem; margin: 2rem 0 .3rem }
table { border-collapse: collapse } th, td { text-align: right; padding: .15rem .8rem .15rem 0 }
th:first-child, td:first-child { text-align: left }
svg { width: 100%; height: auto } text { font-size: 12px; fill: var(--ink) }
.axis { stroke: var(--faint); fill: none } .grid { stroke: var(--faint); opacity: .25 }
.line0 { stroke: var(--a) } .line1 { stroke: var(--b) } .line2 { stroke: var(--c) }
.line { fill: none; stroke-width: 2 }
"""


def load_page(spec: LoadSpec, run: LoadRun, report: LoadReport) -> str:
    """HTML: tables, then how latencies are distributed and how throughput and the mix of requests went over time."""
    good = [record for record in run.records if not record.error and record.arrivals]
    title = f"{spec.model} at {spec.url}"
    parts = [
        f"<h1>{escape(title)}</h1><p>{escape(what_is_sent(spec))}</p>",
        _summary(report),
        _latencies(report),
        "<h2>Share of requests that are faster</h2>",
        plot(_distributions(good), "milliseconds", "share", log=True),
        "<h2>Tokens a second</h2>",
        plot([("generated", _throughput(good))], "seconds", "tok/s"),
        "<h2>Requests under way</h2>",
        plot(_under_way(good), "seconds", "requests"),
    ]
    if run.mix:
        parts += ["<h2>Steps a second, by what they compute</h2>", plot(_steps(run.mix), "seconds", "steps/s")]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>" + "\n".join(parts) + "</html>\n"
    )


def _summary(report: LoadReport) -> str:
    rates = report.throughput
    rows = [
        ("finished", f"{report.finished} of {report.requests} in {report.duration:.2f} s"),
        ("requests/s", f"{rates['requests_per_s']:.2f}"),
        ("tok/s in", f"{rates['input_tokens_per_s']:,.0f}"),
        ("tok/s out", f"{rates['output_tokens_per_s']:,.0f}"),
    ]
    if report.goodput is not None:
        rows.append((f"goodput, requests/s ({report.limits})", f"{report.goodput['requests_per_s']:.2f}"))
    rows += [(f"failed: {kind}", f"{count}") for kind, count in report.errors.items()]
    return "<table>" + "".join(f"<tr><td>{escape(a)}</td><td>{escape(b)}</td></tr>" for a, b in rows) + "</table>"


def _latencies(report: LoadReport) -> str:
    heads = "".join(f"<th>{name}</th>" for name in ("ms", "mean", *(f"p{p}" for p in PERCENTILES), "max"))
    rows = ""
    for name, title in TITLES.items():
        if (latency := report.latencies[name]) is not None:
            rows += f"<tr><td>{title}</td>" + "".join(f"<td>{v:.2f}</td>" for v in latency.report().values()) + "</tr>"
    return f"<h2>Latencies</h2><table><tr>{heads}</tr>{rows}</table>"


def _distributions(good: Sequence[RequestRecord]) -> list[Line]:
    """Cumulative distributions of three latencies, milliseconds."""
    times = {
        "time to first token": [record.arrivals[0] - record.sent for record in good],
        "inter-token latency": [later - at for record in good for at, later in pairwise(record.arrivals)],
        "whole request": [record.arrivals[-1] - record.sent for record in good],
    }
    return [(name, cumulative([value * 1e3 for value in values])) for name, values in times.items() if values]


def cumulative(values: Sequence[float]) -> list[Point]:
    """(value, share of the values that are no larger), of at most MOST_POINTS of them, the last one included."""
    ordered = sorted(values)
    every = max(1, math.ceil(len(ordered) / MOST_POINTS))
    places = sorted({*range(0, len(ordered), every), len(ordered) - 1})
    return [(ordered[place], (place + 1) / len(ordered)) for place in places]


def _throughput(good: Sequence[RequestRecord]) -> list[Point]:
    """Generated tokens a second; an event counts as many as the events of its stream hold on average."""
    if not good:
        return []
    begin, end = min(record.sent for record in good), max(record.arrivals[-1] for record in good)
    width = max(end - begin, 1e-9) / BINS
    bins = [0.0] * BINS
    for record in good:
        each = record.tokens / len(record.arrivals)
        for at in record.arrivals:
            bins[min(int((at - begin) / width), BINS - 1)] += each
    return [((place + 0.5) * width, count / width) for place, count in enumerate(bins)]


def _under_way(good: Sequence[RequestRecord]) -> list[Line]:
    """Count, over time, the requests that wait for their first token and those that get tokens."""
    if not good:
        return []
    begin = min(record.sent for record in good)
    waiting = [(record.sent - begin, record.arrivals[0] - begin) for record in good]
    decoding = [(record.arrivals[0] - begin, record.arrivals[-1] - begin) for record in good]
    return [("wait for their first token", counted(waiting)), ("get tokens", counted(decoding))]


def _steps(mix: Sequence[MixPoint]) -> list[Line]:
    """Steps of each kind over time, as the endpoint says."""
    return [
        ("decode rows alone", [(point.at, point.decode) for point in mix]),
        ("prompts alone", [(point.at, point.prefill) for point in mix]),
        ("both", [(point.at, point.mixed) for point in mix]),
    ]


def counted(spans: Sequence[tuple[float, float]]) -> list[Point]:
    """Count the open spans [begin, end) at BINS times and the last one."""
    last = max(end for _, end in spans)
    times = [last * place / BINS for place in range(BINS + 1)]
    return [(at, float(sum(begin <= at < end for begin, end in spans))) for at in times]


def plot(lines: Sequence[Line], x_title: str, y_title: str, *, log: bool = False) -> str:
    """An SVG of lines, with a legend; `log`: of the logarithm of x."""
    points = [point for _, line in lines for point in line]
    if not points:
        return "<p>Nothing was measured.</p>"

    def scaled(x: float) -> float:
        return math.log10(max(x, 1e-3)) if log else x

    low, high = min(scaled(x) for x, _ in points), max(scaled(x) for x, _ in points)
    high = high if high > low else low + 1
    top = max(max(y for _, y in points), 1e-9)

    def place(x: float, y: float) -> str:
        across = LEFT + (scaled(x) - low) / (high - low) * (WIDTH - LEFT - RIGHT)
        return f"{across:.1f},{HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM):.1f}"

    parts = [_grid(low, high, top, log)]
    for number, (name, line) in enumerate(lines):
        dots = " ".join(place(x, y) for x, y in line)
        parts.append(f'<polyline class="line line{number}" points="{dots}"><title>{escape(name)}</title></polyline>')
        down = TOP + 14 + 16 * number
        parts.append(
            f'<path class="line line{number}" d="M{LEFT + 10} {down - 4}h18"/>'
            f'<text x="{LEFT + 34}" y="{down}">{escape(name)}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) // 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_title)}</text>')
    named = ", ".join(name for name, _ in lines)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(f"{y_title}: {named}")}">'
        + "".join(parts)
        + f'<text x="4" y="{TOP + 8}">{escape(y_title)}</text></svg>'
    )


def _grid(low: float, high: float, top: float, log: bool) -> str:
    """Axes with five marks each."""
    parts = [f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>']
    for mark in range(5):
        down = HEIGHT - BOTTOM - mark / 4 * (HEIGHT - TOP - BOTTOM)
        across = LEFT + mark / 4 * (WIDTH - LEFT - RIGHT)
        x = low + mark / 4 * (high - low)
        parts.append(f'<path class="grid" d="M{LEFT} {down:.1f}H{WIDTH - RIGHT}"/>')
        if mark:
            parts.append(f'<text x="{LEFT - 6}" y="{down + 4:.1f}" text-anchor="end">{_short(top * mark / 4)}</text>')
        label = _short(10**x if log else x)
        parts.append(f'<text x="{across:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{label}</text>')
    return "".join(parts)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
