"""Warm-up meets every kernel that chunks of DeepSeek V4 need, whatever number of tokens they have: none is compiled
while requests wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.compressed import AttendWorkspace
from kernels.page import PAGE_TOKENS
from kernels.sparse import SelectWorkspace, launch, scores, select, select_whole
from workers.graphs.mixed_warm_up import _SHORT, _doubled
from workers.models.compressed_pass import CompressedPass

MOST = 132
"""Tokens from which on each has a multiprocessor of an H200 to itself."""
META = torch.device("meta")
WINDOW, TOP_K, INDEX_HEADS, INDEX_FEATURES, KEYS = 128, 512, 64, 128, 16
"""Of DeepSeek V4 Flash; KEYS of a page."""


class Recorded:
    """Stands for a kernel, and keeps the constants that its launches are compiled for."""

    def __init__(self) -> None:
        self.constants: set[tuple[Any, ...]] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *_, **constants: self.constants.add(tuple(sorted(constants.items())))


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def scored(tokens: int, monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, ...]]:
    """What the kernel of index scores is compiled for, of a chunk of so many tokens."""
    kernel = Recorded()
    monkeypatch.setattr(scores, "score_pages", kernel)
    launch.index_scores(
        torch.empty(tokens, INDEX_HEADS, INDEX_FEATURES, dtype=torch.bfloat16, device=META),
        torch.empty(tokens, INDEX_HEADS, device=META),
        torch.empty(9, KEYS, INDEX_FEATURES, dtype=torch.bfloat16, device=META),
        torch.empty(1, 64, dtype=torch.int32, device=META),
        torch.empty(tokens, dtype=torch.int32, device=META),
        torch.empty(tokens, dtype=torch.int32, device=META),
        torch.empty(tokens, 1024, device=META),
        torch.empty(1, dtype=torch.int64, device=META),
        hopper=False,
    )
    assert len(kernel.constants) == 1
    return kernel.constants


def attended(tokens: int) -> set[tuple[int, ...]]:
    """Into how many parts the entries of a chunk's tokens are divided, for each number of heads and of entries."""
    found = set()
    for heads in (8, 16, 32, 64):
        for entries in (WINDOW, WINDOW + TOP_K, WINDOW + 64 * PAGE_TOKENS // 128, WINDOW + 8192):
            workspace = AttendWorkspace.allocate(tokens, heads, 512, entries, empty)
            found.add((heads, entries, len(workspace.partial_GTHD)))
    return found


def selected(tokens: int, monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, ...]]:
    """What the kernels of the selection are compiled for."""
    found = set()
    for count in (1024, 8192, 262144):
        kernels = {name: Recorded() for name in ("select_whole", "find_maxima", "keep_candidates", "list_positions")}
        for name, kernel in kernels.items():
            monkeypatch.setattr(select_whole if name == "select_whole" else select, name, kernel)
        score_TN, bound_T = torch.empty(tokens, count, device=META), torch.empty(tokens, dtype=torch.int32, device=META)
        workspace = SelectWorkspace.allocate(tokens, count, empty, selected=TOP_K, hopper=True)
        selected_TS = torch.empty(tokens, TOP_K, dtype=torch.int32, device=META)
        fault_1 = torch.empty(1, dtype=torch.int64, device=META)
        launch.select_positions(score_TN, bound_T, selected_TS, fault_1, workspace)
        found |= {(count, name, own) for name, kernel in kernels.items() for own in kernel.constants}
    assert found
    return found


def test_warm_up_has_chunks_for_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    met: dict[str, set[Any]] = {"scores": set(), "attention": set(), "selection": set()}
    for tokens in (1, *CompressedPass.short_chunks, *_doubled(_SHORT, 4 * MOST)):
        met["scores"] |= scored(tokens, monkeypatch)
        met["attention"] |= attended(tokens)
        met["selection"] |= selected(tokens, monkeypatch)
    for tokens in range(1, MOST + 1):
        assert scored(tokens, monkeypatch) <= met["scores"], tokens
        assert attended(tokens) <= met["attention"], tokens
        assert selected(tokens, monkeypatch) <= met["selection"], tokens
    assert len(met["scores"]) > 3
    assert {name for _, name, _ in met["selection"]} >= {"find_maxima", "keep_candidates", "list_positions"}
    assert len({parts for _, _, parts in met["attention"]}) > 3
