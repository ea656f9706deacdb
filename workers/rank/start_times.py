"""Seconds of a rank's start by its parts, for who wants it to be shorter."""

from __future__ import annotations

import time

from typing_extensions import override


class StartTimes:
    """Times of the parts of a start, one after the other."""

    def __init__(self) -> None:
        """The first part begins."""
        self._last = time.perf_counter()
        self._parts: dict[str, float] = {}

    def end(self, part: str) -> None:
        """This part ends, and the next one begins."""
        now = time.perf_counter()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._last
        self._last = now

    @override
    def __str__(self) -> str:
        total = sum(self._parts.values())
        return f"{total:.1f} s: {', '.join(f'{part} {seconds:.1f} s' for part, seconds in self._parts.items())}"
