"""A shard's own part of decode rows, reference and Triton, against entries counted one by one. Run with
TRITON_INTERPRET=1, see test_interpreted.py."""

from tests.support import interpreter

interpreter.repair()

from collections.abc import Callable  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402

from kernels.own_entries import (  # noqa: E402
    OwnEntries,
    launch_own_entries,
    own_entries,
    own_entries_reference,
)
from kernels.page import NULL_PAGE, PAGE_TOKENS, Shards, pages_for  # noqa: E402

PATHS = [
    pytest.param(own_entries_reference, id="reference"),
    pytest.param(launch_own_entries, id="triton"),
]
ARBITRARY_PAGE = 2147480000
LENGTHS = [0, 1, 2, 63, 64, 65, 127, 128, 129, 130, 255, 256, 257, 700]
COLUMNS = 13


def tables(lengths: list[int], seed: int) -> torch.Tensor:
    """Random global pages, so that shards have any number of a row's, with arbitrary ids behind a row's length."""
    random = torch.Generator().manual_seed(seed)
    pages = (torch.randperm(len(lengths) * COLUMNS, generator=random) + 1).view(-1, COLUMNS).to(torch.int32)
    for row, length in enumerate(lengths):
        pages[row, pages_for(length) :] = ARBITRARY_PAGE if row % 2 else NULL_PAGE
    return pages


def computed(
    compute: Callable[..., None], table: torch.Tensor, lengths: list[int], width: int, shards: Shards, first: int
) -> OwnEntries:
    def garbage(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, -77, dtype=dtype)

    out = OwnEntries.allocate(len(lengths), width, COLUMNS, garbage)
    compute(table, torch.tensor(lengths, dtype=torch.int32), out, shards, first)
    return out


@pytest.mark.parametrize("compute", PATHS)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
def test_draft_bounds(compute: Callable[..., None], count: int, width: int, first: int) -> None:
    """Planted faults that this finds: a page that two shards count, or none; the entry at a page's border lost; all
    drafts with the last one's bound; `first` on every shard; the owner of page p - 1; the null page taken for one with
    entries."""
    table = tables(LENGTHS, seed=width * count)
    shares = [computed(compute, table, LENGTHS, width, Shards(count, index), first) for index in range(count)]
    for row, length in enumerate(LENGTHS):
        for token in range(width):
            seen = list(range(max(0, length - (width - 1 - token))))
            owners = [list(range(count))[int(table[row, i // PAGE_TOKENS]) % count - 1] for i in seen]
            for index, share in enumerate(shares):
                assert int(share.bound_RW[row, token]) == owners.count(index), (length, token, index)
        live = table[row, : pages_for(length)].tolist()
        for index, share in enumerate(shares):
            mine = [-(-page // count) for page in live if list(range(count))[page % count - 1] == index]
            assert share.page_RP[row].tolist() == mine + [NULL_PAGE] * (COLUMNS - len(mine))
            assert int(share.length_R[row]) == int(share.bound_RW[row, -1])
            has_first = bool(live) and list(range(count))[live[0] % count - 1] == index
            assert int(share.first_R[row]) == (first if has_first else 0)


@pytest.mark.parametrize("compute", PATHS)
def test_a_window_over_a_border_has_a_bound_for_each_token(compute: Callable[..., None]) -> None:
    table = torch.tensor([[1, 3, 2] + [NULL_PAGE] * (COLUMNS - 3)], dtype=torch.int32)
    shares = [computed(compute, table, [130], 4, Shards(2, index), 0) for index in range(2)]
    assert [share.bound_RW[0].tolist() for share in shares] == [[127, 128, 128, 128], [0, 0, 1, 2]]


@pytest.mark.parametrize("compute", PATHS)
def test_pages_beyond_one_block_of_columns(compute: Callable[..., None]) -> None:
    pages = 600
    table, length = torch.arange(1, pages + 1, dtype=torch.int32).unsqueeze(0), torch.tensor([pages * PAGE_TOKENS])
    out = OwnEntries.allocate(1, 2, pages, lambda *shape, dtype: torch.full(shape, -77, dtype=dtype))
    compute(table, length.to(torch.int32), out, Shards(2, 1), 1)
    assert out.page_RP[0].tolist() == [*range(1, 301), *[NULL_PAGE] * 300]
    assert out.bound_RW.tolist() == [[300 * PAGE_TOKENS - 1, 300 * PAGE_TOKENS]]


def test_more_than_a_page_cannot_be_left_out() -> None:
    out = OwnEntries.allocate(1, 1, 1, torch.empty)
    one = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="first = 64"):
        own_entries(one, one[0], out, Shards(), first=64)
