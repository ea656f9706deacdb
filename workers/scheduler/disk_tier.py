"""The disk behind host memory: what leaves that is found here, read back into host memory, and goes on from there.

- **Saves.** Pages in host memory are copied to the disk while they are still there, so that they may leave at any time.
  Disks wear out, so not all are: first those with which a second prompt has begun, and of the others as many as the
  `WriteBudget` leaves.
- **Loads.** Where a prompt goes on further on disk than in host memory, the request leaves the queue until its pages
  are in host memory, and comes back at its old place. A load holds slots of host memory and no page of the device.
- **Deadlines.** A load begins only if it should take less time than computing its tokens would, by what both took
  lately (`ReadPace`), and with no more pages than come long before the disk counts as failed. A request waits no longer
  than computing would take, neither for its pages nor for others that are read before. If the disk is late, the request
  is computed; the load goes on by itself.
- **Failures.** Every page that comes back was compared with its checksum, tokens and keys. What does not agree is
  forgotten, with all that continues it, and erased. If a disk fails, its rank says so, and nothing is copied any more.

Each rank answers each ticket, as with `workers.scheduler.host_tier`. None of it blocks anybody: a ticket that is never
answered costs its slots.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from kernels.page import PAGE_TOKENS
from workers.protocol.tiers import FOUND, DiskFound, DiskMoved, DiskMoves, DiskPage, check_of
from workers.scheduler.disk_index import NONE, DiskIndex
from workers.scheduler.host_tier import HostTier
from workers.scheduler.prefix_summary import Copy, Entry
from workers.scheduler.read_pace import ReadPace
from workers.scheduler.sequence import Sequence as Row
from workers.scheduler.write_budget import WriteBudget

logger = logging.getLogger("latentserve.tiers")

MOST_WRITES: Final = 4
"""Tickets of saves under way."""
WRITE_BATCH: Final = 16
"""Pages that one ticket saves at the most."""
SETTLED_A_TURN: Final = 65536
"""Slots of which is then seen at once whether they are free."""
MOST_OFFERED: Final = 65536
"""Pages that wait to be saved; older ones give way."""
FOUND_A_TURN: Final = 512
"""Pages that were on disk at the start and are taken in at once, in some milliseconds."""
FIRST_S: Final = 0.005
"""Seconds that a load takes besides those of its pages."""
TOKEN_S: Final = 1e-4
"""Seconds that computing a token of a prompt takes, as far as nothing was measured."""
LONGEST_S: Final = 30.0
"""A request waits for the disk no longer than this, however long computing would take. A disk of which a rank hears
nothing for so long has failed."""
MARGIN: Final = 2.0
"""A load begins with no more pages than should come within `LONGEST_S`, divided by this: a rank answers when it has all
of its pages, and a disk that is a little slower than thought has not failed."""
FIRST_MARGIN: Final = 16.0
"""The same as long as nothing was measured. A disk that is many times slower than it is taken for is found out so."""


@dataclass(slots=True, eq=False)
class DiskTicket:
    """Copies under way between host memory and disk."""

    number: int
    missing: set[int]
    """Ranks that have not answered."""
    slots: list[int]
    """On disk."""
    begun: float
    copies: list[Copy] = field(default_factory=list)
    """In host memory, slot by slot: read by saves, written by loads."""
    loads: bool = False
    behind: int = 0
    """Pages of loads that were under way before."""
    bad: set[int] = field(default_factory=set)
    """Slots on disk whose pages are not to be used."""
    unread: set[int] = field(default_factory=set)
    """Slots whose pages a rank that has given up its disk did not read: they are as good as they were."""
    seconds: float = 0.0
    """That the slowest rank took."""
    waiting: dict[Row, None] = field(default_factory=dict)
    """Requests that wait for it."""


@dataclass(slots=True)
class DiskCounters:
    """Pages, seconds and prompts since start; as in `EngineStats`, which documents them."""

    saved: int = 0
    loaded: int = 0
    load_seconds: float = 0.0
    dropped: int = 0
    lost: int = 0
    late: int = 0


class DiskTier:
    """Which pages are on disk, and what is copied between it and host memory.

    Of use to `Rows` and `HostTier`. It sends nothing: `take_moves` has what ranks must be told.
    """

    def __init__(
        self,
        host: HostTier,
        slots: int,
        ranks: int,
        budget: WriteBudget,
        clock: Callable[[], float],
        *,
        reported: int = 0,
        least: int = 1,
        page_s: float = 0.0,
        serial: int = 0,
        token_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`slots`: pages that fit. `least`: pages that are worth a load. `page_s`: seconds that a page takes to read,
        as far as nothing was measured. `serial`: of the next page that is saved. `token_s`: seconds that a token takes
        to be computed, by what it took lately."""
        self.index = DiskIndex(slots, reported)
        self.counters = DiskCounters()
        self.failed = False
        """Nothing is copied any more."""
        self._host, self._ranks, self._budget, self._clock = host, ranks, budget, clock
        self._least, self._token_s = least, token_s
        self._pace = ReadPace(page_s, clock)
        self._heard: dict[tuple[int, bool], float] = {}
        """When a rank last answered, by its number and whether that was a load."""
        self._numbers, self._serials = count(1), count(serial)
        self._tickets: dict[int, DiskTicket] = {}
        self._writes = 0
        self._ticket_of: dict[Row, DiskTicket] = {}
        self._queued: dict[Row, None] = {}
        """Requests that wait for room to read their pages: for the end of any load."""
        self._changes = 0
        """Loads that have ended, and requests that left what was kept for them: there may be room since."""
        self._load_ended = clock()
        """When the last load did."""
        self._kept: dict[Row, list[Copy]] = {}
        """Pages in host memory that were read for requests which are queued again: pinned until these go on."""
        self._again: deque[Copy] = deque(maxlen=MOST_OFFERED)
        """Pages in host memory that a second prompt has begun with."""
        self._new: deque[Copy] = deque(maxlen=MOST_OFFERED)
        self._walk: list[Copy] = []
        """Of the page that was to be saved last: what `_missing` said of it."""
        self._erase: list[int] = []
        self._found: deque[tuple[bytes, bool]] = deque()
        self._settling = False
        self._settled = False
        """Whether all that was on disk at the start is known."""
        self._outbox: list[DiskMoves] = []
        host.disk = self

    @property
    def waiting(self) -> list[Row]:
        """Requests whose pages are being read, or will be."""
        return [*self._ticket_of, *self._queued]

    @property
    def busy(self) -> bool:
        """Whether there is work for `turn` that waits for nobody."""
        return bool(self._found) or self._settling

    def report(self) -> list[bytes]:
        """Keys that tell routers what is here."""
        return [] if self.failed else self.index.report()

    def take_moves(self) -> list[DiskMoves]:
        """What every rank must be told now; each is given once."""
        moves, self._outbox = self._outbox, []
        return moves

    # Saves

    def written(self, copies: Sequence[Copy]) -> None:
        """Hear that pages are in host memory now."""
        for copy in copies:
            self._offer(self._new, copy)

    def used(self, copy: Copy) -> None:
        """Hear that a prompt has begun with the pages up to this one, which were there before."""
        slot = self.index.slot(copy.key)
        if slot != NONE:
            self.index.use(slot)
        else:
            self._offer(self._again, copy)

    def _offer(self, offered: deque[Copy], copy: Copy) -> None:
        if self.failed or self._budget.none:  # nobody would take it, and it keeps all pages before it in memory
            return
        if len(offered) > 2 * self._host.held + WRITE_BATCH:  # some twice, or gone, with all pages before them
            kept = dict.fromkeys(one for one in offered if not one.gone)
            offered.clear()
            offered.extend(kept)
        offered.append(copy)

    def evicted(self, copy: Copy) -> None:
        """Hear that a page has left host memory, as its slot is needed for another one. It is counted if it was never
        put on disk: before that it may be tried many times."""
        if self.failed or self._budget.none or copy.on_disk:
            return
        slot = self.index.slot(copy.key)
        there = slot != NONE and self.index.agrees(slot, self._slot_of(copy.parent), copy.tokens)
        self.counters.dropped += not there

    def turn(self) -> None:
        """Take in a part of what was on disk at the start, and have pages saved and erased."""
        self._take_in()
        self._begin_erasures()
        if not self._settled or self.failed:
            return
        while self._writes < MOST_WRITES and self._again and self._budget.left:
            if not self._save(self._again, self._budget.left):
                return
        while self._writes < MOST_WRITES and self._new and self._budget.spare:
            if not self._save(self._new, self._budget.spare):
                return

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
                    self._begin_saves(copies, slots)
                    offered.popleft()
                    return False
                copies.append(copy)
                slots.append(slot)
        self._begin_saves(copies, slots)
        return True

    def _still_missing(self, copy: Copy) -> list[Copy]:
        """As `_missing` says. What it said last is known, less the pages that have been put on disk since: those of a
        long prompt are saved some at a time."""
        walk = self._walk
        if not walk or walk[0] is not copy or copy.gone:
            return self._missing(copy)
        while walk and walk[-1].key in self.index:
            walk.pop()
        before = walk[-1].parent if walk else None
        if before is None and walk:
            return walk
        slot = self._slot_of(before)
        known = isinstance(before, Copy) and slot != NONE and before.on_disk == self.index.born(slot)
        return walk if known else self._missing(copy)

    def _missing(self, copy: Copy) -> list[Copy]:
        """The page and those before it that are not on disk; none where it cannot be saved."""
        missing: list[Copy] = []
        at: Entry | None = copy
        while at is not None and at.key not in self.index:
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
            slot = self.index.slot(at.key)
            if slot == NONE or not self.index.agrees(slot, self._slot_of(at.parent), at.tokens):
                return False
            if at.on_disk == self.index.born(slot):
                break
            same.append(at)
            at = at.parent
        for one in same:
            one.on_disk = self.index.born(self.index.slot(one.key))
        return True

    def _slot_of(self, entry: Entry | None) -> int:
        return NONE if entry is None else self.index.slot(entry.key)

    def _slot_for(self, copy: Copy) -> int:
        parent = self._slot_of(copy.parent)
        if parent != NONE:
            self.index.pin([parent])
        slot = self.index.take()
        if parent != NONE:
            self.index.free([parent])
        if slot != NONE:
            self.index.pin([slot])
            self.index.put(slot, copy.key, parent, copy.number, check_of(copy.tokens))
            copy.on_disk = self.index.born(slot)
        return slot

    def _begin_saves(self, copies: list[Copy], slots: list[int]) -> None:
        if not copies:
            return
        self.index.use_ends(slots)
        self._budget.take(len(copies))
        self._writes += 1
        for copy in copies:
            copy.pins += 1
        pages = [_page(slot, copy, next(self._serials)) for slot, copy in zip(slots, copies, strict=True)]
        ticket = self._begin(slots, copies)
        self._outbox.append(DiskMoves(ticket.number, saves=tuple(pages)))

    # Loads

    def load(self, row: Row, device: int, most: int, *, ahead: bool = False) -> bool:
        """Whether the request waits from now on for pages of its prompt, up to page number `most`, to be read into host
        memory, or for room to read them. `device`: pages that it has on the device. `ahead`: no slot is free for it, so
        that what there is no room for is left until one is.

        It is looked at again when a load has ended: there may be more of its prompt, or room where there was none. But
        in all it waits no longer than computing would have taken."""
        if row.disk_asked == self._changes or self.failed or device + self._least > most:
            return False
        if row.keys[device + self._least - 1] not in self.index:  # what is there of a prompt has no gaps
            return False
        row.disk_asked = self._changes
        here = self._host.chain(row, most)
        there = self.index.find(row.tokens, row.keys, most)
        gained = len(there) - max(device, len(here))
        if gained < self._least:
            return False
        if row.disk_left_s is None:
            row.disk_left_s = min(LONGEST_S, self._computing_s(gained))
        if row.disk_left_s <= 0:
            return False
        row.disk_until = self._clock() + row.disk_left_s
        if len(here) < most and (coming := self._coming(row.keys[len(here)])) is not None:
            self._wait(row, coming)
            return True
        reading = sum(len(ticket.slots) for ticket in self._tickets.values() if ticket.loads)
        if not self._pays(len(there) - len(here), reading, row.disk_left_s):
            return False
        room = self._room_ahead(here) if ahead else self._room_beside(row, reading)
        if not (ahead or reading) and room < len(there) - len(here):
            room = self._take_back(row, len(there) - len(here))
        room = min(room, self._most_at_once() - reading)
        slots = there[len(here) : len(here) + max(room, 0)]
        if gained - (len(there) - len(here) - len(slots)) >= self._least:
            copies = self._host.receive(row, len(here), len(here) + len(slots))
            if copies:
                self._begin_load(row, slots[: len(copies)], copies, reading)
                return True
        if reading and not ahead:
            self._queued[row] = None
            return True
        return False

    def looks_ahead(self, row: Row) -> bool:
        """Whether a request for which no slot is free should be looked at: once, and again when a load has ended."""
        if self.failed or row.disk_ahead == self._changes:
            return False
        row.disk_ahead = self._changes
        return True

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
        ends += [ticket.copies[-1] for ticket in self._tickets.values() if ticket.loads]
        held: set[Entry] = set()
        for end in ends:
            at: Entry | None = end
            while at is not None and at not in held:
                held.add(at)
                at = at.parent
        return self._host.usable // 2 - len(held)

    def _begin_load(self, row: Row, slots: list[int], copies: list[Copy], behind: int) -> None:
        self.leave(row)  # what was kept for it is continued by what comes, and stays for that
        self.index.pin(slots)
        self.index.use(slots[-1])
        ticket = self._begin(slots, copies)
        ticket.loads, ticket.behind = True, behind
        pages = [_page(slot, copy) for slot, copy in zip(slots, copies, strict=True)]
        self._outbox.append(DiskMoves(ticket.number, loads=tuple(pages)))
        self._wait(row, ticket)

    def _computing_s(self, pages: int) -> float:
        return pages * PAGE_TOKENS * (self._token_s() or TOKEN_S)

    def _pays(self, pages: int, before: int, computing_s: float) -> bool:
        """Whether so many pages should be read sooner than computing takes, behind those of loads `before`. Where
        nobody knows, it is tried: at first with every request, and later with one at a time."""
        pace = self._pace
        if pace.due and not (pace.measured and before):
            return True
        return FIRST_S + (before + pages) * pace.page_s() < computing_s

    def _most_at_once(self) -> int:
        """Pages of all loads under way that come long before the disk counts as failed, also if it is as slow as it
        was last."""
        page_s = self._pace.page_s()
        if page_s <= 0:
            return self.index.slots
        within = LONGEST_S / (MARGIN if self._pace.measured else FIRST_MARGIN)
        return max(int((within - FIRST_S) / page_s), self._least)

    def _coming(self, key: bytes) -> DiskTicket | None:
        """The load under way that brings this page."""
        slot = self.index.slot(key)
        loads = (ticket for ticket in self._tickets.values() if ticket.loads)
        return None if slot == NONE else next((ticket for ticket in loads if slot in ticket.slots), None)

    def _wait(self, row: Row, ticket: DiskTicket) -> None:
        ticket.waiting[row] = None
        self._ticket_of[row] = ticket

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

    def overdue(self) -> list[Row]:
        """Requests that have waited for as long as computing would have taken: they wait no longer."""
        if not self._tickets:
            return []
        now = self._clock()
        late = [row for row in self.waiting if row.disk_until <= now]
        for row in late:
            row.disk_left_s = 0.0
            self.leave(row)
        self.counters.late += len(late)
        silent = 0.0 if self.failed else self._silent_s(now)
        if silent > LONGEST_S:
            logger.warning(
                "the disk behind host memory has not answered for %.0f s: it is not used any more, and prompts that "
                "are on it are computed",
                silent,
            )
            self._fail()
        return late

    def _silent_s(self, now: float) -> float:
        """Seconds for which a rank owes answers and has given none, the longest of them. Reads and writes count apart:
        a disk may do one and not the other."""
        silent = 0.0
        for ticket in self._tickets.values():
            if now - ticket.begun <= max(silent, LONGEST_S):
                break  # as all that follow have begun later
            for rank in ticket.missing:
                heard = self._heard.get((rank, ticket.loads), ticket.begun)
                silent = max(silent, now - max(heard, ticket.begun))
        return silent

    def _fail(self) -> None:
        """Copy nothing any more, and keep nothing for it."""
        self.failed = True
        self._again.clear()
        self._new.clear()
        self._walk = []

    @property
    def patience_s(self) -> float | None:
        """Seconds until the first request that waits has waited for long enough; None where none waits."""
        until = [row.disk_until for row in self.waiting]
        return max(min(until) - self._clock(), 0.0) if until else None

    # Both

    def _begin(self, slots: list[int], copies: list[Copy]) -> DiskTicket:
        number = next(self._numbers)
        ticket = self._tickets[number] = DiskTicket(number, set(range(self._ranks)), slots, self._clock(), copies)
        return ticket

    def moved(self, message: DiskMoved) -> list[Row]:
        """Take in that a rank is done. The requests that waited for it, where it was the last one. RuntimeError for an
        answer that nobody waits for: scheduler and rank disagree."""
        ticket = self._tickets.get(message.ticket)
        if ticket is None or message.rank not in ticket.missing:
            raise RuntimeError(f"rank {message.rank} answers disk ticket {message.ticket}, which does not wait for it")
        self._heard[message.rank, ticket.loads] = self._clock()
        if message.off:
            self._fail()
        ticket.missing.remove(message.rank)
        (ticket.unread if message.off and ticket.loads else ticket.bad).update(message.bad)
        ticket.seconds = max(ticket.seconds, message.seconds)
        if ticket.missing:
            return []
        del self._tickets[ticket.number]
        if not ticket.copies:  # an erasure
            self.index.free(ticket.slots)
        elif ticket.loads:
            return self._loaded(ticket)
        else:
            self._saved(ticket)
        return []

    def _keep(self, row: Row, copies: list[Copy]) -> None:
        """Others take no slot of these before the request has come to its turn. What was kept for it before are pages
        that these continue, or such as have failed."""
        for copy in copies:
            copy.pins += 1
        self.leave(row)
        if copies:
            self._kept[row] = copies

    def _saved(self, ticket: DiskTicket) -> None:
        self._writes -= 1
        for slot, copy in zip(ticket.slots, ticket.copies, strict=True):
            self._host.unpin(copy)
            if slot not in ticket.bad:
                self.counters.saved += 1
                self.index.complete(slot)
        self._drop(ticket.bad)
        self.index.free(ticket.slots)

    def _loaded(self, ticket: DiskTicket) -> list[Row]:
        """Who may go on, or look again."""
        unusable = ticket.bad | ticket.unread
        bad = [copy for slot, copy in zip(ticket.slots, ticket.copies, strict=True) if slot in unusable]
        good = len(ticket.slots) - len(bad)
        self._host.received(ticket.copies, bad)
        self._drop(ticket.bad)
        self.index.free(ticket.slots)
        self.counters.loaded += good
        now = self._clock()
        if good:
            self.counters.load_seconds += self._measure(ticket, good, now)
        self._changes, self._load_ended = self._changes + 1, now
        waited, queued = [*ticket.waiting], [*self._queued]
        self._queued.clear()
        for row in waited + queued:
            row.disk_left_s = row.disk_until - now
        for row in waited:
            self._keep(row, [copy for copy in ticket.copies if not copy.gone and _is_of(copy, row)])
        return waited + queued

    def _measure(self, ticket: DiskTicket, pages: int, now: float) -> float:
        """A load has read so many pages. Ranks read loads one behind the other, so those before it are not its own
        time: it began when the last of them ended, but read no faster than all of them in the time that it took.
        Returns the seconds of its own."""
        seconds = ticket.seconds
        if self._load_ended > ticket.begun:
            seconds = max(min(seconds, now - self._load_ended), seconds * pages / (pages + ticket.behind))
        self._pace.observe(seconds / pages, worthwhile=seconds < self._computing_s(pages))
        return seconds

    def doubt(self, keys: Sequence[bytes]) -> None:
        """Hear that the pages of these keys may hold no numbers: they are forgotten, with all that continue them, and
        loads under way of such are not used."""
        slots = [slot for key in keys if (slot := self.index.slot(key)) != NONE]
        removed = set(self._remove(slots))
        for ticket in self._tickets.values():
            ticket.bad.update(removed.intersection(ticket.slots))

    def _drop(self, slots: Iterable[int]) -> None:
        removed = set(self._remove(slots))
        self.counters.lost += len(removed)
        for ticket in self._tickets.values():
            ticket.bad.update(removed.intersection(ticket.slots))

    def _remove(self, slots: Iterable[int]) -> list[int]:
        removed = [one for slot in slots for one in self.index.remove(slot)]
        self._erase += removed
        return removed

    def _begin_erasures(self) -> None:
        """Have headers erased that another start would find; of those that nobody is still writing."""
        ready = [slot for slot in self._erase if self.index.pins(slot) == 1]
        if ready:
            self._erase = [slot for slot in self._erase if self.index.pins(slot) > 1]
            ticket = self._begin(ready, [])
            self._outbox.append(DiskMoves(ticket.number, erased=tuple(ready)))

    # Start

    def found(self, message: DiskFound) -> None:
        """Hear of pages that were on disk at the start. They are taken in turn by turn."""
        size = FOUND.size * FOUND_A_TURN
        parts = [message.packed[at : at + size] for at in range(0, len(message.packed), size)] or [b""]
        self._found.extend((part, message.last and number == len(parts)) for number, part in enumerate(parts, 1))

    def _take_in(self) -> None:
        if self._found:
            packed, last = self._found.popleft()
            self.index.adopt(FOUND.iter_unpack(packed))
            self._settling |= last
        elif self._settling:
            self._settled = self.index.settle(SETTLED_A_TURN)
            self._settling = not self._settled


def _page(slot: int, copy: Copy, serial: int = 0) -> DiskPage:
    parent = b"" if copy.parent is None else copy.parent.key
    return DiskPage(slot, copy.page, copy.key, parent, copy.number, copy.tokens, serial)


def _is_of(copy: Copy, row: Row) -> bool:
    """Whether a page is one of this request's prompt."""
    return copy.number <= len(row.keys) and row.keys[copy.number - 1] == copy.key
