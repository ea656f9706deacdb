"""How fast a disk reads beside computing: what was measured, what is worth a load, and when it is worth another try."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kernels.page import PAGE_TOKENS

FIRST_S: Final = 0.005
"""Seconds that a load takes besides those of its pages."""
TOKEN_S: Final = 1e-4
"""Seconds that computing a token of a prompt takes, as far as nothing was measured."""
LONGEST_S: Final = 30.0
"""A request waits for the disk no longer than this, however long computing would take. A disk of which a rank hears
nothing for so long has failed."""
MARGIN: Final = 2.0
"""A load begins with no more pages than should come within `LONGEST_S`, divided by this: a rank answers when it has all
of its pages, and a disk that is a little slower than thought has not failed."""
FIRST_MARGIN: Final = 16.0
"""The same as long as nothing was measured. A disk that is many times slower than it is taken for is found out so."""
AGAIN_S: Final = 60.0
"""After so many seconds without a load a disk that was too slow is tried again: it may have been busy with other
things. Twice as long after each try in vain."""
LONGEST_PAUSE_S: Final = 3600.0


class ReadPace:
    """Seconds that a page takes to read from disk, over all loads under way.

    Nothing but a load measures a disk. So a first load begins whatever is guessed of the disk: it costs the request
    that waits for it no more than computing would have taken. What it measures replaces the guess.
    """

    def __init__(
        self, guess_s: float, clock: Callable[[], float], token_s: Callable[[], float | None] = lambda: None
    ) -> None:
        """`guess_s`: seconds a page, as far as nothing was measured. `token_s`: seconds that a token takes to be
        computed, by what it took lately."""
        self._page_s, self._clock, self._token_s = guess_s, clock, token_s
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

    def computing_s(self, pages: int) -> float:
        """Seconds that computing so many pages of a prompt takes."""
        return pages * PAGE_TOKENS * (self._token_s() or TOKEN_S)

    def pays(self, pages: int, before: int, computing_s: float) -> bool:
        """Whether so many pages should be read sooner than computing takes, behind those of loads `before`. Where
        nobody knows, it is tried: at first with every request, and later with one at a time."""
        if self.due and not (self.measured and before):
            return True
        return FIRST_S + (before + pages) * self.page_s() < computing_s

    def most_at_once(self, least: int, most: int) -> int:
        """Pages of all loads under way that come long before the disk counts as failed, also if it is as slow as it
        was last: from `least` to `most`."""
        page_s = self.page_s()
        if page_s <= 0:
            return most
        within = LONGEST_S / (MARGIN if self.measured else FIRST_MARGIN)
        return max(int((within - FIRST_S) / page_s), least)

    def observe(self, page_s: float, *, worthwhile: bool) -> None:
        """A load has ended that took `page_s` a page. `worthwhile`: whether computing takes longer. The first load, and
        one that came after a pause, replaces what was known before; else older loads count half."""
        afresh = self.due
        self._page_s = page_s if afresh else (self._page_s + page_s) / 2
        self._pause_s = AGAIN_S if worthwhile else min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._at, self.measured = self._clock(), True
