"""Host memory behind the pages: what leaves the prefix cache of the device is found there and copied back.

Every page that is complete, and vouched for (`Entry.sound`), is copied to host memory once, while it is still on the
device. So a page of the device is free for another row at any time, and nothing is copied when that happens. Where a
prompt begins with pages that the device has no more and host memory has, they are copied into fresh pages of the
device, before the prompt is admitted; then it finds them like any others.

Copies take time, and every rank does them by itself. A `Ticket` names what is under way: it holds the pages that are
loaded, and pins the slots of host memory that are read or written, until all ranks have answered. Whoever waits for a
load may leave at any time; the load goes on, and its pages end in the prefix cache. Where a rank says that a copy was
lost, or a page is doubted meanwhile, the copies of the ticket are forgotten, and prompts are computed instead.

Entries form trees as those of the device do, and both trees agree: an entry of the device names its copy
(`Entry.copy`), whose parent is the copy of the parent. What host memory holds of a prompt is compared token by token
(`match`), so that colliding keys cost a miss and never a wrong page. Which slot of host memory each has, and which is
given up for another, `workers.scheduler.host_slots` says.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from kernels.page import PAGE_TOKENS, Shards
from workers.protocol.tiers import MOST_SAVES, Moved, Moves, saver_of
from workers.scheduler.host_slots import HostSlots
from workers.scheduler.pages import RowPages
from workers.scheduler.prefix import PrefixCache
from workers.scheduler.prefix_summary import Copy, Entry
from workers.scheduler.sequence import Sequence as Row
from workers.scheduler.sequence import Tokens

MOST_LOADS = 4
"""Loads under way, or done and not yet used."""
LOAD_S: Final = 0.005
"""Seconds that a load takes besides those of its pages: prompts whose missing pages are computed sooner have none."""


@dataclass(slots=True, eq=False)
class Ticket:
    """Copies under way."""

    number: int
    missing: set[int]
    """Ranks that have not answered."""
    copies: list[Copy]
    """That it writes or reads, in the order of a prompt where it loads."""
    lost: bool = False
    seconds: float = 0.0
    """That the slowest rank took."""
    row: RowPages | None = None
    """Of a load: the pages of the prompt as far as it is loaded, the first ones found on the device."""
    tokens: Tokens | None = None
    """Of the prompt that it loads for."""
    loaded: frozenset[Copy] = frozenset()
    """Its copies, where it loads."""
    waiting: dict[Row, int] = field(default_factory=dict)
    """Requests that wait for it, or wait with its pages for a slot, and how many pages of their prompts the device had
    when they began to."""


@dataclass(slots=True)
class TierCounters:
    """Pages and seconds since start; as in `EngineStats`, which documents them."""

    saved: int = 0
    loaded: int = 0
    load_seconds: float = 0.0
    dropped: int = 0
    lost: int = 0


class HostTier(HostSlots):
    """Which pages are in host memory, and what is copied to and fro.

    Of use to `Rows` alone. It sends nothing: `take_moves` has what ranks must be told before the next plan.
    """

    def __init__(
        self,
        cache: PrefixCache,
        slots: int,
        ranks: int,
        *,
        pins: bool = False,
        reported: int = 0,
        batch: int = 16,
        savers: int = 1,
        shards: int = 1,
        least: int = 4,
        token_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`slots`, `pins`, `reported`: see `HostSlots`. `ranks`: all of them answer each ticket. `batch`: pages that
        one ticket has any rank save at the most; the pages of each of `shards` are shared out among `savers` ranks.
        `least`: pages that are worth a load, however fast prompts are computed. `token_s`: seconds that computing a
        token of a prompt takes, by now."""
        super().__init__(slots, ranks, pins=pins, reported=reported)
        self._ranks, self._cache, self._batch = ranks, cache, batch
        self._most_least, self._token_s = least, token_s
        self._savers, self._shards = savers, Shards(shards)
        self.counters = TierCounters()
        self._numbers = count(1)
        self._tickets: dict[int, Ticket] = {}  # under way, by number
        self._ready: dict[int, Ticket] = {}  # loads that are done, whose pages wait for their prompts
        self._ticket_of: dict[Row, Ticket] = {}
        self._chains: dict[Row, list[Copy]] = {}  # with which prompts that wait begin, as far as they were compared
        self._saves = self._loads = 0  # under way
        self._outbox: list[Moves] = []
        self._offered: deque[tuple[Entry, int]] = deque()
        cache.tier = self

    @property
    def waiting(self) -> list[Row]:
        """Requests whose pages are being loaded."""
        return [row for ticket in self._tickets.values() for row in ticket.waiting]

    def take_moves(self) -> list[Moves]:
        """What every rank must be told now, in order, before it is told the next plan; each is given once."""
        moves, self._outbox = self._outbox, []
        return moves

    # Saves

    def offer(self, entry: Entry, number: int) -> None:
        """Hear that an entry of the device, page `number` of its prompt where 1 is the first, is complete and vouched
        for: it is saved when there is staging memory for it, if it is still there then. Where nothing can be saved it
        is not kept: what continues it offers it again."""
        if len(self._offered) < 2 * self.usable:
            self._offered.append((entry, number))

    def evicted(self, entries: Sequence[Entry]) -> None:
        """Hear that pages have left the device. Those are counted that were vouched for and never copied: before that
        a page may be tried many times, or be copied together with one that continues it."""
        for entry in entries:
            if entry.sound and entry.copy is None:
                known = self._copies.get(entry.key)  # of a page that was computed again
                self.counters.dropped += known is None or known.tokens != entry.tokens

    def save(self) -> None:
        """Have pages copied that were offered, those that have not been given away since."""
        while self._offered and self._saves < MOST_SAVES:
            copies: list[Copy] = []
            pages: list[tuple[int, int]] = []
            shares: Counter[tuple[int, int]] = Counter()  # by shard and saver
            stuck: Entry | None = None
            largest = 0
            while self._offered and largest < self._batch and stuck is None:
                entry, number = self._offered.popleft()
                missing = self._missing(entry)
                if len(missing) > 1:  # what it continues was not saved, or not for long: that comes first
                    self._offered.extendleft((one, number - before) for before, one in enumerate(missing))
                elif missing:
                    copy = self._copied(entry, number)
                    if copy is None:
                        stuck = entry
                        self._offered.appendleft((entry, number))
                    else:
                        copies.append(copy)
                        pages.append((entry.page, copy.page))
                        share = self._share(entry.page, copy.page)
                        shares[share] += 1
                        largest = max(largest, shares[share])
            if copies:
                self._saves += 1
                self._begin(copies, Moves(next(self._numbers), saves=tuple(pages)))
            if stuck is not None:
                if not self._comes_free(stuck):
                    self._leave_out()
                return

    def _comes_free(self, entry: Entry) -> bool:
        """Whether copies under way will leave a slot to an entry for which `_slot` has just found none, so that all
        ends are pinned: an end other than the page that the entry continues. Pins of requests that wait for their turn
        may stay for long, and those of a disk that has failed for ever: nobody waits for these."""
        parent = entry.parent.copy if entry.parent is not None else None
        ends = (self._copies[key] for _, key in self._ends)
        return any(end is not parent and self._is_copied(end) for end in ends)

    def _is_copied(self, copy: Copy) -> bool:
        """Whether a page is being copied, from the device or the disk or to them."""
        if any(copy in ticket.copies for ticket in self._tickets.values()):
            return True
        return self.disk is not None and self.disk.copying(copy)

    def _leave_out(self) -> None:
        """Drop the entry in front, for which there is no slot, with those offered behind it that continue it, for which
        there is none either: others come next. What continues them later offers them again."""
        entry, _ = self._offered.popleft()
        while self._offered and self._offered[0][0].parent is entry:
            entry, _ = self._offered.popleft()

    def _share(self, page: int, slot: int) -> tuple[int, int]:
        """Shard and saver, which name the rank of each node that copies this page to this slot."""
        return self._shards.owner(page), saver_of(slot, self._shards.count, self._savers)

    def _missing(self, entry: Entry) -> list[Entry]:
        """The entry, and those before it that are to be saved first, the first of them last. None where it has a copy,
        and none where it cannot be saved, as nobody would find the copy."""
        missing: list[Entry] = []
        at: Entry | None = entry
        while at is not None and not has_copy(at):
            known = self._copies.get(at.key)
            if not self._cache.has(at) or not at.sound or (known is not None and known.tokens != at.tokens):
                return []
            missing.append(at)
            at = at.parent
        # Some may have been computed again though their copies are here.
        while missing and (known := self._copies.get(missing[-1].key)) is not None:
            last = missing.pop()
            if known.parent is not (last.parent.copy if last.parent is not None else None):
                return []
            last.copy = known
        if any(one.key in self._copies for one in missing):  # by another prompt, whose keys collide with these
            return []
        return missing

    def _copied(self, entry: Entry, number: int) -> Copy | None:
        """The new copy of an entry, whose parent has one; None where there is no slot for it."""
        parent = entry.parent.copy if entry.parent is not None else None
        if parent is not None:
            parent.pins += 1
        slot = self._slot()
        if parent is not None:
            parent.pins -= 1
        if slot is None:
            return None
        entry.copy = copy = Copy(entry.key, entry.tokens, parent, slot, pins=1, number=number)
        self._copies[copy.key] = copy
        self._summary.add([copy], number)
        self._use(copy)
        return copy

    # Loads

    def used(self, found: Sequence[Entry]) -> None:
        """A prompt begins with these entries of the device: their copies are worth keeping."""
        for entry in reversed(found):
            if entry.copy is not None and not entry.copy.gone:
                self._use(entry.copy)
                if self.disk is not None:
                    self.disk.used(entry.copy)
                return

    def loadable(self, row: Row, found: Sequence[Entry], most: int) -> list[Copy]:
        """Copies of the pages of a prompt behind those `found` on the device, up to its page number `most`; none where
        they are too few to be worth a load. A request that waits with loaded pages may lack more, if it has waited for
        the load of another one that begins alike; but none waits twice where the first load has brought it nothing."""
        # What is here of a prompt has no gaps: most prompts need no more than this one look.
        if len(found) >= most or row.keys[len(found)] not in self._copies:
            return []
        least = len(found) + self._least
        if least > most:
            return []
        before = self._ticket_of.get(row)
        if before is not None and len(found) <= before.waiting[row]:
            return []
        copies = self.chain(row, most)
        if len(copies) < least:
            return []
        for entry, copy in zip(found, copies, strict=False):
            if not has_copy(entry):
                entry.copy = copy
        return copies[len(found) :]

    @property
    def _least(self) -> int:
        """Pages that are worth a load: computing fewer takes no longer than a load takes besides the time of its
        pages."""
        token_s = self._token_s()
        if not token_s:
            return self._most_least
        return min(max(math.ceil(LOAD_S / (PAGE_TOKENS * token_s)), 1), self._most_least)

    def under_way(self, copies: Sequence[Copy]) -> Ticket | None:
        """The load under way that has the first of these."""
        return next((ticket for ticket in self._tickets.values() if copies[0] in ticket.loaded), None)

    def may_load(self, row: Row) -> bool:
        """Whether one more load may begin, for this request."""
        others = self._loads + len(self._ready)
        before = self._ticket_of.get(row)
        if before is not None and len(before.waiting) == 1:
            others -= 1  # it leaves the one whose pages it waits with
        return others < MOST_LOADS

    def load(self, row: Row, found: Sequence[Entry], copies: list[Copy]) -> None:
        """Have `copies` copied to pages behind `found`, for a request to wait for; as many pages must be available."""
        pages = self._cache.open(found, len(found) + len(copies), overwritten=True)
        for copy in copies:
            copy.pins += 1
        self._use(copies[-1])
        self._loads += 1
        targets = pages.pages[len(found) :]
        loads = tuple([(copy.page, page) for copy, page in zip(copies, targets, strict=True)])
        ticket = self._begin(copies, Moves(next(self._numbers), loads=loads))
        ticket.row, ticket.tokens, ticket.loaded = pages, row.tokens, frozenset(copies)
        self.join(ticket, row, len(found))

    def join(self, ticket: Ticket, row: Row, found: int) -> None:
        """Let one more request wait for a load, of whose prompt the device has `found` pages: those that the load has
        found there, too, or some of them."""
        self.leave(row)
        ticket.waiting[row] = found
        self._ticket_of[row] = ticket

    def leave(self, row: Row) -> None:
        """A request waits no longer, neither for a load nor with its pages: it was admitted, or has ended."""
        self._chains.pop(row, None)
        ticket = self._ticket_of.pop(row, None)
        if ticket is None:
            return
        del ticket.waiting[row]
        if not ticket.waiting and self._ready.pop(ticket.number, None) is not None:
            assert ticket.row is not None
            self._cache.close(ticket.row)

    def give_up_ready(self, keep: Row | None = None) -> bool:
        """Let pages be evicted that one load has brought and that wait for their prompts, but for those of `keep`: of
        several loads that whose prompts come last. Whether there was any."""
        ready = [ticket for ticket in self._ready.values() if keep is None or keep not in ticket.waiting]
        if ready:
            last = max(ready, key=lambda ticket: min(row.rank for row in ticket.waiting))
            for row in [*last.waiting]:
                self.leave(row)
        return bool(ready)

    # The disk behind it

    def chain(self, row: Row, most: int) -> list[Copy]:
        """Copies of the pages with which a prompt begins, `most` at the most, all of them written. What was compared
        once is known until the request goes on: the head of the queue may wait for many plans."""
        copies = self._chains.get(row) or []
        while copies and copies[-1].gone:  # what others continue is never forgotten before them
            copies.pop()
        parent = copies[-1] if copies else None
        for index in range(len(copies), most):
            copy = self._copies.get(row.keys[index])
            # Compared with the whole prompt, like the entries of the device: a key alone only finds candidates.
            if copy is None or not copy.written or copy.parent is not parent or copy.tokens != row.tokens.page(index):
                break
            copies.append(copy)
            parent = copy
        if copies:
            self._chains[row] = copies
        return copies[:most]

    def receive(self, row: Row, first: int, end: int) -> list[Copy]:
        """Slots for the pages of a prompt from index `first` to `end` (exclusive), as far as there are any, to be
        filled from the disk; `chain` has those before. They are pinned until `received`."""
        parent = self._copies[row.keys[first - 1]] if first else None
        if parent is not None:
            parent.pins += 1
        copies: list[Copy] = []
        for index in range(first, end):
            slot = None if row.keys[index] in self._copies else self._slot()
            if slot is None:
                break
            before = copies[-1] if copies else parent
            copies.append(Copy(row.keys[index], row.tokens.page(index), before, slot, pins=1, number=index + 1))
        self._copies.update((copy.key, copy) for copy in copies)
        self._summary.add(copies, first + 1)
        if copies:
            self._use(copies[-1])
        if parent is not None:
            self.unpin(parent)
        return copies

    def received(self, copies: Sequence[Copy], bad: Sequence[Copy]) -> None:
        """Pages have come from the disk; the `bad` ones, and those that continue them, are forgotten."""
        self._drop(bad)
        for copy in copies:
            copy.written = True
            self.unpin(copy)

    # Both

    def _begin(self, copies: list[Copy], moves: Moves) -> Ticket:
        ticket = self._tickets[moves.ticket] = Ticket(moves.ticket, set(range(self._ranks)), copies)
        self._outbox.append(moves)
        return ticket

    def copying(self, ticket: int) -> bool:
        """Whether any rank has not answered this ticket."""
        return ticket in self._tickets

    def moved(self, message: Moved) -> list[Row]:
        """Take in that a rank is done. The requests that waited for it, where it was the last one of a load, whether
        the load succeeded or not. RuntimeError for an answer that nobody waits for: scheduler and rank disagree."""
        ticket = self._tickets.get(message.ticket)
        if ticket is None or message.rank not in ticket.missing:
            raise RuntimeError(f"rank {message.rank} answers ticket {message.ticket}, which does not wait for it")
        ticket.missing.remove(message.rank)
        ticket.lost |= message.lost
        ticket.seconds = max(ticket.seconds, message.seconds)
        if ticket.missing:
            return []
        del self._tickets[ticket.number]
        if ticket.lost:
            self.counters.lost += len(ticket.copies)
            self._drop(ticket.copies)
        for copy in ticket.copies:
            self.unpin(copy)
        if ticket.row is not None:
            self._loads -= 1
            return self._loaded(ticket, ticket.row)
        self._saves -= 1
        if not ticket.lost:
            self.counters.saved += len(ticket.copies)
            for copy in ticket.copies:
                copy.written = True
            if self.disk is not None:
                self.disk.written(ticket.copies)
        return []

    def _loaded(self, ticket: Ticket, row: RowPages) -> list[Row]:
        waited = [*ticket.waiting]
        if ticket.lost:
            self._cache.abandon(row)
            for one in waited:
                del self._ticket_of[one]
            return waited
        assert ticket.tokens is not None
        self.counters.loaded += len(ticket.copies)
        self.counters.load_seconds += ticket.seconds
        before = len(row.pages) - len(ticket.copies)
        self._cache.register(row, ticket.tokens, len(row.pages))
        for entry, copy in zip(row.chain[before:], ticket.copies, strict=False):
            if not has_copy(entry) and not copy.gone:
                entry.copy = copy
        if waited:
            self._ready[ticket.number] = ticket
        else:
            self._cache.close(row)
        return waited

    def doubt(self, entries: Sequence[Entry]) -> None:
        """Hear that these entries of the device may hold no numbers: their copies are forgotten, with what continues
        them, and loads under way of such are lost."""
        self._drop([entry.copy for entry in entries if entry.copy is not None])
        if self.disk is not None:
            self.disk.doubt([entry.key for entry in entries])

    def _drop(self, copies: Sequence[Copy]) -> None:
        dropped: set[Copy] = set()
        for copy in copies:
            if not copy.gone:
                tree = [one for one in self._summary.behind(copy) if isinstance(one, Copy)]
                self._forget(tree)
                dropped.update(tree)
        for ticket in self._tickets.values():
            ticket.lost |= not dropped.isdisjoint(ticket.copies)


def has_copy(entry: Entry) -> bool:
    """Whether an entry of the device is in host memory, or on its way there."""
    return entry.copy is not None and not entry.copy.gone
