"""The grammars of a replica's rows, on rank 0: which masks a step samples under, and what its tokens make of them.

A mask belongs to a (row, position) of the layout. That of position 0 follows from the tokens that the row has, that of
position j from these and its drafts 1 ... j. Both are known on the host once the step before has been decided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from workers.grammar.compiler import Compiled
from workers.grammar.matcher import Bits, RequestMatcher
from workers.protocol.plan import Admission, BatchLayout


class Masks(Protocol):
    """Where masks go, as `workers.step.masks.StepMasks` has it."""

    def take(self, logits_row: int) -> Bits:
        """The mask that is to be that of a logits row."""

    def give_back(self, logits_row: int) -> None:
        """The mask that was taken last is not wanted."""


class ConstrainedRows:
    """The matchers of all slots whose requests have a grammar."""

    def __init__(self, vocab: int, eos_ids: Sequence[int], ready: Callable[[int], Compiled]) -> None:
        """`ready`: the compiled grammar of a ticket."""
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
        stuck: dict[int, int] = {}
        of_grammars = frozenset(constrained)
        for row, slot in enumerate(slots):
            if slot not in of_grammars:
                continue
            rows = layout.logits_rows_of(row)
            drafts = self._drafts_of.get(slot, ())[: len(rows) - 1]
            wanted = rows[: len(drafts) + 1]
            taken = [masks.take(n) for n in wanted]
            filled, nothing = self._matcher_of[slot].fill(drafts, taken)
            if nothing:
                filled -= 1
                stuck[row] = filled
            for n in reversed(wanted[filled:]):
                masks.give_back(n)
        return stuck

    def gained(self, slots: Sequence[int], tokens: Sequence[Sequence[int]], constrained: Sequence[int]) -> list[int]:
        """The sampled rows of a step gained these tokens. Returns the rows of which one was not allowed."""
        of_grammars = frozenset(constrained)
        lost = []
        for row, (slot, gained) in enumerate(zip(slots, tokens, strict=True)):
            if slot in of_grammars:
                matcher = self._matcher_of[slot]
                matcher.accept(gained)
                if matcher.lost:
                    lost.append(row)
        return lost

    def drafted(self, slot: int, drafts: Sequence[int]) -> None:
        """The drafts that a slot holds for its next step."""
        self._drafts_of[slot] = tuple(drafts)
