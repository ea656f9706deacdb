import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.graphs.ladder import Ladder, row_buckets
from workers.plan import BatchLayout

ladders = st.builds(Ladder, st.integers(1, 600), st.integers(1, 8))


@given(ladders, st.data())
def test_every_batch_size_finds_a_captured_graph_that_holds_it(ladder: Ladder, data: st.DataObject) -> None:
    keys = set(ladder)
    width, drafts = data.draw(st.sampled_from(ladder.modes()))
    for rows in range(1, ladder.max_rows + 1):
        key = ladder.key(BatchLayout(width, rows), drafts)
        assert key in keys
        assert key is not None
        assert key.rows >= rows
        assert (key.width, key.drafts) == (width, drafts)
        # Never more than a third of a large bucket is padding, and never a whole row of a small one that has its own.
        assert key.rows - rows <= max(key.rows // 3, 3)


@given(ladders)
def test_keys_are_unique_and_come_largest_first(ladder: Ladder) -> None:
    keys = list(ladder)
    assert len(set(keys)) == len(keys)
    assert [key.rows for key in keys] == sorted((key.rows for key in keys), reverse=True)
    assert all(key.rows <= ladder.max_rows and key.width <= ladder.width for key in keys)


def test_what_has_no_graph_has_no_key() -> None:
    ladder = Ladder(16, 3)
    assert ladder.key(BatchLayout(3, 17), 2) is None
    assert ladder.key(BatchLayout(2, 4), 2) is None
    assert ladder.key(BatchLayout(3, 4, (5,), (True,)), 2) is None
    assert ladder.key(BatchLayout(3, 0), 2) is None
    assert ladder.key(BatchLayout(3, 5), 2) == (6, 3, 2)


def test_buckets_grow_to_the_maximum() -> None:
    assert row_buckets(1) == (1,)
    assert row_buckets(5) == (1, 2, 3, 4, 5)
    assert row_buckets(64) == (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 50, 62, 64)
    with pytest.raises(ValueError, match="rows and tokens"):
        Ladder(0, 1)
