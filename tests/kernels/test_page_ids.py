"""Global and local ids of pages: each page lies on one shard, and at one place there."""

from __future__ import annotations

import pytest

from kernels.page import NULL_PAGE, LocalPage, Shards


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_every_page_has_one_owner_and_one_place(count: int) -> None:
    shards, per_rank = [Shards(count, index) for index in range(count)], 6
    pages = shards[0].pages(per_rank)
    assert pages == count * (per_rank - 1) + 1
    places = set()
    for page in range(1, pages):
        owners = [shard.index for shard in shards if shard.owns(page)]
        assert owners == [shards[0].owner(page)]
        local = shards[0].local(page)
        assert NULL_PAGE < local < per_rank
        assert shards[owners[0]].page(local) == page
        places.add((owners[0], local))
    assert len(places) == pages - 1


def test_neighbouring_pages_lie_on_neighbouring_shards_from_the_first_on() -> None:
    """A planted fault: the owner of p - 1 taken for that of p."""
    shards = Shards(4)
    assert [shards.owner(page) for page in range(1, 7)] == [0, 1, 2, 3, 0, 1]
    assert [shards.local(page) for page in range(1, 7)] == [1, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_null_page_is_everywhere_and_nobodys(count: int) -> None:
    for index in range(count):
        shards = Shards(count, index)
        assert shards.local(NULL_PAGE) == NULL_PAGE
        assert shards.page(LocalPage(NULL_PAGE)) == NULL_PAGE
        assert not shards.owns(NULL_PAGE)


def test_one_shard_is_the_whole_cache() -> None:
    assert [Shards().local(page) for page in range(50)] == list(range(50))
    assert all(Shards().owns(page) for page in range(1, 50))


@pytest.mark.parametrize(("count", "index"), [(2, 2), (2, -1), (0, 0)])
def test_a_shard_that_there_is_not_is_refused(count: int, index: int) -> None:
    with pytest.raises(ValueError, match=f"no shard {index} of {count}"):
        Shards(count, index)
