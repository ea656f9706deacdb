"""Compilation of the kernels of compressed entries for Hopper, at the sizes of DeepSeek V4 Flash: no spills, loads of
16 bytes, and one variant for all numbers of tokens, rows and pages."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.compressed import AttendWorkspace, TokenRows, attention_launch, launch
from kernels.page import PAGE_TOKENS
from kernels.residual_streams import StreamMemory
from tests.support.hopper import compile_only, instructions, machine_code, resources, serialized

pytestmark = pytest.mark.gate

ENTRY, ROPE, WINDOW = 512, 64, 128
TOKENS = [(1, 1), (24, 3), (64, 8), (2048, 0)]
"""Numbers of tokens, and their rows' width."""


def token_rows(tokens: int, width: int) -> TokenRows:
    rows = tokens // width if width else 3
    return TokenRows(
        torch.zeros(tokens, dtype=torch.int64),
        torch.zeros(tokens, dtype=torch.int32),
        torch.zeros(rows, dtype=torch.int64),
        torch.zeros(rows, 9 + tokens, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int64),
        width,
    )


def wide_loads(kernel: Any) -> int:
    return len(re.findall(r"LDG\.E\S*\.128", machine_code(kernel)))


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_queries_and_entries(heads: int) -> None:
    found = []
    for tokens, width in TOKENS:
        q, kv = (torch.empty(*shape, ENTRY, dtype=torch.bfloat16) for shape in ((tokens, heads), (tokens,)))
        norm, turn = torch.empty(ENTRY, dtype=torch.bfloat16), torch.empty(tokens, ROPE)
        ring = torch.empty(5, WINDOW + 7, ENTRY, dtype=torch.bfloat16)
        with compile_only() as compiled:
            rows = token_rows(tokens, width)
            launch.rope_store(q, kv, norm, turn, torch.empty_like(kv), ring, rows, 1e-6, dependent=width > 0)
            launch.keep_entries(kv, ring, rows)
        found += compiled
    for kernel in found:
        resources(kernel).check(registers=96)
    assert len({kernel.hash for kernel in found}) == 3  # the first one for decode rows and for chunks
    assert wide_loads(found[0]) >= 2
    assert wide_loads(found[1]) == 2


def test_queries_of_an_indexer() -> None:
    with compile_only() as compiled:
        for tokens in (1, 64, 2048):
            q = torch.empty(tokens, 64, 128, dtype=torch.bfloat16)
            launch.rope_queries(q, torch.empty(tokens, ROPE))
    resources(compiled[0]).check(registers=64)
    assert wide_loads(compiled[0]) >= 1
    assert len({kernel.hash for kernel in compiled}) == 1


