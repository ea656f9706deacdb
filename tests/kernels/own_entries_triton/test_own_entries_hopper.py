"""Compilation of a shard's own part of decode rows for Hopper: no spills, one variant for every batch."""

from __future__ import annotations

import pytest
import torch

from kernels.own_entries import OwnEntries, launch_own_entries
from kernels.page import Shards
from tests.support.hopper import compile_only, resources

pytestmark = pytest.mark.gate


def compiled(rows: int, width: int, pages: int, count: int = 8) -> object:
    with compile_only() as found:
        table, length = torch.zeros(rows, pages, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
        launch_own_entries(table, length, OwnEntries.allocate(rows, width, pages, torch.zeros), Shards(count, 1), 1)
    (kernel,) = found
    return kernel


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
def test_compiles_without_spills(width: int, count: int) -> None:
    resources(compiled(64, width, 2560, count)).check(registers=128)


def test_rows_and_pages_compile_nothing_new() -> None:
    assert len({compiled(*sizes).hash for sizes in ((1, 4, 1), (3, 4, 16), (16, 4, 17), (255, 4, 2560))}) == 1
