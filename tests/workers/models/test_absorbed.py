"""Prefill rows as decode rows: where each token's query lies, what it sees, and how much memory that can take."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.mla_decode import DecodeShape, Workspace
from kernels.mla_decode.schedule import hopper_tiling
from workers.models.attention.absorbed_chunks import ChunkRows
from workers.models.batch import PrefillBatch


def rows_of(start: list[int], count: list[int], heads: int, pages: int, shards: int = 1) -> ChunkRows:
    table = torch.arange(len(start) * pages, dtype=torch.int32).view(-1, pages)
    return ChunkRows.of(PrefillBatch(tuple(start), tuple(count), table), heads, shards)


chunks = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 70)), min_size=1, max_size=6)


@given(chunks=chunks, heads=st.sampled_from([1, 5, 16, 63, 128]))
def test_every_token_sees_what_is_before_it(chunks: list[tuple[int, int]], heads: int) -> None:
    start, count = [a for a, _ in chunks], [b for _, b in chunks]
    rows = rows_of(start, count, heads, 80)
    token = 0
    for row, (begin, tokens) in enumerate(chunks):
        for offset in range(tokens):
            place = int(rows.place_T[token])
            assert int(rows.token_U[place]) == token
            own, back = place // rows.width, rows.width - 1 - place % rows.width
            assert int(rows.length_R[own]) - back == begin + offset + 1
            assert int(rows.page_RP[own, 0]) == row * 80
            token += 1
    assert len(rows.length_R) * rows.width == len(rows.token_U)
    assert sum(len(decode.length_R) for _, decode in rows.parts()) == len(rows.length_R)


def need(rows: ChunkRows, heads: int) -> int:
    """Bytes, of latents of 512 + 64 features in bf16."""
    counts = [len(decode.length_R) for _, decode in rows.parts()]
    assert max(counts) == counts[0]
    shape = DecodeShape(counts[0], rows.width, heads, 512, 64, rows.page_RP.shape[1], True, rows.shards)
    workspace = Workspace.bytes(shape, hopper_tiling(shape, 132), torch.bfloat16)
    return 2 * heads * (len(rows.token_U) * 320 + shape.rows * shape.width * 1090) + workspace


@settings(max_examples=200)
@given(
    chunks=chunks,
    heads=st.sampled_from([4, 16, 64, 128]),
    shards=st.sampled_from([1, 2, 8]),
    spare=st.tuples(st.integers(0, 500), st.integers(0, 60), st.integers(0, 2000)),
)
def test_none_needs_more_memory_than_the_largest(
    chunks: list[tuple[int, int]], heads: int, shards: int, spare: tuple[int, int, int]
) -> None:
    start, count = [a for a, _ in chunks], [b for _, b in chunks]
    tokens, rows, pages = sum(count) + spare[0], len(count) + spare[1], 80 + spare[2]
    largest = ChunkRows.largest(tokens, rows, pages, heads, torch.device("cpu"), shards)
    assert need(rows_of(start, count, heads, pages, shards), heads) <= max(need(some, heads) for some in largest)


def test_lengths_and_tables_of_all_parts_are_aligned() -> None:
    """Triton compiles kernels anew for pointers at no multiple of 16 bytes: in the middle of serving, if the first part
    alone, by which they are compiled ahead, has them. Of 262,144 tokens two rows are a part, and of three times as
    many one is."""
    for pages in (64, 1001, 4095, 4096, 12_001):
        rows = rows_of([pages * 64 - 7], [7], 128, pages)
        parts = rows.parts()
        assert {len(decode.length_R) for _, decode in parts[:-1]} <= {1, 2, 4, 8, 16, 32, 64}
        assert all(x.data_ptr() % 16 == 0 for _, decode in parts for x in (decode.length_R, decode.page_RP))
        assert torch.equal(torch.cat([decode.length_R for _, decode in parts]), rows.length_R)
        assert torch.equal(torch.cat([decode.page_RP for _, decode in parts]), rows.page_RP)


@settings(max_examples=50)
@given(chunks=chunks, shards=st.sampled_from([1, 2, 4, 8]), pages=st.integers(80, 3000))
def test_shards_have_partial_results_of_their_own_pieces_alone(
    chunks: list[tuple[int, int]], shards: int, pages: int
) -> None:
    """With D shards a rank has one in D of a row's pieces, and so takes D times as many rows at once."""
    rows = rows_of([start for start, _ in chunks], [count for _, count in chunks], 128, pages, shards)
    _, first = rows.parts()[0]
    columns = rows.page_RP.shape[1]
    shape = DecodeShape(len(first.length_R), rows.width, 128, 512, 64, columns, invariant=True, shards=shards)
    most = max(sum(own) for own in zip(*_pieces_of_shards(columns, shards), strict=True))
    assert hopper_tiling(shape, 132).slots(shape) == len(first.length_R) * most
    assert len(first.length_R) == min(512, len(rows.length_R), 2048 // (1 << (most - 1).bit_length()))


def _pieces_of_shards(pages: int, shards: int) -> list[list[int]]:
    """How many pieces of each stretch of 8 pages of a row of so many are each shard's, counted one by one; the first
    shard begins. Up to 4,096 tokens a piece has 2 pages, up to 16,384 it has 4, and behind these 8."""
    counts = []
    for begin in range(0, pages, 8):
        size = 2 if begin < 64 else 4 if begin < 256 else 8
        counts.append(
            [len(range(begin, min(begin + 8, pages), size)) * (begin // 8 % shards == s) for s in range(shards)]
        )
    return counts
