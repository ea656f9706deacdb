"""Pages of the rows of a proof's fixtures: in invariant mode they lie as those of served rows do."""

from __future__ import annotations

import random

import pytest

from kernels.page import Shards
from workers.proof.fixture_pool import FreePages


def test_without_pieces_pages_are_taken_in_their_order() -> None:
    free = FreePages([9, 4, 7, 1], Shards(2), in_pieces=False)
    assert free.most() == len(free) == 4
    assert free.take(3) == (9, 4, 7)
    assert free.fits(1)
    assert not free.fits(2)
    assert free.take(1) == (1,)
    assert free.most() == 0


@pytest.mark.parametrize("count", [2, 4, 8])
def test_pieces_go_round(count: int) -> None:
    """What is said to fit does, and no more; a shard has no more pieces of a row than its share, rounded up."""
    rng = random.Random(count)
    for _ in range(40):
        pages = rng.sample(range(1, 400), rng.randint(1, 120))
        shards, free = Shards(count), FreePages(pages, Shards(count), in_pieces=True)
        taken: list[int] = []
        while most := free.most():
            assert not free.fits(most + 1)
            row = free.take(rng.randint(1, most))
            first = shards.owner(row[0])
            assert [shards.owner(page) for page in row] == [(first + column // 8) % count for column in range(len(row))]
            taken += row
        assert len(set(taken)) == len(taken)
        assert set(taken) <= set(pages)
        assert len(free) == len(pages) - len(taken) == 0
