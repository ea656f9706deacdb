"""When the portions of graphs that an engine began to serve without are captured, and which pages they are proven on.

Ranks run no step while they capture. So portions follow each other at once where nobody waits for a step, and elsewhere
at such distances that streams lose a small share of their time.

Imports no torch, as all of the scheduler.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from workers.protocol.captures import CapturePortion, PortionCaptured
from workers.scheduler.pages import RowPages
from workers.scheduler.prefix import PrefixCache

PAUSE: Final = 3.0
"""Time between two portions while rows run, as a multiple of what the portion before took: a quarter of the time is the
most that streams lose."""
QUIET_S: Final = 0.2
"""Seconds from the start in which an engine captures nothing before its first step."""
SPARE_PAGES: Final = 4
"""Pages for each slot that stay open to rows while a portion is proven: as many as a row may need for the plans
that are made meanwhile, and more."""


class Captures:
    """The portions that are left, in their order.

    The first one waits for the result of a step: a token that a stream waits for comes before it. Where nobody asks for
    anything it waits `QUIET_S`, in which the streams of an engine that died, or a health probe, would have come.
    """

    def __init__(
        self, pages: Sequence[tuple[int, int]], cache: PrefixCache, slots: int, ranks: int, clock: Callable[[], float]
    ) -> None:
        """`pages`: of each portion how many pages its proof takes, and the fewest that will do."""
        self._left, self._cache, self._slots, self._ranks, self._clock = deque(pages), cache, slots, ranks, clock
        self._number = 0
        self._under_way: RowPages | None = None
        """Pages of the portion that ranks capture at present."""
        self._answers = 0
        self._longest = 0.0
        self._not_before = math.inf
        """While rows run."""
        self._idle_not_before = clock() + QUIET_S
        """Time that an engine is idle at the least before it captures anything."""

    @property
    def under_way(self) -> bool:
        """Whether ranks capture at present."""
        return self._under_way is not None

    @property
    def left(self) -> int:
        """Portions that ranks were not told to capture yet."""
        return len(self._left)

    def next(self, *, idle: bool) -> CapturePortion | None:
        """Return the message for all ranks that is due now, before the next plan; None where none is. `idle`: no row
        runs, waits or is in flight."""
        if self.under_way or not self._left or self._clock() < (self._idle_not_before if idle else self._not_before):
            return None
        wanted, least = self._left[0]
        spare = max(self._cache.available - SPARE_PAGES * self._slots, 0)
        if least > spare and not idle:
            return None
        self._left.popleft()
        self._number += 1
        self._answers, self._longest = 0, 0.0
        # Cached pages are worth more to who comes next than to a proof, for which fewer do as well.
        free = self._cache.free if idle else min(self._cache.free, spare)
        pages = min(wanted, max(least, free), self._cache.available)
        # All of them will be overwritten, and zeroed in the end.
        self._under_way = self._cache.open((), pages, overwritten=True, scattered=True)
        return CapturePortion(self._number, tuple(self._under_way.pages))

    def step_ended(self) -> None:
        """Hear that a step has ended: the first portion waits for that."""
        if self._not_before == math.inf:
            self._not_before = self._idle_not_before = self._clock()

    def captured(self, message: PortionCaptured) -> bool:
        """Take in that a rank has captured the portion; return whether all ranks have, and the pages are free again.
        RuntimeError for one that nobody asked for: scheduler and worker disagree."""
        if self._under_way is None or message.number != self._number:
            raise RuntimeError(f"rank {message.rank} has captured portion {message.number}, which nobody waits for")
        self._answers += 1
        self._longest = max(self._longest, message.seconds)
        if self._answers < self._ranks:
            return False
        self._cache.close(self._under_way)
        self._under_way = None
        self._not_before = self._clock() + PAUSE * self._longest
        return True
