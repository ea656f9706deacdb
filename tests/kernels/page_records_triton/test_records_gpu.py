"""Pages into records and back on a GPU."""

from __future__ import annotations

import pytest
import torch
from records_case import Records

from kernels.page_records import PagedRecords, gather_pages, scatter_pages

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("sizes", [[64], [16, 40704, 8448], [73728] * 27, [40704, 8448] * 62])
@pytest.mark.parametrize(("pages", "count"), [(1, 1), (70, 33)])
def test_every_byte_comes_and_goes(sizes: list[int], pages: int, count: int) -> None:
    Records(sizes, pages, count, "cuda").check()


def test_pages_past_two_to_the_31_bytes() -> None:
    pages = 2**31 // 73728 + 2
    cache = torch.zeros(pages, 73728, dtype=torch.uint8, device="cuda")
    cache[-1] = torch.randint(0, 256, (73728,), dtype=torch.uint8, device="cuda")
    records = PagedRecords.of([cache], [0])
    record_NR = torch.zeros(1, 73728, dtype=torch.uint8, device="cuda")
    gather_pages(records, torch.tensor([pages - 1], device="cuda"), record_NR)
    assert torch.equal(record_NR[0], cache[-1])
    scatter_pages(records, torch.tensor([pages - 2], device="cuda"), record_NR)
    assert torch.equal(cache[-2], cache[-1])
