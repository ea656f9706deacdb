"""A clock for those who watch whether others live: it stands still while the watcher itself cannot look."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

MOST_BETWEEN_LOOKS_S: Final = 0.5
"""Seconds that count between two looks at the most. Watchers look more often where nothing holds them up."""


class AwakeClock:
    """Seconds in which this process ran, as far as it looked at the clock.

    A virtual machine that is moved to another host, or a machine that has no processor to spare for seconds, holds up
    the watcher and whom it watches alike. What was not heard in that time says nothing: those who were silent because
    everything stood still would be given up at the first look behind it, although they live.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds that never go backwards."""
        self._clock = clock
        self._looked = clock()
        self.time = 0.0
        """As of the last look."""

    def look(self) -> float:
        """Count what has passed since the last look, MOST_BETWEEN_LOOKS_S at the most. Return `time`."""
        now = self._clock()
        self.time += min(now - self._looked, MOST_BETWEEN_LOOKS_S)
        self._looked = now
        return self.time
