"""How fast a replica computes, compared with others: a hot GPU or a noisy neighbor makes one several times slower.

Steps of different sizes take different times, and so do those whose tokens have more or fewer tokens before them: times
are kept by kind, context and size, each context and size up to twice the one before. A replica measures its own; a
router compares what several replicas report.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from statistics import median
from typing import Final, TypeVar

from workers.protocol.messages import EngineStats

KEPT_S: Final = 30.0
"""Seconds for which a measured time counts. A replica that gets no requests because it was slow is tried again then."""
SLOWER: Final = 4.0
"""A replica that is less than this many times slower counts as equally fast: its queue tells. Steps of one size and
context differ by up to twice, and on cores that others use now and then by more."""
NOTICEABLE_S: Final = 0.01
"""A step that takes less than so much longer than others' says nothing of a replica: a host that is busy for a moment
does that."""
LEAST_CONTEXT: Final = 2048
"""Tokens before each token of a step up to which a step takes about as long as without any."""
_WINDOWS: Final = 5
"""Times kept of each kind, context and size. Their median is what counts: one step that was held up says nothing."""

R = TypeVar("R", bound=Hashable)
StepTimes = Mapping[str, float]
"""Seconds of a step by its kind, context and size, as `decode@12 3`: decode rows alone that feed 8 to 15 tokens, which
have 4,096 to 8,191 tokens before them each. Replicas of earlier versions say `decode 3`, whatever the context."""


class StepClock:
    """Times of the newest steps of a replica, from the figures that its scheduler sends several times a second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._before = EngineStats()
        self._times: dict[str, deque[tuple[float, float]]] = {}
        """By kind, context and size: when it was measured, and the seconds of a step."""

    def add(self, stats: EngineStats) -> None:
        """Take what the scheduler's figures say of the steps since those before."""
        if stats.steps == self._before.steps:
            return
        before, self._before = (self._before if stats.steps > self._before.steps else EngineStats()), stats
        for kind, times in stats.step_seconds.items():
            old = before.step_seconds.get(kind)
            steps = times.count - (old.count if old is not None else 0)
            if steps <= 0:
                continue
            seconds = times.total - (old.total if old is not None else 0.0)
            tokens = _tokens(kind, stats) - _tokens(kind, before)
            size = f"{kind}{_context(kind, stats, before)} {max(round(tokens / steps), 1).bit_length() - 1}"
            self._times.setdefault(size, deque(maxlen=_WINDOWS)).append((self._clock(), seconds / steps))

    def times(self) -> StepTimes:
        """Return what was measured within `KEPT_S`."""
        begin = self._clock() - KEPT_S
        recent = {size: [seconds for at, seconds in held if at >= begin] for size, held in self._times.items()}
        return {size: median(seconds) for size, seconds in recent.items() if seconds}


def _tokens(kind: str, stats: EngineStats) -> float:
    """Tokens that the steps of a kind were given; of rows that decode beside prompts one each."""
    if kind == "decode":
        return stats.decode_fed
    return sum(found[kind].total for found in (stats.step_prefill_tokens, stats.step_decode_rows) if kind in found)


def _context(kind: str, stats: EngineStats, before: EngineStats) -> str:
    """How a name says what the tokens of the newest steps have before them on average; empty where nobody counted."""
    found, old = stats.step_context.get(kind), before.step_context.get(kind)
    steps = 0 if found is None else found.count - (old.count if old is not None else 0)
    if found is None or steps <= 0:
        return ""
    tokens = (found.total - (old.total if old is not None else 0.0)) / steps
    return f"@{max(round(tokens), LEAST_CONTEXT).bit_length() - 1}"


def paces(times: Mapping[R, StepTimes]) -> dict[R, float]:
    """How many times longer than the fastest replica each one takes for equal steps, at the least; 1 where that is less
    than `SLOWER` or less than `NOTICEABLE_S` longer, and where no other measured steps of the kind.

    Where the others' steps had other sizes, a smaller step than theirs would have taken them no longer, and a larger
    one no longer than in proportion. Only steps of about the same context are compared: between one with a long context
    and one without any nothing tells how long either should take.
    """
    known: dict[str, list[tuple[int, int, float, R]]] = {}
    for replica, own in times.items():
        for name, seconds in own.items():
            of, _, number = name.partition(" ")
            kind, mark, behind = of.partition("@")
            known.setdefault(kind + mark, []).append((int(number), int(behind or 0), seconds, replica))
    ratios: dict[R, list[float]] = {replica: [] for replica in times}
    for steps in known.values():
        for size, context, seconds, replica in steps:
            others = [
                taken * 2 ** (max(size - its_size, 0) + max(context - its_context, 0))
                for its_size, its_context, taken, other in steps
                if other != replica and taken > 0 and abs(context - its_context) <= 1
            ]
            if others:
                noticeable = seconds - min(others) >= NOTICEABLE_S
                ratios[replica].append(seconds / min(others) if noticeable else 1.0)
    found = {replica: median(own) if own else 1.0 for replica, own in ratios.items()}
    return {replica: pace if pace >= SLOWER else 1.0 for replica, pace in found.items()}
