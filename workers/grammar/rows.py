"""The grammars of a replica's rows, on rank 0: which masks a step samples under, and what its tokens make of them.

A mask belongs to a (row, position) of the layout. That of position 0 follows from the tokens that the row has, that of
position j from these and its drafts 1 ... j. Both are known on the host once the step before has been decided.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Final, Protocol

from workers.grammar.compiler import Compiled
from workers.grammar.matcher import Bits, RequestMatcher
from workers.protocol.plan import Admission, BatchLayout

MOST_THREADS: Final = 8
"""Most threads that fill the masks of rows whose grammars take long."""


class Masks(Protocol):
    """Destination of masks; `workers.step.masks.StepMasks` is one."""

    def take(self, logits_row: int) -> Bits:
        """The mask that is to be that of a logits row."""

    def give_back(self, logits_row: int) -> None:
        """The mask that was taken for a logits row is not wanted."""


def take(masks: Masks, rows: Sequence[int]) -> list[Bits]:
    """The masks of some logits rows."""
    return [masks.take(n) for n in rows]


class ConstrainedRows:
    """The matchers of all slots whose requests have a grammar."""

    def __init__(self, vocab: int, eos_ids: Sequence[int], ready: Callable[[int], Compiled]) -> None:
        """`ready`: the compiled grammar of a grammar id."""
        self._vocab, self._eos_ids, self._ready = vocab, tuple(eos_ids), ready
        self._matcher_of: dict[int, RequestMatcher] = {}
        self._drafts_of: dict[int, tuple[int, ...]] = {}

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Give slots to new tenants. One that was preempted goes on behind the tokens that it had generated."""
        for admission in admissions:
            self._matcher_of.pop(admission.slot, None)
            self._drafts_of.pop(admission.slot, None)
            if admission.grammar:
                compiled = self._ready(admission.grammar)
                matcher = RequestMatcher(compiled, admission.sampling, self._eos_ids, self._vocab)
                if admission.generated:
                    matcher.accept(admission.history[-admission.generated :])
                self._matcher_of[admission.slot] = matcher

    def fill(
        self, layout: BatchLayout, slots: Sequence[int], constrained: Sequence[int], masks: Masks
    ) -> dict[int, int]:
        """Fill the masks of a step. `slots`: of its sampled rows, in their order. Returns the positions, by sampled
        row, at which no token is allowed; from there on the row has no mask."""
        dead_ends: dict[int, int] = {}
        of_grammars = frozenset(constrained)

        def keep(row: int, rows: Sequence[int], filled: int, nothing: bool) -> None:
            if nothing:
                filled -= 1
                dead_ends[row] = filled
            for n in reversed(rows[filled:]):
                masks.give_back(n)

        quick, beside = [], []
        for row, slot in enumerate(slots):
            if slot in of_grammars:
                rows = layout.logits_rows_of(row)
                drafts, matcher = self._drafts_of.get(slot, ())[: len(rows) - 1], self._matcher_of[slot]
                wanted = rows[: len(drafts) + 1]
                if matcher.slow:
                    beside.append((row, wanted, self._threads.submit(matcher.fill, drafts, take(masks, wanted))))
                else:
                    quick.append((row, wanted, matcher, drafts))
        for row, wanted, matcher, drafts in quick:
            keep(row, wanted, *matcher.fill(drafts, take(masks, wanted)))
        for row, wanted, future in beside:
            keep(row, wanted, *future.result())
        return dead_ends

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        """xgrammar leaves Python's lock alone while it fills a mask."""
        threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
        return ThreadPoolExecutor(threads, thread_name_prefix="masks")

    def gained(
        self, slots: Sequence[int], tokens: Sequence[Sequence[int]], constrained: Sequence[int]
    ) -> dict[int, int]:
        """The sampled rows of a step gained these tokens. Returns the rows of which one was not allowed, or took too
        long, and how many of their tokens stand before it."""
        of_grammars = frozenset(constrained)
        lost = {}
        for row, (slot, gained) in enumerate(zip(slots, tokens, strict=True)):
            if slot in of_grammars:
                matcher = self._matcher_of[slot]
                kept = matcher.accept(gained)
                if matcher.lost:
                    lost[row] = kept
        return lost

    def drafted(self, slot: int, drafts: Sequence[int]) -> None:
        """The drafts that a slot holds for its next step."""
        self._drafts_of[slot] = tuple(drafts)
