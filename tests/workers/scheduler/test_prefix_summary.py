"""Report of a cache about itself, against the cache itself, which knows everything."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.page import PAGE_TOKENS
from workers.protocol.request import REPORTED_BYTES, Prompt, pack_keys, unpack_keys
from workers.scheduler import prefix_summary
from workers.scheduler.pages import PagePool, RowPages
from workers.scheduler.prefix import PrefixCache
from workers.scheduler.prefix_summary import Entry, PrefixSummary
from workers.scheduler.sequence import Tokens


def prompt(*parts: tuple[int, int]) -> Tokens:
    """(what, pages) after each other."""
    return Tokens(Prompt.of([what for what, pages in parts for _ in range(PAGE_TOKENS * pages)]))


def cache_of(pages: int, reported: int) -> PrefixCache:
    return PrefixCache(PagePool(pages + 1), reported=reported)


def opened(cache: PrefixCache, tokens: Tokens, twin: bool = False) -> RowPages:
    """A row that has computed all of its prompt. `twin`: at the same time as others, whose pages it does not find."""
    pages = tokens.length // PAGE_TOKENS
    row = cache.open([] if twin else cache.match(tokens, tokens.keys(), pages), pages)
    cache.register(row, tokens, pages)
    return row


def cached(cache: PrefixCache, *prompts: Tokens) -> None:
    for tokens in prompts:
        cache.close(opened(cache, tokens))


def credit(keys: list[bytes], tokens: Tokens) -> int:
    """Pages that a router takes for cached."""
    reported = set(keys)
    return max((index + 1 for index, key in enumerate(tokens.keys()) if key in reported), default=0)


def held(cache: PrefixCache, tokens: Tokens) -> int:
    """Pages that are."""
    return len(cache.match(tokens, tokens.keys(), tokens.length // PAGE_TOKENS))


def test_a_small_cache_is_reported_whole() -> None:
    cache = cache_of(100, reported=20)
    one, two = prompt((1, 10)), prompt((1, 3), (2, 7))
    cached(cache, one, two)
    assert sorted(cache.report()) == sorted({*one.keys(), *two.keys()})


def test_ends_and_branch_points_are_exact_and_what_is_between_loses_less_than_a_stride() -> None:
    cache = cache_of(12_800, reported=1024)
    sessions = [prompt((1, 90), (2 + number, 1473)) for number in range(8)]
    cached(cache, *sessions)
    keys = cache.report()
    assert len(keys) == len(set(keys)) <= 1024
    assert [credit(keys, tokens) for tokens in sessions] == [1563] * 8
    assert credit(keys, prompt((1, 90), (100, 500))) == 90
    assert credit(keys, prompt((100, 500))) == 0
    grown = prompt((1, 90), (2, 1473), (100, 20))
    assert credit(keys, grown) == 1563
    lost = [pages - credit(keys, prompt((1, 90), (3, pages - 90), (100, 5))) for pages in range(90, 1563, 53)]
    assert 0 <= min(lost) < 4 <= 12 < max(lost) < 16


def test_an_evicted_end_gives_way_to_what_it_continued() -> None:
    cache = cache_of(100, reported=4)
    old, new = prompt((1, 40)), prompt((2, 40))
    cached(cache, old, new)
    for taken in (30, 37, 58):
        row = cache.open([], taken)
        keys = cache.report()
        assert credit(keys, new) == 40
        assert credit(keys, old) == held(cache, old) == 60 - taken if taken < 58 else 2
        cache.close(row)


def test_a_branch_that_is_evicted_makes_its_branch_point_a_page_like_others() -> None:
    cache = cache_of(100, reported=4)
    one, two = prompt((1, 33), (2, 30)), prompt((1, 33), (3, 30))
    cached(cache, one, two)
    point = one.keys()[32]
    assert point in cache.report()
    row = cache.open([], 7 + 30)
    assert held(cache, one) == 33
    assert point not in cache.report()
    assert credit(cache.report(), two) == 63
    cache.close(row)


def test_the_report_is_bounded_and_of_many_short_prompts_names_those_used_last() -> None:
    cache = cache_of(2000, reported=64)
    prompts = [prompt((number, 3)) for number in range(600)]
    cached(cache, *prompts)
    cached(cache, prompts[5])
    keys = cache.report()
    assert len(pack_keys(keys)) == 64 * REPORTED_BYTES
    assert [credit(keys, tokens) for tokens in prompts] == [0] * 5 + [3] + [0] * 531 + [3] * 63


def test_many_short_prompts_leave_half_of_the_report_for_the_middle_of_long_ones() -> None:
    cache = cache_of(3000, reported=64)
    long = prompt((10_000, 1500))
    cached(cache, long, *(prompt((number, 3)) for number in range(400)))
    keys = cache.report()
    assert [credit(keys, prompt((10_000, pages), (1, 1))) for pages in (100, 700, 1499)] == [64, 640, 1472]


def test_keys_survive_their_packing() -> None:
    keys = [bytes(16), b"sixteen bytes...", bytes(range(16))]
    assert unpack_keys(pack_keys(keys)) == [bytes(8), b"sixteen ", bytes(range(8))]
    assert pack_keys(unpack_keys(pack_keys(keys))) == pack_keys(keys)
    assert unpack_keys(pack_keys([])) == []
    with pytest.raises(ValueError, match="8-byte keys"):
        unpack_keys(bytes(12))


# Everything that can happen to a cache

Step = tuple[str, int, int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["open", "open", "twin", "close", "close", "doubt", "grow"]),
        st.integers(0, 3),
        st.integers(0, 6),
        st.integers(1, 14),
    ),
    max_size=60,
)


def drawn(what: int, shared: int, pages: int) -> Tokens:
    """Prompts of which many share a beginning."""
    return prompt((0, min(shared, pages)), (1 + what, max(pages - shared, 0)))


ASKED = [drawn(what, shared, 16) for what in range(5) for shared in (0, 1, 2, 3, 5, 6, 16)]


def happens(cache: PrefixCache, steps: list[Step]) -> Iterator[list[RowPages]]:
    """Do all this; yields the rows that run, after each step."""
    rows: list[RowPages] = []
    for do, what, shared, pages in steps:
        if do in ("open", "twin"):
            tokens = drawn(what, shared, pages)
            found = [] if do == "twin" else cache.match(tokens, tokens.keys(), pages)
            if cache.needed(found, pages) <= cache.available:
                rows.append(opened(cache, tokens, do == "twin"))
        elif do == "grow" and rows and pages <= cache.available:
            cache.extend(rows[-1], pages)
        elif rows and do in ("close", "doubt"):
            row = rows.pop((what + shared) % len(rows))
            if do == "doubt":
                cache.mark_suspect(row)
            elif what % 2:
                cache.vouch(row)
            cache.close(row)
        yield rows
    while rows:
        cache.close(rows.pop())
        yield rows


def path(entry: Entry) -> Iterator[Entry]:
    """It and all that it continues, cached or not."""
    at: Entry | None = entry
    while at is not None:
        yield at
        at = at.parent


def number_of(entry: Entry) -> int:
    return 1 + (number_of(entry.parent) if entry.parent else 0)


def check(cache: PrefixCache, at_rest: bool) -> None:
    """Hold what is reported against all entries of the cache."""
    entries, summary = cache._entries, cache._summary
    keys = cache.report()
    assert len(set(keys)) == len(keys) <= summary._most
    assert set(keys) <= set(entries), "an entry is reported that is gone"
    if len(entries) <= summary._most:
        assert set(keys) == set(entries)
    children = Counter(id(entry.parent) for entry in entries.values() if entry.parent)
    assert all(entry.children == children[id(entry)] for entry in entries.values())
    paths = {one: {id(other) for other in path(one)} for one in entries.values()}
    for entry in [*entries.values()][::4]:
        behind = summary.behind(entry)
        places = {id(one): place for place, one in enumerate(behind)}
        assert {*behind} == {one for one, its in paths.items() if id(entry) in its}, "not all that is behind it"
        assert all(places[id(one)] < places[id(one.parent)] for one in behind if id(one.parent) in places)
        linked = [*(entry.others or ()), *([entry.child] if entry.child else [])]
        assert len(linked) == len({*linked}) == entry.children
        assert all(one.parent is entry and entries[one.key] is one for one in linked)
    assert {*summary._orphans} == {
        one for one in entries.values() if one.parent and entries.get(one.parent.key) is not one.parent
    }
    assert set(summary._ends) == {key for key, entry in entries.items() if children[id(entry)] != 1}
    grid = [{key: number_of(entries[key]) for key in level} for level in summary._grid]
    for level, numbers in enumerate(grid):
        unit = summary._stride << level
        assert all(number % unit == 0 and number // unit % 2 for number in numbers.values())
    on_grid = {key for key, entry in entries.items() if number_of(entry) % summary._stride == 0}
    assert {key for level in grid for key in level} == on_grid
    if not at_rest:
        return
    whole = next((level for level in range(len(grid)) if set().union(*grid[level:]) <= set(keys)), len(grid))
    for tokens in ASKED:
        had, told = held(cache, tokens), credit(keys, tokens)
        assert told <= had, "more is credited than is cached"
        assert told >= had - had % (summary._stride << whole), "a page of the grid is not credited"
        if had and tokens.keys()[had - 1] in keys:
            assert told == had


def driven(pages: int, reported: int, steps: list[Step]) -> None:
    cache = cache_of(pages, reported)
    for rows in happens(cache, steps):
        check(cache, at_rest=not rows)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([14, 20, 40, 100]), st.sampled_from([0, 1, 3, 8, 30]), STEPS)
def test_the_report_agrees_with_the_cache_whatever_happens_to_it(pages: int, reported: int, steps: list[Step]) -> None:
    driven(pages, reported, steps)


def garbage_of(pages: int, steps: list[Step]) -> int:
    """Entries that only the collector of cyclic garbage frees, while the cache lives."""
    gc.freeze()  # all else that this process has need not be looked through
    cache = cache_of(pages, 8)
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in happens(cache, steps):
            pass
        gc.collect()
        return sum(isinstance(one, Entry) for one in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()


TWINS: list[Step] = [
    *[("open", what, 3, 9) for what in range(4)],
    *[("twin", what, 3, 14) for what in range(3)],
    *[("close", what, 0, 1) for what in range(3)],
    *[("open", what, 2, 12) for what in range(4)],
    *[("doubt", what, 1, 1) for what in range(3)],
    *[("open", what, 0, 14) for what in range(4)],
]


@settings(deadline=None, max_examples=15)
@given(st.sampled_from([14, 40, 100]), STEPS)
def test_entries_that_are_gone_need_no_collector(pages: int, steps: list[Step]) -> None:
    assert garbage_of(pages, TWINS + steps) == 0


def test_links_that_stay_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = PrefixSummary.remove

    def remove(summary: PrefixSummary, entries: Sequence[Entry]) -> None:
        honest(summary, entries)
        gone = set(entries)
        for entry in entries:
            if entry.parent in gone:
                entry.parent.child = entry

    monkeypatch.setattr(PrefixSummary, "remove", remove)
    assert garbage_of(100, TWINS) > 0


@pytest.mark.alone
def test_doubt_takes_no_longer_for_what_else_is_cached() -> None:
    cache = cache_of(60_000, reported=1024)
    cached(cache, *(prompt((number, 500)) for number in range(110)))
    row = opened(cache, prompt((1, 500), (1000, 20)))
    gc.disable()  # garbage of other tests is not looked for meanwhile
    begin = time.thread_time()
    cache.mark_suspect(row)
    took = time.thread_time() - begin
    gc.enable()
    assert took < 0.005
    cache.close(row)
    assert held(cache, prompt((2, 500))) == 500


def stale_ends(patch: pytest.MonkeyPatch) -> None:
    """An evicted end is still reported."""
    honest = PrefixSummary.remove

    def remove(summary: PrefixSummary, entries: Sequence[Entry]) -> None:
        honest(summary, entries)
        summary._ends |= {entry.key: None for entry in entries}

    patch.setattr(PrefixSummary, "remove", remove)


def stale_grid(patch: pytest.MonkeyPatch) -> None:
    """Pages inside of an evicted chain are still reported."""
    honest = PrefixSummary.remove

    def remove(summary: PrefixSummary, entries: Sequence[Entry]) -> None:
        honest(summary, entries)
        for entry in entries:
            if entry.level >= 0:
                summary._grid[entry.level][entry.key] = None

    patch.setattr(PrefixSummary, "remove", remove)


def ends_that_stay_away(patch: pytest.MonkeyPatch) -> None:
    """Let what an evicted end continued not become an end itself."""

    def left(summary: PrefixSummary, parent: Entry, entry: Entry) -> None:
        prefix_summary._unlink(parent, entry)
        parent.children -= 1

    patch.setattr(PrefixSummary, "_left", left)


def forgotten_orphans(patch: pytest.MonkeyPatch) -> None:
    """Of entries whose beginning was evicted nobody knows any more that they continue what came before it."""
    patch.setattr(PrefixSummary, "behind", lambda summary, entry: prefix_summary._tree(entry)[::-1])


def doubt_of_ends_first(patch: pytest.MonkeyPatch) -> None:
    """What continues an entry is found behind it."""
    honest = PrefixSummary.behind
    patch.setattr(PrefixSummary, "behind", lambda summary, entry: honest(summary, entry)[::-1])


def forgotten_moves(patch: pytest.MonkeyPatch) -> None:
    """A gap is mended, and nobody notes what continues the new entry."""
    patch.setattr(PrefixSummary, "move", lambda summary, entry, parent: setattr(entry, "parent", parent))


TOLD: list[Step] = [("open", 0, 0, 14), ("close", 0, 0, 1), ("open", 1, 0, 12), ("close", 0, 0, 1)]
MENDED: list[Step] = [
    ("twin", 0, 0, 1),
    ("twin", 0, 0, 2),
    ("close", 0, 0, 1),
    ("open", 1, 0, 12),
    ("close", 0, 0, 1),
]

ORPHANED: list[Step] = [("twin", 0, 0, 4), ("twin", 0, 0, 5), ("close", 0, 0, 1), ("twin", 1, 0, 6)]
"""Page 5 is cached and page 4, which another row had, is not; pages 1 to 3 are."""


@pytest.mark.parametrize(
    ("plant", "steps"),
    [
        (stale_ends, TOLD),
        (stale_grid, TOLD),
        (ends_that_stay_away, TOLD),
        (forgotten_moves, MENDED),
        (forgotten_orphans, ORPHANED),
        (doubt_of_ends_first, TOLD),
    ],
)
def test_a_planted_fault_is_found(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], steps: list[Step]
) -> None:
    driven(14, 3, steps)
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        driven(14, 3, steps)
