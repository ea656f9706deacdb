"""Defects that tiered caches of other engines had, planted into this one: each check passes, and fails with its fault.

What the faults of the other checks of host memory are stands beside these, in `test_host_tier.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import disk_replica
import pytest
from host_replica import LONG, ask, loading, pinned, served, tiered
from replica import Replica
from workload import tokens

from workers.protocol.plan import PageGrant
from workers.protocol.tiers import DiskMoved, Moved
from workers.scheduler.disk_tickets import DiskTicket, DiskTickets
from workers.scheduler.host_tier import HostTier, has_copy
from workers.scheduler.pages import RowPages
from workers.scheduler.prefix import PrefixCache
from workers.scheduler.prefix_summary import Copy, Entry
from workers.scheduler.rows import Rows
from workers.scheduler.sequence import Sequence as Row

# Ranks that are not equally far


def answers_end_tickets_at_once(patch: pytest.MonkeyPatch) -> None:
    """Plant a fault: what one rank has copied counts as copied by all."""
    of_host, of_disk = HostTier.moved, DiskTickets.moved

    def moved(self: HostTier, told: Moved) -> list[Row]:
        if (ticket := self._tickets.get(told.ticket)) is None:
            return []
        ticket.missing = {told.rank}
        return of_host(self, told)

    def moved_on_disk(self: DiskTickets, told: DiskMoved) -> DiskTicket | None:
        if (ticket := self.under_way.get(told.ticket)) is None:
            return None
        ticket.missing = {told.rank}
        return of_disk(self, told)

    patch.setattr(HostTier, "moved", moved)
    patch.setattr(DiskTickets, "moved", moved_on_disk)


def steps(replica: Replica, count: int) -> None:
    """Steps without an answer of any rank."""
    for _ in range(count):
        replica.plan()
        if replica.launched:
            replica.apply()


def a_rank_loads_slowly() -> None:
    """The other has loaded a prompt long before, and a third request is served meanwhile."""
    replica = tiered(ranks=2, pages=30)
    first = tokens(600, seed=1)
    served(replica, "a", first)
    for seed in (2, 3, 4):
        served(replica, f"between {seed}", tokens(600, seed=seed))
    ask(replica, "c", first)
    steps(replica, 1)
    replica.move()
    replica.answer(rank=0)
    ask(replica, "d", tokens(70, seed=9))
    steps(replica, 10)
    assert replica.finish == {**dict.fromkeys(replica.requests.keys() - {"c"}, "length")}
    replica.answer(rank=1)
    replica.run()
    replica.check_tokens()
    replica.check_pages()
    assert replica.outputs["c"][0].cached_tokens == LONG


def a_rank_saves_slowly() -> None:
    """A prompt comes back when one rank of two has written its pages to host memory, and once more when both have."""
    replica = tiered(ranks=2)
    first = tokens(600, seed=1)
    for name, prompt in (("a", first), ("b", tokens(600, seed=2)), ("c", first)):
        ask(replica, name, prompt)
        for _ in range(20):
            steps(replica, 1)
            while any(answer.rank == 0 for answer in replica.answers):
                replica.answer(rank=0)
    assert replica.scheduler.stats().host_saved_pages == 0, "copies count that a rank has not made"
    assert replica.finish.keys() == {"a", "b", "c"}, "nobody waits for them"
    assert [replica.outputs[name][0].cached_tokens for name in "abc"] == [0, 0, 0]
    replica.run()
    served(replica, "d", tokens(600, seed=3))
    assert served(replica, "e", first) == LONG


def a_rank_reads_slowly_from_disk() -> None:
    replica = disk_replica.tiered(ranks=2)
    disk_replica.waiting(replica)
    replica.move()
    replica.answer_of_disk(rank=0)
    steps(replica, 10)
    assert "c" not in replica.finish
    replica.run()
    replica.check_tokens()
    assert replica.outputs["c"][0].cached_tokens == LONG


@pytest.mark.usefixtures("short_prompts_are_worth_a_load")
@pytest.mark.parametrize(
    ("check", "shows"),
    [
        (a_rank_loads_slowly, "prefix hit was never written"),
        (a_rank_saves_slowly, "copies count that a rank has not made"),
        (a_rank_reads_slowly_from_disk, "prefix hit was never written"),
    ],
)
def test_what_one_rank_has_copied_waits_for_the_slowest(
    check: Callable[[], None], shows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check()
    answers_end_tickets_at_once(monkeypatch)
    with pytest.raises(AssertionError, match=shows):
        check()


@pytest.mark.parametrize("slots", [(100, 20), (20, 100)])
def test_a_rank_with_less_host_memory_than_another_bounds_what_all_use(
    slots: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty slots of one rank hold two prompts of four, and the device has room for one."""

    def four_prompts() -> None:
        replica = pinned(tiered(pins_pages=True, ranks=2), *slots)
        found = [served(replica, f"{turn}", tokens(600, seed=seed)) for turn, seed in enumerate((0, 1, 2, 3, 2))]
        assert found == [0, 0, 0, 0, LONG]

    four_prompts()
    # A planted fault: slots are of use as soon as any rank has pinned them.
    monkeypatch.setattr(HostTier, "usable", property(lambda self: max(self._pinned)))
    with pytest.raises(AssertionError, match="slot 20 of host memory, of which a rank has 20"):
        four_prompts()


