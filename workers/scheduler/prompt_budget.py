"""Budget of prompts in a step that has decode rows: tokens, and the time that they are expected to cost; and how fast
prompts are computed.

Imports no torch, as all of the scheduler.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Final

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
