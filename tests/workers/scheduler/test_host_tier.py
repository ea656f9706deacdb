"""Host memory behind the pages, with a simulated worker that checks every entry that is read."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import replace

import msgspec
import pytest
from host_replica import ask, loading, pinned, served, tiered
from replica import Replica
from simulated_worker import alone
from workload import config, random_config, random_request, tokens

from kernels.page import PAGE_TOKENS
from workers.protocol import request as prompts
from workers.protocol.messages import Request
from workers.protocol.plan import SamplingParams
from workers.protocol.request import page_keys, unpack_keys
from workers.protocol.tiers import Moves
from workers.scheduler.host_tier import LOAD_S, HostTier, Ticket
from workers.scheduler.pages import RowPages
from workers.scheduler.prefix import PrefixCache
from workers.scheduler.prefix_summary import Copy, Entry
from workers.scheduler.sequence import Phase, Sequence, Tokens


def test_what_left_the_device_comes_back_from_host_memory() -> None:
    replica = tiered()
    first, second = tokens(600, seed=1), tokens(600, seed=2)
    assert served(replica, "a", first) == 0
    assert served(replica, "b", second) == 0  # takes the pages of the first
    without = Replica(config(pages=11, max_context=640, slots=3))
    assert [served(without, name, prompt) for name, prompt in (("a", first), ("b", second), ("c", first))] == [0, 0, 0]
    # Nine pages are full; of the tenth nobody could use the rest.
    assert served(replica, "c", [*first, 1, 2, 3]) == 9 * PAGE_TOKENS
    stats = replica.scheduler.stats()
    assert stats.host_loaded_pages == 9
    assert stats.host_saved_pages == stats.host_pages == 18
    assert stats.host_pages_total == 100


def of_one_salt() -> None:
    replica = tiered()
    first, second = tokens(600, seed=1), tokens(600, seed=2)
    assert [served(replica, f"first of {salt!r}", first, salt) for salt in (b"one", b"two")] == [0, 0]
    assert served(replica, "second", second, b"one") == 0
    stats = replica.scheduler.stats()
    assert (stats.host_saved_pages, stats.host_loaded_pages) == (27, 0)
    for number, salt in enumerate((b"one", b"two"), 1):
        assert served(replica, f"again of {salt!r}", first, salt) == 9 * PAGE_TOKENS
        assert replica.scheduler.stats().host_loaded_pages == 9 * number
        assert served(replica, f"of none, {number}", first) == (number - 1) * 9 * PAGE_TOKENS
    assert served(replica, "another salt", first, b"three") == 0


def test_host_memory_is_shared_among_requests_of_one_salt_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    of_one_salt()
    # A planted fault: keys have no salt.
    monkeypatch.setattr("workers.scheduler.scheduler.salted_root", lambda root, salt: root)
    with pytest.raises(AssertionError):
        of_one_salt()


def test_pages_in_host_memory_whose_keys_have_one_low_half_are_all_found(monkeypatch: pytest.MonkeyPatch) -> None:
    strong = prompts.chain_key
    monkeypatch.setattr(prompts, "chain_key", lambda parent, page: bytes(8) + strong(parent, page)[8:])
    replica = tiered()
    first, second = tokens(600, seed=1), tokens(600, seed=2)
    assert [served(replica, str(number), prompt) for number, prompt in enumerate((first, second))] == [0, 0]
    assert served(replica, "again", first) == 9 * PAGE_TOKENS
    assert replica.scheduler.stats().host_loaded_pages == 9


@pytest.mark.parametrize(
    ("token_s", "loaded"),
    [(None, 0), (LOAD_S / (2.9 * PAGE_TOKENS), 3), (LOAD_S / (3.1 * PAGE_TOKENS), 0), (1.0, 3)],
)
def test_few_pages_are_loaded_where_computing_them_takes_longer(token_s: float | None, loaded: int) -> None:
    """The last three pages of nine have left the device."""
    replica = tiered(load_least=4)
    tier = replica.scheduler._rows.tier
    assert tier is not None
    tier._token_s = lambda: token_s
    first = tokens(600, seed=1)
    served(replica, "a", first)
    served(replica, "b", tokens(230, seed=2))
    assert served(replica, "c", first) == (6 + loaded) * PAGE_TOKENS
    assert replica.scheduler.stats().host_loaded_pages == loaded


def asked_twice() -> None:
    replica = tiered()
    first = tokens(600, seed=1)
    served(replica, "a", first)
    served(replica, "b", tokens(600, seed=2))
    assert served(replica, "c", first) == 9 * PAGE_TOKENS
    loaded = replica.scheduler.stats().host_loaded_pages
    assert served(replica, "d", first) == 9 * PAGE_TOKENS
    assert replica.scheduler.stats().host_loaded_pages == loaded


def test_a_second_asker_finds_loaded_pages_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_twice()
    # A planted fault: pages that were loaded are not registered.
    honest = HostTier._loaded

    def forgetful(self: HostTier, ticket: Ticket, row: RowPages) -> list[Sequence]:
        with monkeypatch.context() as patch:
            patch.setattr(PrefixCache, "register", lambda *arguments: None)
            return honest(self, ticket, row)

    monkeypatch.setattr(HostTier, "_loaded", forgetful)
    with pytest.raises(AssertionError):
        asked_twice()


def test_askers_of_the_same_pages_wait_for_one_load() -> None:
    replica = tiered(pages=30)
    first = tokens(600, seed=1)
    served(replica, "a", first)
    for seed in (2, 3, 4):
        served(replica, f"b{seed}", tokens(600, seed=seed))
    ask(replica, "c", [*first, 1])
    ask(replica, "d", [*first, 2])
    while replica.plan() is not None:
        pass
    assert {s.phase for s in replica.scheduler._live.values()} == {Phase.LOADING}
    replica.check_books()
    replica.run()
    replica.check_tokens()
    assert replica.scheduler.stats().host_loaded_pages == 8  # the first one is still on the device
    assert [replica.outputs[name][0].cached_tokens for name in "cd"] == [9 * PAGE_TOKENS] * 2


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 2, 3]])
def test_askers_that_begin_alike_get_all_that_each_of_them_has_in_host_memory(order: list[int]) -> None:
    """Sessions with a system prompt of four pages in common, and sixteen of their own."""
    replica = tiered(pages=60, max_context=1500, host_pages=400, slots=8, token_budget=2000)
    common = tokens(4 * PAGE_TOKENS, seed=99)
    asked = [[*common, *tokens(16 * PAGE_TOKENS, seed=seed)] for seed in range(4)]
    for number, prompt in enumerate(asked):
        served(replica, f"a{number}", prompt)
    for seed in range(10, 16):
        served(replica, f"between {seed}", tokens(1300, seed=seed))
    before = replica.scheduler.stats().host_loaded_pages
    for number in order:
        ask(replica, f"b{number}", [*asked[number], 1, 2, 3])
    for _ in range(20_000):
        if not replica.step():
            break
        replica.check_pages()
        replica.check_books()
    replica.check_tokens()
    replica.check_rest()
    found = [replica.outputs[f"b{number}"][0].cached_tokens // PAGE_TOKENS for number in order]
    assert found == [20] * len(order)
    loaded = replica.scheduler.stats().host_loaded_pages - before
    assert loaded == 4 + 16 * len(order), "what they have in common is loaded once"


def test_where_pages_lack_one_load_is_given_up_and_not_all() -> None:
    """Three prompts wait with nine loaded pages each when a row takes a page more than is free."""
    replica = tiered(pages=31, slots=1, width=1, token_budget=700)
    asked = [tokens(600, seed=seed) for seed in range(3)]
    for number, prompt in enumerate(asked):
        served(replica, f"a{number}", prompt)
    for seed in range(5, 9):
        served(replica, f"between {seed}", tokens(600, seed=seed))
    tier = replica.scheduler._rows.tier
    assert tier is not None
    assert replica.add("grows", tokens(100, seed=4), max_tokens=600) is None
    assert replica.plan() is not None
    replica.apply()
    rows = replica.scheduler._rows
    for number, prompt in enumerate(asked):
        ask(replica, f"b{number}", prompt)
    for _ in asked:  # as if there had been a slot for each
        waiting = rows.queue.head()
        found = rows.cache.match(waiting.tokens, waiting.keys, 9)
        copies = tier.loadable(waiting, found, 9)
        rows.queue.pop()
        waiting.phase = Phase.LOADING
        tier.load(waiting, found, copies)
    replica.channel.extend(replica.scheduler.moves())
    while replica.answers or replica.channel:
        replica.move()
        replica.answer()
    assert len(tier._ready) == 3
    while len(tier._ready) == 3:
        replica.plan()
        replica.apply()
        replica.check_pages()
    assert {row.request.request_id for ticket in tier._ready.values() for row in ticket.waiting} == {"b0", "b1"}
    replica.run()
    replica.check_tokens()


def test_nothing_is_saved_before_host_memory_is_pinned() -> None:
    replica = pinned(tiered(pins_pages=True, ranks=2), 100, 0)
    served(replica, "a", tokens(600, seed=1))
    stats = replica.scheduler.stats()
    assert (stats.host_pages_total, stats.host_pages, stats.host_lost_pages) == (0, 0, 0)
    tier = replica.scheduler._rows.tier
    assert tier is not None
    assert not tier._offered, "nor kept"
    assert stats.host_dropped_pages == 0, "all of them are on the device"
    pinned(replica, 100, 9)
    second = tokens(600, seed=2)
    served(replica, "b", second)
    served(replica, "c", tokens(640 - 60, seed=3)[:100])
    stats = replica.scheduler.stats()
    assert (stats.host_pages_total, stats.host_saved_pages, stats.host_dropped_pages) == (9, 10, 9)
    saves = [message.page for message in replica.scheduler._rows.tier._copies.values()]  # type: ignore[union-attr]
    assert saves == sorted(saves), "slots side by side are copied at once"


@pytest.mark.parametrize("ranks", [1, 2])
def test_host_memory_of_which_a_part_cannot_be_pinned_works_as_if_it_were_so_small(ranks: int) -> None:
    """100 slots, and all ranks can use 20 of them: for two prompts of the three that are asked for in turn."""
    small = tiered(host_pages=20, ranks=ranks)
    large = pinned(tiered(host_pages=100, ranks=ranks, pins_pages=True), *[100, 20][-ranks:])
    came: list[list[int]] = [[], []]
    for replica, found in zip((small, large), came, strict=True):
        for seed in range(8):
            served(replica, f"a{seed}", tokens(600, seed=seed))
            served(replica, f"b{seed}", tokens(600, seed=1000 + seed))
            found.append(served(replica, f"c{seed}", tokens(600, seed=seed)))
    assert came[1] == came[0] == [9 * PAGE_TOKENS] * 8
    stats = large.scheduler.stats()
    assert (stats.host_pages_total, stats.host_pages, stats.host_lost_pages) == (20, 20, 0)


def test_a_prompt_that_has_to_wait_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five prompts of nine pages, of which four may be loaded at one time, and one in each plan."""
    replica = tiered(pages=100, slots=8, host_pages=400)
    asked = [tokens(600, seed=seed) for seed in range(5)]
    for number, prompt in enumerate(asked):
        served(replica, f"a{number}", prompt)
    for seed in range(20, 40):
        served(replica, f"between {seed}", tokens(600, seed=seed))
    for number, prompt in enumerate(asked):
        ask(replica, f"b{number}", prompt)
    loads = []
    for _ in range(4):
        assert replica.scheduler.patience_s(1.0) == (0.0 if 0 < len(loads) < 4 else 1.0)
        assert replica.plan() is None
        loads.append(len(replica.scheduler._rows.loading))
    assert loads == [1, 2, 3, 4]
    compared = 0
    honest = Tokens.page

    def page(self: Tokens, index: int) -> bytes:
        nonlocal compared
        compared += 1
        return honest(self, index)

    monkeypatch.setattr(Tokens, "page", page)
    for _ in range(10):
        replica.plan()
    assert replica.scheduler._live["b4"].phase is Phase.WAITING
    assert compared <= 9 + 2 * 10, "nine pages once, and what ends the chain and is not on the device in each plan"
    replica.run()
    replica.check_tokens()
    assert [replica.outputs[f"b{number}"][0].cached_tokens for number in range(5)] == [9 * PAGE_TOKENS] * 5
    assert not replica.scheduler._rows.tier._chains  # type: ignore[union-attr]


