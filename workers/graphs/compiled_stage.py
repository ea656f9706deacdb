"""Stages of mixed steps that compute nothing: those of the pass that compiles kernels ahead."""

from __future__ import annotations

from typing_extensions import override

from workers.memory.scratch import Scratch
from workers.protocol.plan import TokenKey
from workers.step.mixed import Stage, Tail
from workers.step.parts import StepParts


class CompiledStage(Stage):
    """A stage that runs once what launches the same kernels in every step. Its segments and tails know of no row, only
    of the number of tokens; drafts know only of the numbers of rows and drafts."""

    def __init__(
        self,
        parts: StepParts,
        tokens: int,
        scratch: Scratch,
        inner: Scratch,
        ran: set[tuple[str | int, ...]] | None = None,
    ) -> None:
        """`ran`: what has run already, which stages of other sizes share: each kind by its name, with its numbers."""
        super().__init__(parts, tokens, scratch, inner)
        self._ran = set[tuple[str | int, ...]]() if ran is None else ran

    @override
    def smaller(self, tokens: int) -> Stage:
        return CompiledStage(self.parts, tokens, self.scratch.another(), self.inner, self._ran)

    @override
    def run_segment(self, which: int, index: int) -> None:
        """Segment `index` of a pass, the first time."""
        if self._first("segment", self.tokens, which, index):
            super().run_segment(which, index)

    @override
    def tail(self, key: TokenKey) -> Tail:
        tail = Tail if self._first("tail", key.tokens) else _TailThatRan
        return tail(self.parts, key.tokens, self.inner)

    @override
    def drafts(self, rows: int, drafts: int) -> bool:
        """Whether it is the first time."""
        return self._first("drafts", rows, drafts)

    def _first(self, *what: str | int) -> bool:
        """Whether this is to run for the first time; it is noted that it has."""
        first = what not in self._ran
        self._ran.add(what)
        return first


class _TailThatRan(Tail):
    @override
    def run(self) -> None:
        """Nothing that is not compiled already."""
