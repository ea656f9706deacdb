"""The decode reference against a naive fp64 formula, with everything that must not matter poisoned."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import mla_decode
from kernels.mla_decode.invariant import invariant_mla_decode
from kernels.page import PAGE_TOKENS, pages_for

LATENT, ROPE = 12, 4
ARBITRARY_PAGE = 2147480000


def naive(q_RWHC: Tensor, entries: list[Tensor], scale: float, first: int) -> tuple[Tensor, Tensor]:
    """fp64, one (row, token, head) at a time; `entries[row]` are the cached features of the row, [length, C]."""
    rows, width, heads, _ = q_RWHC.shape
    out = torch.zeros(rows, width, heads, LATENT, dtype=torch.float64)
    lse = torch.full((rows, width, heads), -torch.inf, dtype=torch.float64)
    for row in range(rows):
        for token in range(width):
            seen = entries[row][first : max(first, len(entries[row]) - (width - 1 - token))].double()
            for head in range(heads):
                weight = (scale * (seen @ q_RWHC[row, token, head].double())).exp()
                if len(seen):
                    out[row, token, head] = (weight[:, None] * seen[:, :LATENT]).sum(0) / weight.sum()
                    lse[row, token, head] = weight.sum().log()
    return out, lse


def poisoned_case(lengths: list[int], width: int, heads: int, seed: int) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Queries, a cache that is NaN wherever no row has an entry, page tables with arbitrary tails, and the entries."""
    generator = torch.Generator().manual_seed(seed)
    counts = [pages_for(length) for length in lengths]
    pages = (torch.randperm(sum(counts) + 2, generator=generator) + 1).tolist()
    cache = torch.full((len(pages) + 1, PAGE_TOKENS, LATENT + ROPE), torch.nan)
    table = torch.full((len(lengths), max(counts) + 2), ARBITRARY_PAGE, dtype=torch.int32)
    entries = []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        own = [pages.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(own, dtype=torch.int32)
        entries.append(torch.randn(length, LATENT + ROPE, generator=generator))
        for entry in range(length):
            cache[own[entry // PAGE_TOKENS], entry % PAGE_TOKENS] = entries[row][entry]
    return torch.randn(len(lengths), width, heads, LATENT + ROPE, generator=generator), cache, table, entries


def run(q: Tensor, cache: Tensor, table: Tensor, lengths: list[int], scale: float, first: int) -> tuple[Tensor, Tensor]:
    out = torch.full((*q.shape[:3], LATENT), torch.nan)
    lse = torch.full(q.shape[:3], torch.nan)
    length = torch.tensor(lengths, dtype=torch.int32)
    mla_decode.mla_decode_reference(q, cache, table, length, out, lse, scale, first)
    # The invariant way, which the tests of its bits cover too, must pass whatever this one does.
    deterministic_out, deterministic_lse = torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
    invariant_mla_decode(q, cache, table, length, deterministic_out, deterministic_lse, scale, first)
    torch.testing.assert_close(deterministic_out, out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(deterministic_lse, lse, atol=1e-5, rtol=1e-5)
    return out, lse


@pytest.mark.parametrize("width", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize("heads", [1, 3, 16])
@pytest.mark.parametrize("first", [0, 1])
def test_matches_fp64_at_page_boundaries(width: int, heads: int, first: int) -> None:
    lengths = [0, 63, 64, 65, 129, width, width + 1]
    q, cache, table, entries = poisoned_case(lengths, width, heads, seed=width)
    out, lse = run(q, cache, table, lengths, 0.3, first)
    want_out, want_lse = naive(q, entries, 0.3, first)
    torch.testing.assert_close(out.double(), want_out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=5),
    width=st.integers(1, 4),
    first=st.sampled_from([0, 1, 5]),
    seed=st.integers(0, 1000),
)
def test_matches_fp64_for_any_lengths(lengths: list[int], width: int, first: int, seed: int) -> None:
    """Lengths below the width are included: their first tokens see nothing at all."""
    q, cache, table, entries = poisoned_case(lengths, width, 3, seed)
    out, lse = run(q, cache, table, lengths, 0.5, first)
    want_out, want_lse = naive(q, entries, 0.5, first)
    torch.testing.assert_close(out.double(), want_out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)


def test_long_row_and_groups_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [4097, 3, 0, 700]
    q, cache, table, entries = poisoned_case(lengths, 2, 2, seed=9)
    whole = run(q, cache, table, lengths, 0.3, 0)
    monkeypatch.setattr(mla_decode, "GATHER_ELEMENTS", 1)
    grouped = run(q, cache, table, lengths, 0.3, 0)
    want = naive(q, entries, 0.3, 0)
    for got in (whole, grouped):
        torch.testing.assert_close(got[0].double(), want[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(got[1].double(), want[1], atol=1e-5, rtol=1e-5)


def test_padded_rows_alone_are_zero() -> None:
    q = torch.full((2, 3, 2, LATENT + ROPE), torch.nan)
    cache = torch.full((2, PAGE_TOKENS, LATENT + ROPE), torch.nan)
    table = torch.full((2, 4), ARBITRARY_PAGE, dtype=torch.int32)
    out, lse = run(q, cache, table, [0, 0], 1.0, 0)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))


def test_padded_rows_beside_live_ones_ignore_their_query() -> None:
    q, cache, table, entries = poisoned_case([70, 0], 2, 2, seed=4)
    q[1] = torch.nan
    out, lse = run(q, cache, table, [70, 0], 0.3, 0)
    want_out, _ = naive(q[:1], entries[:1], 0.3, 0)
    torch.testing.assert_close(out[:1].double(), want_out, atol=1e-5, rtol=1e-5)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert bool((lse[1] == -torch.inf).all())


def test_large_scores_do_not_overflow() -> None:
    q, cache, table, entries = poisoned_case([65], 1, 2, seed=5)
    out, _ = run(q * 100, cache, table, [65], 3.0, 0)
    best = (entries[0] @ q[0, 0, 1]).argmax()
    torch.testing.assert_close(out[0, 0, 1], entries[0][best, :LATENT], atol=1e-4, rtol=1e-4)


def test_addresses_past_two_to_the_31_elements() -> None:
    """Memory is reserved but hardly touched: only the pages of one row become resident."""
    torch.manual_seed(0)
    pages = 2**31 // (PAGE_TOKENS * (LATENT + ROPE)) + 3
    cache = torch.empty(pages, PAGE_TOKENS, LATENT + ROPE, dtype=torch.bfloat16)
    entries = torch.randn(65, LATENT + ROPE).bfloat16()
    cache[pages - 1], cache[pages - 2, 0] = entries[:64], entries[64]
    assert (pages - 1) * cache.stride(0) > 2**31
    table = torch.tensor([[pages - 1, pages - 2, ARBITRARY_PAGE]], dtype=torch.int32)
    q = torch.randn(1, 1, 2, LATENT + ROPE)
    out, _ = run(q, cache, table, [65], 0.3, 0)
    torch.testing.assert_close(out.double(), naive(q, [entries], 0.3, 0)[0], atol=1e-5, rtol=1e-5)
