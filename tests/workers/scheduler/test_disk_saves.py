"""Which pages are written to the disk, and when."""

from __future__ import annotations

from typing import Any

import pytest
from disk_replica import LONG, disk_of, filled, served, tiered
from replica import Replica
from workload import tokens

from kernels.page import PAGE_TOKENS
from workers.protocol.request import page_keys
from workers.protocol.tiers import DiskMoved
from workers.scheduler.disk_saves import WRITE_BATCH, DiskSaves
from workers.scheduler.read_pace import LONGEST_S
from workers.scheduler.write_budget import WriteBudget

pytestmark = pytest.mark.usefixtures("short_prompts_are_worth_a_load")


def offered(replica: Replica) -> int:
    """Pages that wait to be saved."""
    return len(disk_of(replica)._saves._new) + len(disk_of(replica)._saves._again)


def in_host_memory(replica: Replica, prompt: list[int]) -> int:
    """Pages of a prompt that are there."""
    tier = replica.scheduler._rows.tier
    assert tier is not None
    return sum(key in tier._copies for key in page_keys(prompt))


def test_pages_do_not_wait_for_a_disk_to_which_nothing_is_ever_written() -> None:
    replica = tiered(disk_writes_per_s=0.0, disk_writes_saved_up=0.0)
    asked = filled(replica)
    served(replica, "again", asked[3])
    assert offered(replica) == 0


def test_what_waits_to_be_saved_is_no_more_than_host_memory_holds() -> None:
    """Hardly anything is ever written, and each prompt is asked for twice."""
    replica = tiered(pages=40, host_pages=40, disk_writes_per_s=1e-9, disk_writes_saved_up=2.0)
    for seed in range(30):
        for again in range(2):
            served(replica, f"{seed}.{again}", tokens(600, seed=seed))
    disk = disk_of(replica)
    for waiting in (disk._saves._again, disk._saves._new):
        assert len(waiting) <= 2 * 40 + WRITE_BATCH + 1
    stats = replica.scheduler.stats()
    assert stats.disk_saved_pages == 2
    assert stats.disk_dropped_pages == 30 * 9 - 2 - stats.host_pages, "all others that have left host memory, once each"


def test_pages_that_were_read_back_and_then_left_the_disk_before_host_memory_are_not_counted_as_dropped() -> None:
    """The disk has room for two prompts, and host memory for three: it has two newer ones when the one that was read
    leaves host memory."""
    replica = tiered(host_pages=29, disk_pages=18)
    first = filled(replica, prompts=2)[0]
    again = replica.start_again()
    again.scheduler.save_pages()
    assert served(again, "read", first) == LONG
    for seed in range(2, 5):
        served(again, f"{seed}", tokens(600, seed=seed))
    assert not any(key in disk_of(again).index for key in page_keys(first))
    assert in_host_memory(again, first) == 2
    assert again.scheduler.stats().disk_dropped_pages == 0


def test_a_long_prompt_that_is_saved_some_pages_at_a_time_is_looked_through_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget = {"disk_writes_per_s": 1.0, "disk_writes_saved_up": 16.0}
    replica = tiered(pages=200, host_pages=200, disk_pages=400, max_context=7000, **budget)
    prompt = tokens(100 * PAGE_TOKENS, seed=1)
    served(replica, "first", prompt)
    disk = disk_of(replica)
    assert disk.index.held == 8, "the other half is for pages that a second prompt begins with"
    disk._saves._new.clear()
    looked: list[int] = []
    honest = DiskSaves._missing

    def missing(self: DiskSaves, copy: Any) -> Any:
        found = honest(self, copy)
        looked.append(len(found))
        return found

    monkeypatch.setattr(DiskSaves, "_missing", missing)
    served(replica, "second", [*prompt, 1])
    while disk.index.held < 100:
        before = disk.index.held
        replica.now += 1000.0
        replica.scheduler.save_pages()
        replica.channel.extend(replica.scheduler.moves())
        replica.run()
        assert before < disk.index.held <= before + 16
    assert 92 <= sum(looked) <= 2 * 92, "once, and perhaps once more for what came between"


def test_pages_do_not_wait_for_a_disk_that_has_failed() -> None:
    replica = tiered(disk_writes_per_s=1.0, disk_writes_saved_up=20.0)
    filled(replica)
    assert offered(replica) > 0
    (ticket,) = [disk_of(replica)._tickets.begin([], [])]
    replica.scheduler.disk_moved(DiskMoved(0, ticket.number, off=True))
    assert offered(replica) == 0
    served(replica, "more", tokens(600, seed=9))
    served(replica, "more again", tokens(600, seed=9))
    assert offered(replica) == 0


