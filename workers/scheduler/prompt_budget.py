"""Number of prompt tokens that a mixed step feeds, so that it takes as long as its decode rows may wait for their next
token (`MixedTarget`); the budget of them that a step is filled by (`PromptBudget`); and how fast prompts are computed.

A mixed step of prompts with n tokens each, that have d entries before them, is expected to take

    T(rows, width) + (a o + b c N + e c (STARTED p + D / ENTRIES) + g c A / DEPTH) (1 + s)

seconds. T is what a step of its decode rows alone takes. o is what prompts add whatever their number: such a step is no
single graph, and it wakes experts that few rows leave asleep. c is what a token costs in large steps. N are all tokens
of prompts with those that a graph pads the step with, each counted as what it costs at its place: the first thousand
may cost little beside the weights that are read for any number of them, and each one behind them as much as its
products. D is the sum of d: these entries are expanded anew, however short the chunks are, in p pieces. A is the sum of
n (d + n / 2): every token attends to what stands before it. o, c and N are measured when the replica proves its steps,
with few entries before tokens. The factors a, b, e and g follow mixed steps. What they leave unexplained of steps that
are padded alike, s, is followed for itself.

Where nobody says what a mixed step may take, it may take twice as long as one of its decode rows alone. Few rows make
short steps, of which all that is not tokens would leave nothing for them. Then tokens take as long as all that, and the
less beyond the target the more it leaves them.

Imports no torch, as all of the scheduler.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations, pairwise
from math import inf
from statistics import median
from typing import Final

from workers.protocol.report import StepTime
from workers.scheduler.config import SchedulerConfig
from workers.scheduler.step_times import Following, StepTimes

logger = logging.getLogger(__name__)

FEWEST: Final = 64
"""Prompt tokens that are open in every mixed step, whatever they cost: prompts must not starve."""
WORTHWHILE: Final = 16
"""Tokens for which another prompt joins a step: what stands before it has to be expanded for any number of them."""
TAIL: Final = 1.15
"""Tokens of a chunk that ends its prompt, as a multiple of the tokens for which there is time, at most: a few tokens
more delay a step by less than another step would."""
FORGETS_TOKENS: Final = 100_000
"""After so many prompt tokens, what was measured before counts half."""
PIECE: Final = 4096
"""Entries before a chunk that are expanded at once (`workers.models.attention.expanded.CONTEXT_ENTRIES`)."""


@dataclass(frozen=True)
class Costs:
    """Seconds that prompts add to a step."""

    fixed: float
    """Seconds whatever their number."""
    each: float
    """Seconds for a token that counts as one, or one of padding."""
    piece: float
    """Seconds for a piece of the entries before chunks."""
    entry: float
    """Seconds for each entry before a chunk."""
    deeper: float
    """Seconds for a token and an entry that it attends to."""
    own: Mapping[tuple[int, bool], float] = field(default_factory=dict)
    """Shares by which a step is off all that, which is padded to so many tokens, and whether its prompts have entries
    before them."""
    counts: Callable[[int], float] = float
    """Maps the tokens of a whole step, padding and decode rows included, to the number that they count as. It never
    decreases."""

    def tokens(self, beside: int, step: int) -> float:
        """Return the seconds for the prompt tokens of a step that is padded to `step` tokens, `beside` of which are
        decode rows'."""
        return self.each * (self.counts(step) - self.counts(beside))

    def before(self, entries: int) -> float:
        """Return the seconds for `entries` entries before all chunks of a step, however short these are."""
        return self.piece * pieces(entries) + self.entry * entries


class PromptBudget:
    """Budget that is left to prompts in a step: tokens, and seconds."""

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
        """Entries before the chunks that were taken."""
        self._query_key_pairs = 0.0
        """Pairs of their tokens and the entries that these attend to."""
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
        """Return the tokens to feed of a prompt that has `left` tokens left, behind `before` entries; at least one
        while there is room."""
        open_tokens = self._most - self._taken
        if self._fits(before, min(left, open_tokens)):
            return min(left, open_tokens)
        offered = max(self._affordable(before), min(max(self._fewest - self._taken, 1), open_tokens))
        return min(left, open_tokens) if left <= TAIL * offered else offered

    def take(self, before: int, count: int) -> None:
        """Take `count` tokens of a prompt, behind `before` entries, out of the budget."""
        self._seconds = self._allowed(before)
        self._generous = False
        self._taken += count
        self._entries += before
        self._query_key_pairs += count * (before + count / 2)

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
        entries, pairs = self._entries + before, self._query_key_pairs + count * (before + count / 2)
        step = padded(self._beside + self._taken + count, self._buckets)
        other = costs.fixed + costs.before(entries) + costs.deeper * pairs
        share = 1 + costs.own.get((step, entries > 0), 0.0)
        return (other + costs.tokens(self._beside, step)) * share <= self._allowed(before)

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


