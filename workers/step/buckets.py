"""The CUDA-graph buckets: every graph that is captured, enumerated once; capture, dispatch and tests take their keys
from here.

Decode steps are whole graphs, by rows. Of mixed steps the token-wise segments are graphs, by tokens, and the tail of
the last pass is one, by the tokens whose hidden states are wanted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from workers.protocol.plan import BatchLayout, GraphKey, TokenKey

_STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32)
"""Row buckets up to 32: close together, because small batches are where a padded row costs most."""

MOST_DENSE_ROWS = 16
"""Largest bucket of rows that also has graphs in which sparse attention is dense: with more rows that saves little, and
all of them are seldom so short."""

_TOKEN_STEPS = (16, 32, 48, 64, 96, 128)
"""Token buckets up to 128; a few tokens more or less cost nothing there, weights are read all the same."""
_TOKEN_WASTE = 0.15
"""Most of a larger bucket that may be padding."""


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """Row counts that have a graph, the last one `max_rows`: at most a quarter of a bucket is padding. Powers of
    two are among them, for those are the row counts that people ask for."""
    buckets = [rows for rows in _STEPS if rows < max_rows]
    rows = _STEPS[-1]
    while (rows := rows + (1 << (rows.bit_length() - 3))) < max_rows:
        buckets.append(rows)
    return (*buckets, max_rows)


def token_buckets(budget: int) -> tuple[int, ...]:
    """Token counts whose segments are captured, the last one `budget`: as few as keep padding below 15% above 128."""
    buckets = [tokens for tokens in _TOKEN_STEPS if tokens < budget]
    tokens = _TOKEN_STEPS[-1]
    while True:
        # Whole tiles of the products: 16 tokens, and more where a tile is little beside the bucket.
        unit = max(16, 1 << (tokens.bit_length() - 5))
        # The smallest step that is padded to `most` has one token more than the bucket before.
        most = int((tokens + 1) / (1 - _TOKEN_WASTE))
        tokens = max(most // unit * unit, tokens + 16)
        if tokens >= budget:
            return (*buckets, budget)
        buckets.append(tokens)


def split_row_buckets(max_rows: int) -> tuple[int, ...]:
    """Row counts whose steps are split into a forward graph and a sampling graph, between which masks are filled:
    powers of two and `max_rows`. Fewer than `row_buckets`, for every one is two graphs more, and the host works between
    the two anyway."""
    buckets = [1 << power for power in range(max_rows.bit_length()) if 1 << power < max_rows]
    return (*buckets, max_rows)


@dataclass(frozen=True)
class TokenBuckets:
    """Buckets of tokens. A mixed step runs in the smallest that holds its tokens."""

    budget: int
    """The most tokens a step feeds."""

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise ValueError(f"a set of buckets needs tokens, not {self.budget}")

    def __iter__(self) -> Iterator[TokenKey]:
        """Every key, largest first."""
        for tokens in reversed(token_buckets(self.budget)):
            yield BatchLayout(1, tokens).token_key(tokens)

    def key(self, layout: BatchLayout) -> TokenKey:
        """Key of the segments that serve a step of this layout; ValueError when it exceeds the budget."""
        buckets = token_buckets(self.budget)
        place = bisect_left(buckets, layout.tokens)
        if place == len(buckets):
            raise ValueError(f"a step of {layout.tokens} tokens exceeds the budget of {self.budget}")
        return layout.token_key(buckets[place])

    def tails(self, tokens: int) -> Iterator[TokenKey]:
        """Keys of the tails for up to so many tokens, largest first; a step never has more than its budget."""
        most = self.key(BatchLayout(1, min(tokens, self.budget)))
        return (key for key in self if key.tokens <= most.tokens)


@dataclass(frozen=True)
class DecodeBuckets:
    """Buckets of (rows, width, drafts). A pure decode step runs in the smallest bucket that holds its rows."""

    max_rows: int
    width: int
    """The most tokens a decode row feeds."""
    adaptive: bool = False
    """Whether a step may feed fewer, or each feeds as many."""
    sparse: bool = False
    """Whether steps of few short rows have graphs of their own, in which attention is dense."""

    def __post_init__(self) -> None:
        if self.max_rows < 1 or self.width < 1:
            raise ValueError(f"a set of buckets needs rows and tokens, not {self.max_rows} x {self.width}")

    def modes(self) -> tuple[tuple[int, int], ...]:
        """(width, drafts) of the steps that occur: with as many drafts as the next step of the same width feeds; and,
        where widths change, with one more, for a wider one."""
        same = [(width, width - 1) for width in range(self.width, 0, -1)]
        if not self.adaptive:
            return (same[0],)
        return (*same, *((width, width) for width in range(self.width - 1, 0, -1)))

    def __iter__(self) -> Iterator[GraphKey]:
        """Every key, largest first: later captures reuse the memory of earlier, larger ones."""
        for rows in reversed(row_buckets(self.max_rows)):
            for width, drafts in self.modes():
                yield BatchLayout(width, rows).graph_key(rows, drafts)
                if self._has_dense(rows):
                    yield BatchLayout(width, rows).graph_key(rows, drafts, dense=True)

    def split_keys(self) -> Iterator[GraphKey]:
        """Every key of a split step, largest first."""
        for rows in reversed(split_row_buckets(self.max_rows)):
            for width, drafts in self.modes():
                yield BatchLayout(width, rows).graph_key(rows, drafts)

    def forward_graph_keys(self) -> list[list[GraphKey]]:
        """The same, keys that differ by their drafts alone together: the forward graph knows nothing of these."""
        return alike(self.split_keys())

    def key(self, layout: BatchLayout, drafts: int, *, dense: bool = False) -> GraphKey | None:
        """Key of the graph that serves a step of this layout; None, never a wrong one, when there is none. `dense`:
        whether all rows are so short that attention may be; the graph's is, where there is such a one."""
        return next(self.holding(layout, drafts, dense=dense), None)

    def holding(self, layout: BatchLayout, drafts: int, *, dense: bool = False) -> Iterator[GraphKey]:
        """Keys of all graphs that can serve a step of this layout, the smallest first. `dense`: see `key`."""
        buckets = row_buckets(self.max_rows)
        place = bisect_left(buckets, layout.decode_rows)
        dense = dense and place < len(buckets) and self._has_dense(buckets[place])
        if dense:
            buckets = tuple(rows for rows in buckets if self._has_dense(rows))
        return self._holding(layout, drafts, buckets, dense)

    def split_key(self, layout: BatchLayout, drafts: int) -> GraphKey | None:
        """Return the key of the graphs that serve a split step of this layout; None when there is none."""
        return next(self.holding_split(layout, drafts), None)

    def holding_split(self, layout: BatchLayout, drafts: int) -> Iterator[GraphKey]:
        """Return the keys of all graphs that can serve a split step of this layout, the smallest first."""
        return self._holding(layout, drafts, split_row_buckets(self.max_rows), dense=False)

    def _has_dense(self, rows: int) -> bool:
        return self.sparse and rows <= MOST_DENSE_ROWS

    def _holding(self, layout: BatchLayout, drafts: int, buckets: tuple[int, ...], dense: bool) -> Iterator[GraphKey]:
        if layout.prefill_tokens or not layout.decode_rows or (layout.width, drafts) not in self.modes():
            return
        for rows in buckets[bisect_left(buckets, layout.decode_rows) :]:
            yield layout.graph_key(rows, drafts, dense=dense)


def alike(keys: Iterable[GraphKey]) -> list[list[GraphKey]]:
    """Group keys of split steps that differ by their drafts alone: the forward graph knows nothing of these."""
    found: dict[tuple[int, int], list[GraphKey]] = {}
    for key in keys:
        found.setdefault((key.rows, key.width), []).append(key)
    return list(found.values())
