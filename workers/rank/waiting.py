"""Waiting of a rank for steps in flight: it sleeps while they cannot have ended, and then polls without a pause."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Protocol

from workers.protocol.plan import StepPlan

SHORTEST_S = 2e-3
"""Steps that may be shorter than this are looked at all the time."""
MARGIN_S = 0.4e-3
"""Seconds before a step's expected end from which on nobody sleeps. Lately observed oversleeping is added to it."""
SLICES = 16
"""A sleep takes at most this part of the time for which the step has been running, but for what bounds it below."""
LEAST_SLICE_S = 0.3e-3
"""Shortest sleep, in seconds. Less is not worth it: the system takes some 0.1 ms longer than it is asked to."""
MOST_SLICE_S = 1e-3
RECENT = 8
"""Steps of a kind of which the shortest says when the next one may end."""
MOST_KINDS = 256
"""Most kinds of steps that are remembered; the oldest is forgotten."""
FORGETTING = 0.8
"""Factor by which the observed oversleeping decays from step to step."""


class Event(Protocol):
    """Event that the device records when a step has ended, such as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether that has happened."""

    def synchronize(self) -> None:
        """Return when it has. Looks all the time, without Python's lock."""


def kind_of(plan: StepPlan) -> Hashable:
    """Steps that are expected to take about as long: decode steps of one graph, or mixed ones that feed and attend to
    about as many tokens."""
    tokens = sum(len(row.tokens) for row in plan.prefill)
    attended = sum(len(row.tokens) * (row.start + len(row.tokens)) for row in plan.prefill)
    sizes = [_about(size) for size in (len(plan.decode_slots), tokens, attended)]
    return plan.width, plan.drafts, bool(plan.constrained), *sizes


def _about(size: int) -> int:
    """The size without what stands behind its first three binary digits: at most a quarter less."""
    return size & -1 << max(size.bit_length() - 3, 0)


class Waiting:
    """Waits for steps, one after the other. A rank that looks at its device all the time keeps a core busy for nothing;
    one that sleeps finds out late that a step has ended. So it sleeps for as long as the latest steps of the same kind
    all took, and then looks all the time, as it does from the beginning where that would be soon and where nothing is
    known.

    A step may still be shorter than all of those. So it sleeps in slices and looks after each: it finds out late by a
    small part of the time that the step took, and does so once, because the next steps of the kind are not expected to
    take longer. What is learnt of a step is for how long it was seen unfinished, so no expectation grows by what a
    sleep took too long.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.clock, self.sleep = clock, sleep
        self._took: dict[Hashable, deque[float]] = {}
        self._oversleep = 0.0
        self._newest: StepEnd | None = None

    def launched(self, kind: Hashable, event: Event, begun: float) -> StepEnd:
        """The end of a step that was launched behind all others. `event` is what happens then; `begun` is when the host
        began to launch it."""
        self._oversleep *= FORGETTING
        self._newest = StepEnd(self, kind, event, begun, self._newest)
        return self._newest

    def learn(self, kind: Hashable, least: float, most: float) -> None:
        """A step of this kind has taken between `least` and `most` seconds."""
        took = self._took.pop(kind, None) or deque(maxlen=RECENT)
        # Where the host was busy while the step ended it does not know much, and often nothing that was not expected.
        expected = min(took, default=least)
        took.append(expected if least <= expected <= most else least)
        self._took[kind] = took
        if len(self._took) > MOST_KINDS:
            del self._took[next(iter(self._took))]

    def spare(self, kind: Hashable, running: float) -> float:
        """Seconds for which a step of this kind that has been running for so long need not be looked at."""
        took = self._took.get(kind)
        if not took or (expected := min(took)) < SHORTEST_S:
            return 0.0
        left = expected - MARGIN_S - self._oversleep - running
        slice_s = max(LEAST_SLICE_S, min(running / SLICES, MOST_SLICE_S))
        return 0.0 if left < LEAST_SLICE_S else min(left, slice_s)

    def slept(self, asked: float, took: float) -> None:
        """A sleep of `asked` seconds took so long."""
        self._oversleep = max(self._oversleep, took - asked)


class StepEnd:
    """The end of one step, which is to be waited for."""

    def __init__(self, waiting: Waiting, kind: Hashable, event: Event, begun: float, before: StepEnd | None) -> None:
        """`before`: the end of the step that it was launched behind."""
        self._waiting, self._kind, self._event, self._before = waiting, kind, event, before
        self._begun = begun, begun
        """The device began no sooner and no later."""
        self._unfinished = begun
        """Time at which the step was last seen unfinished."""
        self._ended: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the step has ended; looks once."""
        if self._ended is None:
            now = self._waiting.clock()
            if self._event.query():
                self._end(self._waiting.clock())
            else:
                self._unfinished = now
        return self._ended is not None

    def rest(self, sleep: Callable[[float], None] | None = None) -> bool:
        """Sleep for a while if the step will not have ended by then. False: now it is to be looked at all the time.

        `sleep` may return sooner, when something else than the step wants to be seen to."""
        if self.passed or (begun := self._device_began()) is None:
            return False
        spare = self._waiting.spare(self._kind, self._unfinished - begun[0])
        if spare <= 0.0:
            return False
        (sleep or self._waiting.sleep)(spare)
        self._waiting.slept(spare, self._waiting.clock() - self._unfinished)
        return True

    def wait(self) -> None:
        """Return when the step has ended."""
        while self.rest():
            pass
        if not self.passed:
            self._event.synchronize()
            self._unfinished = self._waiting.clock()
            self._end(self._unfinished)

    def _device_began(self) -> tuple[float, float] | None:
        """Return the earliest and the latest time at which the device can have begun this step. None until the step
        before is known to have ended."""
        if (before := self._before) is not None:
            if before._ended is None:
                return None
            self._begun = max(self._begun[0], before._unfinished), max(self._begun[1], before._ended)
            self._before = None
        return self._begun

    def _end(self, now: float) -> None:
        self._ended = now
        if (begun := self._device_began()) is not None:
            earliest, latest = begun
            self._waiting.learn(self._kind, max(self._unfinished - latest, 0.0), now - earliest)
        self._before = None
