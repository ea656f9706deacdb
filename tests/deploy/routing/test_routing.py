import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.routing.policy import (
    FORGET_S,
    QUEUED_TOKEN_COST,
    REMEMBER_S,
    Cost,
    InFlightAccounting,
    Load,
    RequestFeatures,
    cached_tokens,
    choose,
)
from workers.protocol.request import NO_ROOT, Prompt

ROUTER = "me"


def accounting(row_tokens: float = 32.0) -> InFlightAccounting[str]:
    return InFlightAccounting(ROUTER, row_tokens)


def send(book: InFlightAccounting[str], loads: dict[str, Load], features: RequestFeatures, now: float) -> str:
    chosen = choose(book, loads, features, now)[0]
    book.record(chosen, loads[chosen], features, now)
    return chosen


def test_a_burst_of_equal_requests_is_split_evenly_before_any_report() -> None:
    book, loads = accounting(), {"a": Load(), "b": Load()}
    sent = [send(book, loads, RequestFeatures(10), 100.0) for _ in range(64)]
    assert sent.count("a") == sent.count("b") == 32


@pytest.mark.parametrize("pages", [1, 3])
def test_a_burst_of_equal_prompts_is_split_although_they_share_a_prefix(pages: int) -> None:
    prompt = Prompt.of(range(64 * pages + 5))
    book, loads = accounting(), {"a": Load(), "b": Load()}
    sent = [send(book, loads, RequestFeatures(64 * pages + 5, prompt), 100.0) for _ in range(64)]
    # Those that find the pages outweigh the other side until rows cost more than the prefill saved.
    assert abs(sent.count("a") - 32) <= 64 * pages / 32


def test_a_long_prompt_sends_the_next_short_ones_to_the_other_replica() -> None:
    book, loads = accounting(), {"a": Load(), "b": Load()}
    long = send(book, loads, RequestFeatures(4000), 100.0)
    assert {send(book, loads, RequestFeatures(10), 100.0) for _ in range(50)} == {"a", "b"} - {long}
    sent = [send(book, loads, RequestFeatures(10), 100.0) for _ in range(40)]
    assert long in sent  # the other one has become as busy


def test_a_shared_prefix_returns_to_its_pages_until_that_replica_is_busier_by_twice_what_it_saves() -> None:
    features = RequestFeatures(700, Prompt.of(range(640)))
    keys = features.keys(NO_ROOT)
    for backlog, expected in ((0, "b"), (1279, "b"), (1281, "a"), (5000, "a")):
        loads = {"a": Load(), "b": Load(backlog=backlog, keys=frozenset(keys))}
        assert choose(accounting(), loads, features, 100.0)[0] == expected, backlog


def test_idle_replicas_take_turns() -> None:
    book, loads, sent = accounting(), dict.fromkeys("abc", Load()), []
    for number in range(6):
        sent.append(send(book, loads, RequestFeatures(1), 100.0))
        loads = dict.fromkeys("abc", Load(seen={ROUTER: number + 1}))  # all done at once
    assert sent == [*"abcabc"]


def test_rows_cost_what_the_settings_say() -> None:
    loads = {"a": Load(rows=10), "b": Load(backlog=200)}
    assert choose(accounting(row_tokens=9), loads, RequestFeatures(1), 0.0) == ["a", "b"]
    assert choose(accounting(row_tokens=11), loads, RequestFeatures(1), 0.0) == ["b", "a"]


def test_a_replica_without_pages_for_the_request_comes_last() -> None:
    loads = {"a": Load(pages_free=3), "b": Load(backlog=100_000, pages_free=4)}
    assert choose(accounting(), loads, RequestFeatures(4 * 64), 0.0) == ["b", "a"]
    assert choose(accounting(), loads, RequestFeatures(3 * 64), 0.0) == ["a", "b"]


