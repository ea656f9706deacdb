"""Which pages of host memory are written to the disk, and when.

They are written while they are in host memory still, so that they may leave at any time. Disks wear out, so not all
are: first those with which a second prompt has begun, and of the others as many as the `WriteBudget` leaves. A page is
written behind the one that it continues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Final

from workers.protocol.tiers import check_of
from workers.scheduler.disk_index import NONE, DiskIndex
from workers.scheduler.disk_tickets import DiskCounters, DiskTicket, DiskTickets
from workers.scheduler.host_tier import HostTier
from workers.scheduler.prefix_summary import Copy, Entry
from workers.scheduler.write_budget import WriteBudget

MOST_WRITES: Final = 4
"""Tickets of saves under way."""
WRITE_BATCH: Final = 16
"""Pages that one ticket saves at the most."""
MOST_OFFERED: Final = 65536
"""Pages that wait to be saved; older ones give way."""


class DiskSaves:
    """Pages that wait to be written, and their writes."""

    def __init__(
        self,
        host: HostTier,
        index: DiskIndex,
        tickets: DiskTickets,
        counters: DiskCounters,
        budget: WriteBudget,
        serial: int,
    ) -> None:
        """`serial`: of the next page that is saved."""
        self._host, self._index, self._tickets = host, index, tickets
        self._counters, self._budget = counters, budget
        self._serials = count(serial)
        self._none = budget.none
        """Whether nothing is written any more, or ever."""
        self._writes = 0
        self._again: deque[Copy] = deque(maxlen=MOST_OFFERED)
        """Pages in host memory that a second prompt has begun with."""
        self._new: deque[Copy] = deque(maxlen=MOST_OFFERED)
        self._walk: list[Copy] = []
        """Of the page that was to be saved last: what `_missing` said of it."""

    def offer(self, copy: Copy, *, again: bool) -> None:
        """Let a page wait to be saved. `again`: whether a second prompt has begun with it."""
        if self._none:  # nobody would take it, and it keeps all pages before it in memory
            return
        offered = self._again if again else self._new
        if len(offered) > 2 * self._host.held + WRITE_BATCH:  # some twice, or gone, with all pages before them
            kept = dict.fromkeys(one for one in offered if not one.gone)
            offered.clear()
            offered.extend(kept)
        offered.append(copy)

    def evicted(self, copy: Copy) -> None:
        """Hear that a page has left host memory, as its slot is needed for another one. It is counted if it was never
        put on disk: before that it may be tried many times."""
        if self._none or copy.on_disk:
            return
        slot = self._index.slot(copy.key)
        there = slot != NONE and self._index.agrees(slot, self._slot_of(copy.parent), copy.tokens)
        self._counters.dropped += not there

    def give_up(self) -> None:
        """Write nothing any more, and keep nothing for it."""
        self._none = True
        self._again.clear()
        self._new.clear()
        self._walk = []

    def turn(self) -> None:
        """Have pages saved, as many as the budget leaves."""
        while self._writes < MOST_WRITES and self._again and self._budget.left:
            if not self._save(self._again, self._budget.left):
                return
        while self._writes < MOST_WRITES and self._new and self._budget.spare:
            if not self._save(self._new, self._budget.spare):
                return

    def ended(self, ticket: DiskTicket) -> None:
        """All ranks have written its pages, but for those that are bad."""
        self._writes -= 1
        for slot, copy in zip(ticket.slots, ticket.copies, strict=True):
            self._host.unpin(copy)
            if slot not in ticket.bad:
                self._counters.saved += 1
                self._index.complete(slot)

    def _save(self, offered: deque[Copy], most: int) -> bool:
        """Have some of these saved, `most` pages at the most. Whether there was a slot for each."""
        copies: list[Copy] = []
        slots: list[int] = []
        most = min(most, WRITE_BATCH)
        while offered and len(copies) < most:
            missing = self._walk = self._still_missing(offered[0])
            if not missing:
                offered.popleft()
                continue
            for copy in reversed(missing[len(copies) - most :]):
                slot = self._slot_for(copy)
                if slot == NONE:
                    self._begin(copies, slots)
                    offered.popleft()
                    return False
                copies.append(copy)
                slots.append(slot)
        self._begin(copies, slots)
        return True

    def _still_missing(self, copy: Copy) -> list[Copy]:
        """As `_missing` says. What it said last is known, less the pages that have been put on disk since: those of a
        long prompt are saved some at a time."""
        walk = self._walk
        if not walk or walk[0] is not copy or copy.gone:
            return self._missing(copy)
        while walk and walk[-1].key in self._index:
            walk.pop()
        before = walk[-1].parent if walk else None
        if before is None and walk:
            return walk
        slot = self._slot_of(before)
        known = isinstance(before, Copy) and slot != NONE and before.on_disk == self._index.born(slot)
        return walk if known else self._missing(copy)

    def _missing(self, copy: Copy) -> list[Copy]:
        """The page and those before it that are not on disk; none where it cannot be saved."""
        missing: list[Copy] = []
        at: Entry | None = copy
        while at is not None and at.key not in self._index:
            assert isinstance(at, Copy)
            if at.gone or not at.written:
                return []
            missing.append(at)
            at = at.parent
        if missing and at is not None and not self._is_there(at):  # another prompt, whose keys collide with these
            return []
        return missing

    def _is_there(self, copy: Entry) -> bool:
        """Whether the page on disk of this key continues the same prompt."""
        same: list[Copy] = []
        at: Entry | None = copy
        while at is not None:
            assert isinstance(at, Copy)
            slot = self._index.slot(at.key)
            if slot == NONE or not self._index.agrees(slot, self._slot_of(at.parent), at.tokens):
                return False
            if at.on_disk == self._index.born(slot):
                break
            same.append(at)
            at = at.parent
        for one in same:
            one.on_disk = self._index.born(self._index.slot(one.key))
        return True

    def _slot_of(self, entry: Entry | None) -> int:
        return NONE if entry is None else self._index.slot(entry.key)

    def _slot_for(self, copy: Copy) -> int:
        """The slot that a page gets on disk, which is pinned; `NONE` where there is none."""
        index, parent = self._index, self._slot_of(copy.parent)
        if parent != NONE:
            index.pin([parent])
        slot = index.take()
        if parent != NONE:
            index.free([parent])
        if slot != NONE:
            index.pin([slot])
            index.put(slot, copy.key, parent, copy.number, check_of(copy.tokens))
            copy.on_disk = index.born(slot)
        return slot

    def _begin(self, copies: Sequence[Copy], slots: Sequence[int]) -> None:
        if not copies:
            return
        self._index.use_ends(slots)
        self._budget.take(len(copies))
        self._writes += 1
        for copy in copies:
            copy.pins += 1
        self._tickets.begin_saves([*slots], [*copies], self._serials)
