"""How many prompt tokens a mixed step feeds, so that it takes as long as its decode rows may wait for their next token.

A mixed step is expected to take T(rows, width) + c n seconds, where T is what a step of its decode rows alone takes and
n its prompt tokens. What one costs, c, is first guessed from the self-test's largest steps, and then follows mixed
steps: it differs with the number of tokens, for some of it is the same for any number, and with the cached context.

Imports no torch, as all of the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from workers.protocol.report import StepTime
from workers.scheduler.config import SchedulerConfig
from workers.scheduler.step_times import StepTimes

DECODE_STEPS: Final = 2.0
"""What a mixed step may take where nobody says it, in steps of its decode rows alone."""
FEWEST: Final = 64
"""Prompt tokens that are open in every mixed step, whatever they cost: prompts must not starve."""
RATE: Final = 1 / 4
"""Weight of the newest mixed step, of usual size: costs grow with the context, over a few hundred tokens a step."""
UNUSUAL: Final = 3.0
"""A mixed step's prompt tokens are taken to have cost at most so many times what was expected, and at least that part
of it: the machine may have been busy, and a wrong guess is left in a few steps all the same."""


class MixedTarget:
    """The budget for prompts of steps that have decode rows."""

    def __init__(self, config: SchedulerConfig, times: StepTimes) -> None:
        """`times`: of steps of decode rows, as they are followed."""
        self._times, self._target = times, config.mixed_step_target_s
        # Without a target times must be known: those that are only followed begin with any number.
        self._wanted = bool(config.step_times) if self._target is None else self._target > 0
        self._cost = _slope(config.step_times)
        self._usual = 0.0
        """Prompt tokens of a mixed step."""

    def budget(self, rows: int, width: int, most: int) -> int:
        """Prompt tokens of a step with so many decode rows, `most` at the most."""
        if not rows or not self._wanted or self._cost is None:
            return most
        alone = self._times.seconds(rows, width)
        target = DECODE_STEPS * alone if self._target is None else self._target
        return min(most, max(FEWEST, int((target - alone) / self._cost)))

    def observe(self, rows: int, width: int, tokens: int, seconds: float) -> None:
        """What a step with so many decode rows and prompt tokens took."""
        if not rows or not tokens or seconds <= 0 or not self._wanted:
            return
        alone = self._times.seconds(rows, width)
        if self._cost is None:
            self._cost = max(seconds - alone, seconds / UNUSUAL**2) / tokens
        expected = self._cost * tokens
        found = min(max(seconds - alone, expected / UNUSUAL), expected * UNUSUAL)
        # A step of few tokens says little of what one costs among many.
        self._usual += RATE * (tokens - self._usual)
        weight = RATE * min(1.0, tokens / self._usual)
        self._cost *= 1 + weight * (found / expected - 1)


def _slope(measured: Sequence[StepTime]) -> float | None:
    """Seconds that one token more takes in the largest steps that were measured; None where nothing says it."""
    widest = max((time.width for time in measured), default=0)
    seconds = {time.rows * widest: time.seconds for time in measured if time.width == widest}
    largest = max(seconds, default=0)
    # A token costs little beside a step, so steps of about as many tokens say nothing of it.
    other = max((tokens for tokens in seconds if 2 * tokens <= largest), default=0)
    if not other:
        return None
    found = (seconds[largest] - seconds[other]) / (largest - other)
    return found if found > 0 else None
