"""Pages shared by equal prefixes."""

from __future__ import annotations

import ast
import random
import subprocess
import sys
from hashlib import blake2b

import pytest
from replica import Replica
from workload import config, tokens

from kernels.page import PAGE_TOKENS
from workers.protocol import request as prompts
from workers.protocol.request import NO_ROOT, Prompt, page_keys, salted_root, unpack_keys
from workers.scheduler.pages import PagePool
from workers.scheduler.prefix import PrefixCache
from workers.scheduler.sequence import Tokens

SEVEN = bytes(15) + b"\x07"
"""A key that many pages have."""


def run_one(replica: Replica, name: str, prompt: list[int], most: int = 5) -> int:
    """Tokens that came from the cache."""
    assert not replica.add(name, prompt, max_tokens=most)
    replica.run()
    replica.check_tokens()
    assert [output.cached_tokens for output in replica.outputs[name][1:]] == [0] * (len(replica.outputs[name]) - 1)
    return replica.outputs[name][0].cached_tokens


def test_page_keys_chain_full_pages() -> None:
    prompt = [random.Random(1).randrange(2**32) for _ in range(200)]
    for root in (bytes(16), b"sixteen bytes..."):
        expected, key = [], root
        for page in range(3):
            ids = b"".join(token.to_bytes(4, "little") for token in prompt[64 * page : 64 * page + 64])
            key = blake2b(ids, digest_size=16, salt=key).digest()
            expected.append(key)
        assert page_keys(prompt, root) == page_keys(tuple(prompt), root) == expected
        assert page_keys(prompt[:191], root) == expected[:2]
        assert page_keys(prompt[:63], root) == []
    assert page_keys(prompt) == page_keys(prompt, NO_ROOT)


def test_page_keys_are_the_same_in_every_process() -> None:
    code = "from workers.scheduler import page_keys; print(page_keys(list(range(500))))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=300)
    assert ast.literal_eval(other.stdout.decode()) == page_keys(list(range(500)))


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129, 200])
def test_a_repeated_prompt_hits_all_pages_before_its_last_token(width: int, length: int) -> None:
    replica = Replica(config(width=width))
    prompt = tokens(length)
    assert run_one(replica, "first", prompt) == 0
    first = len(replica.plans)
    hit = (length - 1) // PAGE_TOKENS * PAGE_TOKENS
    assert run_one(replica, "again", prompt) == hit
    assert replica.tokens["again"] == replica.tokens["first"]
    row = replica.plans[first].prefill[0]
    # With a draft layer the last cached token is computed again, without writing it.
    assert (row.start, row.write_from) == (hit - 1 if hit and width > 1 else hit, hit)
    assert replica.scheduler.stats().cached_tokens == hit


def test_generated_tokens_are_cached_for_the_next_turn() -> None:
    replica = Replica(config(), agree=0.5)
    prompt = tokens(100)
    run_one(replica, "turn 1", prompt, most=100)
    prompt = [*prompt, *replica.tokens["turn 1"], *tokens(30, seed=1)]
    assert run_one(replica, "turn 2", prompt, most=100) == 192
    prompt = [*prompt, *replica.tokens["turn 2"], *tokens(3, seed=2)]
    assert run_one(replica, "turn 3", prompt) == (100 + 100 + 30 + 99) // 64 * 64


def test_running_rows_share_pages() -> None:
    replica = Replica(config(pages=14), agree=0.5)
    prompt = tokens(256)
    replica.add("a", [*prompt, 1], max_tokens=60)
    while not replica.tokens["a"]:
        replica.step()
    # 13 pages: each of the three needs 5 or 6, of which 4 are common.
    replica.add("b", [*prompt, 2], max_tokens=60)
    replica.add("c", [*prompt, 3], max_tokens=60)
    while not replica.tokens["c"]:
        replica.step()
        replica.check_pages()
    assert replica.scheduler.stats().running == 3
    assert replica.outputs["c"][0].cached_tokens == 256
    replica.run()
    replica.check_tokens()
    assert replica.scheduler.stats().preemptions == 0


def test_without_a_cache_nothing_is_shared() -> None:
    replica = Replica(config(prefix_cache=False))
    assert run_one(replica, "a", tokens(200)) == run_one(replica, "b", tokens(200)) == 0
    assert replica.scheduler.stats().prefix_keys == b""
    assert replica.scheduler._rows.pool.free_count == 99


