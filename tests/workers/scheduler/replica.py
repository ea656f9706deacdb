"""A scheduler and a simulated worker, stepped by hand, and what must hold between any two calls."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace as replace_config
from itertools import count
from typing import TypeVar

from msgspec.structs import replace
from simulated_worker import SimulatedWorker, alone, slots_of

from kernels.page import NULL_PAGE, PAGE_TOKENS, GlobalPage
from tests.workers.widths import restless
from workers.protocol.messages import Request, RequestOutput
from workers.protocol.plan import SamplingParams, StepPlan
from workers.protocol.request import Prompt
from workers.protocol.tiers import FOUND, DiskFound, DiskMoved, DiskMoves, Moved, Moves, check_of
from workers.scheduler import Scheduler, SchedulerConfig, max_pages_per_row
from workers.scheduler import pages as placing
from workers.scheduler.disk_index import NONE
from workers.scheduler.disk_tier import DiskTier
from workers.scheduler.host_tier import HostTier
from workers.scheduler.pages import PagePool
from workers.scheduler.sequence import Phase

Answer = TypeVar("Answer", Moved, DiskMoved)


class Replica:
    """Checks every plan and every output as it comes."""

    def __init__(self, config: SchedulerConfig, agree: float = 0.7, seed: int = 0, found: bytes = b"") -> None:
        """`found`: on disk at the start, as in `DiskFound`."""
        self.config = config
        self.now = 0.0
        """Seconds of the scheduler's clock."""
        self.scheduler = Scheduler(config, lambda: self.now)
        self.scheduler.disk_found(DiskFound(found, last=True))
        self.passed_over = watch_owners(self.scheduler._rows.pool, config.cache_shards)
        """Owners that had no free page when one of theirs was wanted."""
        if config.adaptive and not config.step_times:
            # Nothing says what pays: then any width may follow any other.
            self._random = random.Random(seed)
            restless(self.scheduler, self._width)
        rows = max_pages_per_row(config.max_context, config.width, config.pipeline)
        self.worker = SimulatedWorker(config.slots, config.pages, config.width, rows, agree, seed)
        self.launched: deque[StepPlan] = deque()
        self.channel: deque[StepPlan | Moves | DiskMoves] = deque()
        """What the ranks were told and have not come to."""
        self.answers: list[Moved] = []
        """Of ranks that are done, or will be, with copies of pages."""
        self.disk_answers: list[DiskMoved] = []
        """Of ranks that are done, or will be, with copies to or from the disk."""
        self.bad: dict[int, set[int]] = {}
        """By ticket: slots of the disk that fail."""
        self.losses = 0.0
        """How often a copy fails."""
        self.lost: dict[int, bool] = {}
        self.page_s: float | None = None
        """Seconds that a page takes to be read from disk or written; none: a ticket takes a millisecond."""
        self.chance = random.Random(seed)
        self.plans: list[StepPlan] = []
        self.overtaken = 0
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, str] = {}
        self.outputs: dict[str, list[RequestOutput]] = {}

    def _width(self) -> int:
        if not self.plans or self._random.random() < 0.2:
            return self._random.randint(1, self.config.width)
        return self.plans[-1].width

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        priority: int = 0,
        key: str = "",
        weight: float = 1.0,
        salt: bytes = b"",
        **sampling: object,
    ) -> RequestOutput | None:
        """The refusal of this request; one that lost its place to it is finished as `gave way`."""
        ids = prompt if isinstance(prompt, Prompt) else tuple(prompt)
        params = SamplingParams(**sampling)  # type: ignore[arg-type]
        request = Request(request_id, ids, params, priority, key, weight, salt=salt)
        refusal = self.scheduler.add(request)
        if refusal is not None:
            assert (refusal.tokens, refusal.finish) == ((), None)
            if refusal.request_id == request_id:
                return refusal
            gone = self.requests[refusal.request_id]
            assert refusal.overloaded
            assert gone.key != key
            assert not self.outputs[refusal.request_id]
            assert gone.priority >= priority
            self.finish[refusal.request_id] = "gave way"
        self.requests[request_id] = request
        self.tokens[request_id], self.outputs[request_id] = [], []
        return None

    def cancel(self, request_id: str) -> None:
        self._deliver(self.scheduler.cancel(request_id))

    def plan(self) -> StepPlan | None:
        in_flight = len(self.launched)
        plan = self.scheduler.plan()
        self.channel.extend(self.scheduler.moves())
        if plan is not None:
            self.channel.append(plan)
            assert in_flight < self.config.pipeline
            assert plan.layout.tokens <= self.config.token_budget
            last = self.plans[-1] if self.plans else None
            assert plan.width <= 1 + (last.drafts if last else self.config.width - 1)
            self.launched.append(plan)
            self.plans.append(plan)
            self.check_order(plan)
        else:
            under_way = self.answers or self.channel or self.disk_answers
            left = "nothing is in flight, nothing can be planned, and work is left"
            assert in_flight or under_way or self.scheduler.idle, left
        self.scheduler.save_pages()
        self.channel.extend(self.scheduler.moves())
        return plan

    def apply(self) -> tuple[RequestOutput, ...]:
        self.move()
        plan = self.launched.popleft()
        assert self.channel.popleft() is plan
        outputs = self.scheduler.apply(self.worker.execute(plan))
        self._deliver(outputs)
        return outputs

    def move(self) -> None:
        """Let the ranks copy what they are told before the next plan."""
        while self.channel and isinstance(moves := self.channel[0], Moves | DiskMoves):
            self.channel.popleft()
            if isinstance(moves, DiskMoves):
                self.worker.move_on_disk(moves)
                bad = {slot for slot in slots_of(moves) if self.chance.random() < self.losses}
                self.bad[moves.ticket] = bad
                self.disk_answers += [DiskMoved(rank, moves.ticket) for rank in range(self.config.ranks)]
                continue
            self.worker.move(moves)
            lost = [self.chance.random() < self.losses for _ in range(self.config.ranks)]
            self.answers += [Moved(rank, moves.ticket, fails) for rank, fails in enumerate(lost)]
            self.lost[moves.ticket] = any(lost)

    def answer(self, rank: int | None = None) -> None:
        """Let one rank say that it is done, whichever where none is given."""
        answer = self._of(rank, self.answers)
        if all(other.ticket != answer.ticket for other in self.answers):
            self.worker.loaded(answer.ticket, lost=self.lost.pop(answer.ticket))
        self.scheduler.moved(answer)

    def answer_of_disk(self, rank: int | None = None) -> None:
        """Let one rank say that it is done, whichever where none is given. The last one names what is bad."""
        answer = self._of(rank, self.disk_answers)
        if all(other.ticket != answer.ticket for other in self.disk_answers):
            pages = len(slots_of(self.worker.on_disk[answer.ticket][0]))
            bad = self.worker.moved_on_disk(answer.ticket, self.bad.pop(answer.ticket))
            seconds = 0.001 if self.page_s is None else self.page_s * pages
            answer = replace(answer, bad=tuple(bad), seconds=seconds)
        self.scheduler.disk_moved(answer)

    def _of(self, rank: int | None, answers: list[Answer]) -> Answer:
        """Take any answer of a rank, or of any rank."""
        places = [place for place, answer in enumerate(answers) if rank in (None, answer.rank)]
        return answers.pop(self.chance.choice(places))

    def start_again(self) -> Replica:
        """A replica that finds on disk what this one has left there; this one ends in the middle of everything."""
        for moves, content in self.worker.on_disk.values():
            for page, was in zip(moves.saves, content, strict=True):  # some are done, and some not
                if self.chance.random() < 0.5:
                    self.worker.disk[page.slot] = page, was
                elif self.chance.random() < 0.5:
                    self.worker.disk.pop(page.slot, None)
        serial = 1 + max((page.serial for page, _ in self.worker.disk.values()), default=0)
        headers = sorted((page.serial, slot, page) for slot, (page, _) in self.worker.disk.items())
        entries = [
            FOUND.pack(slot, page.number, check_of(page.tokens), serial, page.key, page.parent)
            for serial, slot, page in headers
        ]
        config = replace_config(self.config, disk_serial=serial)
        again = Replica(config, self.worker.agree, self.chance.randrange(1000), b"".join(entries))
        again.worker.disk = self.worker.disk
        return again

    def step(self) -> bool:
        """Plan as far as allowed, take in one result or answer; False when all is done."""
        while self.plan() is not None:
            pass
        self.move()
        if self.answers and (not self.launched or self.chance.random() < 0.5):
            self.answer()
        elif self.disk_answers and (not self.launched or self.chance.random() < 0.3):
            self.answer_of_disk()
        elif self.launched:
            self.apply()
        else:
            return False
        return True

    def run(self, most: int = 20_000) -> None:
        for _ in range(most):
            if not self.step():
                assert self.scheduler.idle
                return
        raise AssertionError(f"not done after {most} steps")

    def _deliver(self, outputs: tuple[RequestOutput, ...]) -> None:
        assert len({output.request_id for output in outputs}) == len(outputs)
        for output in outputs:
            name = output.request_id
            assert name not in self.finish, f"output of {name} after its end"
            assert output.tokens or output.finish == "cancelled" or output.failed
            if output.failed:
                assert output.finish is None
                self.finish[name] = "failed"
            self.tokens[name] += output.tokens
            self.outputs[name].append(output)
            if output.finish is not None:
                self.finish[name] = output.finish

    def check_tokens(self) -> None:
        """Every request got what it would get alone; a cancelled one got a beginning of that."""
        for name, request in self.requests.items():
            tokens, reason = alone(request, self.config.max_context)
            if self.finish.get(name) in ("stop", "length"):
                assert (self.tokens[name], self.finish[name]) == (tokens, reason), name
            else:
                assert self.tokens[name] == tokens[: len(self.tokens[name])], name
        self.check_scores()

    def check_scores(self) -> None:
        """Check that a request which asked for them has all log-probabilities of its prompt, each of its own token,
        with its first output."""
        for name, request in self.requests.items():
            first, *others = [output for output in self.outputs[name] if output.tokens] or [None]
            assert all(output.prompt is None for output in others)
            # Of a continued request they came with an output of the engine before.
            if first is None or request.sampling.prompt_logprobs < 0 or request.done:
                assert first is None or first.prompt is None
                continue
            assert first.prompt is not None
            entries = list(first.prompt.entries())
            assert [(-chosen, place) for chosen, place, _, _ in entries] == list(zip(request.prompt[1:], count(1)))
            assert first.cached_tokens == 0, "positions that are cached have no logits"

    def check_pages(self) -> None:
        """No page leaked, owned twice, or open to writes while others may read it."""
        scheduler = self.scheduler
        pool, cache = scheduler._rows.pool, scheduler._rows.cache
        rows = [*scheduler._rows.prefilling, *scheduler._rows.decoding]
        held = Counter(page for row in rows for page in row.pages.pages)
        if (tier := scheduler._rows.tier) is not None:
            check_tier(tier, scheduler._rows.disk)
            if scheduler._rows.disk is not None:
                check_disk(scheduler._rows.disk)
            for ticket in [*tier._tickets.values(), *tier._ready.values()]:
                held.update(ticket.row.pages if ticket.row is not None else ())
        free, unheld = [page for of_owner in pool._free for page in of_owner], set(cache._unheld)
        owners = range(self.config.cache_shards)
        assert all(owner_of(page, len(owners)) == owner for owner in owners for page in pool._free[owner])
        available = Counter(owner_of(page, len(owners)) for page in {*free, *unheld})
        assert pool._available == [available[owner] for owner in owners]
        assert pool.free_count == len(free)
        assert len(set(free)) == len(free)
        assert not set(free) & set(held)
        assert not unheld & (set(free) | set(held))
        assert {*free, *held, *unheld} == set(range(1, self.config.pages))
        assert all(pool.holders(page) == held[page] for page in range(1, self.config.pages))
        assert cache._of_page.keys() >= unheld
        assert not set(cache._of_page) & set(free)
        assert {e.page: e.key for e in cache._entries.values()} == {p: e.key for p, e in cache._of_page.items()}
        if pool.in_pieces:
            for row in rows:
                check_pieces([owner_of(page, len(owners)) for page in row.pages.pages], len(owners))
        for row in rows:
            sampled = row.tokens.length > row.goal
            first_write = row.tokens.length - 1 if sampled else max(row.write_from, len(row.pages.chain) * PAGE_TOKENS)
            for page in row.pages.pages[first_write // PAGE_TOKENS :]:
                assert held[page] == 1, "a page that will be written is shared"
                assert not cache.is_cached(page), "a page that will be written can be found"
            assert len(row.pages.pages) <= max_pages_per_row(
                self.config.max_context, self.config.width, self.config.pipeline
            )

    def check_order(self, plan: StepPlan) -> None:
        """Check that nobody is overtaken on the way to a slot, except those that wait for a page which this very plan
        fills; and then a slot is left for them."""
        scheduler = self.scheduler
        filled = {
            key
            for sequence, row in zip(scheduler._flights[-1].prefill, plan.prefill, strict=True)
            for key in sequence.keys[row.start // PAGE_TOKENS : (row.start + len(row.tokens)) // PAGE_TOKENS]
        }
        slots = {admission.slot for admission in plan.admissions}
        last = max((s.rank for s in scheduler._live.values() if s.slot in slots), default=(-(2**63), 0.0, 0))
        overtaken = [s for s in scheduler._live.values() if s.phase is Phase.WAITING and s.rank < last]
        assert all(filled.intersection(s.keys) for s in overtaken)
        assert len(overtaken) <= len(scheduler._rows.free_slots)
        self.overtaken += len(overtaken)

    def check_books(self) -> None:
        """Slots, queue and statistics agree with the requests."""
        scheduler = self.scheduler
        live = list(scheduler._live.values())
        waiting = [s for s in live if s.phase is Phase.WAITING]
        loading = [s for s in live if s.phase is Phase.LOADING]
        stats = scheduler.stats()
        assert len(waiting) == len(scheduler._rows.queue)
        assert stats.waiting == len(waiting) + len(loading)
        assert set(loading) == set(scheduler._rows.loading)
        kept = list(scheduler._rows.queue)
        assert kept == sorted(waiting, key=lambda s: s.rank), "others are kept than those that wait"
        assert scheduler._rows.queue.tokens == sum(s.tokens.length for s in waiting)
        assert stats.running == len(scheduler._rows.prefilling) + len(scheduler._rows.decoding) <= self.config.slots
        in_flight = {s for flight in scheduler._flights for s in (*flight.decode, *flight.prefill)}
        holders = [s.slot for s in {*live, *in_flight} if s.slot >= 0]
        assert sorted([*holders, *scheduler._rows.free_slots]) == list(range(self.config.slots))
        assert stats.pages_total == self.config.pages - 1
        assert 0 <= stats.pages_free <= stats.pages_total

    def check_rest(self) -> None:
        """Check that, with nothing running, all pages are available, and every cached page continues one that is
        cached."""
        stats = self.scheduler.stats()
        assert stats.pages_free == stats.pages_total
        assert stats.running == stats.waiting == stats.prefill_backlog == 0
        cache = self.scheduler._rows.cache
        order = {entry.key: index for index, entry in enumerate(cache._unheld.values())}
        for entry in cache._entries.values():
            if entry.parent is not None:
                assert cache._entries.get(entry.parent.key) is entry.parent
                assert order[entry.key] < order[entry.parent.key], "evicted before what continues it"


def owner_of(page: int, shards: int) -> int:
    """Return the rank on which page 1 + owner, and every so many pages behind it, lie."""
    return list(range(shards))[page % shards - 1]


def check_pieces(owners: list[int], shards: int) -> None:
    """Check that a row's pieces go round the ranks without exceptions."""
    size = placing.PIECE_PAGES
    for column, owner in enumerate(owners):
        assert owner == (owners[0] + column // size) % shards, f"page number {column} of a row on ranks {owners}"


def watch_owners(pool: PagePool, shards: int) -> Counter[int]:
    """Check of every page that is taken from now on that it lies where it should: on the neighbour of the page before
    it, or where most pages are available, or behind those that have none. Return how often an owner had none."""
    take, passed_over = pool.take, Counter[int]()

    def checked(after: int = NULL_PAGE, *, owner: int | None = None, overwritten: bool = False) -> GlobalPage:
        if owner is not None:
            page = take(owner=owner, overwritten=overwritten)
            assert owner_of(page, shards) == owner
            return page
        unheld = Counter(owner_of(page, shards) for page in range(1, pool.total + 1) if not pool.holders(page))
        free = [len(pages) for pages in pool._free]
        page = take(after, overwritten=overwritten)
        owner = owner_of(page, shards)
        if after == NULL_PAGE:
            first = next(o for o in range(shards) if unheld[o] == max(unheld.values()))
        else:
            first = (owner_of(after, shards) + 1) % shards
        skipped = [(first + step) % shards for step in range((owner - first) % shards)]
        assert not any(free[o] for o in skipped), f"page {page} of rank {owner} behind {after}, and {skipped} have some"
        passed_over.update(skipped)
        return page

    pool.take = checked  # type: ignore[method-assign]
    return passed_over


def check_tier(tier: HostTier, disk: DiskTier | None = None) -> None:
    """No slot of host memory leaked or used twice; every copy continues one that is there; who is to be evicted is
    found."""
    copies = list(tier._copies.values())
    tickets = [*tier._tickets.values(), *(disk._tickets.under_way.values() if disk is not None else ())]
    pins = Counter(copy for ticket in tickets for copy in ticket.copies)
    pins.update(copy for kept in (disk._loads._kept.values() if disk is not None else ()) for copy in kept)
    slots = [copy.page for copy in copies] + [copy.page for copy in pins if copy.gone]
    assert sorted([*slots, *tier._free, *tier._unpinned]) == list(range(tier.slots))
    assert all(slot < tier.usable for slot in [*slots, *tier._free])
    assert tier._unpinned == list(range(tier.slots - 1, tier.usable - 1, -1))
    for copy in copies:
        assert copy.pins == pins[copy]
        assert not copy.gone
        if copy.parent is not None:
            assert tier._copies.get(copy.parent.key) is copy.parent
        if not copy.children:
            assert (copy.used, copy.key) in tier._ends
    for entry in tier._cache._entries.values():
        if entry.copy is not None and not entry.copy.gone:
            assert entry.copy.tokens == entry.tokens
            assert tier._copies[entry.key] is entry.copy
    waiting = (*tier._tickets.values(), *tier._ready.values())
    assert set(tier._ticket_of) == {row for ticket in waiting for row in ticket.waiting}


def check_disk(disk: DiskTier) -> None:
    """No slot of the disk leaked or used twice; every page continues one that is there; who is to be evicted is
    found."""
    index, tickets = disk.index, list(disk._tickets.under_way.values())
    held = {slot for slot in range(index.slots) if index._number[slot]}
    assert {index._key[slot]: slot for slot in held} == {
        key: slot for slots in index._slots_of for key, slot in slots.items()
    }
    assert index.held == len(held)
    pins = Counter(slot for ticket in tickets for slot in ticket.slots)
    pins.update(disk._erase)
    assert pins == index._pins
    if disk._settled:
        assert sorted([*held, *index._free, *(slot for slot in pins if slot not in held)]) == list(range(index.slots))
    ends = set(index._ends)
    for slot in held:
        parent = index._parent[slot]
        assert index._number[slot] == (1 if parent == NONE else index._number[parent] + 1)
        assert parent == NONE or (parent in held and slot in index._after(parent))
        if index._child[slot] == NONE:
            assert (index._used[slot], slot) in ends
        assert index._complete[slot] or pins[slot]
    loads = disk._loads
    assert set(loads._ticket_of) == {row for ticket in tickets for row in ticket.waiting}
    assert all(row.phase is Phase.WAITING for row in loads._kept if row not in loads._ticket_of | loads._queued)
    assert loads._ticket_of.keys().isdisjoint(loads._queued)