def test_pages_in_host_memory_draw_a_request_unless_they_are_on_a_device() -> None:
    features = RequestFeatures(640, Prompt.of(range(640)))
    third, eighth = (frozenset({features.keys(NO_ROOT)[page - 1]}) for page in (3, 8))
    nothing = Load()
    device, host = Load(keys=eighth), Load(host_keys=eighth, host_token_cost=0.1)
    both = Load(keys=third, host_keys=eighth, host_token_cost=0.1)
    loads = {"nothing": nothing, "host": host, "both": both, "device": device}
    book = accounting(row_tokens=0)
    assert choose(book, loads, features, 0.0) == ["device", "both", "host", "nothing"]
    costs = {name: book.cost(name, load, features, 0.0).tokens for name, load in loads.items()}
    assert costs == pytest.approx({"nothing": 640, "host": 128 + 51.2, "both": 128 + 32, "device": 128})
    assert book.record("host", host, features, 0.0)[1] == 128, "what is copied is not computed"


def test_pages_on_disk_draw_a_request_less_than_those_in_host_memory() -> None:
    features = RequestFeatures(640, Prompt.of(range(640)))
    third, eighth = (frozenset({features.keys(NO_ROOT)[page - 1]}) for page in (3, 8))
    host, disk = Load(host_keys=eighth, host_token_cost=0.1), Load(disk_keys=eighth, disk_token_cost=0.5)
    both = Load(host_keys=third, host_token_cost=0.1, disk_keys=eighth, disk_token_cost=0.5)
    loads = {"nothing": Load(), "disk": disk, "both": both, "host": host}
    book = accounting(row_tokens=0)
    assert choose(book, loads, features, 0.0) == ["host", "both", "disk", "nothing"]
    costs = {name: book.cost(name, load, features, 0.0).tokens for name, load in loads.items()}
    expected = {"nothing": 640, "disk": 128 + 256, "both": 128 + 19.2 + 160, "host": 128 + 51.2}
    assert costs == pytest.approx(expected)
    assert book.record("disk", disk, features, 0.0)[1] == 128, "what is read is not computed"


def test_pages_in_host_memory_need_pages_of_the_device() -> None:
    features = RequestFeatures(640, Prompt.of(range(640)))
    fourth, tenth = (frozenset({features.keys(NO_ROOT)[page]}) for page in (3, 9))
    assert accounting().cost("a", Load(host_keys=fourth, pages_free=9), features, 0.0).crowded
    assert not accounting().cost("a", Load(keys=fourth, pages_free=9), features, 0.0).crowded
    book = accounting()
    host = Load(host_keys=tenth, pages_free=15)
    book.record("a", host, features, 0.0)
    assert book.cost("a", host, RequestFeatures(384), 0.0).crowded


@pytest.mark.parametrize("where", ["keys", "host_keys", "disk_keys"])
def test_who_has_most_of_a_prompt_is_not_passed_over_for_want_of_pages(where: str) -> None:
    """Sessions that return once left the replica that had them whenever its rows held all pages for a moment, and were
    computed as a whole elsewhere."""
    features = RequestFeatures(640, Prompt.of(range(640)))
    ninth, fourth = (frozenset({features.keys(NO_ROOT)[page]}) for page in (8, 3))
    free = Load(pages_free=100)
    assert choose(accounting(), {"a": free, "b": Load(**{where: ninth}, pages_free=0)}, features, 0.0) == ["b", "a"]
    assert choose(accounting(), {"a": free, "b": Load(**{where: fourth}, pages_free=0)}, features, 0.0) == ["a", "b"]
    busy = Load(**{where: ninth}, pages_free=0, backlog=1200)
    assert choose(accounting(), {"a": free, "b": busy}, features, 0.0) == ["a", "b"]


def test_pages_of_what_was_sent_are_taken_off() -> None:
    book, loads = accounting(row_tokens=0), {"a": Load(pages_free=10)}
    assert not book.cost("a", loads["a"], RequestFeatures(6 * 64), 0.0).crowded
    book.record("a", loads["a"], RequestFeatures(6 * 64), 0.0)
    assert book.cost("a", loads["a"], RequestFeatures(6 * 64), 0.0).crowded


