"""The disk behind host memory, with a simulated worker that checks every entry that is read."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from replica import Replica
from workload import config, random_config, random_request, tokens

from kernels.page import PAGE_TOKENS
from workers.protocol import prompt as prompts
from workers.protocol.prompt import page_keys, unpack_keys
from workers.protocol.tiers import DiskMoved
from workers.scheduler import disk_tier
from workers.scheduler.disk_index import DiskIndex
from workers.scheduler.disk_tier import LONGEST_S, DiskTier
from workers.scheduler.sequence import Phase
from workers.scheduler.write_budget import WriteBudget

LONG = 9 * PAGE_TOKENS
"""Of a prompt of 600 tokens: nine pages are full."""


@pytest.fixture(autouse=True)
def short_prompts_are_worth_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "FIRST_S", 0.0)


def tiered(**changes: object) -> Replica:
    """A device with room for one long prompt, host memory for two, and a disk for all."""
    settings: dict[str, object] = {
        "pages": 11,
        "max_context": 640,
        "host_pages": 20,
        "disk_pages": 100,
        "load_least": 1,
        "disk_least": 1,
        "disk_page_s": 0.0,
        "slots": 3,
    }
    return Replica(config(**(settings | changes)))


def served(replica: Replica, name: str, prompt: list[int], salt: bytes = b"") -> int:
    """Run a request to its end; prompt tokens that it found cached."""
    assert replica.add(name, prompt, max_tokens=2, salt=salt) is None
    replica.run()
    replica.check_tokens()
    replica.check_pages()
    replica.check_rest()
    return replica.outputs[name][0].cached_tokens


def disk_of(replica: Replica) -> DiskTier:
    assert replica.scheduler._rows.disk is not None
    return replica.scheduler._rows.disk


def filled(replica: Replica, prompts: int = 4) -> list[list[int]]:
    """So many prompts served, of which host memory holds the last two."""
    asked = [tokens(600, seed=seed) for seed in range(prompts)]
    assert [served(replica, f"first {number}", prompt) for number, prompt in enumerate(asked)] == [0] * prompts
    return asked


def test_what_left_host_memory_comes_back_from_the_disk() -> None:
    replica = tiered()
    asked = filled(replica)
    stats = replica.scheduler.stats()
    assert (stats.disk_saved_pages, stats.disk_pages, stats.host_pages) == (36, 36, 20)
    assert stats.disk_pages_total == 100
    assert served(replica, "again", [*asked[0], 1, 2]) == LONG
    stats = replica.scheduler.stats()
    assert (stats.disk_loaded_pages, stats.host_loaded_pages) == (9, 9)
    assert stats.disk_load_seconds == pytest.approx(0.001)
    without = Replica(replace(replica.config, disk_pages=0))
    filled(without)
    assert served(without, "again", asked[0]) == 0


def test_only_pages_that_host_memory_lacks_are_read() -> None:
    replica = tiered(host_pages=24)
    asked = filled(replica)
    here = len(replica.scheduler._rows.tier.chain(row_of(replica, asked[1]), 9))  # type: ignore[union-attr]
    assert 0 < here < 9
    assert served(replica, "again", asked[1]) == LONG
    assert replica.scheduler.stats().disk_loaded_pages == 9 - here


def row_of(replica: Replica, prompt: list[int]):  # type: ignore[no-untyped-def]
    """A request as it waits."""
    assert replica.add("looked at", prompt, max_tokens=1) is None
    row = replica.scheduler._live["looked at"]
    replica.cancel("looked at")
    del replica.requests["looked at"], replica.finish["looked at"]
    return row


def test_the_disk_is_shared_among_requests_of_one_salt_alone() -> None:
    replica = tiered(host_pages=10)
    first, second = tokens(600, seed=1), tokens(600, seed=2)
    assert served(replica, "a", first, b"one") == served(replica, "b", second, b"one") == 0
    assert served(replica, "other salt", first, b"two") == 0
    assert served(replica, "none", first) == 0
    assert replica.scheduler.stats().disk_loaded_pages == 0
    assert served(replica, "same salt", first, b"one") == LONG
    assert replica.scheduler.stats().disk_loaded_pages == 9


def waiting(replica: Replica, name: str = "c") -> list[int]:
    """A prompt that is being read from disk for a request."""
    first = filled(replica)[0]
    assert replica.add(name, first, max_tokens=2) is None
    while replica.plan() is not None:
        pass
    assert replica.scheduler._live[name].phase is Phase.LOADING
    assert replica.scheduler.stats().waiting == 1
    replica.check_books()
    return first


def test_who_waits_for_the_disk_holds_no_page_of_the_device() -> None:
    replica = tiered()
    waiting(replica)
    assert replica.scheduler.stats().pages_free == replica.scheduler.stats().pages_total
    assert replica.add("d", tokens(600, seed=9), max_tokens=2) is None
    while "d" not in replica.finish:
        replica.plan()
        replica.apply()
    assert not replica.outputs["c"]
    replica.run()
    replica.check_tokens()
    assert replica.outputs["c"][0].cached_tokens == LONG


@pytest.mark.parametrize("cancelled", [False, True])
def test_what_was_read_for_a_request_stays_until_its_turn(cancelled: bool) -> None:
    replica = tiered()
    waiting(replica)
    replica.move()
    while replica.disk_answers:
        replica.answer_of_disk()
    assert replica.scheduler._live["c"].phase is Phase.WAITING
    replica.check_pages()
    tier = replica.scheduler._rows.tier
    assert tier is not None
    others = [tier._slot() for _ in range(20)]
    assert others.count(None) == 9
    tier._free += [slot for slot in others if slot is not None]
    if cancelled:
        replica.cancel("c")
        assert not disk_of(replica)._kept
    replica.run()
    replica.check_tokens()
    replica.check_pages()
    assert not disk_of(replica)._kept
    assert cancelled or replica.outputs["c"][0].cached_tokens == LONG


def test_nobody_waits_for_a_slow_disk_longer_than_computing_takes() -> None:
    """Steps of the simulated worker take a millisecond each."""
    replica = tiered()
    first = waiting(replica)
    token_s = replica.scheduler._prompt_speed.token_s()
    assert token_s is not None
    computing = LONG * token_s
    assert replica.scheduler.patience_s(9.0) == pytest.approx(computing)
    replica.now += 0.99 * computing
    replica.scheduler.expire()
    assert replica.scheduler._live["c"].phase is Phase.LOADING
    replica.now += 0.02 * computing
    replica.scheduler.expire()
    assert replica.scheduler._live["c"].phase is Phase.WAITING
    while "c" not in replica.finish:
        assert replica.plan() is not None or replica.launched
        replica.apply()
        replica.check_pages()
    assert replica.outputs["c"][0].cached_tokens == 0
    assert replica.scheduler.stats().disk_late_loads == 1
    assert replica.scheduler.patience_s(9.0) == 9.0
    replica.run()  # the pages come at last, and are of use to the next
    replica.check_tokens()
    replica.check_pages()
    served(replica, "other", tokens(600, seed=9))
    assert served(replica, "d", first) == LONG
    assert replica.scheduler.stats().disk_loaded_pages == 9


def test_a_disk_that_does_not_answer_is_given_up_and_its_slots_stay_pinned(caplog: pytest.LogCaptureFixture) -> None:
    replica = tiered()
    first = waiting(replica)
    replica.move()
    stalled, replica.disk_answers = replica.disk_answers, []
    replica.now += LONGEST_S + 1
    replica.scheduler.expire()
    replica.scheduler.expire()
    assert [record.message for record in caplog.records if "has not answered" in record.message] == [
        "the disk behind host memory has not answered for 31 s: it is not used any more, and prompts that are on it "
        "are computed"
    ]
    replica.run()
    replica.check_tokens()
    replica.check_pages()
    assert replica.scheduler.stats().disk_pages_total == 0
    for seed in range(5, 8):
        assert served(replica, f"{seed}", tokens(600, seed=seed)) == 0
    assert served(replica, "d", first) == 0
    assert not replica.disk_answers, "nothing more is asked of it"
    replica.disk_answers = stalled
    while replica.disk_answers:
        replica.answer_of_disk()
    replica.check_pages()


def late_and_answered(replica: Replica) -> None:
    """Two loads are under way, and 20 seconds later one of them is answered."""
    asked = filled(replica)
    for name, prompt in zip("cd", asked, strict=False):
        assert replica.add(name, prompt, max_tokens=2) is None
    while replica.plan() is not None:
        pass
    replica.move()
    _, second = (ticket.number for ticket in disk_of(replica)._tickets.values() if ticket.loads)
    replica.now += 20
    replica.disk_answers = [answer for answer in replica.disk_answers if answer.ticket == second]


def test_a_disk_from_which_pages_come_has_not_failed_however_long_all_of_them_take() -> None:
    replica = tiered()
    late_and_answered(replica)
    replica.answer_of_disk()
    replica.now += LONGEST_S - 1
    replica.scheduler.expire()
    assert not disk_of(replica).failed
    replica.now += 2
    replica.scheduler.expire()
    assert disk_of(replica).failed


def test_a_rank_whose_disk_hangs_is_noticed_beside_one_that_answers() -> None:
    replica = tiered(ranks=2)
    late_and_answered(replica)
    replica.disk_answers = [answer for answer in replica.disk_answers if answer.rank == 0]
    replica.scheduler.disk_moved(replica.disk_answers.pop())
    replica.now += LONGEST_S - 19
    replica.scheduler.expire()
    assert disk_of(replica).failed


@pytest.mark.parametrize(("margin", "read"), [("FIRST_MARGIN", [4, 5]), ("MARGIN", [4, 4, 1])])
def test_no_more_is_read_at_once_than_comes_long_before_a_disk_counts_as_failed(
    monkeypatch: pytest.MonkeyPatch, margin: str, read: list[int]
) -> None:
    replica = tiered(disk_page_s=1e-4)
    replica.page_s = 1e-4
    first = filled(replica)[0]
    begin, sizes = DiskTier._begin_load, []

    def watched(self: DiskTier, row: Any, slots: list[int], *given: Any) -> None:
        sizes.append(len(slots))
        begin(self, row, slots, *given)

    monkeypatch.setattr(DiskTier, "_begin_load", watched)
    disk_of(replica)._pace.measured = margin == "MARGIN"
    monkeypatch.setattr(disk_tier, margin, LONGEST_S / 4.5e-4)
    assert served(replica, "again", first) == LONG
    assert sizes == read


def offered(replica: Replica) -> int:
    """Pages that wait to be saved."""
    return len(disk_of(replica)._new) + len(disk_of(replica)._again)


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
    for waiting in (disk._again, disk._new):
        assert len(waiting) <= 2 * 40 + disk_tier.WRITE_BATCH + 1
    assert replica.scheduler.stats().disk_dropped_pages > 0


def test_a_long_prompt_that_is_saved_some_pages_at_a_time_is_looked_through_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget = {"disk_writes_per_s": 1.0, "disk_writes_saved_up": 16.0}
    replica = tiered(pages=200, host_pages=200, disk_pages=400, max_context=7000, **budget)
    prompt = tokens(100 * PAGE_TOKENS, seed=1)
    served(replica, "first", prompt)
    disk = disk_of(replica)
    assert disk.index.held == 8, "the other half is for pages that a second prompt begins with"
    disk._new.clear()
    looked: list[int] = []
    honest = DiskTier._missing

    def missing(self: DiskTier, copy: Any) -> Any:
        found = honest(self, copy)
        looked.append(len(found))
        return found

    monkeypatch.setattr(DiskTier, "_missing", missing)
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
    (ticket,) = [disk_of(replica)._begin([], [])]
    replica.scheduler.disk_moved(DiskMoved(0, ticket.number, off=True))
    assert offered(replica) == 0
    served(replica, "more", tokens(600, seed=9))
    served(replica, "more again", tokens(600, seed=9))
    assert offered(replica) == 0


def test_pages_that_a_rank_did_not_look_at_are_found_by_another_start() -> None:
    replica = tiered(ranks=2)
    first = waiting(replica)
    replica.move()
    number = replica.disk_answers[0].ticket
    slots = disk_of(replica)._tickets[number].slots
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


def of_speed(replica: Replica, page_s: float) -> Replica:
    """The replica after another start, with so slow a disk. Computing a page takes it a millisecond."""
    again = replica.start_again()
    again.page_s = page_s
    again.scheduler.save_pages()
    disk_of(again)._token_s = lambda: 1e-3 / PAGE_TOKENS
    return again


def test_a_disk_that_reads_faster_than_computing_is_read_whatever_was_guessed_of_it() -> None:
    replica = tiered(host_pages=20, disk_page_s=0.002)  # twice what computing takes
    asked = filled(replica, prompts=8)
    again = of_speed(replica, page_s=1e-4)
    served(again, "computed", tokens(600, seed=99))
    for number, pause in enumerate((0.0, 0.0, 120.0, 3600.0)):
        again.now += pause
        assert served(again, f"again {number}", asked[number]) == LONG, f"after {pause} s"
    assert again.scheduler.stats().disk_loaded_pages == 36


def test_a_disk_that_reads_slower_than_computing_is_tried_once_and_more_and_more_seldom() -> None:
    replica = tiered(disk_pages=400)
    asked = filled(replica, prompts=10)
    again = of_speed(replica, page_s=0.01)
    assert served(again, "first", asked[0]) == LONG
    assert served(again, "second", asked[1]) == 0
    tried = []
    for minute in range(1, 9):
        again.now += disk_tier.LONGEST_S * 2
        served(again, f"minute {minute}", asked[minute + 1])
        tried.append(again.scheduler.stats().disk_loaded_pages)
        served(again, f"beside that {minute}", tokens(600, seed=100 + minute))
        served(again, f"and that {minute}", tokens(600, seed=200 + minute))
    assert [count // 9 for count in tried] == [2, 2, 3, 3, 3, 3, 4, 4]
    again.page_s = 1e-4
    again.now += 8 * 60
    assert served(again, "faster", asked[0]) == LONG
    assert served(again, "then as well", asked[2]) == LONG


def test_loads_beside_each_other_do_not_make_a_disk_seem_slow() -> None:
    """Each takes 0.4 of what computing takes, and is read behind those before it."""
    replica = tiered(pages=100, host_pages=200, slots=8)
    asked = filled(replica, prompts=5)
    again = of_speed(replica, page_s=0.0)
    for number, prompt in enumerate(asked):
        assert again.add(f"c{number}", prompt, max_tokens=2) is None
    while again.plan() is not None:
        pass
    again.move()
    assert len(again.disk_answers) == 5
    for number, answer in enumerate(again.disk_answers, 1):
        again.now += 9 * 0.4e-3
        again.scheduler.expire()
        bad = again.worker.moved_on_disk(answer.ticket, again.bad.pop(answer.ticket))
        again.scheduler.disk_moved(DiskMoved(0, answer.ticket, tuple(bad), number * 9 * 0.4e-3))
        assert disk_of(again)._pace.page_s() == pytest.approx(0.4e-3)
    assert again.scheduler.stats().disk_load_seconds == pytest.approx(5 * 9 * 0.4e-3)
    again.disk_answers.clear()
    again.run()
    again.check_tokens()
    assert [again.outputs[f"c{number}"][0].cached_tokens for number in range(5)] == [LONG] * 5
    assert again.scheduler.stats().disk_late_loads == 3, "they waited as long as computing takes"


def test_time_in_the_queue_is_no_wait_for_the_disk() -> None:
    """A prompt is read in two parts, between which it waits for the only slot for long."""
    replica = tiered(pages=40, slots=1, disk_page_s=1e-4)
    first = filled(replica)[0]
    again = of_speed(replica, page_s=1e-4)
    disk_of(again)._pace.observe(1e-4, worthwhile=True)
    assert again.add("c", first, max_tokens=2) is None
    honest, disk = DiskTier._most_at_once, disk_of(again)
    disk._most_at_once = lambda: 4  # type: ignore[method-assign]
    while again.plan() is not None:
        pass
    assert again.add("busy", tokens(20, seed=77), max_tokens=30, priority=-1) is None
    again.plan()
    again.move()
    while again.disk_answers:
        again.answer_of_disk()
    again.now += 10.0
    assert again.scheduler._live["c"].phase is Phase.WAITING
    disk._most_at_once = lambda: honest(disk)  # type: ignore[method-assign]
    again.run()
    again.check_tokens()
    assert again.outputs["c"][0].cached_tokens == LONG
    assert again.scheduler.stats().disk_late_loads == 0


def test_a_load_that_takes_longer_than_computing_is_not_begun() -> None:
    replica = tiered()
    first = filled(replica)[0]
    disk_of(replica)._pace.observe(1.0, worthwhile=False)
    assert served(replica, "again", first) == 0
    assert replica.scheduler.stats().disk_loaded_pages == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_who_leaves_while_pages_are_read_loses_none(ranks: int) -> None:
    replica = tiered(ranks=ranks)
    first = waiting(replica)
    replica.cancel("c")
    replica.check_pages()
    assert replica.scheduler.idle
    replica.run()
    replica.check_rest()
    assert served(replica, "d", first) == LONG
    assert replica.scheduler.stats().disk_loaded_pages == 9


def sessions(replica: Replica, count: int, common: int) -> list[list[int]]:
    """So many prompts of 20 pages served, which begin with the same `common` pages; and a further token."""
    first = tokens(common * PAGE_TOKENS, seed=99)
    asked = [[*first, *tokens((20 - common) * PAGE_TOKENS, seed=seed)] for seed in range(count)]
    for number, prompt in enumerate(asked):
        served(replica, f"first {number}", prompt)
        served(replica, f"second {number}", [*prompt, 4])
    return [[*prompt, 1, 2, 3] for prompt in asked]


def asked_together(replica: Replica, prompts: list[list[int]]) -> list[int]:
    """Pages that these found cached when they came at one time."""
    for number, prompt in enumerate(prompts):
        assert replica.add(f"together {number}", prompt, max_tokens=2) is None
    for _ in range(20_000):
        if not replica.step():
            break
        replica.check_pages()
        replica.check_books()
    replica.check_tokens()
    replica.check_rest()
    return [replica.outputs[f"together {number}"][0].cached_tokens // PAGE_TOKENS for number in range(len(prompts))]


@pytest.mark.parametrize("count", [2, 6])
def test_askers_that_begin_alike_get_all_that_each_of_them_has_on_disk(count: int) -> None:
    replica = tiered(pages=200, max_context=1500, host_pages=200, disk_pages=400, slots=8, token_budget=2000)
    asked = sessions(replica, count, common=4)
    again = replica.start_again()
    again.scheduler.save_pages()
    assert asked_together(again, asked) == [20] * count
    assert again.scheduler.stats().disk_loaded_pages == 4 + 16 * count, "what they have in common is read once"


@pytest.mark.parametrize("host_pages", [200, 100, 40])
def test_who_finds_no_room_for_a_load_waits_for_those_under_way(host_pages: int) -> None:
    replica = tiered(pages=200, max_context=1500, host_pages=host_pages, disk_pages=400, slots=8, token_budget=2000)
    asked = sessions(replica, 6, common=0)
    again = replica.start_again()
    again.scheduler.save_pages()
    assert asked_together(again, asked) == [20] * 6


def test_who_comes_before_a_disk_was_measured_waits_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """So little is read at once before anything was measured that there is one load at a time."""
    replica = tiered(host_pages=200, pages=100, slots=8, max_context=1000, disk_page_s=1e-4)
    asked = filled(replica, prompts=5)
    monkeypatch.setattr(disk_tier, "FIRST_MARGIN", LONGEST_S / 9.5e-4)
    again = replica.start_again()
    again.scheduler.save_pages()
    assert asked_together(again, asked) == [9] * 5


def test_who_waits_for_room_goes_on_when_computing_would_have_ended() -> None:
    replica = tiered(host_pages=30, pages=100, slots=8, max_context=1000)
    asked = filled(replica, prompts=5)
    again = replica.start_again()
    again.scheduler.save_pages()
    for number, prompt in enumerate(asked[:3]):
        assert again.add(f"c{number}", prompt, max_tokens=2) is None
    while again.plan() is not None:
        pass
    again.move()
    disk = disk_of(again)
    assert (len(disk._ticket_of), len(disk._queued)) == (2, 1)
    stalled, again.disk_answers = again.disk_answers, []
    patience = again.scheduler.patience_s(LONGEST_S)
    assert patience == pytest.approx(LONG * disk_tier.TOKEN_S)
    again.now += 1.01 * patience
    again.scheduler.expire()
    assert not disk.waiting
    again.check_books()
    while len(again.finish) < 3:
        assert again.plan() is not None or again.launched
        again.apply()
    assert again.scheduler.stats().disk_late_loads == 3
    again.disk_answers = stalled
    again.run()
    again.check_tokens()
    again.check_pages()


def test_a_load_in_two_parts_keeps_both_until_its_turn() -> None:
    """Room for eleven pages beside the load of another: the rest comes when that has ended."""
    replica = tiered(pages=200, max_context=1500, host_pages=62, disk_pages=400, slots=8, token_budget=2000)
    asked = sessions(replica, 2, common=0)
    again = replica.start_again()
    again.scheduler.save_pages()
    assert asked_together(again, asked) == [20, 20]
    assert again.scheduler.stats().disk_loaded_pages == 40


def test_askers_of_the_same_pages_wait_for_one_load() -> None:
    replica = tiered(pages=30)
    first = filled(replica, prompts=6)[0]
    for name in "cd":
        assert replica.add(name, [*first, ord(name) % 40], max_tokens=2) is None
    while replica.plan() is not None:
        pass
    assert {s.phase for s in replica.scheduler._live.values()} == {Phase.LOADING}
    replica.check_books()
    replica.run()
    replica.check_tokens()
    assert replica.scheduler.stats().disk_loaded_pages == 9
    assert [replica.outputs[name][0].cached_tokens for name in "cd"] == [LONG] * 2


def test_a_page_that_is_not_as_it_was_written_costs_those_behind_it_and_never_a_token() -> None:
    replica = tiered(ranks=2)
    first = filled(replica)[0]
    keys = page_keys(first)
    fifth = disk_of(replica).index.slot(keys[4])
    header, content = replica.worker.disk[fifth]
    replica.worker.disk[fifth] = type(header)(fifth, 0, b"another", b"", 1, header.tokens), content
    assert served(replica, "again", first) == 4 * PAGE_TOKENS
    stats = replica.scheduler.stats()
    assert (stats.disk_lost_pages, stats.disk_loaded_pages) == (5, 8)
    assert fifth not in replica.worker.disk or replica.worker.disk[fifth][0].key != b"another", "it was not erased"
    # It was computed, and is saved again.
    for seed in (5, 6):
        served(replica, f"{seed}", tokens(600, seed=seed))
    assert served(replica, "once more", first) == LONG


def test_a_page_that_is_taken_for_another_is_noticed() -> None:
    """A planted fault: nobody compares what comes from disk."""
    replica = tiered()
    asked = filled(replica)
    replica.worker.credulous = True
    one, other = (disk_of(replica).index.slot(page_keys(prompt)[3]) for prompt in asked[:2])
    replica.worker.disk[one] = replica.worker.disk[other]
    with pytest.raises(AssertionError, match="belongs to another prefix"):
        served(replica, "again", asked[0])


def test_a_host_slot_that_is_given_away_while_it_is_saved_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: slots of host memory are not pinned."""
    honest = DiskTier._begin_saves

    def careless(self: DiskTier, copies: list, slots: list) -> None:  # type: ignore[type-arg]
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
    monkeypatch.setattr(DiskTier, "_begin_saves", careless)
    with pytest.raises(AssertionError, match="was written while it was saved"):
        asked()


