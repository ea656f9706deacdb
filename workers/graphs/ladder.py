"""The ladder: every graph that is captured, enumerated once; capture, dispatch and tests take their keys from here."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from workers.plan import BatchLayout, GraphKey

_STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32)
"""Row buckets up to 32: close together, because small batches are where a padded row costs most."""


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """Row counts that have a graph, the last one `max_rows`: at most a third of a larger bucket is padding."""
    buckets = [rows for rows in _STEPS if rows < max_rows]
    rows = _STEPS[-1]
    while (rows := rows + max(8, rows // 4)) < max_rows:
        buckets.append(rows)
    return (*buckets, max_rows)


@dataclass(frozen=True)
class Ladder:
    """Buckets of (rows, width, drafts). A pure decode step runs in the smallest bucket that holds its rows."""

    max_rows: int
    width: int
    """The most tokens a decode row feeds."""

    def __post_init__(self) -> None:
        if self.max_rows < 1 or self.width < 1:
            raise ValueError(f"a ladder needs rows and tokens, not {self.max_rows} x {self.width}")

    def modes(self) -> tuple[tuple[int, int], ...]:
        """(width, drafts) of the steps that occur: drafting as always, drafting given up, and the step into and out of
        that, which feeds what was drafted and drafts no more, or the other way round."""
        most = self.width - 1
        if not most:
            return ((1, 0),)
        return ((self.width, most), (1, 0), (self.width, 0), (1, most))

    def __iter__(self) -> Iterator[GraphKey]:
        """Every key, largest first: later captures reuse the memory of earlier, larger ones."""
        for rows in reversed(row_buckets(self.max_rows)):
            for width, drafts in self.modes():
                yield BatchLayout(width, rows).graph_key(rows, drafts)

    def key(self, layout: BatchLayout, drafts: int) -> GraphKey | None:
        """Key of the graph that serves a step of this layout; None, never a wrong one, when there is none."""
        if layout.prefill_tokens or not layout.decode_rows or (layout.width, drafts) not in self.modes():
            return None
        buckets = row_buckets(self.max_rows)
        place = bisect_left(buckets, layout.decode_rows)
        return layout.graph_key(buckets[place], drafts) if place < len(buckets) else None