def test_sequence_numbers_tell_what_a_report_includes() -> None:
    book = accounting(row_tokens=0)
    for _ in range(3):
        book.record("a", Load(), RequestFeatures(100), 10.0)
    assert book.cost("a", Load(), RequestFeatures(0), 10.0) == Cost(False, 150)
    # A report from before the burst was noticed, although its time is later.
    assert book.cost("a", Load(seen={ROUTER: 0}, at=11.0), RequestFeatures(0), 11.0).tokens == 150
    assert book.cost("a", Load(backlog=200, seen={ROUTER: 2}, at=11.0), RequestFeatures(0), 11.0).tokens == 150
    assert book.cost("a", Load(seen={ROUTER: 3}, at=12.0), RequestFeatures(0), 12.0).tokens == 0


def test_without_sequence_numbers_time_tells_what_a_report_includes() -> None:
    book = accounting(row_tokens=0)
    book.record("a", Load(), RequestFeatures(100), 10.0)
    assert book.cost("a", Load(at=10.01), RequestFeatures(0), 10.1).tokens == 50
    assert book.cost("a", Load(at=10.2), RequestFeatures(0), 10.3).tokens == 0


def test_a_request_that_never_arrived_is_forgotten() -> None:
    book = accounting(row_tokens=0)
    book.record("a", Load(), RequestFeatures(100), 10.0)
    assert book.cost("a", Load(seen={ROUTER: 0}), RequestFeatures(0), 10.0 + FORGET_S - 0.1).tokens == 50
    assert book.cost("a", Load(seen={ROUTER: 0}), RequestFeatures(0), 10.0 + FORGET_S + 0.1).tokens == 0


def test_a_prefix_just_sent_counts_as_cached_for_a_while() -> None:
    prompt = Prompt.of(range(640))
    book = accounting(row_tokens=0)
    assert book.record("a", Load(), RequestFeatures(640, prompt), 10.0) == (1, 640)
    assert book.record("a", Load(), RequestFeatures(640, prompt), 10.0) == (2, 1)
    seen = Load(seen={ROUTER: 2})
    assert book.cost("a", seen, RequestFeatures(640, prompt), 11.0).tokens == 1
    assert book.cost("a", seen, RequestFeatures(640, prompt), 10.0 + REMEMBER_S + 1).tokens == 640


def test_a_prefix_sent_again_does_not_keep_others_that_are_older() -> None:
    first, second = Prompt.of(range(64)), Prompt.of(range(64, 128))
    book = accounting(row_tokens=0)
    for at, prompt in ((0.0, first), (1.0, second), (9.0, first)):
        book.record("a", Load(), RequestFeatures(64, prompt), at)
    seen, now = Load(seen={ROUTER: 3}), 1.0 + REMEMBER_S + 1
    assert book.cost("a", seen, RequestFeatures(64, first), now).tokens == 1
    assert book.cost("a", seen, RequestFeatures(64, second), now).tokens == 64


def test_a_replica_that_left_is_forgotten() -> None:
    book = accounting(row_tokens=0)
    book.record("a", Load(), RequestFeatures(100), 10.0)
    book.keep(["b"])
    assert book.cost("a", Load(), RequestFeatures(0), 10.0).tokens == 0