# Many loads for few pages


def twenty_come_back() -> Replica:
    """The device has room for three of them, and two at a time decode until they have thirteen pages each: as much as
    all of it, with one that is loaded ahead."""
    replica = tiered(pages=31, slots=2, width=1, token_budget=700, max_context=900, host_pages=400)
    prompts = [tokens(600, seed=seed) for seed in range(20)]
    for seed, prompt in enumerate(prompts):
        served(replica, f"first {seed}", prompt)
    for seed, prompt in enumerate(prompts):
        assert replica.add(f"again {seed}", [*prompt, 1], max_tokens=200) is None
    for _ in range(4):
        assert replica.plan() is None, "they are being loaded"
    assert len(replica.scheduler._rows.loading) == 3, "as many as there are pages for"
    replica.run()
    replica.check_tokens()
    replica.check_rest()
    assert [replica.outputs[f"again {seed}"][0].cached_tokens for seed in range(20)] == [LONG] * 20
    assert replica.scheduler.stats().preemptions == 0
    return replica


def keeps_what_was_loaded(self: HostTier, keep: Row | None = None) -> bool:
    """Plant a fault: who has its pages keeps them until it has a slot."""
    return False


honest_growth = Rows.grow


def preempts_for_loads(self: Rows, sequence: Row, entries: int) -> tuple[PageGrant | None, bool]:
    """Plant a fault: rows that decode give up theirs before what was loaded ahead is given up."""
    tier, self.tier = self.tier, None
    grown = honest_growth(self, sequence, entries)
    self.tier = tier
    return grown


