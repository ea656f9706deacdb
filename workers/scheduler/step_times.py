"""How long steps of decode rows take: measured at the start, and followed since.

Imports no torch, as all of the scheduler.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

from workers.protocol.report import StepTime

DRAFT_COST: Final = 0.25
"""Share of a step that each draft is taken to cost where nothing was measured."""
RATE: Final = 1 / 16
"""Weight of the newest step."""
UNUSUAL: Final = 3.0
"""A step that took so many times what was expected, or so little of it, says nothing: the machine was busy."""


class StepTimes:
    """Seconds of a step of decode rows, by rows and width."""

    def __init__(self, measured: Iterable[StepTime], width: int) -> None:
        """`measured`: at the start, in any order; steps of up to `width` tokens a row, and mixed ones, which do not
        count here."""
        points: dict[int, dict[int, float]] = {}
        for time in measured:
            if time.width <= width and time.seconds > 0 and not time.prompt_tokens:
                points.setdefault(time.width, {})[time.rows] = time.seconds
        # Of some widths only: what a draft costs is taken from those there are, else from nothing.
        self._tables = {w: (sorted(table), [table[rows] for rows in sorted(table)]) for w, table in points.items()}
        self._ratio = 1.0
        self._of_width = [1.0] * (width + 1)

    def seconds(self, rows: int, width: int) -> float:
        """What a step is expected to take."""
        return self._measured(rows, width) * self._ratio * self._of_width[width]

    def observe(self, rows: int, width: int, seconds: float) -> None:
        """What one took. Contexts grow, which all widths feel: the common ratio follows fast, a width's own slowly."""
        found = seconds / self.seconds(rows, width)
        if not 1 / UNUSUAL < found < UNUSUAL and self._tables:
            return
        self._ratio *= 1 + RATE * (found - 1)
        self._of_width[width] *= 1 + RATE / 2 * (found - 1)

    def _measured(self, rows: int, width: int) -> float:
        table = self._tables.get(width)
        if table is None:
            others = sorted(self._tables, key=lambda known: abs(known - width))
            if not others:
                return 1e-3 * (1 + DRAFT_COST * (width - 1))
            scale = (1 + DRAFT_COST * (width - 1)) / (1 + DRAFT_COST * (others[0] - 1))
            return scale * self._measured(rows, others[0])
        sizes, seconds = table
        # Rows run in the smallest bucket that holds them; beyond the last one they take as long as that.
        return seconds[min(bisect_left(sizes, rows), len(sizes) - 1)]
