"""The grammars that live requests need, and the requests that wait for theirs.

A request is admitted once rank 0 has its grammar ready: compiling may take seconds, and no step waits for it. What a
grammar says is nothing to the scheduler; equal ones are compiled once, and named by a grammar id from then on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from workers.protocol.grammar import (
    COMPILED_AT_ONCE,
    CompileGrammar,
    ForgetGrammar,
    Grammar,
    GrammarProgress,
    GrammarReady,
)
from workers.scheduler.sequence import Sequence

_BLAMED_SHARE: Final = 0.5
"""A grammar is to blame for being late if a processor has worked on it for this share of the time that it may take."""


@dataclass(frozen=True)
class Refusal:
    """Reason why requests are refused."""

    reason: str
    unavailable: bool = False
    """Whether the reason is not their grammar: elsewhere, or later, it may be compiled."""


@dataclass(eq=False)
class _Use:
    """Use of one grammar, which is ready or on its way."""

    grammar: Grammar
    grammar_id: int
    deadline: float
    ready: bool = False
    late: bool = False
    """Whether it took longer than it may; it may still become ready."""
    worked: float = 0.0
    """Seconds of a processor that rank 0 has spent on it, by what it said last."""
    users: int = 0
    waiting: list[Sequence] = field(default_factory=list)


class Grammars:
    """Ids for grammars, and the messages about them to rank 0."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`timeout_s`: seconds that a grammar may take to become ready; `clock` tells the time in seconds."""
        self._timeout_s, self._clock = timeout_s, clock
        self._of: dict[Grammar, _Use] = {}
        self._by_id: dict[int, _Use] = {}
        self._last_id = 0
        self.outbox: list[CompileGrammar | ForgetGrammar] = []
        """Messages for rank 0, in this order and before any plan that is made later; whoever sends them takes them
        out."""

    @property
    def waiting(self) -> int:
        """Requests that wait for their grammars."""
        return sum(len(use.waiting) for use in self._by_id.values())

    @property
    def overdue_text(self) -> str:
        """Error message for requests whose grammar took too long."""
        return (
            f"the grammar was not compiled within {self._timeout_s:g} s: make it simpler (fewer alternatives, "
            "repetitions and levels), or have whoever runs this server raise --grammar-compile-timeout"
        )

    @property
    def busy_text(self) -> str:
        """Error message for requests whose grammar is late without being the cause of it."""
        return (
            f"the grammar was not compiled within {self._timeout_s:g} s, for most of which this replica was busy with "
            "other things or still starting; try again later"
        )

    @property
    def stuck_text(self) -> str:
        """Error message for requests whose grammar cannot even begin to be compiled."""
        return (
            f"no other grammar can be compiled for now: all {COMPILED_AT_ONCE} that can be at a time take longer than "
            f"{self._timeout_s:g} s; try again later. Grammars that are in use, and requests without one, are served. "
            "If it stays so, have whoever runs this server restart this replica"
        )

    def why_refused(self, grammar: Grammar) -> Refusal | None:
        """Return why a request with this grammar is refused at once; None if it is not."""
        use = self._of.get(grammar)
        if use is None:
            return Refusal(self.stuck_text, unavailable=True) if self._stuck and grammar.kind != "free" else None
        return self._why_late(use) if use.late and not use.ready else None

    def _why_late(self, use: _Use) -> Refusal:
        """Return why requests for this grammar, which rank 0 has begun to compile, are refused."""
        if use.worked >= _BLAMED_SHARE * self._timeout_s:
            return Refusal(self.overdue_text)
        return Refusal(self.busy_text, unavailable=True)

    @property
    def _stuck(self) -> bool:
        """Whether all grammars that are being compiled have taken too long. Nothing can end them."""
        now, compiling = self._clock(), self._compiling
        return len(compiling) == COMPILED_AT_ONCE and all(now > use.deadline for use in compiling)

    @property
    def _compiling(self) -> list[_Use]:
        """Grammars that rank 0 compiles: those that are not ready, in the order in which they were asked for."""
        return list(islice((use for use in self._by_id.values() if not use.ready), COMPILED_AT_ONCE))

    def take(self, sequence: Sequence, grammar: Grammar) -> bool:
        """A new request has this grammar. Whether it is ready; else the request waits here."""
        use = self._of.get(grammar)
        if use is None:
            self._last_id += 1
            # Of any text there is nothing to compile, so nobody waits for it.
            ready = grammar.kind == "free"
            use = _Use(grammar, self._last_id, self._clock() + self._timeout_s, ready)
            self._of[grammar] = self._by_id[use.grammar_id] = use
            self.outbox.append(CompileGrammar(use.grammar_id, grammar))
        use.users += 1
        sequence.grammar = use.grammar_id
        if not use.ready:
            use.waiting.append(sequence)
        return use.ready

    def leave(self, sequence: Sequence) -> None:
        """A request has ended, whether it waited or not."""
        use = self._by_id.get(sequence.grammar)
        sequence.grammar = 0
        if use is None:
            return
        if sequence in use.waiting:
            use.waiting.remove(sequence)
        use.users -= 1
        if not use.users and use.ready:
            self._forget(use)

    def progressed(self, message: GrammarProgress) -> None:
        """Rank 0 says how long it has worked on a grammar."""
        if (use := self._by_id.get(message.grammar_id)) is not None:
            use.worked = message.seconds

    def answered(self, message: GrammarReady) -> list[Sequence]:
        """Rank 0 has a grammar ready, or cannot use it: who waited for it."""
        use = self._by_id.get(message.grammar_id)
        if use is None:
            return []
        waited, use.waiting = use.waiting, []
        use.ready = not message.error
        if message.error or not use.users:
            self._forget(use)
        return waited

    def overdue(self) -> list[tuple[Sequence, Refusal]]:
        """Return the requests that have waited too long, and do so no more, with the reason."""
        if not self._by_id:
            return []
        now, compiling = self._clock(), self._compiling
        late: list[tuple[Sequence, Refusal]] = []
        for use in list(self._by_id.values()):
            if use.waiting and now > use.deadline:
                use.late = use in compiling
                why = self._why_late(use) if use.late else Refusal(self.stuck_text, unavailable=True)
                late += [(sequence, why) for sequence in use.waiting]
                use.waiting = []
                if not use.late:  # it never begun, and shall not
                    self._forget(use)
        return late

    def _forget(self, use: _Use) -> None:
        del self._of[use.grammar], self._by_id[use.grammar_id]
        self.outbox.append(ForgetGrammar(use.grammar_id))