def test_a_disk_that_fails_is_left_alone() -> None:
    replica = tiered(ranks=2)
    first = waiting(replica)
    replica.move()
    number = replica.disk_answers[0].ticket
    slots = tuple(range(100))
    replica.worker.moved_on_disk(number, set(slots))
    replica.disk_answers.clear()
    replica.scheduler.disk_moved(DiskMoved(1, number, slots, off=True))
    replica.scheduler.disk_moved(DiskMoved(0, number))
    del replica.bad[number]
    replica.run()
    replica.check_tokens()
    assert replica.outputs["c"][0].cached_tokens == 0
    saved = replica.scheduler.stats().disk_saved_pages
    served(replica, "d", tokens(600, seed=7))
    served(replica, "e", tokens(600, seed=8))
    served(replica, "f", tokens(600, seed=9))
    assert served(replica, "g", first) == 0
    stats = replica.scheduler.stats()
    assert (stats.disk_saved_pages, stats.disk_pages_total, stats.disk_keys) == (saved, 0, b"")


def test_an_answer_that_nobody_waits_for_is_an_error() -> None:
    replica = tiered()
    filled(replica)
    with pytest.raises(RuntimeError, match="does not wait for it"):
        replica.scheduler.disk_moved(DiskMoved(0, 1))


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