def pieces(entries: int) -> int:
    """Return the number of pieces in which this number of entries before chunks is expanded."""
    return -(-entries // PIECE)


def padded(tokens: int, buckets: Sequence[int]) -> int:
    """The smallest of the buckets that holds so many tokens of a step; as many where there is none."""
    place = bisect_left(buckets, tokens)
    return buckets[place] if place < len(buckets) else tokens


DECODE_STEPS: Final = 2.0
"""Target time of a mixed step where none is set, in multiples of a step of its decode rows alone."""
AIM: Final = 0.945
"""Share of the target time that is aimed at: steps take a percent or two more or less than is expected, and nearly all
are to keep to the target."""
LEAST_FIXED: Final = 0.05
"""Least time that prompts are assumed to add whatever their number, as a share of a step of the decode rows alone."""
ENTRIES: Final = 40.0
"""Entries before a chunk that are taken to cost as much as one of its tokens, before anything is known."""
STARTED: Final = 120.0
"""Tokens that a piece of them is taken to cost, however few it has, before anything is known."""
DEPTH: Final = 32_768.0
"""Entries before a token that are taken to double its cost, before anything is known."""
OWN_RATE: Final = 1 / 4
"""Weight of the newest step in what factors do not explain of steps like it."""
MOST_OWN: Final = 0.25
"""Largest correction for steps of one kind, as a share of what prompts add to a step."""
LEAST_SHARE: Final = 0.1
"""Least share of the first mixed step that its prompts are assumed to have added, where nothing was measured."""
LARGE: Final = 4
"""Ratio of the largest step's tokens to those of the smallest step that still counts as large."""
APART: Final = 1.5
"""Least ratio of the tokens of two measured steps from which the cost of a token is computed."""


class MixedTarget:
    """The budget for prompts of steps that have decode rows."""

    def __init__(self, config: SchedulerConfig, times: StepTimes) -> None:
        """`times`: of steps of decode rows, as they are followed."""
        self._times, self._target = times, config.mixed_step_target_s
        # Without a target times must be known: those that are only followed begin with any number.
        self._wanted = bool(config.step_times) if self._target is None else self._target > 0
        self._buckets = config.token_buckets
        measured = Measured.of(config.step_times, self._buckets)
        self._start = 0.0 if measured is None else measured.start
        """Seconds that a mixed step would take without any token."""
        self._cost = _slope(config.step_times) if measured is None else measured.cost
        """Seconds that a token costs."""
        self._counts = float if measured is None else measured.counts
        """Token counts, as in `Costs`."""
        if measured is not None:
            logger.info("a mixed step takes %.1f ms, and %.1f us a token", 1e3 * self._start, 1e6 * measured.cost)
        # What o and c are off by shows in every step, what entries cost in those of long prompts alone. Steps of about
        # as many tokens do not tell o from c, but where both were measured most of what they are off by is the same.
        own, common = (0.5, 0.0) if measured is None else (0.2, 0.5)
        self._factors = Following([1.0, 1.0, 1.0, 1.0], [own, own, 1.0, 2.0], [common, common, 0.0, 0.0])
        """a, b, e and g."""
        self._own: dict[tuple[int, bool], float] = {}
        """See `Costs`."""

    def prompt_budget(self, rows: int, width: int, most: int) -> PromptBudget:
        """Return the budget of prompts in a step with `rows` decode rows: `most` tokens at the most."""
        if not rows or not self._wanted or self._cost is None:
            return PromptBudget(most)
        alone = self._times.seconds(rows, width)
        target = DECODE_STEPS * alone if self._target is None else self._target
        return PromptBudget(
            most,
            seconds=max(0.0, AIM * target - alone),
            costs=self._costs(rows, width, self._cost),
            generous=self._target is None,
            beside=rows * width,
            buckets=self._buckets,
        )

    def observe(self, rows: int, width: int, chunks: Sequence[tuple[int, int]], seconds: float) -> None:
        """Take in the time of a step with `rows` decode rows. `chunks`: entries before and tokens computed, for each
        prompt in it."""
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
        counted = self._counts(step) - self._counts(rows * width)
        parts = [self._fixed(rows, width, self._cost), *(self._cost * share for share in (counted, entries, deep))]
        like = step, before > 0
        own, added = self._own.get(like, 0.0), seconds - alone
        if self._factors.observe(parts, added / (1 + own), beside=alone, kind=like) and self._buckets:
            own += OWN_RATE * (added / self._factors.total(parts) - 1 - own)
            self._own[like] = min(max(own, -MOST_OWN), MOST_OWN)

    def _costs(self, rows: int, width: int, cost: float) -> Costs:
        """Return the costs as far as they are known."""
        fixed, each, entry, deeper = self._factors.values
        return Costs(
            fixed=fixed * self._fixed(rows, width, cost),
            each=each * cost,
            piece=entry * cost * STARTED,
            entry=entry * cost / ENTRIES,
            deeper=deeper * cost / DEPTH,
            own=self._own,
            counts=self._counts,
        )

    def _fixed(self, rows: int, width: int, cost: float) -> float:
        """Seconds that prompts are taken to add to a step of so many rows, whatever their number."""
        alone = self._times.seconds(rows, width)
        return max(self._start + cost * self._counts(rows * width) - alone, LEAST_FIXED * alone)


@dataclass(frozen=True)
class Measured:
    """Measured times of mixed steps whose tokens have few entries before them."""

    start: float
    """Seconds of one without any token."""
    cost: float
    """Seconds per token of large ones: for as long counts what counts as one token."""
    points: tuple[tuple[int, float], ...]
    """Tokens of a step, and as how many they count; in order."""

    @classmethod
    def of(cls, measured: Sequence[StepTime], buckets: Sequence[int]) -> Measured | None:
        """Fit the measured steps; None if they do not suffice. Start and cost are Theil and Sen's estimate: a step that
        something else held up changes little."""
        least: dict[int, float] = {}
        for time in measured:
            if time.prompt_tokens:
                step = padded(time.prompt_tokens + time.rows * time.width, buckets)
                least[step] = min(time.seconds, least.get(step, inf))
        mixed = sorted(least.items())
        if not (slopes := _slopes(mixed)) or (rise := median(slopes)) <= 0:
            return None
        start = max(0.0, median(seconds - rise * tokens for tokens, seconds in mixed))
        # More tokens take no less: a step that took longer than one of more tokens was held up by something else. So
        # was the largest one as far as its tokens took longer than any others.
        *others, (last, longest) = mixed
        few, before = others[-1]
        steepest = max(0.0, max(_slopes(others), default=inf))
        mixed[-1] = last, min(longest, before + steepest * (last - few))
        tokens = [step for step, _ in mixed]
        taken = [*accumulate((seconds for _, seconds in reversed(mixed)), min)][::-1]
        large = _slopes([(step, seconds) for step, seconds in zip(tokens, taken, strict=True) if LARGE * step >= last])
        cost = max(median(large), rise) if large else rise
        counted = [max(0.0, (seconds - start) / cost) for seconds in taken]
        return cls(start, cost, tuple(zip(tokens, counted, strict=True)))

    def counts(self, tokens: int) -> float:
        """Return the cost of a step's tokens in tokens of large steps. Between two measured steps it is on a line,
        below the first one on a line from the origin, and beyond the last one each token counts as one."""
        place = bisect_left(self.points, (tokens, 0.0))
        few, low = self.points[place - 1] if place else (0, 0.0)
        if place == len(self.points):
            return low + tokens - few
        many, high = self.points[place]
        return low + (high - low) * (tokens - few) / (many - few)


def _slopes(points: Sequence[tuple[int, float]]) -> list[float]:
    """Seconds per token from each step to those of clearly more tokens, where these are in order."""
    pairs = combinations(points, 2)
    return [(more - less) / (many - few) for (few, less), (many, more) in pairs if many >= APART * few]


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


class PromptSpeed:
    """Seconds that a token of a long prompt takes to be computed, beside the decode rows of late.

    A step with a few prompt tokens takes about as long as one with many, so their mean would say nothing of a long
    prompt. It is a line through the origin, fitted to the steps: one with ten times as many tokens counts a hundred
    times as much.
    """

    def __init__(self) -> None:
        self._products = self._squares = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """A step with so many prompt tokens took so long."""
        if tokens > 0:
            kept = 0.5 ** (tokens / FORGETS_TOKENS)
            self._products = kept * self._products + tokens * seconds
            self._squares = kept * self._squares + tokens * tokens

    def token_s(self) -> float | None:
        """Seconds a token; None before the first step with any."""
        return self._products / self._squares if self._squares else None
