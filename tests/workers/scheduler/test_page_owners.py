"""Where ranks share out the cache, the pages of a row lie on all of them, and rows do not pile up on one."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from replica import Replica, owner_of
from workload import config, tokens

from kernels.page import Shards
from workers.protocol.request import Prompt
from workers.scheduler import SchedulerConfig
from workers.scheduler.pages import PagePool, RowPages
from workers.scheduler.prefix import PrefixCache
from workers.scheduler.sequence import Tokens


def owners(row: RowPages, shards: int) -> list[int]:
    return [owner_of(page, shards) for page in row.pages]


def test_one_shard_hands_pages_out_in_their_order() -> None:
    pool = PagePool(6)
    assert [pool.take() for _ in range(5)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("shards", [1, 3])
def test_a_pool_without_free_pages_says_so(shards: int) -> None:
    """It must not look for one for ever."""
    pool = PagePool(2 * shards + 1, shards)
    last = [pool.take() for _ in range(2 * shards)][-1]
    for after in (0, last):
        with pytest.raises(IndexError, match="no page is free"):
            pool.take(after)


@pytest.mark.parametrize("shards", [2, 3, 4])
def test_a_rows_pages_go_round_the_shards(shards: int) -> None:
    cache = PrefixCache(PagePool(60 * shards + 1, shards))
    row = cache.open([], 3)
    for _ in range(20):
        cache.extend(row, 1)
    assert all((a + 1) % shards == b for a, b in zip(owners(row, shards), owners(row, shards)[1:], strict=False))


def test_short_rows_begin_where_most_is_available() -> None:
    cache = PrefixCache(PagePool(4 * 16 + 1, 4))
    rows = [cache.open([], 1) for _ in range(32)]
    assert Counter(owner for row in rows for owner in owners(row, 4)) == dict.fromkeys(range(4), 8)


def test_rows_behind_one_prompt_do_not_pile_up() -> None:
    """A planted fault: rows that go round from the last page of the shared prefix all begin on its neighbour."""
    cache = PrefixCache(PagePool(4 * 16 + 1, 4))
    ids = Tokens(Prompt.of(range(128)))
    first = cache.open([], 2)
    cache.register(first, ids, 2)
    found = cache.match(ids, ids.keys(), 2)
    rows = [cache.open(found, 3) for _ in range(8)]
    assert {tuple(row.pages[:2]) for row in rows} == {(1, 2)}
    assert Counter(owners(row, 4)[2] for row in rows) == dict.fromkeys(range(4), 2)


def test_an_owner_without_free_pages_is_passed_over() -> None:
    pool = PagePool(2 * 3 + 1, 2)
    held = [pool.take() for _ in range(6)]
    for page in held[::2]:  # all of one owner
        assert pool.drop(page)
        pool.free(page)
    first = pool.take()
    assert owner_of(pool.take(first), 2) == owner_of(first, 2)
    assert pool.free_count == 1


@pytest.mark.parametrize("shards", [2, 4])
def test_hits_are_the_same_for_any_number_of_shards(shards: int) -> None:
    hits = []
    for count in (1, shards):
        replica = Replica(config(pages=101, cache_shards=count))
        shared = tokens(150, seed=1)
        for name in range(4):
            replica.add(f"{name}", [*shared, *tokens(30 * name + 1, seed=name)], max_tokens=5)
        replica.run()
        replica.check_tokens()
        hits.append([(p.start, p.slot) for plan in replica.plans for p in plan.prefill])
    assert hits[0] == hits[1]


def test_rows_of_all_ranks_are_about_equally_long_under_load() -> None:
    """Of each of 16 rows that grow no rank has more than a page more than another, and of all about its share."""
    cache = PrefixCache(PagePool(4 * 500 + 1, 4))
    rows = [cache.open([], 1 + 7 * index % 13) for index in range(16)]
    for step in range(400):
        cache.extend(rows[step % 16], 1 + step % 3)
    for row in rows:
        count = Counter(owners(row, 4))
        assert max(count.values()) - min(count[owner] for owner in range(4)) <= 1
    load = Counter(owner for row in rows for owner in owners(row, 4))
    assert max(load.values()) * 4 <= 1.03 * sum(load.values())


@pytest.mark.parametrize(("shards", "count"), [(2, 2), (2, 16), (8, 2), (8, 16)])
def test_so_they_are_where_the_cache_is_full(shards: int, count: int) -> None:
    """All pages that no row has are cached, as they are once a replica has served for a while. Planted faults: who
    grows gets the page that is evicted next, whosever it is; or all of an owner's are evicted for one."""
    rng, total = random.Random(1), 300 * shards
    cache = PrefixCache(PagePool(total + 1, shards))

    def begun() -> tuple[RowPages, int]:
        size = rng.randint(10, total // count // 2)
        ids, row = Tokens(Prompt.of([rng.randrange(30_000) for _ in range(64 * size)])), cache.open([], size)
        cache.register(row, ids, size)
        return row, size + rng.randint(5, total // count // 3)

    rows, found = [begun() for _ in range(count)], list[float]()
    for step in range(600):
        for index, (row, most) in enumerate(rows):
            if len(row.pages) < most:
                before = cache.free
                cache.extend(row, 1)
                assert cache.free <= max(before - 1, min(8 * shards, total // 128))
            else:
                cache.close(row)
                rows[index] = begun()
        if step > 200:
            load = Counter(owner for row, _ in rows for owner in owners(row, shards))
            found.append(max(load.values()) * shards / sum(load.values()))
    assert sum(found) / len(found) < 1.04


def test_pieces_go_round_without_exceptions() -> None:
    """Cached pages are evicted until one of the owner is there, though others have free ones."""
    cache = PrefixCache(PagePool(2 * 24 + 1, 2, in_pieces=True))
    ids = Tokens(Prompt.of(range(64 * 16)))
    old = cache.open([], 16)
    assert owners(old, 2) == [0] * 8 + [1] * 8
    cache.register(old, ids, 16)
    cache.close(old)
    rows = [cache.open([], 8) for _ in range(3)]
    assert [owners(row, 2) for row in rows] == [[0] * 8, [1] * 8, [0] * 8]
    assert cache.cached == 16
    cache.extend(rows[1], 8)  # of the first owner, who has 8 that are cached, behind 8 of the other
    assert owners(rows[1], 2) == [1] * 8 + [0] * 8
    assert cache.cached == 0
    assert cache.available == 16
    assert cache.can_extend(rows[1], 8)
    assert not cache.can_extend(rows[1], 9)
    with pytest.raises(RuntimeError, match="the scheduler must ask first"):
        cache.extend(rows[1], 9)
    assert not cache.has_room([], 17, 0)
    assert not cache.has_room([], 9, 0)
    assert cache.has_room([], 8, 0)
    assert cache.has_room([], 8, 1, [rows[1]])
    assert not cache.has_room([], 8, 9, [rows[1]])


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_every_owner_has_his_part_of_a_row(shards: int) -> None:
    """Counted page by page."""
    for first in range(shards):
        for column in (0, 1, 7, 8, 63, 100):
            for count in (0, 1, 8, 9, 64, 200):
                found = Counter((first + at // 8) % shards for at in range(column, column + count))
                assert Shards(shards).in_turns(first, column, count) == [found[owner] for owner in range(shards)]
    for each in (1, 7, 8, 9, 40):
        most, longest = Shards(shards).most_of_a_row(shards * each), 0
        while max(Shards(shards).in_turns(0, 0, longest + 1)) <= each:
            longest += 1
        assert most == longest


def test_a_hit_ends_before_a_page_that_another_rows_pieces_have_elsewhere() -> None:
    """Two rows compute one prompt at once. What the second adds to the first one's pages lies as its own do."""
    cache = PrefixCache(PagePool(2 * 40 + 1, 2, in_pieces=True))
    ids = Tokens(Prompt.of(range(64 * 12)))
    first, second = cache.open([], 8), cache.open([], 12)
    assert owners(first, 2)[0] != owners(second, 2)[0]
    cache.register(first, ids, 8)
    cache.register(second, ids, 12)
    found = cache.match(ids, ids.keys(), 12)
    assert [entry.page for entry in found] == first.pages
    row = cache.open(found, 12)
    assert owners(row, 2) == owners(first, 2)[:8] + [owners(second, 2)[0]] * 4


def a_tail_that_no_prompt_finds() -> tuple[PrefixCache, Tokens, RowPages, RowPages]:
    """A row of 8 pages, and one of the same prompt with 4 pages more, which lie elsewhere than the cycle of the first
    row's has them."""
    cache = PrefixCache(PagePool(2 * 40 + 1, 2, in_pieces=True))
    ids = Tokens(Prompt.of(range(64 * 12)))
    first, second = cache.open([], 8), cache.open([], 12)
    cache.register(first, ids, 8)
    cache.register(second, ids, 12)
    assert len(cache.match(ids, ids.keys(), 12)) == 8
    return cache, ids, first, second


@pytest.mark.parametrize("held", [True, False], ids=["held", "unheld"])
def test_a_tail_that_lies_elsewhere_is_replaced_once_it_is_computed_again(held: bool) -> None:
    """Or all who come behind would compute it, for as long as they keep its pages from being evicted. What nobody has
    any more of the old pages is free, and who vouched for these has not vouched for the new ones."""
    cache, ids, first, second = a_tail_that_no_prompt_finds()
    cache.vouch(second)
    old = second.pages[8:]
    if not held:
        cache.close(second)
    third = cache.open(cache.match(ids, ids.keys(), 12), 12)
    cache.register(third, ids, 12)
    found = cache.match(ids, ids.keys(), 12)
    assert [entry.page for entry in found] == third.pages
    assert cache.cached == 12
    assert not any(entry.sound for entry in found[8:])
    assert not any(map(cache.is_cached, old))
    cache.vouch(third)
    assert all(entry.sound for entry in found)
    for row in (first, second, third):
        cache.close(row)
    assert cache.free == 80 - 12
    assert cache.available == 80
    assert [entry.page for entry in cache.match(ids, ids.keys(), 12)] == [entry.page for entry in found]
    cache.close(cache.open([], 80))
    assert cache.cached == 0


def test_pages_that_lie_elsewhere_take_no_place() -> None:
    """A row that begins with another owner leaves entries that are found as they are."""
    cache = PrefixCache(PagePool(2 * 40 + 1, 2, in_pieces=True))
    ids = Tokens(Prompt.of(range(64 * 12)))
    first, second = cache.open([], 12), cache.open([], 12)
    assert owners(first, 2)[0] != owners(second, 2)[0]
    for row in (first, second):
        cache.register(row, ids, 12)
    assert [entry.page for entry in cache.match(ids, ids.keys(), 12)] == first.pages


def test_a_prompt_is_computed_anew_but_once_where_two_rows_began_with_different_owners() -> None:
    """The second asks for the logprobs of its prompt, and so takes no cached page."""
    replica = Replica(config(pages=2 * 30 + 1, cache_shards=2, in_pieces=True, max_context=1024, token_budget=2048))
    prompt = tokens(64 * 12 + 5, seed=1)
    replica.add("short", prompt[: 64 * 8 + 1], max_tokens=90)
    replica.step()
    replica.add("whole", prompt, max_tokens=2, prompt_logprobs=0)
    hits = []
    for name in range(4):
        for _ in range(5):
            replica.step()
        replica.add(f"{name}", prompt, max_tokens=2)
    replica.run()
    replica.check_tokens()
    hits = [replica.outputs[f"{name}"][0].cached_tokens for name in range(4)]
    assert hits == [64 * 8] + [64 * 12] * 3


def test_pages_that_cannot_be_shared_out_evenly_are_refused() -> None:
    with pytest.raises(ValueError, match="pages = 100: all but the null page are shared out evenly over 2 ranks"):
        SchedulerConfig(slots=1, pages=100, max_context=100, token_budget=8, width=1, queue_limit=1, cache_shards=2)