def test_routers_are_told_of_sessions_in_host_memory_by_their_last_use() -> None:
    """Not by when they were saved: the oldest session may be the busiest."""
    replica = tiered(tier_sample=8)
    sessions = [tokens(600, seed=seed) for seed in range(10)]
    for number, session in enumerate(sessions):
        served(replica, f"first {number}", session)
    ends = [page_keys(session)[8][:8] for session in sessions]

    def reported() -> set[int]:
        keys = unpack_keys(replica.scheduler.stats().host_keys)
        assert len(keys) == len(set(keys)) == 8
        return {number for number, end in enumerate(ends) if end in keys}

    assert reported() == set(range(4, 10))
    for number in (0, 2):
        assert served(replica, f"again {number}", sessions[number]) == 9 * PAGE_TOKENS
    assert reported() == {0, 2, 6, 7, 8, 9}


def test_others_pass_while_pages_are_loaded() -> None:
    replica = tiered(pages=30)
    first = tokens(600, seed=1)
    served(replica, "a", first)
    for seed in (2, 3, 4):
        served(replica, f"b{seed}", tokens(600, seed=seed))
    ask(replica, "c", first)
    ask(replica, "d", tokens(70, seed=9))
    for _ in range(2):
        assert replica.plan() is not None
        replica.apply()
    assert replica.outputs["d"]
    assert not replica.outputs["c"]
    replica.run()
    replica.check_tokens()


