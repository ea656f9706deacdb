"""Chooses how many tokens the decode rows of the next step feed, so that as many as possible are accepted a second.

A step of width w takes T(rows, w) seconds and gives each row 1 + P_1 + ... + P_(w - 1) tokens, where P_j is the
probability that its first j drafts are all accepted. Times were measured when the replica proved its steps, and follow
what steps take since; probabilities follow what is accepted (`Acceptance`). Tokens do not depend on the width, so
choosing badly costs time and nothing else.

Only widths that are run show what they take and what is accepted. So from time to time a few steps are of another
width, of each one in turn that may be better by now. They may lose less than a hundredth of the time.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterable
from typing import Final

from workers.protocol.report import StepTime
from workers.scheduler.config import SchedulerConfig
from workers.scheduler.sequence import Sequence
from workers.scheduler.step_times import StepTimes

logger = logging.getLogger(__name__)

GAIN: Final = 1.01
"""Least factor by which another width must be better: the best one is not left for a difference that is noise."""
EXPLORED_DRAFTS: Final = 32
"""Drafts, at each place, that steps of a wider width try in a row."""
FEWEST: Final = 8
"""Drafts of an exploration after which it ends early, if no row has accepted more than the best width would have given
it."""
TIMED: Final = 4
"""Steps that show what another width takes: the fewest that are tried in a row."""
EXPLORATION_LOSS: Final = 0.0075
"""Share of the time that exploration may lose in the long run."""
LEAST_LOSS: Final = 0.1
"""Least share of their time that exploration steps are assumed to lose: a lower estimate may be a mistake."""
IMPATIENCE: Final = 8
"""Factor by which the first exploration comes sooner after the width has changed, or where nothing is known of this
number of rows. It is halved with each exploration, down to 1."""
HOPELESS: Final = 2.0
"""Speed of the best width, as a multiple of a narrower one's, from which on the narrower one is not tried."""


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
        self._best = self._former = config.width
        self._tried = 0
        self._made = config.width - 1
        self._unknown = EXPLORED_DRAFTS
        """Rows that are left to feed as much as they may before anything is chosen."""
        self._exploring = 0
        """Steps that are left to try another width than the best."""
        self._explored = config.width
        """Width that is being explored, or was explored last."""
        self._tries = self._gains = 0
        """Rows of wider steps that a exploration has tried so far, and how many gained more than the best width
        allows."""
        self._back = 0.0
        """Seconds that are not lost for each of those steps, if it is given up."""
        self._chosen = 0
        """Width of the plan that may be made."""
        self._in_flight: deque[bool] = deque()
        """For each plan that was made, whether its step drafts as it does in the long run, so that its time counts."""
        self._credit = 0.0
        """Seconds that a exploration may lose by now."""
        self._sooner = IMPATIENCE
        self._met: set[int] = set()
        """Numbers of rows that came before anything was known of them."""

    @property
    def best(self) -> int:
        """The width that gives most tokens a second, as far as is known; where it is fixed, that."""
        return self._best

    @property
    def falls(self) -> int:
        """Number of times that acceptance has fallen to half of what was usual."""
        return self._baseline.falls

    def by_position(self) -> tuple[float, ...]:
        """Return the probability, by draft position, that a draft is accepted if those before it are."""
        return self._acceptance.by_position()

    def measured(self, step_times: Iterable[StepTime]) -> None:
        """Go on with times that were measured of more steps than those at the start. What steps took since is
        forgotten."""
        self.times = StepTimes(step_times, self._most)

    def choose(self, rows: int) -> tuple[int, int]:
        """(width, drafts) of the next plan, of so many decode rows."""
        if not self._adaptive:
            return self._most, self._most - 1
        if rows and not self._unknown:
            self._settle(rows)
        aim = self._explored if self._exploring else self._best
        width = min(aim, 1 + self._made)
        self._chosen = width
        return width, min(aim - 1, width)

    def planned(self, drafts: int) -> None:
        """The next plan was made, and makes so many drafts."""
        self._made = drafts
        self._in_flight.append(not self._adaptive or drafts < self._chosen)
        if self._exploring and self._chosen == self._explored:
            self._exploring -= 1

    def observe(self, width: int, rows: Collection[tuple[Sequence, int]], seconds: float, *, alone: bool) -> None:
        """An applied step: its live decode rows, and how many drafts of each were accepted. `alone`: it had no prefill
        rows, so its time is that of decode rows."""
        usual = self._in_flight.popleft() if self._in_flight else True
        if not rows:
            return
        if width > 1:
            self._baseline.observe(rows)
        self._acceptance.observe(width - 1, rows)
        if alone and usual and seconds > 0:
            self.times.observe(len(rows), width, seconds)
        if not self._adaptive:
            return
        if width >= self._best:  # narrower ones show a few steps long less of the rows than is known
            self._tried = width - 1
        if width == self._most:
            self._unknown = max(0, self._unknown - len(rows))
        if self._exploring:
            self._give_up(width, rows)
        else:
            self._credit += (seconds or self.times.seconds(len(rows), width)) * EXPLORATION_LOSS * self._sooner

    def _settle(self, rows: int) -> None:
        """Follow the width that gives most tokens a second, if it is better by enough; or try another one."""
        if self._exploring:
            return
        seconds = [self.times.seconds(rows, width) for width in range(1, self._most + 1)]
        speeds = [self._acceptance.tokens(index + 1, self._tried) / each for index, each in enumerate(seconds)]
        best = max(range(1, self._most + 1), key=lambda width: speeds[width - 1])
        if best != self._best and speeds[best - 1] > GAIN * speeds[self._best - 1]:
            logger.debug("width %d instead of %d for %d rows", best, self._best, rows)
            if best != self._former:  # else two widths give as much, and nothing has changed
                self._sooner, self._credit = IMPATIENCE, min(self._credit, 0.0)
            self._former, self._best = self._best, best
        elif not self.times.known(rows) and rows not in self._met:
            self._met.add(rows)
            self._sooner, self._credit = IMPATIENCE, min(self._credit, 0.0)
        self._try_another(rows, seconds, speeds)

    def _try_another(self, rows: int, seconds: list[float], speeds: list[float]) -> None:
        """Begin a exploration of the next width that may be better, once it may lose what it probably does."""
        best, speed = self._best, speeds[self._best - 1]
        for step in range(1, self._most + 1):
            # All in turn, the one that was tried last at the end.
            width = (self._explored - 1 + step) % self._most + 1
            if width == best or (width < best and HOPELESS * speeds[width - 1] < speed):
                continue
            wider = width > best
            steps = max(TIMED, -(-EXPLORED_DRAFTS // rows)) if wider else TIMED
            # It is given up a step late: another one is in flight.
            fewest = min(steps, -(-FEWEST // rows) + 1) if wider else TIMED
            # Each step on the way there, or back, drafts one more.
            lost = seconds[width - 1] * max(LEAST_LOSS, 1 - speeds[width - 1] / speed)
            if self._credit >= (fewest + abs(width - best)) * lost:
                self._credit -= (steps + abs(width - best)) * lost
                self._explored, self._exploring, self._back = width, steps, lost
                self._tries = self._gains = 0
                self._sooner = max(1, self._sooner // 2)
            return
        self._credit = min(self._credit, 0.0)

    def _give_up(self, width: int, rows: Collection[tuple[Sequence, int]]) -> None:
        """A step while there is a exploration: end it early where it is plain that it gains nothing."""
        if width == self._explored > self._best:
            self._tries += len(rows)
            self._gains += sum(accepted >= self._best for _, accepted in rows)
            if self._tries >= FEWEST and not self._gains:
                self._credit += self._exploring * self._back
                self._exploring = 0


PRIOR: Final = 0.7
"""Probability that a draft is accepted where those before it do, before anything is known."""
LEAST_WEIGHT: Final = 8.0
"""Drafts that the prior counts for, and that what is known counts for when it has not been tried for long."""
MEMORY: Final = 256
"""Drafts after which what was accepted before has about a third of its weight left; or steps in which none was
tried."""
ROW_MEMORY: Final = 64
"""Steps after which what was accepted before in a row has about a third of its weight left."""
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
        """Probability that the draft at `position` (from 0) is accepted where those before it are."""
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
        """A step in which every row had so many drafts, of which that many were accepted."""
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
        """The mean over rows of what is known of each. A row's figures are how often its first j drafts were all
        accepted."""
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
        """A step whose rows had drafts, of which so many were accepted."""
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
                "fewer drafts are accepted than usual: %.0f%% of the last %d first drafts, %.0f%% before",
                100 * share,
                WINDOW,
                100 * self._usual,
            )
        elif self._fallen and share > RECOVERED * self._usual:
            self._fallen = False
            logger.info("as many drafts are accepted as before: %.0f%%", 100 * share)
