"""Progress of loading, in bytes and in seconds that remain: a line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

PERIOD_S: Final = 3.0
"""Seconds between two lines."""
LEAST_KNOWN_S: Final = 1.0
"""Seconds before which nobody says how long it will take."""


class LoadingProgress:
    """Progress of loading one rank's weights."""

    def __init__(self, total: int, tell: Callable[[str], None] | None) -> None:
        """`total`: bytes of memory to fill. `tell` gets the lines."""
        self._total = total
        self._tell = tell
        self._done = 0
        self._where = ""
        self._begin = time.perf_counter()
        self._told = -PERIOD_S

    def note(self, text: str) -> None:
        """A line of its own, at once."""
        if self._tell is not None:
            self._tell(text)

    def at(self, where: str) -> None:
        """Name what is being loaded from now on."""
        self._where = where
        self._say()

    def add(self, count: int) -> None:
        """Add bytes that are in place, or soon will be."""
        self._done += count
        self._say()

    def _say(self) -> None:
        seconds = time.perf_counter() - self._begin
        if self._tell is None or seconds - self._told < PERIOD_S:
            return
        self._told = seconds
        rest = ""
        if seconds >= LEAST_KNOWN_S and self._done:
            rest = f", about {seconds * max(0, self._total - self._done) / self._done:.0f} s left"
        self._tell(f"{self._where}: {self._done / 2**30:.2f} of {self._total / 2**30:.2f} GiB of weights{rest}")

    def end(self) -> None:
        """Report the end: everything is in place."""
        if self._tell is not None:
            seconds = time.perf_counter() - self._begin
            self._tell(f"{self._done / 2**30:.2f} GiB of weights loaded in {seconds:.1f} s")
