"""Whether there is room for a request: the sequences that run and wait at a replica are bounded."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, Protocol

from starlette.types import Scope

from deploy.api.http.errors import invalid, overloaded
from workers.protocol.front import Engine

ROUNDING = 1e-6
"""Smaller lacks are those of floating-point numbers."""
PACE_OF = 64
"""Ends of sequences by which the next ones are foretold."""
LONGEST_WAIT_S = 60.0
"""Longest wait, in seconds, that is predicted: nobody knows more about the time after it."""

CONTINUED: Final[ContextVar[int | None]] = ContextVar("CONTINUED", default=None)
"""Tokens that other fronts gave to the request of this task; None for a request that arrives now. One that goes on was
let in where it began: no limit turns it away, and its key has paid for its prompt and for those tokens."""


class Pace:
    """Rate at which sequences have ended lately, from which the ends of others are predicted."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=PACE_OF)

    def ended(self, sequences: int) -> None:
        """Record that this number of sequences has just ended."""
        self._ends.extend([self._clock()] * min(sequences, PACE_OF))

    def wait(self, sequences: int) -> float:
        """Seconds in which so many more will end at that pace, `LONGEST_WAIT_S` at the most; 0 if none is known."""
        if not self._ends:
            return 0.0
        seconds = self._clock() - self._ends[0]
        return min(sequences * seconds / len(self._ends), LONGEST_WAIT_S)


def whole_seconds(seconds: float) -> int:
    """Round up to whole seconds, for a Retry-After header that is never too early."""
    return max(math.ceil(seconds - ROUNDING), 1)


class Counted(Protocol):
    """A sequence, as limits look at it while it runs."""

    @property
    def generated(self) -> int:
        """Tokens so far."""

    @property
    def limit(self) -> int:
        """Tokens at which it ends."""

    @property
    def finish(self) -> str | None:
        """Finish reason; None while the sequence runs."""


class Admitted:
    """A request that runs. Its sequences tell it how they go; this one, of no API key, listens to nothing."""

    def place(self, priority: int) -> tuple[int, str, float]:
        """Priority, name and weight of the key under which its sequences are queued, where it asks for `priority`."""
        return priority, "", 1.0

    def started(self, prompt_tokens: int) -> None:
        """The engine is asked for a sequence."""

    def began(self) -> None:
        """A sequence has its first token."""

    def finished(self, reason: str, generated: int, queued: float | None) -> None:
        """A sequence has ended, with so many tokens, and waited for `queued` seconds where that is known."""


class Admission:
    """The room of one replica, for requests of anybody. This front is the only one that its scheduler serves."""

    def __init__(self, engine: Engine, retry_after_s: int) -> None:
        """`retry_after_s`: the least that a Retry-After header says."""
        self.in_flight = 0
        """Sequences handed to the engine and not ended."""
        self._engine, self._retry_after_s = engine, retry_after_s
        self._pace = Pace(time.monotonic)
        self._admitted = Admitted()

    @contextmanager
    def running(self, scope: Scope, prompt_tokens: int, sequences: Sequence[Counted]) -> Iterator[Admitted]:
        """Count the sequences of a request while the block runs; 429 where there is no room for them, or a limit of its
        key does not allow them. Nothing is awaited between the check and the count: a burst cannot slip through."""
        self.check_capacity(len(sequences))
        with self._counted(len(sequences)):
            yield self._admitted

    @contextmanager
    def _counted(self, sequences: int) -> Iterator[None]:
        self.in_flight += sequences
        try:
            yield
        finally:
            self.in_flight -= sequences
            self._pace.ended(sequences)

    def check_size(self, prompts: int, n: int) -> None:
        """400 for more sequences, `prompts` times `n`, than the replica ever takes."""
        most, stats = self._most(), self._engine.stats
        if prompts * n > most:
            raise invalid(
                f"{prompts} prompts times n = {n} are {prompts * n} sequences; one request may have at most {most}, "
                f"what can run ({stats.slots}) and wait ({stats.queue_limit}) here: send several requests",
                "prompt" if prompts > 1 else "n",
            )

    def check_capacity(self, sequences: int) -> None:
        """429 for more sequences than the replica takes now."""
        if CONTINUED.get() is not None:
            return
        if self.in_flight + sequences > self._most() and not self._others_make_room(sequences):
            raise overloaded(
                f"{self.in_flight} sequences run or wait, which leaves no room for {sequences} more; try again later",
                self.retry_after(self.in_flight + sequences - int(self._most())),
            )

    def _others_make_room(self, sequences: int) -> bool:
        return False

    def retry_after(self, sequences: int) -> int:
        """Seconds, for a Retry-After header, in which so many sequences are likely to end: by the last ones' pace."""
        return max(whole_seconds(self._pace.wait(sequences)), self._retry_after_s)

    def _most(self) -> float:
        """Sequences that can run and wait; until the scheduler reports it, it refuses for itself."""
        stats = self._engine.stats
        return stats.slots + stats.queue_limit if stats.slots else math.inf