def test_prompts_whose_keys_are_equal_never_get_each_others_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that know the last token of a page alone."""
    strong = prompts.chain_key
    monkeypatch.setattr(prompts, "chain_key", lambda parent, page: strong(parent, page[-4:]))
    replica = tiered(host_pages=10, pages=12)
    short = tokens(300, seed=1)
    other = [(short[0] + 1) % 40, *short[1:256], *tokens(344, seed=2)]
    assert page_keys(short)[:4] == page_keys(other)[:4]
    assert served(replica, "short", short) == 0
    for seed in (5, 6):
        served(replica, f"between {seed}", tokens(600, seed=seed))
    assert served(replica, "other", other) == 0, "four pages of another prompt have these keys"
    assert replica.scheduler.stats().disk_lost_pages == 0
    for seed in (5, 6):
        served(replica, f"again {seed}", tokens(600, seed=seed))
    assert served(replica, "longer", [*short[:256], *other[256:]]) == 4 * PAGE_TOKENS
    assert replica.scheduler.stats().disk_lost_pages == 0
    assert replica.scheduler.stats().disk_dropped_pages > 0


def test_the_report_names_what_is_on_disk() -> None:
    replica = tiered(tier_sample=4, host_pages=10)
    asked = filled(replica)
    keys = set(unpack_keys(replica.scheduler.stats().disk_keys))
    assert {page_keys(prompt)[8][:8] for prompt in asked[2:]} <= keys
    assert len(keys) <= 4


def test_an_index_reports_ends_and_a_grid_and_no_more_than_it_may() -> None:
    index = DiskIndex(200, reported=8)
    assert [index.settle(150), index.settle(150)] == [False, True]
    chains = [page_keys(tokens(40 * PAGE_TOKENS, seed=seed)) for seed in range(4)]
    for keys in chains:
        parent = -1
        for number, key in enumerate(keys, 1):
            slot = index.take()
            index.put(slot, key, parent, number, 0, complete=True)
            parent = slot
        index.use_ends([parent])
    report = index.report()
    assert len(report) == len(set(report)) == 8
    assert {keys[-1] for keys in chains} <= set(report)
    assert {keys[number - 1] for keys in chains[2:] for number in (16, 32)} <= set(report)


def test_sessions_on_disk_are_all_reported_before_any_of_the_grid() -> None:
    """Where a session has ended matters most: half of a report was for the grid, however many sessions there were."""
    index = DiskIndex(1000, reported=8)
    assert index.settle()
    ends = []
    for number in range(10):
        parent = -1
        for page, key in enumerate(page_keys(tokens(20 * PAGE_TOKENS, seed=number)), 1):
            slot = index.take()
            index.put(slot, key, parent, page, 0, complete=True)
            parent = slot
        index.use_ends([parent])
        ends.append(key)
    assert index.report() == ends[:1:-1]
    index.use(index.slot(ends[0]))
    assert index.report() == [ends[0], *ends[:2:-1]]


def soak(seed: int, requests: int = 40, losses: float = 0.0, mishaps: float = 0.0, starts: bool = False) -> Replica:
    rng = random.Random(seed)
    settings = replace(
        random_config(rng, tight=True),
        host_pages=rng.choice([1, 3, 4, 5, 8]),
        disk_pages=rng.choice([8, 40, 300]),
        queue_limit=50,
        ranks=rng.choice([1, 2, 3]),
        save_batch=rng.choice([1, 2, 16]),
        load_least=rng.choice([1, 1, 2]),
        disk_least=1,
        disk_page_s=0.0,
        disk_writes_per_s=rng.choice([100.0, 1e9]),
        disk_writes_saved_up=rng.choice([30.0, 1e9]),
        prefix_cache=True,
    )
    replica = Replica(settings, agree=rng.choice([0.0, 0.5, 1.0]), seed=seed)
    replica.losses, replica.worker.mishap = losses, mishaps
    known: list[list[int]] = []
    for number in range(requests):
        if starts and number == requests // 2:
            known = [[*request.prompt, *replica.tokens[name]] for name, request in replica.requests.items()]
            replica.check_tokens()
            replica = replica.start_again()
            replica.losses, replica.worker.mishap = losses, mishaps
        prompt, sampling = random_request(rng, settings.max_context)
        if replica.finish and rng.random() < 0.7:
            name = rng.choice(sorted(replica.finish))
            prompt = [*replica.requests[name].prompt, *replica.tokens[name], 1, 2, 3]
        elif known and rng.random() < 0.8:
            prompt = [*rng.choice(known), 1, 2]
        replica.add(f"request {number}", prompt, **sampling)
        live = sorted(replica.scheduler._live)
        if live and rng.random() < 0.2:
            replica.cancel(rng.choice(live))
        for _ in range(rng.choice([0, 0, 1, 10, 40])):
            kind = rng.random()
            if kind < 0.4:
                replica.plan()
            elif kind < 0.55 and replica.launched:
                replica.apply()
            elif kind < 0.7:
                replica.move()
            elif kind < 0.85 and replica.answers:
                replica.answer()
            elif kind < 0.9 and replica.disk_answers:
                replica.answer_of_disk()
            else:
                replica.now += rng.choice([0.001, 0.1, 1.0])
                replica.scheduler.expire()
            replica.check_pages()
            replica.check_books()
    replica.run()
    replica.check_pages()
    replica.check_books()
    return replica


@pytest.mark.parametrize(
    ("losses", "starts"), [pytest.param(0.0, False, marks=pytest.mark.long), (0.1, True), (0.0, True)]
)
def test_under_pressure_every_request_gets_its_own_tokens_from_wherever(losses: float, starts: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in range(30):
        replica = soak(seed, losses=losses, starts=starts)
        assert set(replica.finish) == set(replica.requests)
        replica.check_tokens()
        replica.check_rest()
        stats = replica.scheduler.stats()
        seen["saved"] += stats.disk_saved_pages
        seen["loaded"] += stats.disk_loaded_pages
        seen["late"] += stats.disk_late_loads
        if losses:
            seen["lost"] += stats.disk_lost_pages
    print(seen)
    assert min(seen["saved"], seen["loaded"], seen.get("lost", 99)) >= 15
    assert seen["late"] >= 1


@pytest.mark.long
def test_bad_rows_harm_nobody_else_where_their_pages_come_and_go() -> None:
    bad = 0
    for seed in range(20):
        replica = soak(seed, losses=0.05, mishaps=1e-3, starts=seed % 2 == 0)
        bad += replica.scheduler.stats().bad_rows
        replica.check_tokens()
    assert bad >= 5


@pytest.mark.long
def test_colliding_page_keys_cost_hits_but_never_tokens_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    strong = prompts.chain_key
    monkeypatch.setattr(prompts, "chain_key", lambda parent, page: bytes(15) + bytes([strong(parent, page)[0] % 3]))
    stats = [soak(seed, starts=True).scheduler.stats() for seed in range(20)]
    assert sum(one.disk_saved_pages for one in stats) > 10