@pytest.mark.parametrize("answered", [0, 1])
def test_who_leaves_while_pages_are_loaded_loses_none(answered: int) -> None:
    replica = tiered(ranks=2)
    first = loading(replica)
    replica.move()
    for _ in range(answered):
        replica.answer()
    replica.cancel("c")
    replica.check_pages()
    assert replica.scheduler.idle
    while replica.answers:
        replica.answer()
    replica.check_pages()
    replica.check_rest()
    assert served(replica, "d", first) == 9 * PAGE_TOKENS  # the load went on
    assert replica.scheduler.stats().host_loaded_pages == 9


def leaves_when_its_pages_are_there() -> None:
    replica = tiered()
    loading(replica)
    replica.move()
    replica.answer()
    replica.check_pages()
    assert replica.scheduler.stats().pages_free == 1
    replica.cancel("c")
    replica.check_pages()
    replica.check_rest()


def test_who_leaves_when_its_pages_are_there_gives_them_up(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves_when_its_pages_are_there()
    # A planted fault: nobody gives up pages that it waited for.
    monkeypatch.setattr(HostTier, "leave", lambda self, row: None)
    with pytest.raises(AssertionError):
        leaves_when_its_pages_are_there()


def loses_a_copy() -> None:
    replica = tiered(ranks=2)
    first = loading(replica)
    replica.losses = 1.0
    replica.move()
    replica.losses = 0.0
    replica.run()
    replica.check_tokens()
    replica.check_pages()
    assert replica.outputs["c"][0].cached_tokens == 0
    stats = replica.scheduler.stats()
    assert stats.host_lost_pages == 9
    assert stats.host_loaded_pages == 0
    # It was computed again, and saved again.
    served(replica, "e", tokens(600, seed=7))
    assert served(replica, "f", first) == 9 * PAGE_TOKENS


def test_a_lost_copy_costs_its_pages_and_never_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    loses_a_copy()
    # A planted fault: a copy that failed counts as loaded.
    honest = HostTier.moved
    monkeypatch.setattr(HostTier, "moved", lambda self, told: honest(self, msgspec.structs.replace(told, lost=False)))
    with pytest.raises(AssertionError, match="prefix hit was never written"):
        loses_a_copy()


def fails_to_save() -> None:
    replica = tiered()
    replica.losses = 1.0
    first = tokens(600, seed=1)
    served(replica, "a", first)
    assert replica.scheduler.stats().host_pages == 0
    served(replica, "b", tokens(600, seed=2))
    assert served(replica, "c", first) == 0


def test_a_save_that_fails_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_to_save()
    # A planted fault: it counts as done.
    honest = HostTier.moved
    monkeypatch.setattr(HostTier, "moved", lambda self, told: honest(self, msgspec.structs.replace(told, lost=False)))
    with pytest.raises(AssertionError):
        fails_to_save()


def test_host_memory_that_is_smaller_than_the_device_starves_nobody() -> None:
    replica = tiered(host_pages=3)
    for seed in (1, 2, 1, 2, 3):
        served(replica, f"{len(replica.requests)}", tokens(600, seed=seed))
    stats = replica.scheduler.stats()
    assert stats.host_pages == 3
    assert stats.host_dropped_pages > 0
    assert served(replica, "last", tokens(600, seed=3)) == 9 * PAGE_TOKENS  # it is on the device


def test_a_prompt_for_which_host_memory_is_too_small_keeps_others_from_it_no_longer_than_a_turn() -> None:
    """Its first pages fill all slots, and the next one would take that of the page before it."""
    replica = tiered(host_pages=3, pages=40)
    served(replica, "long", tokens(600, seed=1))
    served(replica, "other", tokens(100, seed=2))
    assert replica.scheduler._rows.cache.cached == 10, "both are on the device"
    tier = replica.scheduler._rows.tier
    assert tier is not None
    assert page_keys(tokens(100, seed=2))[0] in tier._copies
    replica.check_pages()


def steps_alone(replica: Replica) -> None:
    """Serve what was asked while no copy is answered."""
    while replica.plan() is not None or replica.launched:
        if replica.launched:
            replica.apply()
    replica.move()


def saved(replica: Replica, prompt: list[int]) -> int:
    """Pages of a prompt that are in host memory."""
    tier = replica.scheduler._rows.tier
    assert tier is not None
    return sum(key in tier._copies for key in page_keys(prompt))


def test_a_prompt_that_comes_while_copies_fill_host_memory_is_saved_when_they_are_done() -> None:
    """The first one's pages are being written to all slots."""
    replica = tiered(host_pages=9, pages=40)
    first, second = tokens(600, seed=1), tokens(300, seed=2)
    for name, prompt in (("a", first), ("b", second)):
        ask(replica, name, prompt)
        steps_alone(replica)
        assert replica.answers
        assert (saved(replica, first), saved(replica, second)) == (9, 0)
        replica.check_pages()
    replica.run()
    assert (saved(replica, first), saved(replica, second)) == (5, 4)
    replica.check_pages()


def test_a_prompt_that_comes_while_a_load_reads_all_of_host_memory_is_saved_when_it_is_done() -> None:
    replica = tiered(host_pages=9, pages=20)
    first, second = tokens(600, seed=1), tokens(300, seed=2)
    served(replica, "a", first)
    cache = replica.scheduler._rows.cache
    cache.close(cache.open([], 19, overwritten=True))
    assert cache.cached == 0, "it has left the device"
    ask(replica, "c", first)
    assert replica.plan() is None
    ask(replica, "b", second)
    steps_alone(replica)
    assert "b" in replica.finish
    assert "c" not in replica.finish
    assert (saved(replica, first), saved(replica, second)) == (9, 0)
    replica.answer()
    replica.scheduler.save_pages()
    assert (saved(replica, first), saved(replica, second)) == (5, 4)
    replica.run()
    replica.check_tokens()
    replica.check_pages()


def test_pages_that_leave_unsaved_are_counted_once_each() -> None:
    """Three pages of each prompt of nine find a slot; the others are tried turn by turn while they are there."""
    replica = tiered(host_pages=3)
    left = [served(replica, f"{seed}", tokens(600, seed=seed)) for seed in range(4)]
    assert left == [0] * 4
    for _ in range(50):
        replica.scheduler.save_pages()
    stats = replica.scheduler.stats()
    on_device = replica.scheduler._rows.cache.cached
    assert stats.host_saved_pages == 4 * 3
    assert stats.host_dropped_pages == 4 * (9 - 3) - (on_device - 3)


def test_pages_that_wait_for_host_memory_and_are_saved_at_last_are_not_counted() -> None:
    """Nine pages find host memory that is not pinned yet, and are saved together with a tenth that continues them."""
    replica = pinned(tiered(pins_pages=True, pages=30, max_context=720), 0)
    first = tokens(600, seed=1)
    served(replica, "a", first)
    pinned(replica, 100)
    served(replica, "b", [*first, *tokens(100, seed=2)])
    served(replica, "c", tokens(600, seed=3))
    served(replica, "d", tokens(600, seed=4))
    served(replica, "e", tokens(600, seed=5))
    stats = replica.scheduler.stats()
    assert stats.host_saved_pages == 10 + 3 * 9
    assert stats.host_dropped_pages == 0


def test_the_copies_that_were_used_last_stay() -> None:
    replica = tiered(host_pages=20)
    first, second, third = (tokens(600, seed=seed) for seed in (1, 2, 3))
    served(replica, "a", first)
    served(replica, "b", second)
    assert served(replica, "c", first) == 9 * PAGE_TOKENS
    served(replica, "d", third)
    assert served(replica, "e", first) == 9 * PAGE_TOKENS
    assert served(replica, "f", second) < 9 * PAGE_TOKENS


def test_prompts_that_load_and_wait_never_hold_up_each_other() -> None:
    """Room for one prompt, and twenty that are in host memory."""
    replica = tiered(host_pages=400)
    for seed in range(20):
        served(replica, f"a{seed}", tokens(600, seed=seed))
    for seed in range(20):
        ask(replica, f"b{seed}", [*tokens(600, seed=seed), 1])
    for seed in range(4):
        ask(replica, f"c{seed}", tokens(100, seed=100 + seed), priority=seed % 3 - 1)
    replica.run()
    replica.check_tokens()
    replica.check_rest()
    found = [replica.outputs[f"b{seed}"][0].cached_tokens for seed in range(20)]
    assert found.count(9 * PAGE_TOKENS) >= 19


def test_decode_rows_that_grow_take_pages_from_prompts_that_wait_with_theirs() -> None:
    replica = tiered(pages=20, slots=1, width=1, token_budget=700)
    first = tokens(600, seed=1)
    served(replica, "a", first)
    served(replica, "b", tokens(600, seed=2))
    served(replica, "b2", tokens(600, seed=3))
    assert replica.add("grows", tokens(60, seed=4), max_tokens=600) is None
    assert replica.plan() is not None
    replica.apply()
    rows = replica.scheduler._rows
    # A prompt whose pages were loaded, and which waits for the only slot.
    assert rows.tier is not None
    ask(replica, "c", first)
    waiting = replica.scheduler._live["c"]
    found = rows.cache.match(waiting.tokens, waiting.keys, 9)
    copies = rows.tier.loadable(waiting, found, 9)
    rows.queue.pop()
    waiting.phase = Phase.LOADING
    rows.tier.load(waiting, found, copies)
    replica.run()
    replica.check_tokens()
    assert replica.scheduler.stats().preemptions == 0


def test_what_a_bad_row_has_read_leaves_host_memory_too() -> None:
    """The copy in host memory is what is broken, so whoever loads it again is a bad row again."""
    replica = tiered(width=1)
    first = loading(replica)
    tier = replica.scheduler._rows.tier
    assert tier is not None
    replica.worker.breaks(tier._copies[prompts.page_keys(first)[3]].page)
    replica.worker.mishap = 1e-30  # looks for entries that are no numbers
    replica.run()
    replica.check_tokens()
    replica.check_pages()
    assert replica.finish["c"] == "length"
    assert replica.scheduler.stats().bad_rows == 1
    served(replica, "d", tokens(600, seed=5))
    assert served(replica, "e", first) == 9 * PAGE_TOKENS, "it was computed again, and saved then"
    assert replica.finish["e"] == "length"
    assert replica.scheduler.stats().bad_rows == 1


def test_the_report_names_what_is_in_host_memory() -> None:
    replica = tiered()
    first = tokens(600, seed=1)
    served(replica, "a", first)
    served(replica, "b", tokens(600, seed=2))
    stats = replica.scheduler.stats()
    keys = {key[:8] for key in prompts.page_keys(first)}
    assert keys <= set(unpack_keys(stats.host_keys))
    assert keys.isdisjoint(unpack_keys(stats.prefix_keys))


def test_an_answer_that_nobody_waits_for_is_an_error() -> None:
    replica = tiered()
    loading(replica)
    replica.move()
    answer = replica.answers[0]
    replica.answer()
    with pytest.raises(RuntimeError, match="does not wait for it"):
        replica.scheduler.moved(answer)


def test_a_cache_of_the_drafter_that_is_not_copied_is_noticed() -> None:
    """A planted fault."""
    replica = tiered()
    replica.worker.forgetful = True
    loading(replica)
    with pytest.raises(AssertionError, match="holds None"):
        replica.run()


def test_ranks_that_save_out_of_order_with_the_plans_are_noticed() -> None:
    """A planted fault: the scheduler gives a page away as soon as the ranks are told to save it."""
    replica = tiered()
    replica.worker.late = True
    ask(replica, "a", tokens(600, seed=1))
    ask(replica, "b", tokens(600, seed=2))
    while "b" not in replica.finish:
        replica.plan()
        if replica.launched:
            replica.apply()

    def come_back() -> None:
        replica.run()
        served(replica, "c", tokens(600, seed=1))

    with pytest.raises(AssertionError, match=r"is saved and not complete|belongs to another prefix|not the row's own"):
        come_back()


def test_pages_that_are_found_before_they_are_loaded_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: what is being loaded counts as there."""

    def second_asker() -> None:
        replica = tiered(pages=30)
        first = tokens(600, seed=1)
        served(replica, "a", first)
        for seed in (2, 3, 4):
            served(replica, f"b{seed}", tokens(600, seed=seed))
        ask(replica, "c", [*first, 1])
        while replica.plan() is not None:
            pass
        ask(replica, "d", [*first, 2])
        replica.run()
        replica.check_tokens()

    second_asker()
    honest = HostTier.load

    def load(self: HostTier, row: Sequence, found: list[Entry], copies: list[Copy]) -> None:
        honest(self, row, found, copies)
        pages = self._ticket_of[row].row
        assert pages is not None
        self._cache.register(pages, row.tokens, len(pages.pages))

    monkeypatch.setattr(HostTier, "load", load)
    with pytest.raises(AssertionError, match="prefix hit was never written"):
        second_asker()


def test_pages_that_are_loaded_over_what_an_earlier_step_reads_are_noticed() -> None:
    """A planted fault: ranks load as soon as they are told, and not behind the steps that they were told of before."""

    def overtaken(early: bool) -> None:
        """A row meets a stop id while one more step of it is under way, and its pages are taken for a load."""
        replica = tiered(width=1)
        first, second = tokens(600, seed=1), tokens(600, seed=2)
        served(replica, "a", first)
        answer, _ = alone(Request("b", tuple(second), SamplingParams(10)), 640)
        assert answer[3] not in answer[:3]
        assert replica.add("b", second, max_tokens=10, stop_ids=(answer[3],)) is None
        ask(replica, "c", first)
        under_way = 0
        while not replica.scheduler.idle:
            while replica.plan() is not None:
                pass
            loads = [item for item in replica.channel if isinstance(item, Moves) and item.loads]
            under_way += bool(loads) and bool(replica.launched)
            if early:
                others = [item for item in replica.channel if item not in loads]
                replica.channel = deque([*loads, *others])
            replica.step()
        replica.check_tokens()
        assert under_way, "a load was begun while a step was under way"

    overtaken(early=False)
    with pytest.raises(AssertionError, match="holds None, not the row's own"):
        overtaken(early=True)


def test_pages_that_are_saved_after_they_were_given_away_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: what was evicted since counts as there."""

    def overtaken() -> None:
        """Two pages are being saved when those that wait behind them are taken for another prompt."""
        replica = tiered(save_batch=1)
        ask(replica, "a", tokens(600, seed=1))
        while "a" not in replica.finish:
            replica.plan()
            replica.apply()
        ask(replica, "b", tokens(600, seed=2))
        while "b" not in replica.finish:
            replica.plan()
            replica.apply()
        replica.run()
        served(replica, "c", tokens(600, seed=1))

    overtaken()
    monkeypatch.setattr(PrefixCache, "has", lambda self, entry: True)
    with pytest.raises(AssertionError, match="belongs to another prefix"):
        overtaken()


def soak(seed: int, requests: int = 25, losses: float = 0.0, mishaps: float = 0.0) -> Replica:
    rng = random.Random(seed)
    settings = replace(
        random_config(rng, tight=True),
        host_pages=rng.choice([1, 8, 40, 200, 200]),
        ranks=rng.choice([1, 2, 3]),
        save_batch=rng.choice([1, 2, 16]),
        load_least=rng.choice([1, 1, 2]),
        prefix_cache=True,
    )
    settings = replace(settings, savers=settings.ranks)
    replica = Replica(settings, agree=rng.choice([0.0, 0.5, 1.0]), seed=seed)
    replica.losses, replica.worker.mishap = losses, mishaps
    for number in range(requests):
        prompt, sampling = random_request(rng, settings.max_context)
        if replica.finish and rng.random() < 0.7:
            name = rng.choice(sorted(replica.finish))
            prompt = [*replica.requests[name].prompt, *replica.tokens[name], 1, 2, 3]
        replica.add(f"request {number}", prompt, **sampling)
        live = sorted(replica.requests.keys() & replica.scheduler._live)  # not its own probe
        if live and rng.random() < 0.2:
            replica.cancel(rng.choice(live))
        for _ in range(rng.choice([0, 0, 1, 10, 40])):
            kind = rng.random()
            if kind < 0.4:
                replica.plan()
            elif kind < 0.6 and replica.launched:
                replica.apply()
            elif kind < 0.8:
                replica.move()
            elif replica.answers:
                replica.answer()
            replica.check_pages()
            replica.check_books()
    replica.run()
    while replica.answers:
        replica.answer()
    replica.check_pages()
    replica.check_books()
    return replica


@pytest.mark.parametrize("losses", [pytest.param(0.0, marks=pytest.mark.long), 0.2])
def test_under_pressure_every_request_gets_its_own_tokens_from_wherever(losses: float) -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        replica = soak(seed, losses=losses)
        assert set(replica.finish) == set(replica.requests)
        replica.check_tokens()
        replica.check_rest()
        stats = replica.scheduler.stats()
        seen["saved"] += stats.host_saved_pages
        seen["loaded"] += stats.host_loaded_pages
        seen["dropped"] += stats.host_dropped_pages
        seen["preempted"] += stats.preemptions
        if losses:
            seen["lost"] += stats.host_lost_pages
    print(seen)
    assert all(count >= 20 for count in seen.values())


@pytest.mark.long
def test_bad_rows_harm_nobody_else_where_their_pages_come_and_go() -> None:
    bad = 0
    for seed in range(20):
        replica = soak(seed, losses=0.05, mishaps=1e-3)
        bad += replica.scheduler.stats().bad_rows
        for name, finish in replica.finish.items():
            assert finish != "failed" or replica.worker.mishaps, name
        replica.check_tokens()
    assert bad >= 10


@pytest.mark.long
def test_colliding_page_keys_cost_hits_but_never_tokens_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    strong = prompts.chain_key
    monkeypatch.setattr(prompts, "chain_key", lambda parent, page: bytes(15) + bytes([strong(parent, page)[0] % 3]))
    assert sum(soak(seed).scheduler.stats().host_saved_pages for seed in range(20)) > 30
