"""The disk behind host memory, with a simulated worker that checks every entry that is read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from disk_replica import LONG, asked_together, disk_of, filled, row_of, served, sessions, tiered, waiting
from replica import Replica
from workload import tokens

from kernels.page import PAGE_TOKENS
from workers.protocol import request as prompts
from workers.protocol.request import page_keys
from workers.protocol.tiers import DiskMoved
from workers.scheduler.prefix import PrefixCache
from workers.scheduler.prefix_summary import Entry
from workers.scheduler.sequence import Phase, Tokens

pytestmark = pytest.mark.usefixtures("short_prompts_are_worth_a_load")


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


def of_one_salt() -> None:
    replica = tiered(host_pages=10)
    first, second = tokens(600, seed=1), tokens(600, seed=2)
    assert served(replica, "a", first, b"one") == served(replica, "b", second, b"one") == 0
    assert served(replica, "other salt", first, b"two") == 0
    assert served(replica, "none", first) == 0
    assert replica.scheduler.stats().disk_loaded_pages == 0
    assert served(replica, "same salt", first, b"one") == LONG
    assert replica.scheduler.stats().disk_loaded_pages == 9


def test_the_disk_is_shared_among_requests_of_one_salt_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    of_one_salt()
    # A planted fault: keys have no salt.
    monkeypatch.setattr("workers.scheduler.scheduler.salted_root", lambda root, salt: root)
    with pytest.raises(AssertionError):
        of_one_salt()


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
        assert not disk_of(replica)._loads._kept
    replica.run()
    replica.check_tokens()
    replica.check_pages()
    assert not disk_of(replica)._loads._kept
    assert cancelled or replica.outputs["c"][0].cached_tokens == LONG


def test_pages_are_read_while_no_slot_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a prompt that has to wait is looked at once for that."""
    replica = tiered(slots=1, pages=31, host_pages=40, width=1, token_budget=700)
    asked = filled(replica, 8)
    looks = 0
    honest = PrefixCache.match

    def match(self: PrefixCache, found: Tokens, keys: list[bytes], most: int) -> list[Entry]:
        nonlocal looks
        looks += 1
        return honest(self, found, keys, most)

    monkeypatch.setattr(PrefixCache, "match", match)
    assert replica.add("runs", tokens(100, seed=20), max_tokens=200) is None
    while replica.scheduler.stats().running == 0:
        replica.step()
    assert replica.add("c", [*asked[0], 1], max_tokens=2) is None
    assert replica.add("computed", tokens(600, seed=21), max_tokens=2) is None
    looks = 0
    for _ in range(100):
        replica.step()
        replica.check_pages()
        replica.check_books()
    assert replica.scheduler.stats().running == 1
    assert "runs" not in replica.finish
    assert replica.scheduler._live["c"].phase is Phase.WAITING, "it is at its place again"
    assert replica.scheduler.stats().disk_loaded_pages == 9
    assert looks <= 6
    replica.run()
    replica.check_tokens()
    replica.check_rest()
    assert replica.outputs["c"][0].cached_tokens == LONG


@pytest.mark.parametrize("common", [0, 16])
def test_what_is_read_while_no_slot_is_free_leaves_half_of_host_memory_to_others(common: int) -> None:
    """A prompt of 36 pages, one behind it and then one before it wait for as long as an answer runs, whose pages are
    saved meanwhile. Pages with which the first and the answer's prompt begin are in host memory already, and stay there
    for what continues them: they count, too."""
    replica = tiered(slots=1, pages=60, host_pages=40, max_context=2500, disk_pages=200, width=1, token_budget=3000)
    replica.page_s, disk_of(replica)._pace._token_s = 0.0, lambda: 1.0
    begin = tokens(common * PAGE_TOKENS, seed=30)
    long = [*begin, *tokens((36 - common) * PAGE_TOKENS, seed=31)]
    behind, before, last = (tokens(38 * PAGE_TOKENS, seed=seed) for seed in (32, 33, 35))
    for number, prompt in enumerate([long, behind, before, last]):
        assert served(replica, f"first {number}", prompt) == 0
        served(replica, f"second {number}", [*prompt, 4])  # all of it is on disk by then
    assert replica.add("runs", [*begin, *tokens(9 * PAGE_TOKENS, seed=34)], max_tokens=500) is None
    while not replica.outputs["runs"]:
        replica.step()
    begun = replica.scheduler.stats()
    assert replica.add("c", [*long, 1], max_tokens=2) is None
    assert replica.add("d", [*behind, 1], max_tokens=2) is None
    while len(replica.tokens["runs"]) < 480:
        replica.step()
    replica.check_pages()
    replica.check_books()
    assert replica.add("e", [*before, 1], max_tokens=2, priority=-1) is None
    while len(replica.tokens["runs"]) < 490:
        replica.step()
    assert "runs" not in replica.finish
    assert {replica.scheduler._live[name].phase for name in "cde"} == {Phase.WAITING}
    stats = replica.scheduler.stats()
    assert stats.disk_loaded_pages - begun.disk_loaded_pages == 20 - common
    assert stats.host_dropped_pages == begun.host_dropped_pages
    assert stats.host_saved_pages >= begun.host_saved_pages + 7, "of the answer"
    replica.cancel("e")
    replica.run()
    replica.check_tokens()
    replica.check_rest()
    cached = [replica.outputs[name][0].cached_tokens // PAGE_TOKENS for name in "cd"]
    assert cached == [36, 38], "the rest is read when a slot is free"
    assert replica.scheduler.stats().disk_loaded_pages - begun.disk_loaded_pages == 36 - common + 38


def test_what_is_read_ahead_takes_no_room_from_who_comes_first() -> None:
    """Half of host memory has pages for a prompt that waits, and a slot is free for one of higher priority."""
    replica = tiered(slots=1, pages=60, host_pages=40, max_context=2500, disk_pages=400, width=1, token_budget=3000)
    replica.page_s, disk_of(replica)._pace._token_s = 0.0, lambda: 1.0
    asked = [tokens(36 * PAGE_TOKENS, seed=40 + number) for number in range(4)]
    for number, prompt in enumerate(asked):
        served(replica, f"first {number}", prompt)
        served(replica, f"second {number}", [*prompt, 4])  # all of it is on disk by then
    assert replica.add("runs", tokens(9 * PAGE_TOKENS, seed=50), max_tokens=300) is None
    while not replica.outputs["runs"]:
        replica.step()
    assert replica.add("waits", [*asked[0], 1], max_tokens=2) is None
    while len(replica.tokens["runs"]) < 100:
        replica.step()
    assert replica.scheduler.stats().disk_loaded_pages == 20
    assert replica.add("urgent", [*asked[1], 1], max_tokens=2, priority=-1) is None
    replica.run()
    replica.check_tokens()
    replica.check_rest()
    assert [replica.outputs[name][0].cached_tokens // PAGE_TOKENS for name in ("urgent", "waits")] == [36, 36]


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


def test_an_answer_that_nobody_waits_for_is_an_error() -> None:
    replica = tiered()
    filled(replica)
    with pytest.raises(RuntimeError, match="does not wait for it"):
        replica.scheduler.disk_moved(DiskMoved(0, 1))


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
