"""The kernels that a pass of DeepSeek V4 begins with as they were compiled, under a drawn schedule."""

from __future__ import annotations

import pytest
import torch

from kernels.compressed import launch
from kernels.residual_streams import StreamMemory
from tests.support.ptx import emulated

pytestmark = pytest.mark.long


def test_the_beginning_of_a_pass() -> None:
    """Tokens and positions may have been written by the kernel before."""
    tokens, features, streams, rope = 3, 1088, 4, 64
    random = torch.Generator().manual_seed(0)
    embedding = torch.randn(7, features, generator=random).bfloat16()
    tables = torch.randn(9, rope, generator=random), torch.randn(9, rope, generator=random)
    token, position = torch.tensor([6, 0, 3]), torch.tensor([8, 0, 5])
    kept, turns = torch.full_like(token, -1), tuple(torch.full((tokens, rope), torch.nan) for _ in tables)
    x = torch.full((tokens, features), torch.nan, dtype=torch.bfloat16)
    residual = torch.full((tokens, streams, features), torch.nan, dtype=torch.bfloat16)
    memory = StreamMemory.empty(tokens, streams, features, torch.empty, mixing=True)
    row, bound = torch.full((2, tokens), 77, dtype=torch.int32)
    with emulated(1, consecutive=True) as launches:
        length, wanted = torch.tensor([9, 0, 4], dtype=torch.int32), torch.tensor([1, 1, 0])
        launch.lay_out_rows(position, length, wanted, row, bound, 4, dependent=True)
        given = token, position, embedding, tables, kept, turns, x, residual
        launch.begin(*given, memory, dependent=True)
    assert launches == ["lay_out_rows_kernel", "begin_kernel"]
    assert (row.tolist(), bound.tolist()) == ([0, 1, -1], [2, 0, 0])
    assert torch.equal(kept, token)
    assert torch.equal(x, embedding[token])
    assert all(torch.equal(own, table[position]) for own, table in zip(turns, tables, strict=True))
    assert not residual.any()
    assert memory.mix_TSS is not None
    assert not memory.mix_TSS.any()
    assert bool((memory.open_TS == 1).all())
