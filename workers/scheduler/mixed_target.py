"""How many prompt tokens a mixed step feeds, so that it takes as long as its decode rows may wait for their next token.

A mixed step of n prompt tokens, which have d entries before them on average, is expected to take

    T(rows, width) + s (o + c n) + g c n d

seconds. T is what a step of its decode rows alone takes. o is what prompts add whatever their number: such a step is no
single graph. o and c are measured when the replica proves its steps, with few entries before tokens. s and g follow
mixed steps: g is how much more a token costs the more it attends to.

Where nobody says what a mixed step may take, it may take twice as long as one of its decode rows alone. Few rows make
short steps, of which o would leave nothing for prompts. So prompts get o / c tokens in any case: of the time they add,
half at least is spent on tokens.

Imports no torch, as all of the scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import combinations
from math import inf, sqrt
from statistics import median
from typing import Final

from workers.protocol.report import StepTime
from workers.scheduler.config import SchedulerConfig
from workers.scheduler.step_times import StepTimes

logger = logging.getLogger(__name__)

DECODE_STEPS: Final = 2.0
"""What a mixed step may take where nobody says it, in steps of its decode rows alone."""
AIM: Final = 0.97
"""Of what a mixed step may take, what is aimed at: equal steps differ by a few percent, and nearly all are to keep to
it."""
FEWEST: Final = 64
"""Prompt tokens that are open in every mixed step, whatever they cost: prompts must not starve."""
RATE: Final = 1 / 4
"""How much of its difference from what was expected the newest mixed step of usual size takes away."""
DEPTH: Final = 4096
"""Entries before a token that its growing cost is counted by."""
GROWTH: Final = 0.125
"""Costs of a token by which it is taken to cost more for each of these, before anything is known."""
FAR: Final = 2.0
"""A step that took so many times what was expected, or so little of it, says nothing: the machine was busy. Two in a
row say that costs are other ones, and not what they grow by."""
MOST_OFF: Final = 16.0
"""By which costs may be off at most, and be grown by `DEPTH` entries."""
UNUSUAL: Final = 3.0
"""Prompts are taken to have added at most so many times what was expected, and at least that part of it: a wrong guess
is left in a few steps all the same."""
APART: Final = 1.5
"""How many times the tokens of one measured step another must have had for both to say what a token costs."""


class Room:
    """What is left to prompts in a step: tokens, and seconds."""

    def __init__(self, tokens: int, seconds: float = inf, each: float = 0.0, deeper: float = 0.0) -> None:
        """A token costs `each` seconds, and `deeper` more for every entry before it."""
        self._tokens, self._seconds, self._each, self._deeper = tokens, seconds, each, deeper
        self._fewest = min(FEWEST, tokens)

    @property
    def open(self) -> bool:
        """Whether there is any."""
        return self._tokens > 0 and (self._fewest > 0 or self._seconds >= self._each)

    def tokens(self, before: int) -> int:
        """Of a prompt, behind so many entries; one at least while there is room."""
        if self._seconds == inf:
            return self._tokens
        # n tokens have n / 2 of themselves before them on average: seconds = each n + deeper (before n + n^2 / 2).
        each = self._each + self._deeper * before
        bought = 2 * self._seconds / (each + sqrt(each * each + 2 * self._deeper * self._seconds))
        return min(self._tokens, max(self._fewest, int(bought), 1))

    def take(self, before: int, count: int) -> None:
        """So many tokens of a prompt, behind so many entries."""
        self._tokens -= count
        self._fewest -= count
        # The fewest tokens, or a single one, may take more than there was.
        self._seconds = max(0.0, self._seconds - count * (self._each + self._deeper * (before + count / 2)))


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
        self._scale, self._growth = 1.0, GROWTH
        """By which both are off, and the costs of a token by which it costs more for each `DEPTH` entries before it."""
        self._usual = 0.0
        """Seconds that the prompts of a mixed step add."""
        self._far = False
        """Whether the newest mixed step took far more than was expected, or far less."""

    def room(self, rows: int, width: int, most: int) -> Room:
        """What is open to prompts in a step with so many decode rows: `most` tokens at the most."""
        if not rows or not self._wanted or self._cost is None:
            return Room(most)
        alone, fixed = self._times.seconds(rows, width), self._scale * self._fixed
        target = DECODE_STEPS * alone if self._target is None else self._target
        added = AIM * target - alone
        if self._target is None:
            added = max(added, 2 * fixed)
        return Room(most, max(0.0, added - fixed), self._scale * self._cost, self._growth * self._cost / DEPTH)

    def observe(self, rows: int, width: int, chunks: Sequence[tuple[int, int]], seconds: float) -> None:
        """What a step with so many decode rows took. `chunks`: of each prompt in it, the entries before and the tokens
        computed."""
        tokens = sum(count for _, count in chunks)
        if not rows or not tokens or seconds <= 0 or not self._wanted:
            return
        alone = self._times.seconds(rows, width)
        if seconds <= alone:  # which says nothing of prompts: a step of these rows alone would have taken less
            self._times.observe(rows, width, seconds)
            return
        if self._cost is None:
            self._cost = max(seconds - alone, seconds / UNUSUAL**2) / tokens
        plain = self._fixed + self._cost * tokens
        deep = self._cost * sum(count * (before + count / 2) for before, count in chunks) / DEPTH
        expected = self._scale * plain + self._growth * deep
        found = min(max(seconds - alone, expected / UNUSUAL), expected * UNUSUAL)
        self._usual += RATE * (plain - self._usual)
        size = max(plain, self._usual)  # what few tokens took says little of many
        busy, self._far = self._far, not 1 / FAR < found / expected < FAR
        scale, growth = self._scale, self._growth
        if not self._far:
            # Normalised least mean squares (Widrow and Hoff). A step that mostly attends says little of all else.
            off = RATE * (found - expected) / (size * size + deep * deep)
            scale += off * plain * min(1.0, plain / deep)
            growth += off * deep
        elif busy:  # for the second time in a row
            off = 1 + RATE * plain / size * (found / expected - 1)
            scale, growth = off * scale, off * growth
        self._scale = min(max(scale, 1 / MOST_OFF), MOST_OFF)
        self._growth = min(max(growth, 0.0), MOST_OFF)


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
