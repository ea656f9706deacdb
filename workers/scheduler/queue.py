"""Requests that wait for a slot and pages: by priority, then fairly among API keys, then by arrival.

Fair is weighted fair queueing by tokens that are known only once they are generated: the virtual token counter of
"Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024). A key pays for the prompt tokens that are
computed for it and for the tokens that are generated, each divided by its weight (`Share`). Among those that wait, the
key that has paid least goes next. Who did not wait saves nothing up: it begins with what those who wait have paid.

Keys also pay for what other replicas give them, of which a replica hears about once a second (`Charges`).
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, count
from math import inf
from operator import attrgetter
from typing import Final

from workers.protocol.messages import Charge, Charges
from workers.scheduler.sequence import Phase, Rank, Sequence, Share

_by_rank = attrgetter("rank")
NOT_SERVED: Final = inf
"""Stands in the rank of a request whose turn among the keys has not come: it changes while the request waits."""
_BELOW: Final = 64
"""Bits for the count of those that arrived in the same microsecond."""
AHEAD_S = 30.0
"""Seconds that bound how far other replicas' work for a key puts it behind: at most by what all keys pay here in that
time. A key never has to wait longer for others to catch up, whatever it was given elsewhere."""


class Arrivals:
    """Gives arrival numbers, by when requests arrived, here or at an engine that had them before: the earlier a request
    arrived, the lower its number is; of two that arrived in one microsecond the first to be numbered has the lower one.
    No two numbers are equal."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds."""
        self._clock, self._count = clock, count()

    def number(self, arrived: float | None = None) -> int:
        """The number of a request that arrived at that time of the clock, by default now."""
        at = self._clock() if arrived is None else arrived
        return (round(at * 1e6) << _BELOW) + next(self._count)


