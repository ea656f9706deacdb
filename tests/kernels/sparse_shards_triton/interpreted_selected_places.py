"""Places of selected entries that ranks give each other, reference and Triton, position by position. Run with
TRITON_INTERPRET=1, see test_interpreted.py."""

from tests.support import interpreter

interpreter.repair()

import pytest  # noqa: E402
import torch  # noqa: E402

from kernels.page import Shards  # noqa: E402
from kernels.selected_places import SelectedPlaces, find_places_reference, launch_find_places  # noqa: E402
from tests.support.bounds import check_bounds  # noqa: E402

check_bounds()


@pytest.mark.parametrize("compute", [find_places_reference, launch_find_places], ids=["reference", "triton"])
@pytest.mark.parametrize("selected", [16, 64, 100])
@pytest.mark.parametrize("count", [2, 4])
def test_every_rank_finds_what_it_has(compute: object, selected: int, count: int) -> None:
    """The first position may be left out, as in the draft layer, and there may be fewer than are selected. A planted
    fault that this finds: the owner of page p - 1 for that of p."""
    random = torch.Generator().manual_seed(selected)
    pages = 7
    table_RP = (torch.randperm(4 * pages, generator=random)[: 3 * pages] + 1).view(3, pages).to(torch.int32)
    row_T = torch.tensor([2, 0, 0, 1], dtype=torch.int32)
    selected_TS = torch.full((4, selected), -1, dtype=torch.int32)
    for token, length in enumerate((selected, 1, 0, selected - 3)):
        positions = torch.randperm(64 * pages, generator=random)[:length].sort().values
        selected_TS[token, :length] = positions.to(torch.int32)
    selected_TS[0, 0] = -1
    for index in range(count):
        shards = Shards(count, index)
        local_RP = torch.tensor([[shards.local(p) if shards.owns(p) else 0 for p in row] for row in table_RP.tolist()])
        local_RP = local_RP.to(torch.int32)
        owner_TS = torch.full((4, selected), -1)
        places_TS = torch.zeros(4, selected, dtype=torch.int64)
        for token, row in enumerate(row_T.tolist()):
            for at, position in enumerate(selected_TS[token].tolist()):
                if position >= 0:
                    page = int(table_RP[row, position // 64])
                    owner_TS[token, at] = shards.owner(page)
                    if shards.owns(page):
                        places_TS[token, at] = shards.local(page) * 64 + position % 64
        own_TS = torch.where(owner_TS == index, selected_TS, -1).to(torch.int32)
        out = SelectedPlaces.allocate(4, selected, lambda *shape, dtype: torch.full(shape, 77, dtype=dtype))
        fault_1 = torch.zeros(1, dtype=torch.int64)
        compute(selected_TS, own_TS, row_T, table_RP, local_RP, 4 * pages + 1, shards, out, fault_1)  # type: ignore[operator]
        assert fault_1 == 0
        assert torch.equal(out.place_TX[:, :selected], places_TS)
        assert torch.equal(out.owner_TX[:, :selected], owner_TS.clamp(min=0))
        assert not out.place_TX[:, selected:].any()
        assert not out.owner_TX[:, selected:].any()
        found_TS = torch.where(selected_TS >= 0, torch.arange(selected), -1)
        assert torch.equal(out.index_TS, found_TS.to(torch.int32))
        assert torch.equal(out.page_TY, torch.arange(out.page_TY.numel(), dtype=torch.int32).view_as(out.page_TY))
        assert torch.equal(out.row_T, torch.arange(4, dtype=torch.int32))
        # Pages behind the cache's end are counted, and not followed.
        compute(selected_TS, own_TS, row_T, table_RP, local_RP, 2, shards, out, fault_1)  # type: ignore[operator]
        outside_TS = (own_TS >= 0) & (places_TS >= 128)
        assert fault_1 == int(outside_TS.sum())
        assert torch.equal(out.place_TX[:, :selected], torch.where(outside_TS, 0, places_TS))
        assert torch.equal(out.index_TS == -1, (selected_TS < 0) | outside_TS)
