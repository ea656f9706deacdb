"""How many prompt tokens a mixed step feeds, so that it takes as long as its decode rows may wait for their next token.

A mixed step of prompts with n tokens each, that have d entries before them, is expected to take

    T(rows, width) + a o + sum over prompts of (b c n + e c d / ENTRIES + g c n (d + n / 2) / DEPTH)

seconds. T is what a step of its decode rows alone takes. o is what prompts add whatever their number: such a step is no
single graph, and it wakes experts that few rows leave asleep. c is what a token costs. Entries before a chunk are
expanded anew for it, however short it is, and each of its tokens attends to all of them. o and c are measured when the
replica proves its steps, with few entries before tokens. The factors a, b, e and g follow mixed steps.

Where nobody says what a mixed step may take, it may take twice as long as one of its decode rows alone. Few rows make
short steps, of which all that is not tokens would leave nothing for them. So tokens take as long as o at least, and
half as long as all that is not tokens.

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
from workers.scheduler.following import Following
from workers.scheduler.step_times import StepTimes

logger = logging.getLogger(__name__)

DECODE_STEPS: Final = 2.0
"""What a mixed step may take where nobody says it, in steps of its decode rows alone."""
AIM: Final = 0.95
"""Of what a mixed step may take, what is aimed at: equal steps differ by a few percent, and nearly all are to keep to
it."""
FEWEST: Final = 64
"""Prompt tokens that are open in every mixed step, whatever they cost: prompts must not starve."""
WORTHWHILE: Final = 16
"""Tokens for which another prompt joins a step: what stands before it has to be expanded for any number of them."""
LEAST_FIXED: Final = 0.05
"""Of a step of decode rows alone, what prompts are taken to add at least, whatever their number."""
ENTRIES: Final = 24.0
"""Entries before a chunk that are taken to cost as much as one of its tokens, before anything is known."""
DEPTH: Final = 32_768.0
"""Entries before a token that are taken to double its cost, before anything is known."""
APART: Final = 1.5
"""How many times the tokens of one measured step another must have had for both to say what a token costs."""


class Room:
    """What is left to prompts in a step: tokens, and seconds."""

    def __init__(
        self,
        tokens: int,
        seconds: float = inf,
        each: float = 0.0,
        deeper: float = 0.0,
        *,
        entry: float = 0.0,
        least: float = -inf,
    ) -> None:
        """A token costs `each` seconds, and `deeper` more for every entry before it; a chunk `entry` for each of those
        entries. The tokens of the first prompt get `least` seconds in any case, and half of `least` and its entries
        together; -inf: they do not."""
        self._tokens, self._seconds, self._each, self._deeper, self._entry = tokens, seconds, each, deeper, entry
        self._least = least
        self._fewest = min(FEWEST, tokens)

    @property
    def open(self) -> bool:
        """Whether there is any."""
        return self._tokens > 0 and (self._fewest > 0 or self._seconds >= self._each)

    def suits(self, before: int) -> bool:
        """Whether a further prompt, behind so many entries, finds room for more than a few tokens."""
        return self._left(before) >= WORTHWHILE * (self._each + self._deeper * before)

    def tokens(self, before: int) -> int:
        """Of a prompt, behind so many entries; one at least while there is room."""
        seconds = self._left(before)
        if seconds == inf:
            return self._tokens
        # n tokens have n / 2 of themselves before them on average: seconds = each n + deeper (before n + n^2 / 2).
        each = self._each + self._deeper * before
        bought = 2 * seconds / (each + sqrt(each * each + 2 * self._deeper * seconds))
        return min(self._tokens, max(self._fewest, int(bought), 1))

    def take(self, before: int, count: int) -> None:
        """So many tokens of a prompt, behind so many entries."""
        # The fewest tokens, or a single one, may take more than there was.
        self._seconds = max(0.0, self._left(before) - count * (self._each + self._deeper * (before + count / 2)))
        self._least = -inf
        self._tokens -= count
        self._fewest -= count

    def _left(self, before: int) -> float:
        """Seconds for tokens of a prompt behind so many entries."""
        entries = self._entry * before
        return max(0.0, self._seconds - entries, self._least, (self._least + entries) / 2)


class MixedTarget:
    """The budget for prompts of steps that have decode rows."""

    def __init__(self, config: SchedulerConfig, times: StepTimes) -> None:
        """`times`: of steps of decode rows, as they are followed."""
        self._times, self._target = times, config.mixed_step_target_s
        # Without a target times must be known: those that are only followed begin with any number.
        self._wanted = bool(config.step_times) if self._target is None else self._target > 0
        self._start, self._cost = 0.0, _slope(config.step_times)
        """Seconds that a mixed step would take without any token, and those that a token costs."""
        if (measured := _measured(config.step_times)) is not None:
            self._start, self._cost = measured
            logger.info("a mixed step takes %.1f ms, and %.1f us a token", 1e3 * self._start, 1e6 * self._cost)
        # What o and c are off by shows in every step, what entries cost in those of long prompts alone.
        self._factors = Following([1.0, 1.0, 1.0, 1.0], [0.5, 0.5, 1.0, 2.0])
        """a, b, e and g."""

    def room(self, rows: int, width: int, most: int) -> Room:
        """What is open to prompts in a step with so many decode rows: `most` tokens at the most."""
        if not rows or not self._wanted or self._cost is None:
            return Room(most)
        alone, (fixed, each, entry, deeper) = self._times.seconds(rows, width), self._factors.values
        fixed *= self._fixed(rows, width)
        target = DECODE_STEPS * alone if self._target is None else self._target
        return Room(
            most,
            max(0.0, AIM * target - alone - fixed),
            each * self._cost,
            deeper * self._cost / DEPTH,
            entry=entry * self._cost / ENTRIES,
            least=fixed if self._target is None else -inf,
        )

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
            self._cost = (seconds - alone) / tokens
        entries = sum(before for before, _ in chunks)
        deep = sum(count * (before + count / 2) for before, count in chunks)
        parts = [tokens * self._cost, entries * self._cost / ENTRIES, deep * self._cost / DEPTH]
        self._factors.observe([self._fixed(rows, width), *parts], seconds - alone, beside=alone)

    def _fixed(self, rows: int, width: int) -> float:
        """Seconds that prompts are taken to add to a step of so many rows, whatever their number."""
        alone = self._times.seconds(rows, width)
        tokens = 0.0 if self._cost is None else self._cost * rows * width
        return max(self._start + tokens - alone, LEAST_FIXED * alone)


def _measured(measured: Sequence[StepTime]) -> tuple[float, float] | None:
    """(seconds of a mixed step without any token, seconds a token) of those that were measured; None where they do not
    say it. Theil and Sen's estimate: a step that something else held up changes little."""
    mixed = [(time.prompt_tokens + time.rows * time.width, time.seconds) for time in measured if time.prompt_tokens]
    pairs = [sorted(pair) for pair in combinations(mixed, 2)]
    slopes = [(more - less) / (many - few) for (few, less), (many, more) in pairs if many >= APART * few]
    if not slopes or (cost := median(slopes)) <= 0:
        return None
    return max(0.0, median(seconds - cost * tokens for tokens, seconds in mixed)), cost


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