def test_the_least_recently_used_prefix_goes_first_and_its_end_before_its_beginning() -> None:
    replica = Replica(config(pages=11, max_context=512, slots=1))
    old, new = tokens(257, seed=1), tokens(257, seed=2)
    run_one(replica, "old", old)
    run_one(replica, "new", new)
    # Ten pages hold four of each; the next prompt needs three: two are free, and the last one of `old` goes.
    run_one(replica, "other", tokens(130, seed=3))
    cache = replica.scheduler._rows.cache
    assert [key in cache._entries for key in page_keys(old)] == [True, True, True, False]
    assert [key in cache._entries for key in page_keys(new)] == [True] * 4
    # A hit makes `old` the newest.
    assert run_one(replica, "old again", old[:193]) == 192
    run_one(replica, "another", tokens(200, seed=4))
    assert [key in cache._entries for key in page_keys(old)[:3]] == [True] * 3
    assert False in [key in cache._entries for key in page_keys(new)]


def test_the_statistics_name_the_ends_of_what_was_used_last() -> None:
    replica = Replica(config(prefix_sample=2))
    a, b, c = (tokens(130, seed=seed) for seed in range(3))

    def reported() -> list[bytes]:
        return list(unpack_keys(replica.scheduler.stats().prefix_keys))

    def told(prompt: list[int]) -> list[bytes]:
        return [key[:8] for key in page_keys(prompt)]

    run_one(replica, "a", a)
    assert sorted(reported()) == sorted(told(a))
    run_one(replica, "b", b)
    run_one(replica, "c", c)
    assert reported() == [told(c)[1], told(b)[1]]
    run_one(replica, "a again", a)
    assert reported() == [told(a)[1], told(c)[1]]


def test_a_colliding_key_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.protocol.request.chain_key", lambda parent, page: SEVEN)
    replica = Replica(config())
    assert run_one(replica, "a", tokens(200, seed=1)) == 0
    assert run_one(replica, "b", tokens(200, seed=2)) == 0
    assert run_one(replica, "a again", tokens(200, seed=1)) == 64


def test_equal_pages_behind_different_prefixes_are_different(monkeypatch: pytest.MonkeyPatch) -> None:
    # Even when the keys do not tell them apart: key of a page = hash of that page alone.
    strong = prompts.chain_key
    monkeypatch.setattr(prompts, "chain_key", lambda parent, page: strong(NO_ROOT, page))
    replica = Replica(config())
    head1, head2, tail = tokens(64, seed=1), tokens(64, seed=2), tokens(65, seed=3)
    assert run_one(replica, "a", [*head1, *tail]) == 0
    assert run_one(replica, "b", [*head2, *tail]) == 0
    assert run_one(replica, "c", [*head2, *tail]) == 64
    assert run_one(replica, "d", [*head1, *tail]) == 128


def test_a_gap_left_by_a_twin_is_filled_when_the_row_ends() -> None:
    # Rows 1 and 2 compute the same first page; row 1's is the cached one and is evicted while row 2 holds the page
    # that continues it. When row 2 ends, its own first page takes the place.
    pool = PagePool(6)
    cache = PrefixCache(pool)
    ids = Tokens(Prompt.of(range(128)))
    one, two = cache.open([], 1), cache.open([], 2)
    cache.register(one, ids, 1)
    cache.register(two, ids, 2)
    assert two.duplicates
    cache.close(one)
    three = cache.open([], 3)  # takes the last free pages, then row 1's
    assert ids.keys()[0] not in cache._entries
    assert cache.match(ids, ids.keys(), 2) == []
    cache.close(two)
    assert [entry.page for entry in cache.match(ids, ids.keys(), 2)] == [2, 3]
    cache.close(three)
    assert cache.available == 5


def test_nothing_is_cached_behind_a_page_whose_key_collided(monkeypatch: pytest.MonkeyPatch) -> None:
    # All first pages collide. Cached behind the other's first page, b's second one would be taken for a's.
    strong = prompts.chain_key
    monkeypatch.setattr(prompts, "chain_key", lambda parent, page: strong(SEVEN, page) if parent != NO_ROOT else SEVEN)
    replica = Replica(config())
    a, b, tail = tokens(64, seed=1), tokens(64, seed=2), tokens(65, seed=3)
    assert run_one(replica, "a", [*a, 0]) == 0
    assert run_one(replica, "b", [*b, *tail]) == 0
    assert run_one(replica, "c", [*a, *tail]) == 64


