"""Grouped-query attention: reference and kernels against torch, and what the compiler makes of them for Hopper."""

from __future__ import annotations

import pytest
import torch

import kernels.grouped_attention as family
from kernels.page import PAGE_TOKENS
from tests.support.hopper import compile_only, resources


def compiled(rows: int, width: int, heads: int, key_heads: int, dtype: torch.dtype = torch.bfloat16) -> list[object]:
    """Compile a pass of decode rows, or of tiles (width 0), with heads of 128 features."""
    features, tokens = 128, rows * (width or family.QUERIES)
    qkv_TF = torch.zeros(tokens, (heads + 2 * key_heads) * features, dtype=dtype)
    cache_PKC = torch.zeros(3, PAGE_TOKENS, 2 * key_heads * features, dtype=dtype)
    q_THD = qkv_TF.view(tokens, -1, features)[:, :heads]
    out_THD = torch.zeros(tokens, heads, features, dtype=dtype)
    table = torch.zeros(4, rows, dtype=torch.int32)
    how = {"length_R": table[0], "width": width} if width else {"tile_4N": table}
    with compile_only() as found:
        slot_T = torch.zeros(tokens, dtype=torch.int64)
        family.launch_rope_store(qkv_TF, torch.zeros(tokens, features), slot_T, cache_PKC, heads)
        page_RP = torch.zeros(rows, 7, dtype=torch.int32)
        family.launch_attend(q_THD, cache_PKC, page_RP, out_THD, first=1, scale=0.1, **how)
    return found


@pytest.mark.gate
@pytest.mark.parametrize(("heads", "key_heads"), [(8, 1), (64, 8), (8, 8), (16, 1)])
@pytest.mark.parametrize("width", [0, 1, 3, 8])
def test_compiles_without_spills(width: int, heads: int, key_heads: int) -> None:
    found = [resources(kernel) for kernel in compiled(16, width, heads, key_heads)]
    assert [kernel.name for kernel in found] == ["rope_store", "attend"]
    for kernel in found:
        kernel.check(registers=255)


@pytest.mark.gate
@pytest.mark.parametrize("width", [0, 3])
def test_rows_compile_nothing_new(width: int) -> None:
    assert len({kernel.hash for rows in (1, 16, 33) for kernel in compiled(rows, width, 8, 2)}) == 2
