"""Requests whose pages are read from the disk into host memory, and what is kept there for them.

- Where a prompt goes on further on disk than in host memory, the request leaves the queue until its pages are in host
  memory, and comes back at its old place. A load holds slots of host memory and no page of the device.
- A load begins only if it should take less time than computing its tokens would (`ReadPace`), and with no more pages
  than come long before the disk counts as failed. A request waits no longer than computing would take, neither for its
  pages nor for others that are read before. If the disk is late, the request is computed; the load goes on by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workers.scheduler.disk_index import NONE, DiskIndex
from workers.scheduler.disk_tickets import DiskCounters, DiskTicket, DiskTickets
from workers.scheduler.host_tier import HostTier
from workers.scheduler.prefix_summary import Copy, Entry
from workers.scheduler.read_pace import LONGEST_S, ReadPace
from workers.scheduler.sequence import Sequence as Row


class DiskLoads:
    """Loads from disk, and the requests that wait for them."""

    def __init__(
        self,
        host: HostTier,
        index: DiskIndex,
        tickets: DiskTickets,
        counters: DiskCounters,
        pace: ReadPace,
        clock: Callable[[], float],
        least: int,
    ) -> None:
        """`least`: pages that are worth a load."""
        self._host, self._index, self._tickets = host, index, tickets
        self._counters, self._pace, self._clock, self._least = counters, pace, clock, least
        self._ticket_of: dict[Row, DiskTicket] = {}
        self._queued: dict[Row, None] = {}
        """Requests that wait for room to read their pages: for the end of any load."""
        self._kept: dict[Row, list[Copy]] = {}
        """Pages in host memory that were read for requests which are queued again: pinned until these go on."""
        self._changes = 0
        """Loads that have ended, and requests that left what was kept for them: there may be room since."""
        self._load_ended = clock()
        """When the last load did."""

    @property
    def waiting(self) -> list[Row]:
        """Requests whose pages are being read, or will be."""
        return [*self._ticket_of, *self._queued]

    @property
    def patience_s(self) -> float | None:
        """Seconds until the first request that waits has waited for long enough; None where none waits."""
        until = [row.disk_until for row in self.waiting]
        return max(min(until) - self._clock(), 0.0) if until else None

    def looks_ahead(self, row: Row) -> bool:
        """Whether a request for which no slot is free should be looked at: once, and again when a load has ended."""
        if row.disk_ahead == self._changes:
            return False
        row.disk_ahead = self._changes
        return True

    def load(self, row: Row, device: int, most: int, *, ahead: bool) -> bool:
        """As `DiskTier.load` says, of a disk that has not failed."""
        if row.disk_asked == self._changes or device + self._least > most:
            return False
        if row.keys[device + self._least - 1] not in self._index:  # what is there of a prompt has no gaps
            return False
        row.disk_asked = self._changes
        here = self._host.chain(row, most)
        there = self._index.find(row.tokens, row.keys, most)
        gained = len(there) - max(device, len(here))
        if gained < self._least:
            return False
        if row.disk_left_s is None:
            row.disk_left_s = min(LONGEST_S, self._pace.computing_s(gained))
        if row.disk_left_s <= 0:
            return False
        row.disk_until = self._clock() + row.disk_left_s
        if len(here) < most and (coming := self._coming(row.keys[len(here)])) is not None:
            self._wait(row, coming)
            return True
        reading = self._tickets.reading
        if not self._pace.pays(len(there) - len(here), reading, row.disk_left_s):
            return False
        room = self._room_ahead(here) if ahead else self._room_beside(row, reading)
        if not (ahead or reading) and room < len(there) - len(here):
            room = self._take_back(row, len(there) - len(here))
        room = min(room, self._pace.most_at_once(self._least, self._index.slots) - reading)
        slots = there[len(here) : len(here) + max(room, 0)]
        if gained - (len(there) - len(here) - len(slots)) >= self._least:
            copies = self._host.receive(row, len(here), len(here) + len(slots))
            if copies:
                self._begin(row, slots[: len(copies)], copies)
                return True
        if reading and not ahead:
            self._queued[row] = None
            return True
        return False

    def leave(self, row: Row) -> None:
        """A request waits no longer, neither for a load nor with its pages: it goes on, or has ended."""
        self._queued.pop(row, None)
        ticket = self._ticket_of.pop(row, None)
        if ticket is not None:
            del ticket.waiting[row]
        if kept := self._kept.pop(row, None):
            self._changes += 1
            for copy in kept:
                self._host.unpin(copy)

    def overdue(self, now: float) -> list[Row]:
        """Requests that have waited for as long as computing would have taken: they wait no longer."""
        late = [row for row in self.waiting if row.disk_until <= now]
        for row in late:
            row.disk_left_s = 0.0
            self.leave(row)
        self._counters.late += len(late)
        return late

    def received(self, ticket: DiskTicket) -> int:
        """All ranks have read its pages, or have not. How many are in host memory now."""
        unusable = ticket.bad | ticket.unread
        bad = [copy for slot, copy in zip(ticket.slots, ticket.copies, strict=True) if slot in unusable]
        self._host.received(ticket.copies, bad)
        return len(ticket.slots) - len(bad)

    def ended(self, ticket: DiskTicket, good: int) -> list[Row]:
        """A load has ended that brought `good` pages. Who may go on, or look again."""
        self._counters.loaded += good
        now = self._clock()
        if good:
            self._counters.load_seconds += self._measure(ticket, good, now)
        self._changes, self._load_ended = self._changes + 1, now
        waited, queued = [*ticket.waiting], [*self._queued]
        self._queued.clear()
        for row in waited + queued:
            row.disk_left_s = row.disk_until - now
        for row in waited:
            self._keep(row, [copy for copy in ticket.copies if not copy.gone and _is_of(copy, row)])
        return waited + queued

    def _room_beside(self, row: Row, reading: int) -> int:
        """Slots of host memory that a load for this request may take, for which a slot is free. One may take all of it;
        several leave half of it to what is saved meanwhile."""
        others = (copies for other, copies in self._kept.items() if other is not row)
        kept = len({copy for copies in others for copy in copies})  # some are kept for several
        return self._host.usable // 2 - reading - kept if reading or kept else self._host.usable

    def _take_back(self, row: Row, pages: int) -> int:
        """Let others have what was read for requests behind this one, for which a slot is free, until there is room for
        so many pages: the last ones first. Returns what there is room for."""
        behind = sorted((other for other in self._kept if other is not row), key=lambda other: other.rank)
        while behind and self._room_beside(row, 0) < pages:
            self.leave(behind.pop())
        return self._room_beside(row, 0)

    def _room_ahead(self, here: Sequence[Copy]) -> int:
        """The same for a request for which no slot is free, whose prompt begins with the pages `here`. What is read for
        it stays for as long as other answers run, and keeps all that it continues; so does what is read, or was, for
        others. All of it leaves half of host memory to what is saved meanwhile."""
        ends = [*here[-1:], *(copies[-1] for copies in self._kept.values())]
        ends += [ticket.copies[-1] for ticket in self._tickets.loads]
        held: set[Entry] = set()
        for end in ends:
            at: Entry | None = end
            while at is not None and at not in held:
                held.add(at)
                at = at.parent
        return self._host.usable // 2 - len(held)

    def _begin(self, row: Row, slots: list[int], copies: list[Copy]) -> None:
        self.leave(row)  # what was kept for it is continued by what comes, and stays for that
        self._index.pin(slots)
        self._index.use(slots[-1])
        for slot, copy in zip(slots, copies, strict=True):
            copy.on_disk = self._index.born(slot)
        self._wait(row, self._tickets.begin_loads(slots, copies))

    def _coming(self, key: bytes) -> DiskTicket | None:
        """The load under way that brings this page."""
        slot = self._index.slot(key)
        return None if slot == NONE else next((ticket for ticket in self._tickets.loads if slot in ticket.slots), None)

    def _wait(self, row: Row, ticket: DiskTicket) -> None:
        ticket.waiting[row] = None
        self._ticket_of[row] = ticket

    def _keep(self, row: Row, copies: list[Copy]) -> None:
        """Others take no slot of these before the request has come to its turn. What was kept for it before are pages
        that these continue, or such as have failed."""
        for copy in copies:
            copy.pins += 1
        self.leave(row)
        if copies:
            self._kept[row] = copies

    def _measure(self, ticket: DiskTicket, pages: int, now: float) -> float:
        """A load has read so many pages. Ranks read loads one behind the other, so those before it are not its own
        time: it began when the last of them ended, but read no faster than all of them in the time that it took.
        Returns the seconds of its own."""
        seconds = ticket.seconds
        if self._load_ended > ticket.begun:
            seconds = max(min(seconds, now - self._load_ended), seconds * pages / (pages + ticket.behind))
        self._pace.observe(seconds / pages, worthwhile=seconds < self._pace.computing_s(pages))
        return seconds


def _is_of(copy: Copy, row: Row) -> bool:
    """Whether a page is one of this request's prompt."""
    return copy.number <= len(row.keys) and row.keys[copy.number - 1] == copy.key
