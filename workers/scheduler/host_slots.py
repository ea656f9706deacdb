"""Slots of host memory: which copy of a page has which one, and whose slot another copy takes.

Eviction: among the copies that nothing continues, the one whose last use is longest ago.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final, Protocol

from workers.protocol.tiers import Pinned
from workers.scheduler.prefix_summary import Copy, PrefixSummary

REPORTED_ENDS: Final = 0.75
"""Share of what routers are told that is for where prompts end: a session has one such place, or two with that where
its last turn left the turn before."""


class Disk(Protocol):
    """Keeps copies of pages behind host memory (`workers.scheduler.disk_tier`)."""

    def written(self, copies: Sequence[Copy]) -> None:
        """Hear that pages are in host memory now."""

    def used(self, copy: Copy) -> None:
        """Hear that a prompt has begun with the pages up to this one, which were there before."""

    def evicted(self, copy: Copy) -> None:
        """Hear that a page has left host memory, as its slot is needed for another one."""

    def doubt(self, keys: Sequence[bytes]) -> None:
        """Hear that the pages of these keys may hold no numbers."""

    def copying(self, copy: Copy) -> bool:
        """Whether a page is being copied to the disk or from it, and the disk has not failed."""


class HostSlots:
    """Copies of pages in host memory, each in a slot: who has one, who is pinned, whose is taken next. Of copying it
    knows nothing: that is what `HostTier` adds."""

    def __init__(self, slots: int, ranks: int, *, pins: bool, reported: int) -> None:
        """`slots`: pages that host memory holds. `pins`: whether slots are of use only as far as all `ranks` say that
        they are pinned. `reported`: keys that `report` names at the most."""
        self.slots = slots
        self._free = list(range(slots - 1, -1, -1))
        self._unpinned: list[int] = []
        """Slots that are of no use yet, the last ones first."""
        self._pinned = [slots] * ranks
        """Of each rank: slots that it can copy to and from, from the first one on."""
        if pins:
            self._pinned = [0] * ranks
            self._free, self._unpinned = self._unpinned, self._free
        self._copies: dict[bytes, Copy] = {}  # by key
        self._summary = PrefixSummary(self._copies, slots, reported, REPORTED_ENDS)
        self._ends: list[tuple[int, bytes]] = []  # a heap of (used, key), outdated ones among them
        self._clock = count(1)
        self.disk: Disk | None = None
        """Where pages are copied to from here."""

    @property
    def usable(self) -> int:
        """Slots that all ranks can copy to and from."""
        return min(self._pinned)

    def pinned(self, message: Pinned) -> None:
        """Take in how many slots a rank can copy to and from: never fewer than before."""
        self._pinned[message.rank] = message.slots
        more: list[int] = []
        while self._unpinned and self._unpinned[-1] < self.usable:
            more.append(self._unpinned.pop())
        self._free += reversed(more)  # those side by side are taken one after the other, and copied in one go

    @property
    def held(self) -> int:
        """Pages in host memory, those included that are being written."""
        return len(self._copies)

    def report(self) -> list[bytes]:
        """Keys that tell routers what is here (`PrefixSummary`)."""
        return self._summary.report()

    def _slot(self) -> int | None:
        """A free slot, if need be that of the end which was not used for longest; None where all are pinned."""
        pinned: list[tuple[int, bytes]] = []
        while not self._free and self._ends:
            used, key = heappop(self._ends)
            copy = self._copies.get(key)
            if copy is None or copy.children or copy.used != used:
                continue
            if copy.pins:
                pinned.append((used, key))
            else:
                self._forget([copy])
                if self.disk is not None:
                    self.disk.evicted(copy)
        for item in pinned:
            heappush(self._ends, item)
        return self._free.pop() if self._free else None

    def _use(self, copy: Copy) -> None:
        copy.used = next(self._clock)
        self._summary.use([copy])
        if not copy.children:
            self._is_end(copy)

    def _is_end(self, copy: Copy) -> None:
        heappush(self._ends, (copy.used, copy.key))
        if len(self._ends) > 64 + 4 * len(self._copies):  # most of it is outdated
            self._ends = [(one.used, one.key) for one in self._copies.values() if not one.children]
            heapify(self._ends)

    def _forget(self, copies: Sequence[Copy]) -> None:
        """Each comes before the one that it continues."""
        for copy in copies:
            del self._copies[copy.key]
            copy.gone = True
            if not copy.pins:
                self._free.append(copy.page)
        self._summary.remove(copies)
        for copy in copies:
            parent = copy.parent
            if isinstance(parent, Copy) and not parent.gone and not parent.children:
                self._is_end(parent)

    def unpin(self, copy: Copy) -> None:
        """Nobody reads or writes it any more on behalf of one ticket."""
        copy.pins -= 1
        if copy.gone and not copy.pins:
            self._free.append(copy.page)
