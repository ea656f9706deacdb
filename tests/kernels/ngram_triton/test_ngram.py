"""Prompt look-up: reference and kernels against lists, and what the compiler makes of the kernels for Hopper."""

from __future__ import annotations

import pytest
import torch

import kernels.ngram as family
from tests.support.hopper import compile_only, resources


def compiled(rows: int, tokens: int, drafts: int) -> list[object]:
    state = torch.zeros(257, tokens, dtype=torch.int32)
    newest_S, draft_SK = torch.zeros(257, dtype=torch.int64), torch.zeros(257, 7, dtype=torch.int64)
    found_RC = torch.zeros(rows, family.blocks(tokens), dtype=torch.int64)
    with compile_only() as found:
        family.launch_propose(state, newest_S, newest_S[:rows], draft_SK, drafts, found_RC)
    return found


@pytest.mark.gate
@pytest.mark.parametrize("tokens", [320, 163840])
def test_compiles_without_spills(tokens: int) -> None:
    found = [resources(kernel) for kernel in compiled(64, tokens, 3)]
    assert [kernel.name for kernel in found] == ["find_kernel", "take_kernel"]
    for kernel in found:
        kernel.check(registers=128)


@pytest.mark.gate
def test_rows_and_drafts_compile_nothing_new() -> None:
    assert (
        len({kernel.hash for rows, drafts in ((1, 1), (16, 2), (255, 7)) for kernel in compiled(rows, 163840, drafts)})
        == 2
    )
