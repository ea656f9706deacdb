"""How fast a disk reads: what was measured, and when it is worth another try."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

AGAIN_S: Final = 60.0
"""After so many seconds without a load a disk that was too slow is tried again: it may have been busy with other
things. Twice as long after each try in vain."""
LONGEST_PAUSE_S: Final = 3600.0


class ReadPace:
    """Seconds that a page takes to read from disk, over all loads under way.

    Nothing but a load measures a disk. So a first load begins whatever is guessed of the disk: it costs the request
    that waits for it no more than computing would have taken. What it measures replaces the guess.
    """

    def __init__(self, guess_s: float, clock: Callable[[], float]) -> None:
        """`guess_s`: seconds a page, as far as nothing was measured."""
        self._page_s, self._clock = guess_s, clock
        self.measured = False
        """Whether any load has ended."""
        self._at = clock()
        self._pause_s = AGAIN_S / 2

    @property
    def due(self) -> bool:
        """Whether the disk is to be tried, whatever is known of it."""
        return not self.measured or self._clock() - self._at >= self._pause_s

    def page_s(self) -> float:
        """Seconds a page, by the loads so far; the guess before the first."""
        return self._page_s

    def observe(self, page_s: float, *, worthwhile: bool) -> None:
        """A load has ended that took `page_s` a page. `worthwhile`: whether computing takes longer. The first load, and
        one that came after a pause, replaces what was known before; else older loads count half."""
        afresh = self.due
        self._page_s = page_s if afresh else (self._page_s + page_s) / 2
        self._pause_s = AGAIN_S if worthwhile else min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._at, self.measured = self._clock(), True
