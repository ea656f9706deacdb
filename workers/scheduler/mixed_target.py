"""How many prompt tokens a mixed step feeds, so that it takes as long as its decode rows may wait for their next token.

A mixed step of n prompt tokens is expected to take T(rows, width) + s (o + c n) seconds. T is what a step of its decode
rows alone takes. o is what prompts add whatever their number: such a step is no single graph. o and c are measured when
the replica proves its steps, and s follows mixed steps: what tokens cost grows with the cached context.

Where nobody says what a mixed step may take, it may take twice as long as one of its decode rows alone. Few rows make
short steps, of which o would leave nothing for prompts. So prompts get o / c tokens in any case: of the time they add,
half at least is spent on tokens.

Imports no torch, as all of the scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import Final

from workers.protocol.report import StepTime
from workers.scheduler.config import SchedulerConfig
from workers.scheduler.step_times import StepTimes

logger = logging.getLogger(__name__)

DECODE_STEPS: Final = 2.0
"""What a mixed step may take where nobody says it, in steps of its decode rows alone."""
FEWEST: Final = 64
"""Prompt tokens that are open in every mixed step, whatever they cost: prompts must not starve."""
RATE: Final = 1 / 4
"""Weight of the newest mixed step, of usual size: costs grow with the context, over a few hundred tokens a step."""
UNUSUAL: Final = 3.0
"""Prompts are taken to have added at most so many times what was expected, and at least that part of it: the machine
may have been busy, and a wrong guess is left in a few steps all the same."""
APART: Final = 1.5
"""How many times the tokens of one measured step another must have had for both to say what a token costs."""


class MixedTarget:
    """The budget for prompts of steps that have decode rows."""

    def __init__(self, config: SchedulerConfig, times: StepTimes) -> None:
        """`times`: of steps of decode rows, as they are followed."""
        self._times, self._target = times, config.mixed_step_target_s
        # Without a target times must be known: those that are only followed begin with any number.
        self._wanted = bool(config.step_times) if self._target is None else self._target > 0
        self._fixed, self._cost = 0.0, _slope(config.step_times)
        """Seconds that prompts add to a step, whatever their number and for each token."""
        if (measured := _measured(config.step_times, times)) is not None:
            self._fixed, self._cost = measured
            logger.info(
                "prompts add %.1f ms to a step of decode rows, and %.1f us a token",
                1e3 * measured[0],
                1e6 * measured[1],
            )
        self._usual = 0.0
        """Seconds that the prompts of a mixed step add."""

    def budget(self, rows: int, width: int, most: int) -> int:
        """Prompt tokens of a step with so many decode rows, `most` at the most."""
        if not rows or not self._wanted or self._cost is None:
            return most
        alone = self._times.seconds(rows, width)
        added = max((DECODE_STEPS - 1) * alone, 2 * self._fixed)
        if self._target is not None:
            added = self._target - alone
        return min(most, max(FEWEST, int((added - self._fixed) / self._cost)))

    def observe(self, rows: int, width: int, tokens: int, seconds: float) -> None:
        """What a step with so many decode rows and prompt tokens took."""
        if not rows or not tokens or seconds <= 0 or not self._wanted:
            return
        alone = self._times.seconds(rows, width)
        if self._cost is None:
            self._cost = max(seconds - alone, seconds / UNUSUAL**2) / tokens
        expected = self._fixed + self._cost * tokens
        found = min(max(seconds - alone, expected / UNUSUAL), expected * UNUSUAL)
        # What few tokens took says little of many.
        self._usual += RATE * (expected - self._usual)
        scale = 1 + RATE * min(1.0, expected / self._usual) * (found / expected - 1)
        self._fixed, self._cost = scale * self._fixed, scale * self._cost


def _measured(measured: Sequence[StepTime], times: StepTimes) -> tuple[float, float] | None:
    """(seconds that prompts add whatever their number, seconds a token) of the mixed steps that were measured; None
    where they do not say it. Theil and Sen's estimate: a step that something else held up changes little."""
    added = [
        (time.prompt_tokens, time.seconds - times.seconds(time.rows, time.width))
        for time in measured
        if time.prompt_tokens and time.rows
    ]
    pairs = [sorted(pair) for pair in combinations(added, 2)]
    slopes = [(more - less) / (many - few) for (few, less), (many, more) in pairs if many >= APART * few]
    if not slopes or (cost := median(slopes)) <= 0:
        return None
    return max(0.0, median(seconds - cost * tokens for tokens, seconds in added)), cost


def _slope(measured: Sequence[StepTime]) -> float | None:
    """Seconds that one token more takes in the largest steps of decode rows that were measured; None where nothing says
    it."""
    alone = [time for time in measured if not time.prompt_tokens]
    widest = max((time.width for time in alone), default=0)
    seconds = {time.rows * widest: time.seconds for time in alone if time.width == widest}
    largest = max(seconds, default=0)
    # A token costs little beside a step, so steps of about as many tokens say nothing of it.
    other = max((tokens for tokens in seconds if 2 * tokens <= largest), default=0)
    if not other:
        return None
    found = (seconds[largest] - seconds[other]) / (largest - other)
    return found if found > 0 else None
