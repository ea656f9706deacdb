"""Compilation of the decode bookkeeping for Hopper: no spills, one variant for every batch and index."""

import pytest
import torch

import kernels.decode_state as family
from kernels.decode_state import SlotTensors
from kernels.page import WHOLE, Shards
from tests.support.hopper import compile_only, resources

pytestmark = pytest.mark.gate

SLOTS = 256


def step(rows: int, width: int, pages: int, *, tokens: bool = False, shards: Shards = WHOLE) -> list[object]:
    """Compile the bookkeeping of one step."""
    state = SlotTensors.allocate(SLOTS, width - 1, pages, torch.device("cpu"), tokens=tokens)
    slot_R, newest_R = (torch.zeros(rows, dtype=torch.int64) for _ in range(2))
    token_RW, position_RW, cache_RW = (torch.zeros(rows, width, dtype=torch.int64) for _ in range(3))
    length_R, page_RP = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows, pages, dtype=torch.int32)
    # As in a step: target tokens, then accepted counts, which begin wherever the tokens end.
    decided_N = torch.zeros(rows * width + rows + 1, dtype=torch.int64)
    target_RW, accepted_R = decided_N[: rows * width].view(rows, width), decided_N[rows * width : -1]
    with compile_only() as compiled:
        family.launch_feed(state, slot_R, token_RW, position_RW, cache_RW, length_R, page_RP, shards)
        family.launch_advance(state, slot_R, target_RW, accepted_R, position_RW, cache_RW, length_R, newest_R, shards)
        for index in range(width - 1):
            family.launch_feed_draft(
                state, slot_R, newest_R, index, position_RW[:, 0], cache_RW[:, 0], length_R, shards
            )
    return compiled


@pytest.mark.parametrize(
    ("pages", "tokens", "shards"), [(3, False, WHOLE), (2560, False, WHOLE), (3, True, WHOLE), (3, True, Shards(8, 3))]
)
@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
def test_compiles_without_spills(width: int, pages: int, tokens: bool, shards: Shards) -> None:
    found = [resources(kernel) for kernel in step(64, width, pages, tokens=tokens, shards=shards)]
    assert [kernel.name for kernel in found] == ["feed", "advance", *["feed_draft"] * (width - 1)]
    for kernel in found:
        kernel.check(registers=64)


def test_rows_pages_and_drafts_compile_nothing_new() -> None:
    """Every batch size, page table and index of a draft runs the same machine code."""
    hashes = {
        kernel.hash for rows, pages in ((1, 1), (3, 16), (16, 17), (255, 2560)) for kernel in step(rows, 4, pages)
    }
    assert len(hashes) == 3
