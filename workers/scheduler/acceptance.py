"""Acceptance of drafts: recent rates, by position and by row, and their comparison with what a replica is used to."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Final

from workers.scheduler.sequence import Sequence

logger = logging.getLogger(__name__)

PRIOR: Final = 0.7
"""Probability that a draft is accepted where those before it do, before anything is known."""
LEAST_WEIGHT: Final = 8.0
"""Drafts that the prior counts for, and that what is known counts for when it has not been tried for long."""
MEMORY: Final = 256
"""Drafts after which what stood before has about a third of its weight left; or steps in which none was tried."""
ROW_MEMORY: Final = 64
"""Steps after which what stood before in a row has about a third of its weight left."""
ROW_PRIOR: Final = 16.0
"""Steps that all rows together count for in what is taken for a row's."""
MOST_ROWS: Final = 32
"""Rows up to which each is followed by itself. Of more, the drafts of a few steps say what their mean is."""
WINDOW: Final = 1024
"""First drafts of rows between two looks at a replica's baseline."""
BASELINE_RATE: Final = 1 / 16
"""Weight of the newest window in the baseline."""
SETTLED: Final = 4
"""Windows before there is one."""
FALLEN, RECOVERED = 0.5, 0.75
"""Shares of the baseline at which acceptance has fallen, and at which it is as it was."""


class Acceptance:
    """Probability that drafts are accepted, by position."""

    def __init__(self, drafts: int) -> None:
        """`drafts`: most drafts of a row."""
        self._reached = [LEAST_WEIGHT] * drafts
        self._accepted = [PRIOR * LEAST_WEIGHT] * drafts
        self._mean: list[float] = []
        """Probability that the first j drafts are accepted, for the rows of the newest step, where rows are
        followed."""

    def after(self, position: int) -> float:
        """Probability that the draft at `position` (from 0) stands where those before it do."""
        return self._accepted[position] / self._reached[position]

    def by_position(self) -> tuple[float, ...]:
        """Return the probability at every position."""
        return tuple(self.after(position) for position in range(len(self._reached)))

    def tokens(self, width: int, tried: int) -> float:
        """Tokens that a row of a step of `width` gains on average. `tried`: drafts that rows had of late."""
        gained, chance = 1.0, 1.0
        for position in range(width - 1):
            known = position < min(tried, len(self._mean))
            chance = self._mean[position] if known else chance * self.after(position)
            gained += chance
        return gained

    def observe(self, drafts: int, rows: Collection[tuple[Sequence, int]]) -> None:
        """A step in which every row had so many drafts, of which that many stood."""
        reached = len(rows)
        for position in range(len(self._reached)):
            if position < drafts and reached:
                accepted_at = sum(accepted > position for _, accepted in rows)
                self._forget(position, max(0.5, 1 - reached / MEMORY))
                self._reached[position] += reached
                self._accepted[position] += accepted_at
                reached = accepted_at
            elif self._reached[position] > LEAST_WEIGHT:
                self._forget(position, 1 - 1 / MEMORY)
        self._mean = self._follow(drafts, rows) if len(rows) <= MOST_ROWS else []

    def _forget(self, position: int, keep: float) -> None:
        self._reached[position] *= keep
        self._accepted[position] *= keep

    def _follow(self, drafts: int, rows: Collection[tuple[Sequence, int]]) -> list[float]:
        """The mean over rows of what is known of each. A row's figures are how often its first j drafts all stood."""
        positions, keep = len(self._reached), 1 - 1 / ROW_MEMORY
        usual, chance = [], 1.0
        for position in range(positions):
            chance *= self.after(position)
            usual.append(chance)
        sums = [0.0] * positions
        for request, accepted in rows:
            tried, accepted_at = request.drafts_tried, request.drafts_accepted_at
            if not tried:
                tried += [0.0] * positions
                accepted_at += [0.0] * positions
            for position in range(drafts):
                tried[position] = keep * tried[position] + 1
                accepted_at[position] = keep * accepted_at[position] + (accepted > position)
            for position in range(positions):
                sums[position] += (ROW_PRIOR * usual[position] + accepted_at[position]) / (ROW_PRIOR + tried[position])
        return [total / len(rows) for total in sums]


class Baseline:
    """Notices when a replica's first drafts are accepted half as often as they used to: a change of drafter, of prompts
    or of code, which costs speed and nothing else."""

    def __init__(self) -> None:
        self.falls = 0
        self._fallen = False
        self._usual = 0.0
        self._windows = 0
        self._offered = self._accepted = 0

    def observe(self, rows: Collection[tuple[Sequence, int]]) -> None:
        """A step whose rows had drafts, of which so many stood."""
        self._offered += len(rows)
        self._accepted += sum(accepted > 0 for _, accepted in rows)
        if self._offered < WINDOW:
            return
        share = self._accepted / self._offered
        self._offered = self._accepted = 0
        if self._windows >= SETTLED:
            self._judge(share)
        if not self._fallen:
            self._windows += 1
            self._usual += max(BASELINE_RATE, 1 / self._windows) * (share - self._usual)

    def _judge(self, share: float) -> None:
        if not self._fallen and share < FALLEN * self._usual:
            self._fallen = True
            self.falls += 1
            logger.warning(
                "fewer drafts stand than usual: %.0f%% of the last %d first drafts, %.0f%% before",
                100 * share,
                WINDOW,
                100 * self._usual,
            )
        elif self._fallen and share > RECOVERED * self._usual:
            self._fallen = False
            logger.info("as many drafts stand as before: %.0f%%", 100 * share)
