"""The geometry of prefill rows: every cached entry of every row is in one piece, and kernels find it where they did."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.gather_context import gather_context
from workers.batch import Batch, PrefillBatch
from workers.models.prefill import PrefillGeometry
from workers.plan import BatchLayout

chunks = st.lists(st.tuples(st.integers(0, 6000), st.integers(1, 70)), min_size=1, max_size=9)


@given(chunks=chunks, first=st.integers(0, 1))
def test_pieces_hold_every_cached_entry_once(chunks: list[tuple[int, int]], first: int) -> None:
    start, count = tuple(first + a for a, _ in chunks), tuple(b for _, b in chunks)
    layout = BatchLayout(1, 0, count, (True,) * len(count))
    table = torch.randperm(len(chunks) * 100).to(torch.int32).view(len(chunks), 100)
    cache_PK1 = torch.arange(len(chunks) * 100 * 64).float().view(-1, 64, 1)
    batch = Batch(layout, torch.empty(0), torch.empty(0), None, PrefillBatch(start, count, table), first)
    geometry = PrefillGeometry.of(batch)
    assert geometry is not None
    assert geometry.max_q == max(count)
    assert geometry.cu_q_B1.diff().tolist() == list(count)
    assert geometry.page_BP is table
    found: list[list[int]] = [[] for _ in chunks]
    for piece in geometry.pieces:
        bounds = piece.cu_k_B1.tolist()
        assert (bounds[0], bounds[-1]) == (0, piece.entries)
        entry_S1 = torch.empty(piece.entries, 1)
        gather_context(cache_PK1, table, piece.cu_k_B1, entry_S1, begin=piece.begin)
        for row, own in enumerate(found):
            part = entry_S1[bounds[row] : bounds[row + 1], 0].int().tolist()
            assert len(part) <= piece.max_k
            own += part
    for row, own in enumerate(found):
        assert own == [int(table[row, entry // 64]) * 64 + entry % 64 for entry in range(first, start[row])]
    # Triton compiles a kernel again for a pointer that is aligned where it was not before.
    for cu_B1 in (geometry.cu_q_B1, *(piece.cu_k_B1 for piece in geometry.pieces)):
        assert cu_B1.is_contiguous()
        assert (cu_B1.data_ptr() - geometry.cu_q_B1.data_ptr()) % 16 == 0
