"""Requests that wait for a slot and pages, by (priority, arrival)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from workers.scheduler.sequence import Phase, Sequence

_by_urgency = attrgetter("rank")


class WaitingQueue:
    """A list sorted by rank: who leaves it, from wherever it stands, is forgotten at once. A place is found in
    logarithmic time; moving the entries behind it takes a microsecond for every some thousand of them. A request that
    comes back after a preemption has its old rank and so its old place."""

    def __init__(self) -> None:
        self._sorted: list[Sequence] = []
        self._aside = 0
        self.tokens = 0
        """Tokens of all waiting requests."""

    def __len__(self) -> int:
        return len(self._sorted) + self._aside

    def __iter__(self) -> Iterator[Sequence]:
        """Those that wait, but for those that are set aside, next to be served first."""
        return iter(self._sorted)

    def push(self, sequence: Sequence) -> None:
        """Let it wait."""
        sequence.phase = Phase.WAITING
        insort(self._sorted, sequence, key=_by_urgency)
        self.tokens += sequence.tokens.length

    def head(self) -> Sequence | None:
        """The next to be served."""
        return self._sorted[0] if self._sorted else None

    def pop(self) -> Sequence:
        """Take the head out; the caller gives it its next phase."""
        sequence = self._sorted.pop(0)
        self.tokens -= sequence.tokens.length
        return sequence

    def set_aside(self) -> Sequence:
        """Let those behind the head go first; it still counts as waiting, and comes back by `put_back`."""
        self._aside += 1
        return self._sorted.pop(0)

    def put_back(self, sequence: Sequence) -> None:
        """To its old place."""
        self._aside -= 1
        insort(self._sorted, sequence, key=_by_urgency)

    def remove(self, sequence: Sequence) -> None:
        """Take a waiting request out, wherever it stands; it has ended. It must not be set aside."""
        place = bisect_left(self._sorted, sequence.rank, key=_by_urgency)
        assert self._sorted[place] is sequence, "a request that does not wait cannot leave the queue"
        del self._sorted[place]
        sequence.phase = Phase.ENDED
        self.tokens -= sequence.tokens.length
