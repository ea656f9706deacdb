"""The requests that have a slot and pages, and every change of that."""

from __future__ import annotations

import heapq
import time
from bisect import insort
from collections.abc import Callable
from itertools import chain, takewhile
from operator import attrgetter

from kernels.page import PAGE_TOKENS, pages_for
from workers.protocol.plan import PageGrant
from workers.protocol.tiers import DiskMoved, Moved
from workers.scheduler.config import SchedulerConfig
from workers.scheduler.disk_tier import DiskTier
from workers.scheduler.host_tier import HostTier
from workers.scheduler.pages import PagePool
from workers.scheduler.prefix import PrefixCache
from workers.scheduler.prefix_summary import Copy, Entry
from workers.scheduler.queue import WaitingQueue
from workers.scheduler.sequence import Phase, Sequence
from workers.scheduler.snapshots import Snapshot, Snapshots
from workers.scheduler.write_budget import WriteBudget

by_rank = attrgetter("rank")
by_slot = attrgetter("slot")


class Rows:
    """The requests of a replica in their phases: waiting, loading, prefilling, decoding, leaving."""

    def __init__(
        self,
        config: SchedulerConfig,
        clock: Callable[[], float] = time.monotonic,
        token_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`token_s`: seconds that computing a token of a prompt takes, by now."""
        self.pool = PagePool(config.pages, config.cache_shards, in_pieces=config.in_pieces)
        self.cache = PrefixCache(self.pool, config.prefix_cache, config.prefix_sample)
        self.tier: HostTier | None = None
        """Host memory behind the pages, where there is any."""
        if config.host_pages and config.prefix_cache:
            self.tier = HostTier(
                self.cache,
                config.host_pages,
                config.ranks,
                pins=config.pins_pages,
                reported=config.tier_sample,
                batch=config.save_batch,
                savers=config.savers,
                shards=config.cache_shards,
                least=config.load_least,
                token_s=token_s,
            )
        self.disk: DiskTier | None = None
        """The disk behind host memory, where there is one."""
        if self.tier is not None and config.disk_pages:
            self.disk = DiskTier(
                self.tier,
                config.disk_pages,
                config.ranks,
                WriteBudget(config.disk_writes_per_s, config.disk_writes_saved_up, clock),
                clock,
                reported=config.tier_sample,
                least=config.disk_least,
                page_s=config.disk_page_s,
                serial=config.disk_serial,
                token_s=token_s,
            )
        self.snapshots: Snapshots | None = None
        """Snapshots of rings beside the pages, where prompts need some to share those."""
        if config.snapshots and config.prefix_cache:
            self.snapshots = self.cache.snapshots = Snapshots(config.snapshots, config.snapshot_tokens)
        self.queue = WaitingQueue()
        self.free_slots = list(range(config.slots))  # a heap: the lowest slot first
        self.prefilling: list[Sequence] = []
        """Requests that are being prefilled, by rank."""
        self.decoding: list[Sequence] = []
        """Requests that decode, by slot."""
        self.preemptions = 0
        # Of the plan that is being made:
        self._filled: set[bytes] = set()  # keys of the pages that its chunks complete
        self._aside: list[Sequence] = []  # who waits for one of them
        self._kept = 0  # pages that those will need besides
        self._saved: list[tuple[Sequence, Snapshot]] = []  # snapshots that its chunks make
        self._loads = 0  # that it begins
        self.put_off = False
        """Whether the plan that was made last left a load to the next one."""
        self._config = config

    def enqueue(self, sequence: Sequence) -> None:
        """Let a request wait, with the tokens it has by now."""
        if self._config.prefix_cache:
            sequence.keys = sequence.tokens.keys()
        self.queue.push(sequence)

    def admit(self, suits: Callable[[int, int], bool]) -> Sequence | None:
        """Give the head of the queue a slot and the pages of its whole prompt; None when they are not there, or when it
        does not suit the step, which is asked with the entries that are cached of it, and the tokens left. It comes
        back waiting, and set aside until the plan is complete, when a row of this plan fills its next page: then it
        takes that page in the next plan instead of computing it again. Those behind it leave it its slot and pages.
        It never waits for anything but plans: rows before it have their chunks already. Whoever has to leave a part
        of its prompt for later mostly leaves no budget to admit anybody with; where chunks end at snapshots it may, and
        then the wait takes several plans.

        Where host memory has more of its prompt than the device, or the disk more than both, the head comes back
        loading: it lets others pass until its pages are there (`moved`, `read`). From disk they are read also while no
        slot is free.

        One page for each running row is left over, so that a newcomer is not preempted at once for their growth.
        """
        sequence = self.queue.head()
        if sequence is None:
            return None
        if len(self.free_slots) <= len(self._aside):
            return self._read_ahead(sequence)
        length, cache, most = sequence.tokens.length, self.cache, _most_cached(sequence)
        found = cache.match(sequence.tokens, sequence.keys, most)
        coming = list(takewhile(self._filled.__contains__, sequence.keys[len(found) : most]))
        saves: list[int] = []
        if self.snapshots is not None:
            boundary, leaves = self.snapshots.boundary, len(found) * PAGE_TOKENS
            if self._made_soon().isdisjoint(sequence.keys[len(found) : most]):
                coming = []  # no snapshot would come with them
            found = found[: self.snapshots.usable(found)]
            ends = {boundary(leaves), boundary(length - 1)}
            saves = sorted(end for end in ends if end > len(found) * PAGE_TOKENS)
        if not coming and self.disk is not None and self.disk.load(sequence, len(found), most):
            self.queue.pop()
            sequence.phase = Phase.LOADING
            return sequence
        if not coming and (copies := self._loadable(sequence, found, most)):
            return self._load(sequence, found, copies)
        pages = pages_for(length + self._config.draft_margin)
        if not self._there_is_room(sequence, found, pages - len(coming)):
            return None
        if coming:
            needed = cache.needed(found, pages) - len(coming)
            self._aside.append(self.queue.set_aside())
            self._kept += needed
            return sequence
        hit = len(found) * PAGE_TOKENS
        cursor = hit - 1 if hit and self._config.drafting else hit
        if not suits(cursor, length - cursor):
            return None
        self.queue.pop()
        sequence.phase = Phase.PREFILL
        sequence.slot = heapq.heappop(self.free_slots)
        sequence.pages = cache.open(found, pages)
        if self.tier is not None:
            self.tier.used(found)
            self.tier.leave(sequence)
        if self.disk is not None:
            self.disk.leave(sequence)
        sequence.capacity = sequence.pages.capacity
        sequence.goal = length
        sequence.cursor = cursor
        sequence.write_from = hit
        sequence.saves, sequence.snapshots, sequence.restore = saves, [], -1
        if self.snapshots is not None and found:
            sequence.snapshots.append(self.snapshots.use(found[-1]))
            sequence.restore = sequence.snapshots[0].number
        sequence.scores_from = sequence.scored
        sequence.upper = 0
        sequence.sound = False
        insort(self.prefilling, sequence, key=by_rank)
        return sequence

    def _read_ahead(self, sequence: Sequence) -> Sequence | None:
        """Let the head of the queue, for which no slot is free, have its pages read from disk meanwhile; None where
        there is nothing to read, or no room for it: what is read stays until a slot is free, and others need host
        memory meanwhile. Copies from host memory to the device take no time worth that, and pages that rows
        may need."""
        if self.disk is None or not self.disk.looks_ahead(sequence):
            return None
        most = _most_cached(sequence)
        found = len(self.cache.match(sequence.tokens, sequence.keys, most))
        if found < most and sequence.keys[found] in self._filled:
            return None
        if not self.disk.load(sequence, found, most, ahead=True):
            sequence.disk_asked = -1  # by then the device may have less of its prompt
            return None
        self.queue.pop()
        sequence.phase = Phase.LOADING
        return sequence

    def _there_is_room(self, sequence: Sequence, found: list[Entry], pages: int) -> bool:
        """Whether a row of `pages` pages, the first of which are `found`, finds the others. Those that were loaded for
        requests behind it in the queue are taken from them, if need be."""
        growth = len(self.decoding) + len(self.prefilling) + len(self._aside)
        growing = [row.pages for row in chain(self.decoding, self.prefilling)] if self.pool.in_pieces else []
        while not self.cache.has_room(found, pages, self._kept + growth, growing):
            # Its own come last: they may be twins of pages that another row has computed meanwhile.
            if self.tier is None or not (self.tier.give_up_ready(keep=sequence) or self.tier.give_up_ready()):
                return False
        return True

    def _loadable(self, sequence: Sequence, found: list[Entry], most: int) -> list[Copy]:
        return self.tier.loadable(sequence, found, most) if self.tier is not None else []

    def _load(self, sequence: Sequence, found: list[Entry], copies: list[Copy]) -> Sequence | None:
        """Let the head of the queue wait for pages of its prompt; None when there is no room for them yet."""
        assert self.tier is not None
        ticket = self.tier.under_way(copies)
        if ticket is None:
            if self._loads:  # of a long prompt it takes milliseconds to begin one
                self.put_off = True
                return None
            # Those that were loaded before and wait are behind it in the queue.
            if not self.tier.may_load(sequence) and not self.tier.give_up_ready(keep=sequence):
                return None
            if not self._there_is_room(sequence, found, len(found) + len(copies)):
                return None
        self.queue.pop()
        sequence.phase = Phase.LOADING
        if ticket is None:
            self._loads += 1
            self.tier.load(sequence, found, copies)
        else:
            self.tier.join(ticket, sequence, len(found))
        if self.disk is not None:
            self.disk.leave(sequence)  # the load pins what was kept for it
        return sequence

    def moved(self, message: Moved) -> bool:
        """Take in that a rank has copied pages: those who waited for them are queued again, at their old place.
        Return whether all ranks have now."""
        assert self.tier is not None, "nothing is copied where there is no host memory to copy to"
        for sequence in self.tier.moved(message):
            self.enqueue(sequence)
        return not self.tier.copying(message.ticket)

    def read(self, message: DiskMoved) -> None:
        """Take in that a rank has copied pages to or from the disk: those who waited for them are queued again."""
        assert self.disk is not None, "nothing is copied where there is no disk to copy to"
        for sequence in self.disk.moved(message):
            self.enqueue(sequence)

    def wait_no_longer(self) -> None:
        """Queue those again for whom the disk takes longer than computing would have taken."""
        if self.disk is not None:
            for sequence in self.disk.overdue():
                self.enqueue(sequence)

    @property
    def loading(self) -> list[Sequence]:
        """Requests that wait for pages of their prompts."""
        from_host = [] if self.tier is None else self.tier.waiting
        return from_host if self.disk is None else from_host + self.disk.waiting

    def filled(self, sequence: Sequence, start: int) -> None:
        """The plan has a chunk of its prompt, from `start` to its cursor."""
        self._filled.update(sequence.keys[start // PAGE_TOKENS : sequence.cursor // PAGE_TOKENS])

    def save(self, sequence: Sequence) -> int:
        """Number of the snapshot that the chunk makes which ends at the cursor of a prompt; -1 where it makes none."""
        if not sequence.saves or sequence.cursor != sequence.saves[0]:
            return -1
        assert self.snapshots is not None
        del sequence.saves[0]
        snapshot = self.snapshots.take()
        if snapshot is None:
            return -1
        self._saved.append((sequence, snapshot))
        return snapshot.number

    def _made_soon(self) -> set[bytes]:
        """Keys of the pages beside which prompts that are being prefilled make snapshots, in this plan or later."""
        ends = [(sequence, end) for sequence in self.prefilling for end in sequence.saves]
        ends += [(sequence, sequence.cursor) for sequence, _ in self._saved]
        return {sequence.keys[end // PAGE_TOKENS - 1] for sequence, end in ends}

    def begin_plan(self) -> None:
        """A plan is made now. It begins one load at the most."""
        self._loads, self.put_off = 0, False

    def planned(self, prefilled: list[Sequence]) -> None:
        """The plan, with these prompts, is complete: from the next one on the pages that it fills are there to read."""
        for sequence in prefilled:
            self.cache.register(sequence.pages, sequence.tokens, sequence.cursor // PAGE_TOKENS)
        for sequence, snapshot in self._saved:
            assert self.snapshots is not None
            last = sequence.cursor // PAGE_TOKENS - 1
            entries = sequence.pages.chain[last : last + 1]  # none where its pages are not cached
            self.snapshots.attach(snapshot, next(filter(self.cache.has, entries), None))
            sequence.snapshots.append(snapshot)
        self._saved.clear()
        for sequence in self._aside:
            self.queue.put_back(sequence)
        self._filled.clear()
        self._aside.clear()
        self._kept = 0

    def start_decoding(self, sequence: Sequence) -> None:
        """The last chunk of its prompt is planned."""
        self.prefilling.remove(sequence)
        sequence.phase = Phase.DECODE
        sequence.upper = sequence.goal
        insort(self.decoding, sequence, key=by_slot)

    def grow(self, sequence: Sequence, entries: int) -> tuple[PageGrant | None, bool]:
        """Pages for a decode row to hold `entries` cache entries. While there are too few, the latest arrival of the
        lowest priority loses its own; no grant when that was the row itself. Also whether anybody was preempted."""
        first = len(sequence.pages.pages)
        needed = pages_for(entries) - first
        preempted = False
        while not self.cache.can_extend(sequence.pages, needed):
            if self.tier is not None and self.tier.give_up_ready():
                continue
            last = max(chain(self.decoding, self.prefilling), key=by_rank)
            self.preempt(last)
            preempted = True
            if last is sequence:
                return None, True
        grant = PageGrant(sequence.slot, first, self.cache.extend(sequence.pages, needed))
        sequence.capacity = sequence.pages.capacity
        return grant, preempted

    def preempt(self, sequence: Sequence) -> None:
        """Take a running request's pages; what is complete stays in the prefix cache. It is computed again later."""
        sequence.given_up = tuple(sequence.pages.pages)
        self._stop_running(sequence, Phase.PREEMPTED)

    def start_again(self, sequence: Sequence) -> None:
        """A row was bad, perhaps for what it had read: it is computed again, alone."""
        self._mark_suspect(sequence)
        sequence.alone = sequence.void = True
        if sequence.phase is not Phase.PREEMPTED:
            self.preempt(sequence)

    def end_nonfinite(self, sequence: Sequence) -> None:
        """A row was bad, and its request is over."""
        self._mark_suspect(sequence)
        self.end(sequence)

    def _mark_suspect(self, sequence: Sequence) -> None:
        self.cache.mark_suspect(sequence.pages)
        self.cache.mark_given_up_suspect(sequence.given_up)
        for snapshot in sequence.snapshots:
            if not snapshot.sound:
                assert self.snapshots is not None
                self.snapshots.drop(snapshot)

    def end(self, sequence: Sequence) -> None:
        """A request is over: finished or cancelled."""
        if self.tier is not None:
            self.tier.leave(sequence)
        if self.disk is not None:
            self.disk.leave(sequence)
        if sequence.phase is Phase.WAITING:
            self.queue.remove(sequence)
        elif sequence.phase is Phase.LOADING:
            sequence.phase = Phase.ENDED
        else:
            self._stop_running(sequence, Phase.ENDED)

    def landed(self, sequence: Sequence, sampled: bool) -> None:
        """A step of this request was applied; its tokens are already taken in."""
        sequence.in_flight -= 1
        sequence.promised -= sampled
        if sequence.in_flight == 0 and sequence.phase in (Phase.ENDED, Phase.PREEMPTED):
            self._leave_slot(sequence)

    def _stop_running(self, sequence: Sequence, phase: Phase) -> None:
        """No further step is planned for it, and it gives its pages up. The slot stays its own while steps in flight
        have it."""
        if sequence.phase is Phase.PREFILL:
            self.prefilling.remove(sequence)
        elif sequence.phase is Phase.DECODE:
            self.decoding.remove(sequence)
        if phase is Phase.PREEMPTED or not sequence.sound:
            self.cache.distrust(sequence.pages)
        self.cache.close(sequence.pages)
        sequence.capacity = 0
        sequence.phase = phase
        if sequence.in_flight == 0:
            self._leave_slot(sequence)

    def _leave_slot(self, sequence: Sequence) -> None:
        """No step in flight uses the slot any more. A preempted request waits again, at its old place."""
        heapq.heappush(self.free_slots, sequence.slot)
        sequence.slot = -1
        if sequence.phase is Phase.PREEMPTED:
            self.preemptions += not sequence.void
            sequence.void, sequence.given_up = False, ()
            self.enqueue(sequence)


def _most_cached(sequence: Sequence) -> int:
    """Pages of a prompt that may be cached. At least the last token is computed: its logits are wanted. So are those of
    all tokens that are to be scored."""
    computed = sequence.scored if sequence.unscored else sequence.tokens.length - 1
    return 0 if sequence.alone else computed // PAGE_TOKENS
