"""Portions in which the graphs of a rank are captured, and their order.

Either there is one portion with all graphs, or the first one has what an engine serves with at once, and the others
follow between its steps, each so small that streams hardly wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workers.protocol.plan import DecodeBuckets, GraphKey, TokenBuckets, TokenKey, alike


@dataclass(frozen=True)
class Portion:
    """Graphs that are captured, and proven, together; largest first."""

    steps: tuple[GraphKey, ...] = ()
    """Decode steps."""
    split_steps: tuple[GraphKey, ...] = ()
    """Split decode steps. Those that differ by their drafts alone are in the same portion, for they share a graph."""
    tails: tuple[TokenKey, ...] = ()
    """Logits-only tails."""
    stages: tuple[TokenKey, ...] = ()
    """Token buckets whose segments are captured."""

    @property
    def buckets(self) -> int:
        """Number of buckets, as the self-test reports them."""
        return len(self.steps) + len(self.split_steps) + len(self.tails) + len(self.stages)

    @property
    def rows(self) -> int:
        """The most decode rows of any of its steps; 0 where it has none."""
        return max((key.rows for key in (*self.steps, *self.split_steps)), default=0)

    @property
    def tokens(self) -> int:
        """The most tokens of any of its stages; 0 where it has none."""
        return max((key.tokens for key in self.stages), default=0)


@dataclass(frozen=True)
class Buckets:
    """All graphs of a rank by their keys, each kind largest first."""

    steps: tuple[GraphKey, ...]
    split_steps: tuple[GraphKey, ...]
    tails: tuple[TokenKey, ...]
    stages: tuple[TokenKey, ...]

    @staticmethod
    def of(rows: DecodeBuckets, tokens: TokenBuckets, most_tail_tokens: int) -> Buckets:
        """Return the keys of these buckets. `most_tail_tokens`: see `StepParts.most_tail_tokens`."""
        return Buckets(tuple(rows), tuple(rows.split_keys()), tuple(tokens.tails(most_tail_tokens)), tuple(tokens))

    def everything(self) -> Portion:
        """Return one portion with all of them."""
        return Portion(self.steps, self.split_steps, self.tails, self.stages)

    def ends(self) -> frozenset[tuple[str, GraphKey | TokenKey]]:
        """Return the first and the last of every kind: what an engine that inherits a proof proves all the same."""
        sparse = [key for key in self.steps if not key.dense]
        dense = [key for key in self.steps if key.dense]
        kinds: list[tuple[str, Sequence[GraphKey | TokenKey]]] = [("step", sparse), ("step", dense)]
        kinds += [("split", self.split_steps), ("tail", self.tails), ("stage", self.stages)]
        return frozenset((kind, key) for kind, keys in kinds for key in (*keys[:1], *keys[-1:]))

    def in_order(self, waiting: int) -> list[Portion]:
        """Return the portions for an engine that `waiting` rows wait for, in their order.

        First come the steps of the largest bucket of rows, in which every decode step can run; those of the smallest;
        and those of the bucket in which the waiting rows run. Then steps with few rows before those with many, then
        mixed steps with few tokens before those with many, then split steps."""
        rows = sorted({key.rows for key in self.steps})
        wanted = next((bucket for bucket in rows if bucket >= waiting), rows[-1])
        first = {rows[0], wanted, rows[-1]}
        portions = [Portion(steps=tuple(key for key in self.steps if key.rows in first))]
        portions += [Portion(steps=(key,)) for key in reversed(self.steps) if key.rows not in first]
        tails = set(self.tails)
        portions += [Portion(tails=(key,) if key in tails else (), stages=(key,)) for key in reversed(self.stages)]
        portions += [Portion(split_steps=tuple(keys)) for keys in reversed(alike(self.split_steps))]
        return portions