@given(st.integers(1, 400), st.integers(0, 400), st.data())
def test_cached_tokens_agree_with_the_scheduler_s_own_hashes(length: int, shared: int, data: st.DataObject) -> None:
    prompt = data.draw(st.lists(st.integers(0, 9), min_size=length, max_size=length))
    other = prompt[: min(shared, length)] + data.draw(st.lists(st.integers(10, 19), max_size=200))
    features = RequestFeatures(length, Prompt.of(prompt))
    common = next((i for i, (x, y) in enumerate(zip(prompt, other, strict=False)) if x != y), min(length, len(other)))
    held = frozenset(RequestFeatures(len(other), Prompt.of(other)).keys(NO_ROOT))
    assert cached_tokens(features, held, NO_ROOT) == min(common // 64 * 64, length - 1)


PAGES = Prompt.of(range(64 * 5))
LOADS = st.builds(
    Load,
    backlog=st.integers(0, 10_000),
    rows=st.integers(0, 200),
    pages_free=st.none() | st.integers(0, 1000),
    keys=st.frozensets(st.sampled_from(RequestFeatures(64 * 5, PAGES).keys(NO_ROOT))),
)
ASKS = st.integers(0, 5).flatmap(
    lambda pages: st.builds(
        RequestFeatures,
        st.integers(64 * pages, 64 * pages + 5000),
        st.just(Prompt.of(PAGES[: 64 * pages])),
        st.integers(1, 4),
    )
)


@given(st.dictionaries(st.sampled_from("abcd"), LOADS, min_size=1), ASKS, st.randoms())
def test_the_choice_is_the_cheapest_and_names_every_replica_once(
    loads: dict[str, Load], features: RequestFeatures, rng: random.Random
) -> None:
    order = choose(accounting(), loads, features, 0.0)
    assert sorted(order) == sorted(loads)
    costs = [accounting().cost(replica, loads[replica], features, 0.0) for replica in order]
    assert costs == sorted(costs)
    shuffled = list(loads.items())
    rng.shuffle(shuffled)
    again = choose(accounting(), dict(shuffled), features, 0.0)
    assert costs[0] == accounting().cost(again[0], loads[again[0]], features, 0.0)


@given(LOADS, ASKS, st.integers(1, 1000))
def test_more_load_never_makes_a_replica_cheaper(load: Load, features: RequestFeatures, more: int) -> None:
    base = accounting().cost("a", load, features, 0.0)
    for worse in (
        Load(load.backlog + more, load.rows, load.pages_free, load.keys),
        Load(load.backlog, load.rows + more, load.pages_free, load.keys),
        Load(load.backlog, load.rows, load.pages_free, frozenset()),
    ):
        assert accounting().cost("a", worse, features, 0.0).tokens >= base.tokens


@given(st.lists(st.tuples(st.integers(0, 2000), st.floats(0, 0.01)), min_size=30, max_size=120))
def test_the_load_sent_to_two_idle_replicas_differs_by_one_request_at_most(asks: list[tuple[int, float]]) -> None:
    book, loads, now = accounting(), {"a": Load(), "b": Load()}, 50.0
    total = {"a": 0.0, "b": 0.0}
    for tokens, pause in asks:
        now += pause
        total[send(book, loads, RequestFeatures(tokens), now)] += QUEUED_TOKEN_COST * tokens + 32
    assert abs(total["a"] - total["b"]) <= QUEUED_TOKEN_COST * max(tokens for tokens, _ in asks) + 32


@pytest.mark.parametrize(("tokens", "known", "rows"), [(-1, 0, 1), (63, 64, 1), (10, 0, 0)])
def test_an_impossible_request_is_refused(tokens: int, known: int, rows: int) -> None:
    with pytest.raises(ValueError, match=f"{rows} rows, a prompt of {known} in {tokens} tokens"):
        RequestFeatures(tokens, Prompt.of([0] * known), rows)


def test_pages_of_another_root_or_salt_are_not_credited() -> None:
    prompt, roots, salts = Prompt.of(range(640)), (NO_ROOT, b"another root...."), (b"", b"one", b"two")
    asks = {salt: RequestFeatures(640, prompt, salt=salt) for salt in salts}
    for root in roots:
        for salt in salts:
            load = Load(keys=frozenset(asks[salt].keys(root)), root=root)
            for other in roots:
                for asked in salts:
                    seen = replace(load, root=other)
                    found = 640 - accounting(row_tokens=0).cost("a", seen, asks[asked], 0.0).tokens
                    assert found == (639 if (root, salt) == (other, asked) else 0)


def test_a_prefix_just_sent_is_credited_to_its_own_salt_alone() -> None:
    prompt, book = Prompt.of(range(640)), accounting(row_tokens=0)
    book.record("a", Load(), RequestFeatures(640, prompt, salt=b"one"), 10.0)
    seen = Load(seen={ROUTER: 1})
    costs = [book.cost("a", seen, RequestFeatures(640, prompt, salt=salt), 11.0).tokens for salt in (b"one", b"two")]
    assert costs == [1, 640]
