"""How many prompt tokens a mixed step feeds, so that it takes as long as its decode rows may wait for their next token.

A mixed step of prompts with n tokens each, that have d entries before them, is expected to take

    T(rows, width) + (a o + b c N + e c (STARTED p + D / ENTRIES) + g c A / DEPTH) (1 + s)

seconds. T is what a step of its decode rows alone takes. o is what prompts add whatever their number: such a step is no
single graph, and it wakes experts that few rows leave asleep. c is what a token costs, and N are all tokens of prompts
with those that a graph pads the step with. D is the sum of d: these entries are expanded anew, however short the chunks
are, in p pieces. A is the sum of n (d + n / 2): every token attends to what stands before it. o and c are measured when
the replica proves its steps, with few entries before tokens. The factors a, b, e and g follow mixed steps. What they
leave unexplained of steps that are padded alike, s, is followed for itself: tokens do not fill the device's processors
evenly, and other kernels serve more of them.

Where nobody says what a mixed step may take, it may take twice as long as one of its decode rows alone. Few rows make
short steps, of which all that is not tokens would leave nothing for them. Then tokens take as long as all that, and the
less beyond the target the more it leaves them.

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
from workers.scheduler.following import Following
from workers.scheduler.prompt_room import FEWEST, Costs, PromptRoom, padded, pieces
from workers.scheduler.step_times import StepTimes

logger = logging.getLogger(__name__)

DECODE_STEPS: Final = 2.0
"""What a mixed step may take where nobody says it, in steps of its decode rows alone."""
AIM: Final = 0.935
"""Of what a mixed step may take, what is aimed at: equal steps differ by a few percent, and nearly all are to keep to
it."""
LEAST_FIXED: Final = 0.05
"""Of a step of decode rows alone, what prompts are taken to add at least, whatever their number."""
ENTRIES: Final = 40.0
"""Entries before a chunk that are taken to cost as much as one of its tokens, before anything is known."""
STARTED: Final = 120.0
"""Tokens that a piece of them is taken to cost, however few it has, before anything is known."""
DEPTH: Final = 32_768.0
"""Entries before a token that are taken to double its cost, before anything is known."""
OWN_RATE: Final = 1 / 4
"""Weight of the newest step in what factors do not explain of steps like it."""
MOST_OWN: Final = 0.25
"""Of what prompts add to a step, how much that may be."""
LEAST_SHARE: Final = 0.1
"""Of the first mixed step, what its prompts are taken to have added at least, where nobody measured anything."""
APART: Final = 1.5
"""How many times the tokens of one measured step another must have had for both to say what a token costs."""


class MixedTarget:
    """The budget for prompts of steps that have decode rows."""

    def __init__(self, config: SchedulerConfig, times: StepTimes) -> None:
        """`times`: of steps of decode rows, as they are followed."""
        self._times, self._target = times, config.mixed_step_target_s
        # Without a target times must be known: those that are only followed begin with any number.
        self._wanted = bool(config.step_times) if self._target is None else self._target > 0
        self._start, self._cost = 0.0, _slope(config.step_times)
        """Seconds that a mixed step would take without any token, and those that a token costs."""
        self._buckets = config.token_buckets
        if (measured := _measured(config.step_times, self._buckets)) is not None:
            self._start, self._cost = measured
            logger.info("a mixed step takes %.1f ms, and %.1f us a token", 1e3 * self._start, 1e6 * self._cost)
        # What o and c are off by shows in every step, what entries cost in those of long prompts alone.
        self._factors = Following([1.0, 1.0, 1.0, 1.0], [0.5, 0.5, 1.0, 2.0])
        """a, b, e and g."""
        self._own: dict[tuple[int, bool], float] = {}
        """See `Costs`."""

    def room(self, rows: int, width: int, most: int) -> PromptRoom:
        """What is open to prompts in a step with so many decode rows: `most` tokens at the most."""
        if not rows or not self._wanted or self._cost is None:
            return PromptRoom(most)
        alone = self._times.seconds(rows, width)
        target = DECODE_STEPS * alone if self._target is None else self._target
        return PromptRoom(
            most,
            seconds=max(0.0, AIM * target - alone),
            costs=self._costs(rows, width, self._cost),
            generous=self._target is None,
            beside=rows * width,
            buckets=self._buckets,
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
        step = padded(rows * width + tokens, self._buckets)
        tokens = step - rows * width
        if self._cost is None:
            if tokens < FEWEST:
                return  # of so few others take most of the time
            self._cost = max(seconds - alone, seconds * LEAST_SHARE) / tokens
        before = sum(before for before, _ in chunks)
        entries = STARTED * pieces(before) + before / ENTRIES
        deep = sum(count * (before + count / 2) for before, count in chunks) / DEPTH
        parts = [self._fixed(rows, width, self._cost), *(self._cost * share for share in (tokens, entries, deep))]
        like = step, before > 0
        own, added = self._own.get(like, 0.0), seconds - alone
        if self._factors.observe(parts, added / (1 + own), beside=alone) and self._buckets:
            own += OWN_RATE * (added / self._factors.total(parts) - 1 - own)
            self._own[like] = min(max(own, -MOST_OWN), MOST_OWN)

    def _costs(self, rows: int, width: int, cost: float) -> Costs:
        """As far as is known."""
        fixed, each, entry, deeper = self._factors.values
        return Costs(
            fixed=fixed * self._fixed(rows, width, cost),
            each=each * cost,
            piece=entry * cost * STARTED,
            entry=entry * cost / ENTRIES,
            deeper=deeper * cost / DEPTH,
            own=self._own,
        )

    def _fixed(self, rows: int, width: int, cost: float) -> float:
        """Seconds that prompts are taken to add to a step of so many rows, whatever their number."""
        alone = self._times.seconds(rows, width)
        return max(self._start + cost * rows * width - alone, LEAST_FIXED * alone)


def _measured(measured: Sequence[StepTime], buckets: Sequence[int]) -> tuple[float, float] | None:
    """(seconds of a mixed step without any token, seconds per token) of those that were measured; None where they do
    not say it. Theil and Sen's estimate: a step that something else held up changes little."""
    mixed = [
        (padded(time.prompt_tokens + time.rows * time.width, buckets), time.seconds)
        for time in measured
        if time.prompt_tokens
    ]
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