@pytest.mark.parametrize(("ratio", "features", "halves"), [(4, ENTRY, 2), (4, 128, 2), (128, ENTRY, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compressors(ratio: int, features: int, halves: int, dtype: torch.dtype) -> None:
    found = []
    for tokens, width in TOKENS:
        made = torch.empty(tokens, 2 * halves * features, dtype=dtype)
        bias, norm = torch.empty(ratio, halves * features), torch.empty(features, dtype=torch.bfloat16)
        state = torch.empty(5, halves * ratio + 7, 2 * halves * features)
        entry = torch.empty(9 + tokens, max(1, PAGE_TOKENS // ratio), features, dtype=torch.bfloat16)
        with compile_only() as compiled:
            rows = token_rows(tokens, width)
            table = torch.empty(100 + tokens, ROPE)
            launch.compress(made, bias, norm, table, state, entry, rows, 1e-6, dependent=width > 0)
        found += compiled
    for kernel in found:
        resources(kernel).check(registers=128)
    assert len(found) == len(TOKENS) + 1
    assert len({kernel.hash for kernel in found}) == 3  # for decode rows, and two for chunks
    assert wide_loads(found[0]) >= 4


def attending(
    tokens: int,
    width: int,
    ratio: int,
    selected: int,
    heads: int,
    first: int = 0,
    rows: TokenRows | None = None,
    block: int = 0,
    hopper: bool = False,
) -> list[Any]:
    """Compile a call of attention, of `token_rows` without `rows`."""
    dtype, entries = torch.bfloat16, max(1, PAGE_TOKENS // ratio) if ratio else 0
    q, own = torch.empty(tokens, heads, ENTRY, dtype=dtype), torch.empty(tokens, ENTRY, dtype=dtype)
    ring, paged = torch.empty(5, WINDOW + 7, ENTRY, dtype=dtype), torch.empty(9, entries, ENTRY, dtype=dtype)
    listed = torch.empty(tokens, selected, dtype=torch.int32) if selected else None
    sizes = tokens, heads, ENTRY, WINDOW + block + (selected or 1024 * bool(ratio))
    workspace = AttendWorkspace.allocate(*sizes, torch.empty, hopper=hopper)
    with compile_only() as compiled:
        attention_launch.attend(
            *(q, ring, None if width else own, paged if ratio else None, listed),
            *(torch.empty(heads), torch.empty(tokens, ROPE), torch.empty_like(q)),
            rows or token_rows(tokens, width),
            workspace,
            window=WINDOW + block,
            ratio=ratio,
            scale=0.1,
            first=first,
            block=block,
            dependent=width > 0,
        )
    return compiled


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize(("ratio", "selected"), [(0, 0), (4, 512), (128, 0)])
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (2048, 0)])
def test_attention(tokens: int, width: int, ratio: int, selected: int, heads: int) -> None:
    """Entries are copied asynchronously, in pieces of 16 bytes."""
    compiled = attending(tokens, width, ratio, selected, heads)
    for kernel in compiled:
        resources(kernel).check()
    assert len(compiled) == (2 if tokens == 1 else 1)
    assert not serialized(compiled[0])
    assert instructions(compiled[0])["HMMA"] >= 36
    assert re.search(r"LDGSTS\.E\.BYPASS\S*\.128", machine_code(compiled[0]))


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (2048, 0)])
def test_attention_of_the_layer_that_drafts(tokens: int, width: int, heads: int) -> None:
    """It looks at every entry before it takes it, and copies them asynchronously all the same."""
    compiled = attending(tokens, width, 0, 0, heads, first=1)
    for kernel in compiled:
        resources(kernel).check()
    assert not serialized(compiled[0])
    assert re.search(r"LDGSTS\.E\.BYPASS\S*\.128", machine_code(compiled[0]))


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("rows", [1, 64])
def test_attention_of_blocks(rows: int, heads: int) -> None:
    """Of DSpark, whose tokens see all of each other."""
    compiled = attending(5 * rows, 0, 0, 0, heads, block=5)
    for kernel in compiled:
        resources(kernel).check()
    assert not serialized(compiled[0])
    assert re.search(r"LDGSTS\.E\.BYPASS\S*\.128", machine_code(compiled[0]))


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize(
    ("ratio", "selected", "first", "block"), [(0, 0, 0, 0), (4, 512, 0, 0), (128, 0, 0, 0), (0, 0, 1, 0), (0, 0, 0, 5)]
)
def test_attention_on_hopper(ratio: int, selected: int, first: int, block: int, heads: int) -> None:
    """No product waits for another one, and entries are copied without passing through registers. Numbers of tokens
    compile nothing new."""
    compiled = attending(2000, 0, ratio, selected, heads, first, block=block, hopper=True)
    assert [kernel.metadata.name for kernel in compiled] == ["find_entries", "attend_entries"]
    resources(compiled[0]).check(registers=128)
    resources(compiled[1]).check()
    assert not serialized(compiled[1])
    used, code = instructions(compiled[1]), machine_code(compiled[1])
    assert used["HGMMA"] == 2 * 2 * 16 + (2 + 3) * 4
    assert len(re.findall(r"LDGSTS\.E\.BYPASS\S*\.128", code)) == used["LDGSTS"] == 32
    assert used["UTMALDG"] == 2
    assert "CCTL.E.PF2" in code  # the L2 cache is told of the next token
    others = attending(505, 0, ratio, selected, heads, first, block=block, hopper=True)
    assert [kernel.hash for kernel in others] == [kernel.hash for kernel in compiled]


@pytest.mark.parametrize(("ratio", "selected"), [(0, 0), (4, 512), (128, 0)])
def test_attention_of_decode_rows_on_hopper(ratio: int, selected: int) -> None:
    """Of so many that the kernel of many tokens takes them: their entries are in the ring alone."""
    for kernel in attending(512, 4, ratio, selected, 64, hopper=True):
        resources(kernel).check()


def test_entries_without_queries() -> None:
    kv, turn = torch.empty(24, ENTRY, dtype=torch.bfloat16), torch.empty(24, ROPE)
    ring = torch.empty(5, WINDOW + 7, ENTRY, dtype=torch.bfloat16)
    with compile_only() as compiled:
        none = kv.unsqueeze(1)[:, :0]
        launch.rope_store(none, kv, kv[0], turn, torch.empty_like(kv), ring, token_rows(24, 3), 1e-6)
    resources(compiled[0]).check(registers=96)


def test_numbers_of_rows_compile_nothing_new() -> None:
    for tokens in ((2, 2), (500, 2048)):
        assert len({kernel.hash for count in tokens for kernel in attending(count, 0, 4, 512, 32)}) <= 2


@pytest.mark.parametrize("first", [0, 1])
def test_chunks_behind_an_odd_number_of_decode_tokens_compile_nothing_new(first: int) -> None:
    """Their positions then begin 8 bytes behind a multiple of 16."""
    tokens = 16
    even, longer = token_rows(tokens, 0), token_rows(tokens + 1, 0)
    odd = replace(
        even, position_T=longer.position_T[1:], row_T=longer.row_T[1:], slot_R=torch.zeros(4, dtype=torch.int64)[1:]
    )
    q, kv = (torch.empty(*shape, ENTRY, dtype=torch.bfloat16) for shape in ((tokens, 8), (tokens,)))
    norm, turn = torch.empty(ENTRY, dtype=torch.bfloat16), torch.empty(tokens, ROPE)
    ring, state = torch.empty(5, WINDOW + 7, ENTRY, dtype=torch.bfloat16), torch.empty(5, 15, 4 * ENTRY)
    paged = torch.empty(9, 16, ENTRY, dtype=torch.bfloat16)
    hashes = []
    for rows in (even, odd):
        with compile_only() as compiled:
            launch.rope_store(q, kv, norm, turn, torch.empty_like(kv), ring, rows, 1e-6)
            launch.keep_entries(kv, ring, rows)
            made = torch.empty(tokens, 4 * ENTRY), torch.empty(4, 2 * ENTRY)
            launch.compress(*made, norm, torch.empty(100, ROPE), state, paged, rows, 1e-6)
        compiled += attending(tokens, 0, 0, 0, 8, first, rows)
        hashes.append([kernel.hash for kernel in compiled])
    assert len(hashes[0]) == 6
    assert hashes[0] == hashes[1]


def test_the_beginning_of_a_pass() -> None:
    """The same kernels for all numbers of tokens and rows: one where all tokens are wanted, one where some are."""
    hidden, streams, found = 4096, 4, []
    embedding, table = torch.empty(129280, hidden, dtype=torch.bfloat16), torch.empty(100, ROPE)
    for tokens, width in ((1, 1), (24, 3), (256, 8)):
        position, turn = torch.zeros(tokens, dtype=torch.int64), torch.empty(tokens, ROPE)
        residual = torch.empty(tokens, streams, hidden, dtype=torch.bfloat16)
        memory = StreamMemory.empty(tokens, streams, hidden, torch.empty, mixing=True)
        length, row = torch.zeros(tokens // width, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int32)
        with compile_only() as compiled:
            given = position, position, embedding, (table, table), position, (turn, turn), residual[:, 0], residual
            launch.begin(*given, memory, dependent=True)
            for wanted in (None, torch.zeros(len(length), dtype=torch.int64)):
                launch.lay_out_rows(position, length, wanted, row, row, 4, dependent=True)
        found.append([kernel.hash for kernel in compiled])
        for kernel in compiled:
            resources(kernel).check(registers=64)
    assert found[0][0] == found[1][0] == found[2][0]
    assert len(compiled) == 3
