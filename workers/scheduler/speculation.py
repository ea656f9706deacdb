"""Chooses how many tokens the decode rows of the next step feed, so that as many as possible are accepted a second.

A step of width w takes T(rows, w) seconds and gives each row 1 + P_1 + ... + P_(w - 1) tokens, where P_j is the
probability that its first j drafts all stand. Times were measured when the replica proved its steps, and follow what
steps take since; probabilities follow what stands. Tokens do not depend on the width, so choosing badly costs time and
nothing else.

A width that does not pay is left, and from time to time a few steps try one draft more than pays, to see whether it
would by now. They may take a fiftieth of the time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from workers.scheduler.acceptance import Acceptance, Baseline
from workers.scheduler.config import SchedulerConfig
from workers.scheduler.sequence import Sequence as Request
from workers.scheduler.step_times import StepTimes

logger = logging.getLogger(__name__)

GAIN: Final = 1.02
"""How much better another width must be: one is not left for a difference that is noise."""
PROBED: Final = 32
"""Drafts, of one more than pays, that are tried in a row."""
PROBE_SHARE: Final = 0.02
"""Of the time, what that may take in the long run."""
IMPATIENCE: Final = 8
"""How much sooner the first probe comes after the width has changed. Each next one takes twice the time, up to that."""


class Speculation:
    """Decides width and drafts of the next plan.

    Drafts that a step makes are verified in the next one. So a wider step takes a step before it that drafts more than
    it was given: one draft more at a time, for each such pair has a graph of its own. To feed fewer tokens than were
    drafted takes nothing. Widths are the same for all rows of a step.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._most = config.width
        self._adaptive = config.adaptive and config.width > 1
        self.times = StepTimes(config.step_times, config.width)
        self._acceptance, self._baseline = Acceptance(config.width - 1), Baseline()
        self._best = config.width
        self._tried = 0
        self._made = config.width - 1
        self._unknown = PROBED
        """Rows that are left to feed as much as they may before anything is chosen."""
        self._probe = 0
        """Drafts left to try of one more than pays."""
        self._rest = 0.0
        """Seconds until then."""
        self._sooner = IMPATIENCE

    @property
    def best(self) -> int:
        """The width that gives most tokens a second, as far as is known; where it is fixed, that."""
        return self._best

    @property
    def falls(self) -> int:
        """How often acceptance has fallen to half of what was usual."""
        return self._baseline.falls

    def by_position(self) -> tuple[float, ...]:
        """How probable it is that a draft stands where those before it do, by position."""
        return self._acceptance.by_position()

    def choose(self, rows: int) -> tuple[int, int]:
        """(width, drafts) of the next plan, of so many decode rows."""
        if not self._adaptive:
            return self._most, self._most - 1
        if rows and not self._unknown:
            self._settle(rows)
        aim = min(self._best + (self._probe > 0), self._most)
        width = min(aim, 1 + self._made)
        return width, min(aim - 1, width)

    def planned(self, drafts: int) -> None:
        """The next plan was made, and makes so many drafts."""
        self._made = drafts

    def observe(self, width: int, rows: Sequence[tuple[Request, int]], seconds: float, *, alone: bool) -> None:
        """An applied step: its live decode rows, and how many drafts of each stood. `alone`: it had no prefill rows, so
        its time is that of decode rows."""
        if not rows:
            return
        if width > 1:
            self._baseline.observe(rows)
        self._acceptance.observe(width - 1, rows)
        if alone and seconds > 0:
            self.times.observe(len(rows), width, seconds)
        if not self._adaptive:
            return
        self._tried = width - 1
        if width == self._most:
            self._unknown = max(0, self._unknown - len(rows))
        if self._probe and width > self._best:
            self._probe = max(0, self._probe - len(rows))
            if not self._probe:
                self._pause(len(rows))
        elif not self._probe and self._best < self._most:
            self._rest -= seconds or self.times.seconds(len(rows), width)
            if self._rest <= 0:
                self._probe = PROBED

    def _pause(self, rows: int) -> None:
        """Until the next probe: long enough that it, and the step before that drafts for it, may take their share."""
        steps = -(-PROBED // rows) + 1
        probe = steps * self.times.seconds(rows, min(self._best + 1, self._most))
        self._rest = probe / PROBE_SHARE / self._sooner
        self._sooner = max(1, self._sooner // 2)

    def _settle(self, rows: int) -> None:
        """Follow the width that gives most tokens a second, if it is better by enough."""

        def speed(width: int) -> float:
            return self._acceptance.tokens(width, self._tried) / self.times.seconds(rows, width)

        best = max(range(1, self._most + 1), key=speed)
        if best != self._best and speed(best) > GAIN * speed(self._best):
            logger.debug("width %d instead of %d for %d rows", best, self._best, rows)
            self._best, self._probe, self._sooner = best, 0, IMPATIENCE
            self._pause(rows)
