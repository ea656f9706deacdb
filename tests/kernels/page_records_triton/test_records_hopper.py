"""Compilation of the copies for Hopper: no spills, wide loads and stores, one variant in each direction."""

import pytest
import torch
from records_case import Records

from kernels.page_records import PagedRecords, gather_pages
from tests.support.hopper import compile_only, machine_code, resources


@pytest.mark.gate
@pytest.mark.parametrize("out", [True, False])
def test_compiles_without_spills_and_copies_wide(out: bool) -> None:
    with compile_only() as compiled:
        for sizes, count in [([40704, 8448], 3), ([73728] * 5, 1), ([64], 16)]:
            case = Records(sizes, 20, count)
            case.run(case.empty(), out)
    assert len({kernel.hash for kernel in compiled}) == 1
    resources(compiled[0]).check(registers=96)
    code = machine_code(compiled[0])
    assert "LDG.E.128" in code
    assert "STG.E.128" in code


def test_what_is_not_aligned_is_refused() -> None:
    with pytest.raises(ValueError, match="multiples of 16"):
        PagedRecords.of([torch.zeros(3, 24, dtype=torch.uint8)], [0])
    with pytest.raises(ValueError, match="multiples of 16"):
        PagedRecords.of([torch.zeros(3, 32, dtype=torch.uint8)], [8])
    case = Records([64], 3, 2)
    for page_N, record_NR in [
        (case.page_N.int(), case.empty()),
        (case.page_N[:1], case.empty()),
        (case.page_N, case.empty()[:, 8:]),
        (case.page_N, case.empty().char()),
    ]:
        with pytest.raises(ValueError, match=r"int64 page|contiguous bytes"):
            gather_pages(case.records, page_N, record_NR)
