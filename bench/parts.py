"""Says in which part of a step the device spends its time: events on the stream before and after every part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from statistics import median
from typing import Any

import torch
from shapes import ATTENTION, DENSE, EXPERTS, HEAD, INPUT

from kernels.runtime.repeat import nothing_repeated
from workers.drafters.mtp import LayerDrafter
from workers.models.attention import backend, decode_rows, expanded
from workers.models.attention.latent import LatentAttention
from workers.models.attention.sparse import SparseAttention
from workers.models.feed_forward import MixtureOfExperts
from workers.models.general import GeneralOps
from workers.models.layer import DecoderLayer
from workers.models.model import Model
from workers.step.mixed import DRAFT, Stage
from workers.step.parts import StepParts
from workers.step.sampling import SamplingState

Name = Callable[..., str | None]
"""The part that a call with these arguments is; None: it is none."""


def event() -> torch.cuda.Event:
    """Make an event that records when the device got there."""
    return torch.cuda.Event(enable_timing=True)


def hold(ms: float) -> None:
    """Keep the device from what is launched next for about so long, so that the host gets ahead of it."""
    torch.cuda._sleep(int(ms * 2e6))  # cycles, at most two a nanosecond


def wait() -> None:
    """Wait for the device."""
    torch.cuda.synchronize()


@dataclass
class Visit:
    """A part met once in a step. `path`: the parts it lies in, itself the last."""

    path: tuple[str, ...]
    begin: torch.cuda.Event
    end: torch.cuda.Event


@dataclass(frozen=True)
class Row:
    """A part's visits of one step, together and in the middle, in ms."""

    path: tuple[str, ...]
    calls: int
    total: float
    each: float


def measured(run: Callable[[], object], repeats: int, host_ms: float) -> tuple[list[Row], float, bool]:
    """The parts of what `run` launches, in the order of their first visits; the median of all of it in ms; and whether
    the host, which takes `host_ms`, was ahead of the device to the end every time."""
    steps, whole, ahead = [], [], True
    for _ in range(repeats):
        with visits() as found:
            ms, first = held_back(run, host_ms)
        whole.append(ms)
        ahead = ahead and first
        steps.append([(visit.path, visit.begin.elapsed_time(visit.end)) for visit in found])
    rows = []
    for path in dict.fromkeys(path for path, _ in steps[0]):
        times = [[ms for other, ms in step if other == path] for step in steps]
        rows.append(Row(path, len(times[0]), median(map(sum, times)), median(map(median, times))))
    return _nested(rows), median(whole), ahead


def _nested(rows: Sequence[Row]) -> list[Row]:
    """Every part right behind the one it lies in."""
    order = {row.path: place for place, row in enumerate(rows)}
    return sorted(rows, key=lambda row: [order[row.path[: depth + 1]] for depth in range(len(row.path))])


def held_back(run: Callable[[], object], host_ms: float) -> tuple[float, bool]:
    """Measure the milliseconds that the device needs for `run` when it never waits for the host. Also return whether
    `run` was launched before the device began with it. If not, it waited for the device, or launched more than the
    device can queue."""
    begin, end = event(), event()
    wait()
    hold(20 + 3 * host_ms)
    begin.record()
    run()
    end.record()
    ahead = not begin.query()
    wait()
    return begin.elapsed_time(end), ahead


@contextmanager
def visits() -> Iterator[list[Visit]]:
    """Note every part that runs within this context. A graph's replay runs no Python, so its parts are not seen."""
    found: list[Visit] = []
    path: list[str] = []

    def noting(call: Callable[..., Any], name: Name) -> Callable[..., Any]:
        @wraps(call)
        def noted(*args: Any, **kwargs: Any) -> Any:
            part = name(*args)
            if part is None:
                return call(*args, **kwargs)
            path.append(part)
            found.append(visit := Visit(tuple(path), event(), event()))
            visit.begin.record()
            try:
                return call(*args, **kwargs)
            finally:
                visit.end.record()
                path.pop()

        return noted

    plain = [(owner, attribute, vars(owner)[attribute]) for owner, attribute, _ in PARTS]
    for owner, attribute, name in PARTS:
        setattr(owner, attribute, noting(getattr(owner, attribute), name))
    try:
        with nothing_repeated():
            yield found
    finally:
        for owner, attribute, call in plain:
            setattr(owner, attribute, call)


def _projected(attention: LatentAttention, *_: object) -> str | None:
    """Sparse attention projects as dense attention does, and then for its indexer: both are one part."""
    return None if isinstance(attention, SparseAttention) else INPUT


def _finished(layer: DecoderLayer, *_: object) -> str:
    return EXPERTS if isinstance(layer.feed_forward, MixtureOfExperts) else DENSE


def _drafted(stage: Stage, which: int, *_: object) -> str | None:
    return "draft pass" if which == DRAFT else None


def _ended(stage: Stage, *_: object) -> str | None:
    return "draft pass" if stage.parts.width > 1 else None


def _always(name: str) -> Name:
    return lambda *_: name


PARTS: tuple[tuple[Any, str, Name], ...] = (
    (SparseAttention, "project", _always(INPUT)),
    (LatentAttention, "project", _projected),
    (LatentAttention, "attend", _always(ATTENTION)),
    (expanded, "gather_context", _always("context of prefill rows")),
    (backend, "linear", _always("keys and values of prefill rows")),
    (expanded, "mla_prefill", _always("prefill rows")),
    (decode_rows, "mla_decode", _always("decode rows")),
    (decode_rows.launch, "attend", _always("decode rows, before their merge")),
    (decode_rows, "merge_up", _always("decode rows' merge with W_UV")),
    (decode_rows, "rope_absorb", _always("absorbing")),
    (decode_rows, "absorb_roped", _always("absorbing")),
    (decode_rows, "head_linear", _always("absorbing")),
    (DecoderLayer, "finish", _finished),
    (LatentAttention, "output", _always("attention's output, with the norm behind it")),
    (GeneralOps, "route", _always("routing")),
    (GeneralOps, "experts", _always("experts, routed and shared")),
    (Model, "logits", _always(HEAD)),
    (SamplingState, "target_tokens", _always("sampling")),
    (SamplingState, "commit", _always("sampling")),
    (Stage, "run_pass", _drafted),
    (Stage, "end", _ended),
    (LayerDrafter, "catch_up", _always("draft pass")),
    (StepParts, "draft", _always("draft loop")),
)
"""Calls that are a part of a step. What lies in none of them is the rest: the state, the tokens' way to the device,
embedding, the first norm, gathers."""