def test_a_host_slot_that_is_given_away_while_it_is_saved_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: slots of host memory are not pinned."""
    honest = DiskSaves._begin

    def careless(self: DiskSaves, copies: list, slots: list) -> None:  # type: ignore[type-arg]
        honest(self, copies, slots)
        for copy in copies:
            copy.pins -= 1

    def asked() -> None:
        replica = tiered(host_pages=9)
        for seed in range(3):
            assert replica.add(f"{seed}", tokens(600, seed=seed), max_tokens=2) is None
        for _ in range(200):
            replica.plan()
            replica.move()
            if replica.answers:
                replica.answer()
            elif replica.launched:
                replica.apply()
        replica.run()

    asked()
    monkeypatch.setattr(DiskSaves, "_begin", careless)
    with pytest.raises(AssertionError, match="was written while it was saved"):
        asked()


def written_meanwhile(replica: Replica, prompts: list[list[int]]) -> None:
    """Serve prompts one after the other, each saved in host memory, while the disk answers nothing."""
    for prompt in prompts:
        assert replica.add(f"{len(replica.requests)}", prompt, max_tokens=2) is None
        while True:
            replica.plan()
            replica.move()
            if replica.launched:
                replica.apply()
            elif replica.answers:
                replica.answer()
            else:
                break


def test_a_prompt_that_comes_while_host_memory_is_written_to_disk_is_saved_when_that_is_done() -> None:
    replica = tiered(host_pages=9, pages=40)
    first, second = tokens(600, seed=1), tokens(300, seed=2)
    written_meanwhile(replica, [first, second])
    assert replica.disk_answers
    assert (in_host_memory(replica, first), in_host_memory(replica, second)) == (9, 0)
    replica.run()
    assert (in_host_memory(replica, first), in_host_memory(replica, second)) == (5, 4)
    replica.check_pages()


def test_a_disk_that_has_failed_keeps_no_prompt_out_of_host_memory() -> None:
    """Pages that it has not written stay pinned for ever: what a long prompt lacks is not to wait for them."""
    replica = tiered(host_pages=12, pages=40, max_context=1024)
    written_meanwhile(replica, [tokens(200, seed=1)])
    replica.disk_answers.clear()
    replica.now += LONGEST_S + 1
    replica.scheduler.expire()
    first = tokens(900, seed=2)
    served(replica, "long", first)
    assert in_host_memory(replica, first) == 9
    second = tokens(300, seed=3)
    served(replica, "other", second)
    assert in_host_memory(replica, second) == 4
    assert replica.scheduler._rows.cache.cached == 3 + 14 + 4, "all are on the device"


def test_a_full_disk_keeps_what_was_used_last() -> None:
    replica = tiered(disk_pages=27, host_pages=10)
    asked = filled(replica, prompts=3)
    assert served(replica, "again", asked[0]) == LONG
    served(replica, "new", tokens(600, seed=9))
    assert replica.scheduler.stats().disk_pages == 27
    assert served(replica, "once more", asked[0]) == LONG
    assert served(replica, "least used", asked[1]) == 0


def test_writes_are_bounded_and_what_was_asked_for_again_comes_first() -> None:
    replica = tiered(disk_writes_per_s=1.0, disk_writes_saved_up=20.0, host_pages=100, pages=40)
    asked = filled(replica)
    stats = replica.scheduler.stats()
    assert stats.disk_saved_pages == 10, "the other half is for pages that a second prompt begins with"
    assert served(replica, "again", asked[3]) == LONG
    assert replica.scheduler.stats().disk_saved_pages == 19
    assert all(key in disk_of(replica).index for key in page_keys(asked[3]))
    replica.now += 4.0
    served(replica, "short", tokens(10, seed=9))
    assert replica.scheduler.stats().disk_saved_pages == 19, "little was saved up"
    replica.now += 1000.0
    for _ in range(20):
        replica.scheduler.save_pages()
        replica.channel.extend(replica.scheduler.moves())
        replica.run()
    assert replica.scheduler.stats().disk_saved_pages == 29


def test_what_is_not_spent_is_saved_up_to_a_bound() -> None:
    now = 0.0
    budget = WriteBudget(2.0, 10.0, lambda: now)
    assert (budget.left, budget.spare) == (10, 5)
    budget.take(12)
    assert (budget.left, budget.spare) == (0, 0)
    now = 2.0
    assert (budget.left, budget.spare) == (2, 0)
    now = 4.0
    assert (budget.left, budget.spare) == (6, 1)
    now = 1e6
    assert budget.left == 10