@pytest.mark.parametrize(
    ("owner", "name", "fault", "shows"),
    [
        (HostTier, "give_up_ready", keeps_what_was_loaded, "nothing can be planned, and work is left"),
        (Rows, "grow", preempts_for_loads, "preemptions"),
    ],
)
def test_loads_ahead_neither_stop_a_full_device_nor_preempt(
    owner: type, name: str, fault: object, shows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(AssertionError, match=shows):
        twenty_come_back()


def test_twenty_prompts_come_back_to_a_device_with_room_for_three() -> None:
    twenty_come_back()


# Host memory that is smaller than the device's cache


def eight_pages_of_host_memory(pages: int) -> None:
    """Of each prompt of nine pages one finds no slot. Two of four pages each, which come behind these, are found in
    host memory when they have left the device."""
    replica = tiered(host_pages=8, pages=pages)
    assert [served(replica, f"long {seed}", tokens(600, seed=seed)) for seed in (1, 2)] == [0, 0]
    short = [tokens(260, seed=seed) for seed in (3, 4)]
    assert [served(replica, f"short {number}", prompt) for number, prompt in enumerate(short)] == [0, 0]
    cache = replica.scheduler._rows.cache
    cache.close(cache.open([], pages - 1, overwritten=True))
    found = [served(replica, f"again {number}", prompt) for number, prompt in enumerate(short)]
    assert found == [256, 256], "what came later is not saved"
    stats = replica.scheduler.stats()
    assert (stats.host_pages, stats.host_loaded_pages) == (8, 8)


honest_room = PrefixCache.has_room


def only_what_is_saved_may_leave(
    self: PrefixCache, found: Sequence[Entry], pages: int, left_over: int, growing: Sequence[RowPages] = ()
) -> bool:
    """Plant a fault: a page of the device is given away when host memory has it, and not before."""
    unsaved = sum(entry.sound and not has_copy(entry) for entry in self._unheld.values())
    return honest_room(self, found, pages, left_over + unsaved, growing)


def waits_for_a_slot_for_ever(self: HostTier, stuck: Entry) -> bool:
    """Plant a fault: a page for which there is no slot is tried again until there is one, and no other meanwhile."""
    return True


@pytest.mark.parametrize(
    ("pages", "owner", "name", "fault", "shows"),
    [
        (11, PrefixCache, "has_room", only_what_is_saved_may_leave, "nothing can be planned, and work is left"),
        (40, HostTier, "_comes_free", waits_for_a_slot_for_ever, "what came later is not saved"),
    ],
)
def test_host_memory_of_eight_pages_starves_nobody(
    pages: int, owner: type, name: str, fault: object, shows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    eight_pages_of_host_memory(pages)
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(AssertionError, match=shows):
        eight_pages_of_host_memory(pages)


# Who has pages and slots while they are copied


def another_comes_when_one_has_left() -> None:
    """It needs the pages into which those of the one that has left are still being loaded."""
    replica = tiered(ranks=2)
    loading(replica)
    replica.move()
    replica.cancel("c")
    ask(replica, "d", tokens(600, seed=9))
    steps(replica, 20)
    replica.run()
    replica.check_tokens()
    replica.check_rest()


def test_who_leaves_frees_no_page_that_is_being_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    another_comes_when_one_has_left()
    honest = HostTier.leave

    def leave(self: HostTier, row: Row) -> None:
        """Plant a fault: the pages are free with the last one who waits for them."""
        ticket = self._ticket_of.get(row)
        honest(self, row)
        if ticket is not None and not ticket.waiting and ticket.number in self._tickets and ticket.row is not None:
            self._cache.close(ticket.row)
            ticket.row = RowPages()

    monkeypatch.setattr(HostTier, "leave", leave)
    with pytest.raises(AssertionError, match="was written while it was loaded"):
        another_comes_when_one_has_left()


def another_is_saved_meanwhile() -> None:
    """A load reads all slots, which a prompt would take that is complete before the ranks have answered."""
    replica = tiered(host_pages=9, pages=20)
    first = tokens(600, seed=1)
    served(replica, "a", first)
    cache = replica.scheduler._rows.cache
    cache.close(cache.open([], 19, overwritten=True))
    ask(replica, "c", first)
    assert replica.plan() is None
    ask(replica, "b", tokens(300, seed=2))
    steps(replica, 10)
    assert replica.finish.keys() == {"a", "b"}
    replica.run()
    replica.check_tokens()
    assert replica.outputs["c"][0].cached_tokens == LONG


def test_slots_that_are_being_read_are_given_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    another_is_saved_meanwhile()
    honest = HostTier.load

    def load(self: HostTier, row: Row, found: list[Entry], copies: list[Copy]) -> None:
        """Plant a fault: they are not pinned."""
        honest(self, row, found, copies)
        for copy in copies:
            copy.pins -= 1

    monkeypatch.setattr(HostTier, "load", load)
    with pytest.raises(AssertionError, match="belongs to another prefix"):
        another_is_saved_meanwhile()
