"""Requests that wait for a slot and pages, by (priority, arrival)."""

from __future__ import annotations

import heapq

from workers.scheduler.sequence import Phase, Sequence


class WaitingQueue:
    """A heap by rank. A request that comes back after a preemption has its old rank and so its old place."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._length = 0
        self.tokens = 0
        """Tokens of all waiting requests."""

    def __len__(self) -> int:
        return self._length

    def push(self, sequence: Sequence) -> None:
        """Let it wait."""
        sequence.phase = Phase.WAITING
        self.put_back(sequence)
        self._length += 1
        self.tokens += sequence.tokens.length

    def head(self) -> Sequence | None:
        """The next to be served."""
        while self._heap and self._heap[0][1].phase is not Phase.WAITING:
            heapq.heappop(self._heap)  # cancelled meanwhile
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        """Take the head out; the caller gives it its next phase."""
        sequence = self.set_aside()
        self._leave(sequence)
        return sequence

    def set_aside(self) -> Sequence:
        """Let those behind the head go first; it still counts as waiting, and comes back by `put_back`."""
        sequence = self.head()
        assert sequence is not None
        heapq.heappop(self._heap)
        return sequence

    def put_back(self, sequence: Sequence) -> None:
        """To its old place."""
        heapq.heappush(self._heap, (sequence.rank, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Take a waiting request out, wherever it stands; it has ended."""
        sequence.phase = Phase.ENDED
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self._length -= 1
        self.tokens -= sequence.tokens.length