def test_nothing_is_cached_behind_an_equal_page_of_another_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    strong = prompts.chain_key
    monkeypatch.setattr(prompts, "chain_key", lambda parent, page: strong(NO_ROOT, page))
    replica = Replica(config())
    a, b, same, tail = (tokens(64, seed=seed) for seed in range(4))
    assert run_one(replica, "a", [*a, *same, 0]) == 0
    replica.add("b", [*b, *same, *tail, 0], max_tokens=50)
    while not replica.tokens["b"]:
        replica.step()
    assert run_one(replica, "c", [*a, *same, *tail, 0]) == 128


def test_a_gap_that_a_colliding_page_took_is_not_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    strong = prompts.chain_key
    monkeypatch.setattr(prompts, "chain_key", lambda parent, page: strong(SEVEN, page) if parent != NO_ROOT else SEVEN)
    pool = PagePool(6)
    cache = PrefixCache(pool)
    ids, other = (Tokens(Prompt.of(part)) for part in (range(128), range(1000, 1064)))
    one, two = cache.open([], 1), cache.open([], 2)
    cache.register(one, ids, 1)
    cache.register(two, ids, 2)
    cache.close(one)
    three = cache.open([], 3)  # evicts row 1's page
    cache.register(three, other, 1)
    cache.close(two)
    for wrong in (ids, Tokens(Prompt.of([*range(1000, 1064), *range(64, 128)]))):
        assert len(cache.match(wrong, wrong.keys(), 2)) == (wrong[0] == 1000)
    cache.close(three)
    assert cache.available == 5


def test_asking_for_more_pages_than_there_are_raises() -> None:
    cache = PrefixCache(PagePool(4))
    with pytest.raises(RuntimeError, match="4 pages wanted, 3 available"):
        cache.open([], 4)


def test_pages_are_shared_among_requests_of_one_salt_alone() -> None:
    replica = Replica(config())
    prompt = tokens(200)

    def cached(name: str, salt: bytes) -> int:
        assert not replica.add(name, prompt, salt=salt, max_tokens=100)
        replica.run()
        replica.check_tokens()
        return replica.outputs[name][0].cached_tokens

    assert [cached(f"1 of {salt!r}", salt) for salt in (b"", b"one", b"two")] == [0, 0, 0]
    assert [cached(f"2 of {salt!r}", salt) for salt in (b"two", b"", b"one")] == [192, 192, 192]
    # What was generated is a salt's own, too.
    prompt = [*prompt, *replica.tokens["1 of b'one'"]]
    assert [cached(f"3 of {salt!r}", salt) for salt in (b"one", b"three")] == [256, 0]


def test_choices_share_pages_that_others_of_another_salt_compute_at_the_same_time() -> None:
    replica = Replica(config(token_budget=1000))
    for number, salt in enumerate((b"one", b"two", b"one", b"two")):
        replica.add(str(number), tokens(200), salt=salt, max_tokens=5)
    replica.run()
    replica.check_tokens()
    assert [replica.outputs[str(number)][0].cached_tokens for number in range(4)] == [0, 0, 192, 192]


def test_a_salt_makes_a_root_of_its_own_and_none_leaves_it() -> None:
    roots = [salted_root(root, salt) for root in (NO_ROOT, SEVEN) for salt in (b"", b"one", b"two", b"one\0")]
    assert len({*roots}) == 8
    assert salted_root(SEVEN, b"") == SEVEN
    assert {len(root) for root in roots} == {16}
    assert salted_root(SEVEN, b"one") == blake2b(b"one", digest_size=16, salt=SEVEN).digest()


def test_the_statistics_name_the_root() -> None:
    replica = Replica(config(root=SEVEN))
    run_one(replica, "a", tokens(130))
    stats = replica.scheduler.stats()
    assert stats.key_root == SEVEN
    assert set(unpack_keys(stats.prefix_keys)) == {key[:8] for key in page_keys(tokens(130), SEVEN)}


def test_pages_whose_keys_have_one_low_half_are_all_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers are told the low half of a key; the cache goes by all of it."""
    strong = prompts.chain_key
    monkeypatch.setattr(prompts, "chain_key", lambda parent, page: bytes(8) + strong(parent, page)[8:])
    replica = Replica(config())
    for seed in range(3):
        assert run_one(replica, f"{seed}", tokens(200, seed=seed)) == 0
    for seed in range(3):
        assert run_one(replica, f"{seed} again", tokens(200, seed=seed)) == 192
    assert set(unpack_keys(replica.scheduler.stats().prefix_keys)) == {bytes(8)}
