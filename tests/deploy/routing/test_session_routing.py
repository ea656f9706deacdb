"""Sessions of long chats return to the replica that has them cached, from what real caches report."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deploy.routing.arrivals import Arrivals, load_from_report, load_to_report
from deploy.routing.common_beginnings import COMMON_AFTER, MOST_PAGES, CommonBeginnings
from deploy.routing.policy import STALE_S, InFlightAccounting, Load, RequestFeatures, choose
from kernels.page import PAGE_TOKENS
from workers.protocol.messages import EngineStats
from workers.protocol.request import NO_ROOT, Prompt, pack_keys, unpack_keys
from workers.protocol.tiers import Moved
from workers.scheduler import SchedulerConfig
from workers.scheduler.host_tier import HostTier
from workers.scheduler.pages import PagePool
from workers.scheduler.prefix import PrefixCache
from workers.scheduler.sequence import Tokens

TOKENS = 100_000
SESSIONS = 8
"""Sessions of each replica."""
POOL = 12_800
"""Pages, for 0.8 M tokens."""
REPORTED = SchedulerConfig.prefix_sample


def session(number: int) -> list[int]:
    system = random.Random("system").choices(range(100_000), k=6_000)
    return system + random.Random(number).choices(range(100_000), k=TOKENS - 6_000)


@cache
def prompts() -> dict[str, list[list[int]]]:
    """Return the prompts that each of two replicas has cached."""
    return {name: [session(SESSIONS * at + number) for number in range(SESSIONS)] for at, name in enumerate("ab")}


def take(held: PrefixCache, prompt: list[int]) -> None:
    tokens = Tokens(Prompt.of(prompt))
    pages = tokens.length // PAGE_TOKENS
    row = held.open(held.match(tokens, tokens.keys(), pages), pages)
    held.register(row, tokens, pages)
    held.close(row)


@cache
def reports() -> dict[str, bytes]:
    """Return the reports as they travel to routers."""
    caches = {}
    for name, own in prompts().items():
        held = PrefixCache(PagePool(POOL + 1), reported=REPORTED)
        for prompt in own:
            take(held, prompt)
        stats = EngineStats(pages_total=POOL, pages_free=POOL, prefix_keys=pack_keys(held.report()))
        caches[name] = msgspec.msgpack.encode(load_to_report(Arrivals().load(stats)))
    return caches


def loads() -> dict[str, Load]:
    return {name: load_from_report(msgspec.msgpack.decode(report)) for name, report in reports().items()}


def features_of(prompt: list[int], known: int | None = None) -> RequestFeatures:
    return RequestFeatures(len(prompt), Prompt.of(prompt if known is None else prompt[: PAGE_TOKENS * known]))


def credited(name: str, features: RequestFeatures) -> float:
    """Tokens that a router takes for cached."""
    return features.tokens - InFlightAccounting[str]("me", 0).cost(name, loads()[name], features, 0.0).tokens


def test_a_report_is_no_larger_than_the_bound_says() -> None:
    assert REPORTED == 1024
    root = len(msgspec.msgpack.encode("root")) + len(msgspec.msgpack.encode(NO_ROOT))
    assert all(8 * REPORTED < len(report) < 8 * REPORTED + 100 + root for report in reports().values())


def test_each_of_sixteen_sessions_is_found_where_it_is_cached() -> None:
    for name, own in prompts().items():
        for prompt in own:
            features = features_of([*prompt, *range(500)])
            assert credited(name, features) == TOKENS // PAGE_TOKENS * PAGE_TOKENS
            book = InFlightAccounting[str]("me", 32.0)
            assert choose(book, loads(), features, 0.0)[0] == name


@pytest.mark.parametrize("pages", [200, 801, 1333, 1550])
def test_a_session_that_leaves_what_is_cached_in_the_middle_is_found(pages: int) -> None:
    # A template that drops the reasoning of the turn before, a message that was edited.
    for name, own in prompts().items():
        for prompt in own:
            features = features_of([*prompt[: PAGE_TOKENS * pages], *range(100_000, 103_000)])
            assert PAGE_TOKENS * (pages - 16) < credited(name, features) <= PAGE_TOKENS * pages
            assert choose(InFlightAccounting[str]("me", 32.0), loads(), features, 0.0)[0] == name


def test_a_session_of_which_the_router_knows_the_beginning_is_found() -> None:
    for name, own in prompts().items():
        for prompt in own:
            features = features_of([*prompt, *range(500)], known=1000)
            assert 984 * PAGE_TOKENS < credited(name, features) <= 1000 * PAGE_TOKENS
            assert choose(InFlightAccounting[str]("me", 32.0), loads(), features, 0.0)[0] == name


def test_a_new_session_is_credited_the_common_system_prompt() -> None:
    features = features_of(session(1000))
    assert credited("a", features) == credited("b", features) == 6_000 // PAGE_TOKENS * PAGE_TOKENS


def test_a_session_that_was_evicted_is_not_credited() -> None:
    held = PrefixCache(PagePool(POOL + 1), reported=REPORTED)
    first, *others = (session(number) for number in range(SESSIONS + 2))
    take(held, first)
    for prompt in others:
        take(held, prompt)
    stats = EngineStats(pages_total=POOL, pages_free=POOL, prefix_keys=pack_keys(held.report()))
    now = {"a": Arrivals().load(stats), "b": Load()}
    book, features = InFlightAccounting[str]("me", 0), features_of(first)
    assert book.cost("a", now["a"], features, 0.0).tokens == TOKENS - 6_000 // PAGE_TOKENS * PAGE_TOKENS


@cache
def behind_the_device() -> dict[str, EngineStats]:
    """What two replicas tell of four sessions each, of which the device has room for one, and host memory for all."""
    told = {}
    for at, name in enumerate("ab"):
        held = PrefixCache(PagePool(400), reported=REPORTED)
        tier = HostTier(held, 4 * 313, 1, reported=SchedulerConfig.tier_sample, batch=400)
        for number in range(4):
            tokens = Tokens(Prompt.of(session(4 * at + number)[:20_000]))
            row = held.open([], 312)
            held.register(row, tokens, 312)
            held.vouch(row)
            tier.save()
            held.close(row)
            for moves in tier.take_moves():
                tier.moved(Moved(0, moves.ticket))
        assert len(held.match(tokens, tokens.keys(), 312)) == 312
        assert tier.held == 4 * 312 - 3 * (6_000 // PAGE_TOKENS)
        told[name] = EngineStats(
            pages_total=399, pages_free=399, prefix_keys=pack_keys(held.report()), host_keys=pack_keys(tier.report())
        )
    return told


def returns_home(loads: dict[str, Load]) -> list[bool]:
    """Of each session whether it is sent to the replica that has it, in the time of a queue of 5,000 tokens there."""
    homes = []
    for number in range(8):
        name = "ab"[number // 4]
        busy = {other: replace(load, backlog=5_000 * (other == name)) for other, load in loads.items()}
        features = features_of([*session(number)[:20_000], *range(500)])
        homes.append(choose(InFlightAccounting[str]("me", 32.0), busy, features, 0.0)[0] == name)
    return homes


def test_sessions_return_to_the_replica_whose_host_memory_has_them() -> None:
    """And a planted fault: replicas that forget what has left the device."""
    told = behind_the_device()
    assert returns_home({name: Arrivals().load(stats) for name, stats in told.items()}) == [True] * 8
    forgetful = {name: msgspec.structs.replace(stats, host_keys=b"") for name, stats in told.items()}
    on_device = [False, False, False, True]
    assert returns_home({name: Arrivals().load(stats) for name, stats in forgetful.items()}) == on_device * 2


def test_a_report_is_not_believed_for_long_after_the_last_one() -> None:
    prompt = prompts()["a"][3]
    book, load, features = InFlightAccounting[str]("me", 0), loads()["a"], features_of(prompt)
    kept = TOKENS % PAGE_TOKENS

    def costs(load: Load, now: float) -> float:
        return book.cost("a", load, features, now).tokens

    # What counts is this router's own clock: the replica's may be wrong by any time.
    assert costs(load, 5000.0) == costs(load, 5000.0 + STALE_S) == kept
    assert costs(load, 5000.1 + STALE_S) == TOKENS
    again = load_from_report(load_to_report(load) | {"at": load.at + 0.2})
    assert costs(again, 5001.0 + STALE_S) == kept
    assert costs(again, 5001.1 + 2 * STALE_S) == TOKENS


def test_the_keys_of_an_earlier_version_s_report_say_nothing() -> None:
    """During an update the router may be the newer one. Keys of theirs are made in another way."""
    now = Load(backlog=7, keys=frozenset([b"8 bytes."]), host_keys=frozenset([b"8 others"]), root=b"sixteen bytes...")
    report = load_to_report(now)
    assert load_from_report(report) == now
    for keys in ([3, 2**63], b"8 bytes."):
        older = {name: value for name, value in report.items() if name != "host_keys"} | {"keys": keys}
        assert load_from_report(older) == Load(backlog=7, at=now.at)


def test_an_earlier_version_can_read_a_report() -> None:
    """During an update the router may be the older one: it knows these fields alone, and reads keys as so many of 8
    bytes."""
    report = load_to_report(Load(backlog=7, keys=frozenset([b"8 bytes."]), root=b"sixteen bytes..."))
    known = {"backlog", "rows", "pages_free", "keys", "host_keys", "host_token_cost", "seen", "at"}
    assert set(report) == known
    on_disk = load_to_report(Load(host_keys=frozenset([b"8 bytes."]), disk_keys=frozenset([b"8 others"])))
    assert set(on_disk) == known
    assert len(unpack_keys(on_disk["host_keys"])) == 4
    assert len(report["keys"]) == 4 * 8
    assert len(report["host_keys"]) == 0


SYSTEM = list(range(6_000))
"""With which all sessions of agents begin."""


def agents(book: InFlightAccounting[str]) -> list[tuple[str, int]]:
    """The replicas of two, turn by turn, that get 16 sessions of 8 turns, eight of which are being answered at any
    time."""
    caches = {name: PrefixCache(PagePool(10_000), reported=REPORTED) for name in "ab"}
    rows, decoding, sent = dict.fromkeys("ab", 0), list[tuple[str, int]](), list[tuple[str, int]]()
    histories = {number: [*SYSTEM, *random.Random(number).choices(range(100_000), k=1_000)] for number in range(16)}
    waiting, turns = list(histories), dict.fromkeys(histories, 0)
    while waiting or decoding:
        if len(decoding) == 8 or not waiting:
            name, number = decoding.pop(0)
            rows[name] -= 1
            if turns[number] < 8:
                histories[number] += random.Random(f"{number} {turns[number]}").choices(range(100_000), k=500)
                waiting.append(number)
            continue
        number, now = waiting.pop(0), 20.0 * len(sent)  # what was sent before is known from reports alone
        prompt = histories[number]
        features = features_of(prompt)
        loads = {
            name: Load(0, rows[name], keys=frozenset(key[:8] for key in held.report()), seen={"me": book.sent}, at=now)
            for name, held in caches.items()
        }
        name = choose(book, loads, features, now)[0]
        book.record(name, loads[name], features, now)
        take(caches[name], prompt)
        rows[name], turns[number] = rows[name] + 1, turns[number] + 1
        decoding.append((name, number))
        sent.append((name, number))
    return sent


def test_sessions_with_one_system_prompt_share_both_replicas_and_stay_where_they_began() -> None:
    """And a planted fault: nothing is known of what they have in common, and one of two replicas is idle."""
    sent = agents(InFlightAccounting[str]("me", 32.0))
    assert len(sent) == 16 * 8
    homes = {number: {name for name, other in sent if other == number} for number in range(16)}
    assert all(len(names) == 1 for names in homes.values())
    assert 6 <= sum(names == {"a"} for names in homes.values()) <= 10
    gathering = InFlightAccounting[str]("me", 32.0)
    gathering._beginnings.is_common = lambda key, then: False  # type: ignore[method-assign]
    assert len({name for name, _ in agents(gathering)}) == 1


def begun(book: InFlightAccounting[str], tokens: int, home: int, other: int) -> str:
    """Which of two replicas gets the third prompt that begins with `tokens` which only one of them has: `home` rows
    are there, and `other` rows at the other one."""
    for number in range(3):
        features = features_of([*range(tokens), *[number] * 500])
        there = frozenset({features.keys(NO_ROOT)[tokens // PAGE_TOKENS - 1]})
        loads = {"home": Load(rows=home, keys=there), "other": Load(rows=other)}
        chosen = choose(book, loads, features, 0.0)[0]
    return chosen


@pytest.mark.parametrize(
    ("tokens", "home", "other", "chosen"),
    [
        (6_000, 1, 0, "home"),  # it would take longer to compute it again
        (6_000, 2, 0, "other"),
        (6_000, 12, 6, "home"),
        (6_000, 14, 6, "other"),
        (30_000, 7, 0, "home"),
        (30_000, 8, 0, "other"),
    ],
)
def test_a_session_begins_where_its_system_prompt_is_unless_twice_as_many_rows_are_there(
    tokens: int, home: int, other: int, chosen: str
) -> None:
    assert begun(InFlightAccounting[str]("me", 32.0), tokens, home, other) == chosen


def test_a_prompt_that_is_sent_again_stays_where_it_is() -> None:
    """So do the turns of a session, of which the one before is where the next one goes on."""
    prompt, book = [*SYSTEM, *[7] * 500], InFlightAccounting[str]("me", 32.0)
    for _ in range(5):
        features = features_of(prompt)
        there = frozenset({features.keys(NO_ROOT)[6_000 // PAGE_TOKENS - 1]})
        loads = {"home": Load(rows=16, keys=there), "other": Load()}
        assert choose(book, loads, features, 0.0)[0] == "home"
    for turn in range(5):
        there = frozenset(features_of(prompt).keys(NO_ROOT))
        prompt = [*prompt, *[turn] * 500]
        loads = {"home": Load(rows=16, keys=there), "other": Load()}
        assert choose(book, loads, features_of(prompt), 0.0)[0] == "home"


@given(st.integers(60, 140), st.lists(st.integers(1, 90), max_size=20))
@example(128, [3] * 20)  # all of them within a page
def test_a_session_stays_where_it_is_however_short_its_turns_are(first: int, turns: list[int]) -> None:
    history, book = list(range(6_000 + first)), InFlightAccounting[str]("me", 32.0)
    for added in turns:
        there = frozenset(features_of(history).keys(NO_ROOT))
        history = [*history, *range(added)]
        loads = {"home": Load(rows=16, keys=there), "other": Load()}
        assert choose(book, loads, features_of(history), 0.0)[0] == "home"


def test_a_burst_of_sessions_is_shared_before_any_report() -> None:
    book = InFlightAccounting[str]("me", 32.0)
    loads, sent = {"a": Load(), "b": Load()}, []
    for number in range(16):
        features = features_of([*SYSTEM, *random.Random(number).choices(range(100_000), k=500)])
        sent.append(choose(book, loads, features, 0.0)[0])
        book.record(sent[-1], loads[sent[-1]], features, 0.0)
    assert 6 <= sent.count("a") <= 10


def test_how_prompts_went_on_is_remembered_of_so_many_pages_alone() -> None:
    beginnings = CommonBeginnings()
    for number in range(3 * MOST_PAGES):
        assert not beginnings.is_common(number.to_bytes(8), b"then")
    assert not beginnings.is_common(b"common", b""), "that ends with the page"
    for number in range(10):
        beginnings.is_common(b"common", bytes([number]))
    assert beginnings.is_common(b"common", b"another")
    assert not beginnings.is_common(b"common", b""), "that ends with the page"
    assert len(beginnings._went_on) == MOST_PAGES
    assert max(map(len, beginnings._went_on.values())) <= COMMON_AFTER + 1
