"""What another start finds on disk, and what it does not."""

from __future__ import annotations

import pytest
from disk_replica import LONG, disk_of, filled, served, tiered, waiting
from replica import Replica
from workload import tokens

from kernels.page import PAGE_TOKENS
from workers.protocol.request import page_keys
from workers.protocol.tiers import DiskMoved
from workers.scheduler import disk_tier

pytestmark = pytest.mark.usefixtures("short_prompts_are_worth_a_load")


def test_pages_that_a_rank_did_not_look_at_are_found_by_another_start() -> None:
    replica = tiered(ranks=2)
    first = waiting(replica)
    replica.move()
    number = replica.disk_answers[0].ticket
    slots = disk_of(replica)._tickets.under_way[number].slots
    replica.disk_answers.clear()
    del replica.bad[number]
    replica.worker.moved_on_disk(number, set(slots))
    replica.scheduler.disk_moved(DiskMoved(1, number, tuple(slots[::2]), off=True))
    replica.scheduler.disk_moved(DiskMoved(0, number, (slots[7],)))
    replica.run()
    replica.check_tokens()
    replica.check_pages()
    assert replica.outputs["c"][0].cached_tokens == 0
    again = replica.start_again()
    again.scheduler.save_pages()
    assert served(again, "again", first) == 7 * PAGE_TOKENS, "the eighth was not as it was written"


def test_a_replica_that_starts_again_finds_what_was_on_disk() -> None:
    replica = tiered()
    asked = filled(replica)
    again = replica.start_again()
    again.scheduler.save_pages()
    for number, prompt in enumerate(asked):
        assert served(again, f"again {number}", prompt) == LONG
    stats = again.scheduler.stats()
    assert (stats.disk_loaded_pages, stats.disk_saved_pages, stats.disk_pages) == (36, 0, 36)


def test_many_pages_that_were_on_disk_are_taken_in_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "FOUND_A_TURN", 10)
    replica = tiered()
    asked = filled(replica)
    again = replica.start_again()
    held = []
    while again.scheduler.patience_s(1.0) == 0.0:
        again.scheduler.save_pages()
        held.append(again.scheduler.stats().disk_pages)
        again.check_pages()
    assert held == [10, 20, 30, 36, 36], "then those that are free are found"
    assert served(again, "again", asked[0]) == LONG


def test_what_was_doubted_is_not_found_by_another_start() -> None:
    replica = tiered(width=1)
    first = waiting(replica)
    while not replica.answers:
        replica.plan()
        replica.move()
        if replica.disk_answers:
            replica.answer_of_disk()
    tier = replica.scheduler._rows.tier
    assert tier is not None
    replica.worker.breaks(tier._copies[page_keys(first)[3]].page)
    replica.worker.mishap = 1e-30  # looks for entries that are no numbers
    replica.run()
    replica.check_tokens()
    assert replica.finish["c"] == "length"
    assert replica.scheduler.stats().bad_rows == 1
    keys = set(page_keys(first))
    known = {page.key: page.serial for page, _ in replica.worker.disk.values() if page.key in keys}
    assert all(serial >= 36 for serial in known.values()), "as computed again"
    served(replica, "another", tokens(600, seed=9))
    assert served(replica, "again", first) == LONG, "from host memory, which has forgotten what was doubted"
    assert replica.scheduler.stats().bad_rows == 1


def on_disk(replica: Replica, prompt: list[int]) -> list[int]:
    """Which pages of a prompt have a header."""
    keys = page_keys(prompt)
    return sorted(page.number for page, _ in replica.worker.disk.values() if page.key in keys)


def test_headers_of_what_was_doubted_are_erased() -> None:
    replica = tiered()
    first = filled(replica)[0]
    disk_of(replica).doubt([page_keys(first)[2]])
    replica.check_pages()
    replica.run()
    replica.check_pages()
    assert on_disk(replica, first) == [1, 2]
    again = replica.start_again()
    again.scheduler.save_pages()
    assert again.scheduler.stats().disk_pages == 29


def test_what_is_doubted_while_it_is_written_is_erased_behind_that() -> None:
    replica = tiered()
    first = tokens(600, seed=1)
    assert replica.add("a", first, max_tokens=2) is None
    while not replica.disk_answers:
        replica.plan()
        replica.move()
        if replica.answers:
            replica.answer()
        elif replica.launched:
            replica.apply()
    disk_of(replica).doubt([page_keys(first)[0]])
    replica.check_pages()
    replica.run()
    replica.check_pages()
    stats = replica.scheduler.stats()
    assert on_disk(replica, first) == []
    assert (stats.disk_pages, stats.host_pages) == (0, 9)


def test_what_is_doubted_while_it_is_read_is_not_used() -> None:
    replica = tiered()
    first = waiting(replica)
    disk_of(replica).doubt([page_keys(first)[4]])
    replica.run()
    replica.check_tokens()
    replica.check_pages()
    assert replica.outputs["c"][0].cached_tokens == 4 * PAGE_TOKENS
