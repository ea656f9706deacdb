"""Ages of what other replicas report, whatever their clocks say.

A report has the Unix time at which it was made, but clocks of nodes differ, and they jump. So a replica trusts its own
monotonic clock: a report that it has not seen before was made after it last looked.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

KEPT: Final = 1024
"""Replicas whose last reports are remembered. They are when they are gone, too: one that comes back is known."""


@dataclass
class _Seen:
    stamp: float
    made: float
    looked: float


class ReportAges:
    """The times at which reports of other replicas were made, by this replica's monotonic clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.now = clock
        """Seconds on that clock."""
        self._seen: dict[str, _Seen] = {}

    def made(self, replica: str, stamp: float) -> float:
        """Return when the report of `replica` with this `stamp` was made. `stamp`: its Unix time, seconds, by a clock
        that may be wrong. The first report of a replica is as old as that says, later ones at most as old as the time
        since the last call."""
        now, known = self.now(), self._seen.pop(replica, None)
        if known is not None and known.stamp == stamp:
            made = known.made
        else:
            age = max(time.time() - stamp, 0.0)
            made = now - (age if known is None else min(age, now - known.looked))
        self._seen[replica] = _Seen(stamp, made, now)
        if len(self._seen) > KEPT:
            del self._seen[next(iter(self._seen))]
        return made

    def age(self, replica: str, stamp: float) -> float:
        """Return the age of that report in seconds."""
        return self.now() - self.made(replica, stamp)
