"""How much may be written to a disk that wears out: so much a second in the long run, and what was saved up at once."""

from __future__ import annotations

import math
from collections.abc import Callable


class WriteBudget:
    """Pages that may be written now. What is not used is saved up, up to a bound; at the start that is full."""

    def __init__(self, per_second: float, most: float, clock: Callable[[], float]) -> None:
        """`per_second`, `most`: pages; infinity: any number."""
        self._per_second, self._most, self._clock = per_second, most, clock
        self._left, self._at = most, clock()

    @property
    def none(self) -> bool:
        """Whether no page may ever be written."""
        return self._most < 1

    @property
    def left(self) -> int:
        """Pages that may be written."""
        return self._whole(self._now())

    @property
    def spare(self) -> int:
        """Pages of these above half of what can be saved up."""
        return self.left if math.isinf(self._most) else self._whole(self._now() - self._most / 2)

    def take(self, pages: int) -> None:
        """Pages are written now."""
        self._left = self._now() - pages

    def _now(self) -> float:
        now = self._clock()
        if now > self._at and not math.isinf(self._left):
            self._left = min(self._left + (now - self._at) * self._per_second, self._most)
        self._at = now
        return self._left

    @staticmethod
    def _whole(pages: float) -> int:
        return max(int(min(pages, 1 << 30)), 0)
