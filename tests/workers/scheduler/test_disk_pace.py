"""How long requests wait for the disk, and when one counts as slow or failed."""

from __future__ import annotations

from typing import Any

import pytest
from disk_replica import LONG, asked_together, disk_of, filled, of_speed, served, tiered, waiting
from replica import Replica
from workload import tokens

from workers.protocol.tiers import DiskMoved
from workers.scheduler import read_pace
from workers.scheduler.disk_loads import DiskLoads
from workers.scheduler.read_pace import LONGEST_S
from workers.scheduler.sequence import Phase

pytestmark = pytest.mark.usefixtures("short_prompts_are_worth_a_load")


def waits_as_long_as_computing_takes() -> None:
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


def test_nobody_waits_for_a_slow_disk_longer_than_computing_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    waits_as_long_as_computing_takes()
    # A planted fault: there is no deadline.
    monkeypatch.setattr(DiskLoads, "overdue", lambda self, now: [])
    with pytest.raises(AssertionError, match="LOADING"):
        waits_as_long_as_computing_takes()


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
    _, second = (ticket.number for ticket in disk_of(replica)._tickets.loads)
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
    begin, sizes = DiskLoads._begin, []

    def watched(self: DiskLoads, row: Any, slots: list[int], copies: list[Any]) -> None:
        sizes.append(len(slots))
        begin(self, row, slots, copies)

    monkeypatch.setattr(DiskLoads, "_begin", watched)
    disk_of(replica)._pace.measured = margin == "MARGIN"
    monkeypatch.setattr(read_pace, margin, LONGEST_S / 4.5e-4)
    assert served(replica, "again", first) == LONG
    assert sizes == read


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
        again.now += read_pace.LONGEST_S * 2
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
    pace = disk_of(again)._pace
    honest = pace.most_at_once
    pace.most_at_once = lambda least, most: 4  # type: ignore[method-assign]
    while again.plan() is not None:
        pass
    assert again.add("busy", tokens(20, seed=77), max_tokens=30, priority=-1) is None
    again.plan()
    again.move()
    while again.disk_answers:
        again.answer_of_disk()
    again.now += 10.0
    assert again.scheduler._live["c"].phase is Phase.WAITING
    pace.most_at_once = honest  # type: ignore[method-assign]
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


def test_who_comes_before_a_disk_was_measured_waits_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """So little is read at once before anything was measured that there is one load at a time."""
    replica = tiered(host_pages=200, pages=100, slots=8, max_context=1000, disk_page_s=1e-4)
    asked = filled(replica, prompts=5)
    monkeypatch.setattr(read_pace, "FIRST_MARGIN", LONGEST_S / 9.5e-4)
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
    assert (len(disk._loads._ticket_of), len(disk._loads._queued)) == (2, 1)
    stalled, again.disk_answers = again.disk_answers, []
    patience = again.scheduler.patience_s(LONGEST_S)
    assert patience == pytest.approx(LONG * read_pace.TOKEN_S)
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
