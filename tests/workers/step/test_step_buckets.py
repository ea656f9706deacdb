import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.protocol.plan import MOST_DENSE_ROWS, BatchLayout, DecodeBuckets, TokenBuckets, row_buckets, token_buckets

bucket_sets = st.builds(DecodeBuckets, st.integers(1, 600), st.integers(1, 8), st.booleans(), st.booleans())


@given(bucket_sets, st.data())
def test_every_batch_size_finds_a_captured_graph_that_holds_it(buckets: DecodeBuckets, data: st.DataObject) -> None:
    keys = set(buckets)
    width, drafts = data.draw(st.sampled_from(buckets.modes()))
    for rows in range(1, buckets.max_rows + 1):
        key = buckets.key(BatchLayout(width, rows), drafts)
        assert key in keys
        assert key is not None
        assert key.rows >= rows
        assert (key.width, key.drafts) == (width, drafts)
        # Never more than a third of a large bucket is padding, and never a whole row of a small one that has its own.
        assert key.rows - rows <= max(key.rows // 3, 3)
        short = buckets.key(BatchLayout(width, rows), drafts, dense=True)
        assert short in keys
        assert short == key._replace(dense=buckets.sparse and key.rows <= MOST_DENSE_ROWS)
        assert not key.dense


@given(bucket_sets)
def test_keys_are_unique_and_come_largest_first(buckets: DecodeBuckets) -> None:
    keys = list(buckets)
    assert len(set(keys)) == len(keys)
    assert [key.rows for key in keys] == sorted((key.rows for key in keys), reverse=True)
    assert all(key.rows <= buckets.max_rows and key.width <= buckets.width for key in keys)


def test_what_has_no_graph_has_no_key() -> None:
    buckets = DecodeBuckets(16, 3)
    assert buckets.key(BatchLayout(3, 17), 2) is None
    assert buckets.key(BatchLayout(2, 4), 2) is None
    assert buckets.key(BatchLayout(3, 4, (5,), (True,)), 2) is None
    assert buckets.key(BatchLayout(3, 0), 2) is None
    assert buckets.key(BatchLayout(3, 5), 2) == (6, 3, 2, False)
    assert buckets.key(BatchLayout(3, 5), 2, dense=True) == (6, 3, 2, False)
    assert buckets.key(BatchLayout(3, 17), 2, dense=True) is None


def test_buckets_grow_to_the_maximum() -> None:
    assert row_buckets(1) == (1,)
    assert row_buckets(5) == (1, 2, 3, 4, 5)
    assert row_buckets(64) == (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64)
    with pytest.raises(ValueError, match="rows and tokens"):
        DecodeBuckets(0, 1)


@given(st.integers(1, 20000), st.data())
def test_every_number_of_tokens_finds_segments_that_hold_it(budget: int, data: st.DataObject) -> None:
    """No mixed step within the budget runs eagerly, whatever its rows are."""
    buckets = TokenBuckets(budget)
    keys = set(buckets)
    assert len(keys) <= 45
    tokens = data.draw(st.integers(1, budget))
    rows = data.draw(st.integers(0, tokens - 1))
    key = buckets.key(BatchLayout(1, rows, (tokens - rows,), (True,)))
    assert key in keys
    assert key.tokens >= tokens
    assert key.tokens - tokens <= max(0.15 * key.tokens, 15 if tokens <= 64 else 31)
    with pytest.raises(ValueError, match=f"exceeds the budget of {budget}"):
        buckets.key(BatchLayout(1, budget, (1,), (True,)))


@given(st.integers(1, 20000), st.integers(1, 600), st.data())
def test_every_number_of_sampled_rows_finds_a_tail_in_every_bucket(
    budget: int, slots: int, data: st.DataObject
) -> None:
    buckets = TokenBuckets(budget)
    tails = list(buckets.tails(slots))
    tokens = data.draw(st.integers(1, budget))
    bucket = buckets.key(BatchLayout(1, tokens)).tokens
    sampled = data.draw(st.integers(1, min(slots, tokens)))
    key = TokenBuckets(bucket).key(BatchLayout(1, sampled))
    assert sampled <= key.tokens
    assert key in tails
    # None that no step asks for.
    assert tails == [key for key in buckets if key.tokens <= buckets.key(BatchLayout(1, min(slots, budget))).tokens]


def test_token_keys_are_unique_and_come_largest_first() -> None:
    for budget in (1, 16, 17, 128, 129, 2048, 8192):
        keys = [key.tokens for key in TokenBuckets(budget)]
        assert keys == sorted(set(keys), reverse=True)
        assert keys[0] == budget
    assert token_buckets(128) == (16, 32, 48, 64, 96, 128)
    assert token_buckets(200) == (16, 32, 48, 64, 96, 128, 144, 160, 176, 200)
    assert len(token_buckets(2048)) == 26
    assert len(token_buckets(8192)) == 36
    with pytest.raises(ValueError, match="needs tokens"):
        TokenBuckets(0)
