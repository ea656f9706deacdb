"""The disk behind host memory: what leaves that is found here, read back into host memory, and goes on from there.

- **Saves** (`DiskSaves`): pages in host memory are copied to the disk, as many as it may be worn out for.
- **Loads** (`DiskLoads`): requests wait for pages that are read back, no longer than computing them would take.
- **Failures.** Every page that comes back was compared with its checksum, tokens and keys. What does not agree is
  forgotten, with all that continues it, and erased. If a disk fails, its rank says so, and nothing is copied any more.
- **Starts.** What is on the disk from before is taken in turn by turn.

All copies go by tickets that ranks answer (`DiskTickets`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from workers.protocol.tiers import FOUND, DiskFound, DiskMoved, DiskMoves
from workers.scheduler.disk_index import NONE, DiskIndex
from workers.scheduler.disk_loads import DiskLoads
from workers.scheduler.disk_saves import DiskSaves
from workers.scheduler.disk_tickets import DiskCounters, DiskTickets
from workers.scheduler.host_tier import HostTier
from workers.scheduler.prefix_summary import Copy
from workers.scheduler.read_pace import LONGEST_S, ReadPace
from workers.scheduler.sequence import Sequence as Row
from workers.scheduler.write_budget import WriteBudget

logger = logging.getLogger("latentserve.tiers")

SETTLED_A_TURN: Final = 65536
"""Slots of which is then seen at once whether they are free."""
FOUND_A_TURN: Final = 512
"""Pages that were on disk at the start and are taken in at once, in some milliseconds."""


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
        self._clock = clock
        self._tickets = DiskTickets(ranks, clock)
        self._pace = ReadPace(page_s, clock, token_s)
        self._saves = DiskSaves(host, self.index, self._tickets, self.counters, budget, serial)
        self._loads = DiskLoads(host, self.index, self._tickets, self.counters, self._pace, clock, least)
        self._erase: list[int] = []
        self._found: deque[tuple[bytes, bool]] = deque()
        self._settling = False
        self._settled = False
        """Whether all that was on disk at the start is known."""
        host.disk = self

    @property
    def waiting(self) -> list[Row]:
        """Requests whose pages are being read, or will be."""
        return self._loads.waiting

    @property
    def busy(self) -> bool:
        """Whether there is work for `turn` that waits for nobody."""
        return bool(self._found) or self._settling

    @property
    def patience_s(self) -> float | None:
        """Seconds until the first request that waits has waited for long enough; None where none waits."""
        return self._loads.patience_s

    def report(self) -> list[bytes]:
        """Keys that tell routers what is here."""
        return [] if self.failed else self.index.report()

    def take_moves(self) -> list[DiskMoves]:
        """What every rank must be told now; each is given once."""
        return self._tickets.take_moves()

    # From host memory

    def written(self, copies: Sequence[Copy]) -> None:
        """Hear that pages are in host memory now."""
        for copy in copies:
            self._saves.offer(copy, again=False)

    def used(self, copy: Copy) -> None:
        """Hear that a prompt has begun with the pages up to this one, which were there before."""
        slot = self.index.slot(copy.key)
        if slot != NONE:
            self.index.use(slot)
        else:
            self._saves.offer(copy, again=True)

    def evicted(self, copy: Copy) -> None:
        """Hear that a page has left host memory, as its slot is needed for another one."""
        self._saves.evicted(copy)

    def doubt(self, keys: Sequence[bytes]) -> None:
        """Hear that the pages of these keys may hold no numbers: they are forgotten, with all that continue them, and
        loads under way of such are not used."""
        self._remove([slot for key in keys if (slot := self.index.slot(key)) != NONE])

    def copying(self, copy: Copy) -> bool:
        """Whether a page is being copied to the disk or from it, and the disk has not failed."""
        return not self.failed and any(copy in ticket.copies for ticket in self._tickets.under_way.values())

    def turn(self) -> None:
        """Take in a part of what was on disk at the start, and have pages saved and erased."""
        self._take_in()
        self._begin_erasures()
        if self._settled and not self.failed:
            self._saves.turn()

    # For requests

    def load(self, row: Row, device: int, most: int, *, ahead: bool = False) -> bool:
        """Whether the request waits from now on for pages of its prompt, up to page number `most`, to be read into host
        memory, or for room to read them. `device`: pages that it has on the device. `ahead`: no slot is free for it, so
        that what there is no room for is left until one is.

        It is looked at again when a load has ended: there may be more of its prompt, or room where there was none. But
        in all it waits no longer than computing would have taken."""
        return not self.failed and self._loads.load(row, device, most, ahead=ahead)

    def looks_ahead(self, row: Row) -> bool:
        """Whether a request for which no slot is free should be looked at: once, and again when a load has ended."""
        return not self.failed and self._loads.looks_ahead(row)

    def leave(self, row: Row) -> None:
        """A request waits no longer, neither for a load nor with its pages: it goes on, or has ended."""
        self._loads.leave(row)

    def overdue(self) -> list[Row]:
        """Requests that have waited for as long as computing would have taken: they wait no longer."""
        if not self._tickets.under_way:
            return []
        now = self._clock()
        late = self._loads.overdue(now)
        silent = 0.0 if self.failed else self._tickets.silent_s(now)
        if silent > LONGEST_S:
            logger.warning(
                "the disk behind host memory has not answered for %.0f s: it is not used any more, and prompts that "
                "are on it are computed",
                silent,
            )
            self._fail()
        return late

    # From ranks

    def moved(self, message: DiskMoved) -> list[Row]:
        """Take in that a rank is done. The requests that waited for it, where it was the last one. RuntimeError for an
        answer that nobody waits for: scheduler and rank disagree."""
        ticket = self._tickets.moved(message)
        if message.off:
            self._fail()
        if ticket is None:
            return []
        if not ticket.copies:  # an erasure
            self.index.free(ticket.slots)
            return []
        if ticket.loads:
            good = self._loads.received(ticket)
            self._drop(ticket.bad)
            self.index.free(ticket.slots)
            return self._loads.ended(ticket, good)
        self._saves.ended(ticket)
        self._drop(ticket.bad)
        self.index.free(ticket.slots)
        return []

    def _fail(self) -> None:
        self.failed = True
        self._saves.give_up()

    # What is forgotten

    def _drop(self, slots: Iterable[int]) -> None:
        self.counters.lost += len(self._remove(slots))

    def _remove(self, slots: Iterable[int]) -> list[int]:
        """Forget pages, with all that continue them, and have their headers erased. Their slots."""
        removed = [one for slot in slots for one in self.index.remove(slot)]
        self._erase += removed
        self._tickets.spoil(removed)
        return removed

    def _begin_erasures(self) -> None:
        """Have headers erased that another start would find; of those that nobody is still writing."""
        ready = [slot for slot in self._erase if self.index.pins(slot) == 1]
        if ready:
            self._erase = [slot for slot in self._erase if self.index.pins(slot) > 1]
            self._tickets.begin_erasures(ready)

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
