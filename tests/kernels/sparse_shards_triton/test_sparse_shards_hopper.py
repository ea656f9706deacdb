"""Compilation for Hopper of selection by shards, at published sizes: no spills, one variant for all lengths and ranks'
numbers of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from selection_by_shards import garbage

from kernels.page import Shards
from kernels.selected_places import SelectedPlaces, launch_find_places
from kernels.sparse_shards import Candidates, OwnPages, launch
from tests.support.hopper import compile_only, resources

pytestmark = pytest.mark.gate


def compiled(tokens: int, rows: int, pages: int, count: int, selected: int, *, dependent: bool) -> dict[str, Any]:
    table_RP, row_T = torch.zeros(rows, pages, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int32)
    own, candidates = OwnPages.allocate(rows, pages, garbage), Candidates.allocate(tokens, count, selected, garbage)
    selected_TS, score_TN = torch.zeros(tokens, selected, dtype=torch.int32), torch.empty(tokens, pages * 64)
    with compile_only() as found:
        launch.find_own_pages(table_RP, own, Shards(count, 1))
        launch.own_bounds(row_T, row_T, own, row_T, torch.zeros(tokens, dtype=torch.bool))
        launch.offer_candidates(selected_TS, score_TN, row_T, own, candidates.part_TY, dependent=dependent)
        launch.order_candidates(candidates, dependent=dependent)
        launch.keep_selected(candidates, selected_TS, row_T, own, selected_TS, 1, dependent=dependent)
        launch.keep_selected(None, selected_TS, row_T, own, selected_TS, 0, dependent=dependent)
    names = [kernel.metadata.name for kernel in found]
    assert len(names) == 6
    return dict(zip([*names[:5], "keep_own"], found, strict=True))


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("selected", [512, 2048])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_compiles_without_spills(count: int, selected: int, dependent: bool) -> None:
    for name, kernel in compiled(64, 64, 2560, count, selected, dependent=dependent).items():
        used = resources(kernel)
        used.check(registers=96)
        assert used.waits == used.releases == (dependent and name not in ("find_own_pages", "own_bounds"))
        # What every layer writes anew is read past L1.
        assert ("ld.global.cg" in kernel.asm["ptx"]) == (name not in ("find_own_pages", "own_bounds"))


def test_tokens_rows_and_pages_compile_nothing_new() -> None:
    sizes = ((1, 1, 1), (3, 2, 16), (16, 16, 17), (500, 9, 2560))
    found = [compiled(*size, 2, 2048, dependent=True) for size in sizes]
    for name in found[0]:
        assert len({kernels[name].hash for kernels in found}) == 1, name


@pytest.mark.parametrize("count", [2, 8])
def test_places_of_selected_entries(count: int) -> None:
    """Compiled once for all numbers of tokens, rows and pages."""
    with compile_only() as found:
        for tokens, rows, pages in ((1, 1, 1), (3, 2, 16), (32, 9, 2560)):
            table_RP, row_T = torch.zeros(rows, pages, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int32)
            selected_TS, fault_1 = torch.zeros(tokens, 2048, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
            out = SelectedPlaces.allocate(tokens, 2048, garbage)
            lists = selected_TS, selected_TS, row_T, table_RP, table_RP
            launch_find_places(*lists, pages + 1, Shards(count, 1), out, fault_1)
    assert len({kernel.hash for kernel in found}) == 1
    for kernel in found:
        resources(kernel).check(registers=64)
