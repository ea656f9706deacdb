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
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from math import inf
from statistics import median
from typing import Final

from workers.protocol.report import StepTime
from workers.scheduler.config import SchedulerConfig
from workers.scheduler.following import Following
from workers.scheduler.step_times import StepTimes

logger = logging.getLogger(__name__)

DECODE_STEPS: Final = 2.0
"""What a mixed step may take where nobody says it, in steps of its decode rows alone."""
AIM: Final = 0.935
"""Of what a mixed step may take, what is aimed at: equal steps differ by a few percent, and nearly all are to keep to
it."""
FEWEST: Final = 64
"""Prompt tokens that are open in every mixed step, whatever they cost: prompts must not starve."""
WORTHWHILE: Final = 16
"""Tokens for which another prompt joins a step: what stands before it has to be expanded for any number of them."""
TAIL: Final = 1.15
"""How many times the tokens for which there is time a chunk may have that ends its prompt: a few tokens more delay a
step by less than another step would."""
LEAST_FIXED: Final = 0.05
"""Of a step of decode rows alone, what prompts are taken to add at least, whatever their number."""
ENTRIES: Final = 40.0
"""Entries before a chunk that are taken to cost as much as one of its tokens, before anything is known."""
PIECE: Final = 4096
"""Entries before a chunk that are expanded at once (`workers.models.attention.expanded.CONTEXT_ENTRIES`)."""
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


@dataclass(frozen=True)
class Costs:
    """What prompts add to a step, in seconds."""

    fixed: float
    """Whatever their number."""
    each: float
    """For a token, or one of padding."""
    piece: float
    """For a piece of the entries before chunks."""
    entry: float
    """For each entry before a chunk."""
    deeper: float
    """For a token and an entry that it attends to."""
    own: Mapping[tuple[int, bool], float] = field(default_factory=dict)
    """Shares by which a step is off all that, which is padded to so many tokens, and whether its prompts have entries
    before them."""

    def before(self, entries: int) -> float:
        """For so many entries before all chunks of a step, however short these are."""
        return self.piece * _pieces(entries) + self.entry * entries


class Room:
    """What is left to prompts in a step: tokens, and seconds."""

    def __init__(
        self,
        most: int,
        *,
        seconds: float = inf,
        costs: Costs | None = None,
        generous: bool = False,
        beside: int = 0,
        buckets: Sequence[int] = (),
    ) -> None:
        """`most`: tokens. `seconds`: for all that prompts add; inf: as many as it takes. `generous`: where these leave
        nothing for tokens, the first prompt gets as much for them as all else costs, and the less beyond what they
        leave the more that is. `beside`: tokens of the step's decode rows. `buckets`: numbers of tokens to which steps
        are padded, in order."""
        self._costs, self._seconds, self._buckets = costs, seconds, buckets
        self._beside, self._most, self._taken = beside, most, 0
        self._generous = generous and costs is not None
        self._entries = 0
        """Before the chunks that were taken."""
        self._attending = 0.0
        """Pairs of their tokens and what these attend to."""
        self._fewest = min(FEWEST, most)

    @property
    def open(self) -> bool:
        """Whether there is any."""
        return self._taken < self._most and (self._fewest > self._taken or self._fits(0, 1))

    def suits(self, before: int, left: int) -> bool:
        """Whether a further prompt that has so many tokens left, behind so many entries, finds room for more than a few
        of them."""
        wanted = min(WORTHWHILE, left, self._most - self._taken)
        return self._fewest - self._taken >= wanted or self._fits(before, wanted)

    def insist(self) -> None:
        """Open the fewest tokens once more, whatever they cost."""
        self._fewest = min(self._taken + FEWEST, self._most)

    def tokens(self, before: int, left: int) -> int:
        """Of a prompt that has so many left, behind so many entries; one at least while there is room."""
        open_tokens = self._most - self._taken
        if self._fits(before, min(left, open_tokens)):
            return min(left, open_tokens)
        offered = max(self._affordable(before), min(max(self._fewest - self._taken, 1), open_tokens))
        return min(left, open_tokens) if left <= TAIL * offered else offered

    def take(self, before: int, count: int) -> None:
        """So many tokens of a prompt, behind so many entries."""
        self._seconds = self._allowed(before)
        self._generous = False
        self._taken += count
        self._entries += before
        self._attending += count * (before + count / 2)

    def _allowed(self, before: int) -> float:
        """Seconds for all that prompts add, with one behind so many entries."""
        if not self._generous or self._costs is None:
            return self._seconds
        other = self._costs.fixed + self._costs.before(before)
        # Where they are just enough for a third of it, both ways give the same.
        return max(self._seconds, 2 * other - 2 * max(0.0, self._seconds - other))

    def _fits(self, before: int, count: int) -> bool:
        """Whether there is time for so many tokens of a prompt behind so many entries."""
        costs = self._costs
        if costs is None or self._seconds == inf:
            return True
        entries, attending = self._entries + before, self._attending + count * (before + count / 2)
        step = padded(self._beside + self._taken + count, self._buckets)
        other = costs.fixed + costs.before(entries) + costs.deeper * attending
        share = 1 + costs.own.get((step, entries > 0), 0.0)
        return (other + costs.each * (step - self._beside)) * share <= self._allowed(before)

    def _affordable(self, before: int) -> int:
        """Tokens of a prompt behind so many entries for which there is time."""
        used, open_tokens = self._beside + self._taken, self._most - self._taken
        # Steps that are padded alike cost more the more tokens they have; others need not.
        ends = [min(step - used, open_tokens) for step in self._buckets if step > used] or [open_tokens]
        for first, last in reversed(list(pairwise([0, *ends]))):
            if first < last and self._fits(before, first + 1):
                range_of = range(first + 1, last + 1)
                return first + bisect_left(range_of, True, key=lambda count: not self._fits(before, count))
        return 0


def _pieces(entries: int) -> int:
    return -(-entries // PIECE)


def padded(tokens: int, buckets: Sequence[int]) -> int:
    """The smallest of the buckets that holds so many tokens of a step; as many where there is none."""
    place = bisect_left(buckets, tokens)
    return buckets[place] if place < len(buckets) else tokens


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

    def room(self, rows: int, width: int, most: int) -> Room:
        """What is open to prompts in a step with so many decode rows: `most` tokens at the most."""
        if not rows or not self._wanted or self._cost is None:
            return Room(most)
        alone = self._times.seconds(rows, width)
        target = DECODE_STEPS * alone if self._target is None else self._target
        return Room(
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
        entries = STARTED * _pieces(before) + before / ENTRIES
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
    """(seconds of a mixed step without any token, seconds a token) of those that were measured; None where they do not
    say it. Theil and Sen's estimate: a step that something else held up changes little."""
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