class Shares:
    """Shares of all keys that a request has named so far."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self._known: dict[str, Share] = {}
        self._clock = clock
        self._looks: deque[tuple[float, float]] = deque([(clock(), 0.0)])  # when, and what all had paid here by then

    def of(self, name: str, weight: float) -> Share | None:
        """Return the share of a key, with the weight it has now; None for requests without a key, which are served in
        order of arrival."""
        if not name:
            return None
        share = self._known.get(name)
        if share is None:
            share = self._known[name] = Share(name, weight)
        share.weight = weight
        return share

    def news(self) -> Charges | None:
        """Return the charges since the last call; None if there were none."""
        found = []
        for share in self._known.values():
            if share.charged > share.told:
                found.append(Charge(share.name, share.weight, share.charged - share.told))
                share.told = share.charged
        return Charges(tuple(found)) if found else None

    def ahead(self) -> float:
        """Return what all keys pay here in `AHEAD_S`, by what they paid lately."""
        now, paid = self._clock(), sum(share.charged / share.weight for share in self._known.values())
        looks = self._looks
        while len(looks) > 1 and looks[1][0] <= now - AHEAD_S:
            looks.popleft()
        begun, before = looks[0]
        looks.append((now, paid))
        seconds = now - begun
        # Weights may change from one request to the next, and with them what was paid.
        return max(paid - before, 0.0) * (min(AHEAD_S / seconds, 1.0) if seconds else 1.0)


def urgency(sequence: Sequence) -> Rank:
    """The rank that a waiting request would have if it were admitted now."""
    priority, paid, arrival = sequence.rank
    if paid == NOT_SERVED and sequence.share is not None:
        return priority, sequence.share.paid, arrival
    return sequence.rank


def turn(sequence: Sequence) -> Rank:
    """Return the key by which the next chunk is chosen among prompts that are being read."""
    if sequence.share is None:
        return sequence.rank
    return sequence.rank[0], sequence.share.paid, sequence.rank[2]


class WaitingQueue:
    """A line for each API key, sorted by rank; one where there are no keys. Who leaves it, from wherever it stands,
    is forgotten at once. A place is found in logarithmic time; moving the entries behind it takes a microsecond for
    every some thousand of them. The next to be served is the most urgent of the lines' first ones. A request that comes
    back after a preemption has its old rank, and so goes before those of its key that were never served."""

    def __init__(self) -> None:
        self._lines: dict[Share | None, list[Sequence]] = {}
        self._aside = 0
        self._last: Share | None = None
        self._most_paid = 0.0  # of any key when it was served
        self.tokens = 0
        """Tokens of all waiting requests."""

    def __len__(self) -> int:
        return sum(map(len, self._lines.values())) + self._aside

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over the waiting requests by rank, without those that are set aside."""
        return iter(sorted(chain.from_iterable(self._lines.values()), key=_by_rank))

    def push(self, sequence: Sequence) -> None:
        """Let it wait."""
        sequence.phase = Phase.WAITING
        share = sequence.share
        if share is not None and share not in self._lines:
            share.paid = max(share.paid, self._paid_by_others(sequence.rank[0]))
        self._insert(sequence)
        self.tokens += sequence.tokens.length

    def _paid_by_others(self, priority: int) -> float:
        """Return the amount that a key which begins to wait is taken to have paid, so that it is owed nothing for the
        time in which it wanted nothing."""
        paid = [
            share.paid
            for share, line in self._lines.items()
            if share is not None
            and (place := bisect_left(line, (priority,), key=_by_rank)) < len(line)
            and line[place].rank[0] == priority
        ]
        return min(paid) if paid else max(self._most_paid, self._last.paid if self._last is not None else 0.0)

    def served_elsewhere(self, share: Share, tokens: int, ahead: float) -> None:
        """Charge a key for `tokens` that another replica computed. If others wait here, that puts it behind the one of
        them that has paid least by `ahead` at the most."""
        paid = share.paid + tokens / share.weight
        others = [other.paid for other in self._lines if other is not None and other is not share]
        if others:
            paid = min(paid, max(share.paid, min(others) + ahead))
        share.paid = paid
        self._most_paid = max(self._most_paid, paid)

    def head(self) -> Sequence | None:
        """The next to be served."""
        lines = self._lines
        if len(lines) == 1:
            for line in lines.values():
                return line[0]
        return min((line[0] for line in lines.values()), key=urgency, default=None)

    def pop(self) -> Sequence:
        """Take the head out, with the rank that it keeps; the caller gives it its next phase."""
        sequence = self._take_head()
        self.tokens -= sequence.tokens.length
        if sequence.share is not None:
            sequence.rank = urgency(sequence)
            self._last, self._most_paid = sequence.share, max(self._most_paid, sequence.share.paid)
        return sequence

    def set_aside(self) -> Sequence:
        """Let those behind the head go first; it still counts as waiting, and comes back by `put_back`."""
        self._aside += 1
        return self._take_head()

    def put_back(self, sequence: Sequence) -> None:
        """Put a request back to its old place."""
        self._aside -= 1
        self._insert(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a waiting request out, wherever it stands; it has ended. It must not be set aside."""
        line = self._lines.get(sequence.share, [])
        place = bisect_left(line, sequence.rank, key=_by_rank)
        assert line[place] is sequence, "a request that does not wait cannot leave the queue"
        self._take(sequence.share, place)
        sequence.phase = Phase.ENDED
        self.tokens -= sequence.tokens.length

    def gives_way(self, priority: int, share: Share) -> Sequence | None:
        """Return the request that loses its place in a full line to a newcomer of this key: the latest request, never
        served, of the lowest priority below the newcomer's; or of the same, where another key has the longest line for
        its weight, and a longer one than the newcomer's key with it. None: there is none."""
        own = (len(self._lines.get(share, ())) + 1) / share.weight
        found: Sequence | None = None
        most = (priority, own)
        for other, line in self._lines.items():
            last = line[-1]
            if other is None or other is share or last.rank[1] != NOT_SERVED:
                continue
            if (crowd := (last.rank[0], len(line) / other.weight)) > most:
                found, most = last, crowd
        return found

    def _insert(self, sequence: Sequence) -> None:
        insort(self._lines.setdefault(sequence.share, []), sequence, key=_by_rank)

    def _take_head(self) -> Sequence:
        head = self.head()
        assert head is not None, "nobody waits"
        return self._take(head.share, 0)

    def _take(self, share: Share | None, place: int) -> Sequence:
        line = self._lines[share]
        sequence = line.pop(place)
        if not line:
            del self._lines[share]
        return sequence
