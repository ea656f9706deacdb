"""The geometry of prefill rows: every cached entry of every row is in one piece, kernels find it where they did, and
there are no more pieces than the entries fill."""

from __future__ import annotations

from typing import cast
from unittest.mock import patch

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels.gather_context import gather_context
from kernels.mla_prefill import most_partial
from kernels.page import PAGE_TOKENS, pages_for
from workers.memory.scratch import Scratch
from workers.models.attention import expanded
from workers.models.attention.backend import Heads
from workers.models.attention.expanded import CONTEXT_ENTRIES, ExpandedChunks, PrefillGeometry, entries_of_a_row
from workers.models.batch import PrefillBatch
from workers.scheduler import prompt_budget

CPU = torch.device("cpu")

short = st.integers(0, 900)
lengths = (
    short
    | st.integers(0, 6000)
    | st.sampled_from([64, 65, 2048, CONTEXT_ENTRIES - 1, CONTEXT_ENTRIES, CONTEXT_ENTRIES + 1, 30_000, 100_000])
)
contexts = (
    st.lists(lengths, min_size=1, max_size=9)
    | st.lists(short, min_size=1, max_size=100)
    # One long row among many short ones, wherever it stands; and many of one length.
    | st.builds(lambda few, long, at: [*few[:at], long, *few[at:]], st.lists(short, max_size=80), lengths, short)
    | st.builds(lambda length, rows: [length] * rows, lengths, st.integers(1, 70))
)


def geometry_of(contexts: list[int], first: int, page_NP: torch.Tensor) -> PrefillGeometry:
    start, count = tuple(first + length for length in contexts), tuple(1 + row % 70 for row in range(len(contexts)))
    geometry = PrefillGeometry.of(PrefillBatch(start, count, page_NP), first)
    assert geometry.max_q == max(count)
    assert geometry.cu_q_B1.diff().tolist() == list(count)
    assert geometry.page_BP is page_NP
    return geometry


@settings(deadline=None)
@given(contexts=contexts, first=st.integers(0, 1))
@example(contexts=[700] * 9 + [100_000], first=0)
@example(contexts=[100_000] + [700] * 9, first=1)
def test_pieces_hold_every_cached_entry_once(contexts: list[int], first: int) -> None:
    rows, pages = len(contexts), pages_for(first + max(contexts)) + 1
    table = torch.randperm(rows * pages).to(torch.int32).view(rows, pages)
    cache_PK1 = torch.arange(rows * pages * PAGE_TOKENS, dtype=torch.int32).view(-1, PAGE_TOKENS, 1)
    geometry = geometry_of(contexts, first, table)
    found: list[list[torch.Tensor]] = [[] for _ in contexts]
    for piece in geometry.pieces:
        bounds = piece.cu_k_B1.tolist()
        assert (bounds[0], bounds[-1]) == (0, piece.entries)
        entry_S1 = torch.empty(piece.entries, 1, dtype=torch.int32)
        gather_context(cache_PK1, table, piece.cu_k_B1, entry_S1, begin=piece.begin)
        for row, own in enumerate(found):
            part = entry_S1[bounds[row] : bounds[row + 1], 0]
            assert len(part) <= piece.max_k
            own.append(part)
    for row, own in enumerate(found):
        entry = torch.arange(first, first + contexts[row])
        want = table[row, entry // PAGE_TOKENS] * PAGE_TOKENS + entry % PAGE_TOKENS
        assert torch.equal(torch.cat([*own, want[:0]]), want.to(torch.int32))
    # Triton compiles a kernel again for a pointer that is aligned where it was not before.
    for cu_B1 in (geometry.cu_q_B1, *(piece.cu_k_B1 for piece in geometry.pieces)):
        assert cu_B1.is_contiguous()
        assert (cu_B1.data_ptr() - geometry.cu_q_B1.data_ptr()) % 16 == 0


@settings(deadline=None)
@given(contexts=contexts, first=st.integers(0, 1))
@example(contexts=[700] * 9 + [100_000], first=0)
def test_there_are_no_more_pieces_than_the_entries_fill(contexts: list[int], first: int) -> None:
    """However the rows' lengths differ. A piece holds as much of every row, so up to one entry a row may be missing in
    it; and at least a page of every row, so many rows make larger pieces."""
    table = torch.zeros(len(contexts), 1, dtype=torch.int32)
    pieces = geometry_of(contexts, first, table).pieces
    memory = PrefillGeometry.largest(1, len(contexts), CPU).pieces[0].entries
    assert all(0 < piece.entries <= memory for piece in pieces)
    least = CONTEXT_ENTRIES - len(contexts)
    assert all(piece.entries > least for piece in pieces[:-1])
    assert len(pieces) <= -(-sum(contexts) // least)


def test_one_long_row_beside_short_ones_takes_as_many_pieces_as_alone() -> None:
    table = torch.zeros(10, 1, dtype=torch.int32)
    pieces = geometry_of([100_000] + [700] * 9, 0, table).pieces
    assert len(pieces) == 26
    assert [piece.max_k for piece in pieces[3:-1]] == [CONTEXT_ENTRIES] * 22


def test_as_much_of_every_row_as_is_warmed_up_fits_one_piece() -> None:
    for rows in (1, 3, 10, 63, 64, 65, 200):
        table = torch.zeros(rows, 1, dtype=torch.int32)
        most = entries_of_a_row(rows)
        assert [len(geometry_of([length] * rows, 0, table).pieces) for length in (most, most + 1)] == [1, 2]


def test_the_scheduler_knows_how_much_is_expanded_at_once() -> None:
    assert prompt_budget.PIECE == CONTEXT_ENTRIES


@settings(deadline=None, max_examples=30)
@given(contexts=contexts)
def test_context_is_expanded_in_sizes_that_are_warmed_up(contexts: list[int]) -> None:
    """Rows may be any; and the memory is that which is reserved for the largest."""
    warmed_up, attended, rows, heads = Expanding(), Expanding(), len(contexts), cast(Heads, None)
    largest = chunks_of(PrefillGeometry.largest(70 * rows, rows, CPU))
    with patch.object(expanded, "expand", warmed_up):
        largest.reserve(heads)
    chunks = chunks_of(geometry_of(contexts, 0, torch.zeros(rows, 1, dtype=torch.int32)))
    for piece in chunks.context:
        attended(heads, piece.latent_XL, piece.kv_XF)
        for ours, most in ((piece.latent_XL, largest.context[0].latent_XL), (piece.kv_XF, largest.context[0].kv_XF)):
            assert len(piece.source_SC) <= len(ours) <= len(most)
        assert len(piece.keys.out_THV) * piece.keys.out_THV.shape[1] <= most_partial(70 * rows, 2, CPU)
    assert attended.sizes <= warmed_up.sizes


class Expanding:
    """Stand-in for `expanded.expand`, which notes of how many latents keys are made."""

    def __init__(self) -> None:
        self.sizes: set[int] = set()

    def __call__(self, heads: Heads, latent_SL: torch.Tensor, kv_SF: torch.Tensor) -> None:
        assert len(latent_SL) == len(kv_SF)
        self.sizes.add(len(latent_SL))


def chunks_of(geometry: PrefillGeometry) -> ExpandedChunks:
    """Two heads of a few features."""
    tokens = int(geometry.cu_q_B1[-1]) or geometry.max_q
    q, latent, kv, out = (torch.empty(tokens, *shape) for shape in ((2, 5), (7,), (2, 6), (2, 3)))
    return ExpandedChunks.of(q, latent, kv, out, geometry, 3, Scratch(CPU))
