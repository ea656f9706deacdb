"""Into how many parts the keys of context are cut, and the memory that their results take."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.mla_prefill import FEWEST_TILES, MOST_KEY_PARTS, key_parts, mla_prefill, most_partial
from kernels.runtime.hopper import multiprocessors

CPU = torch.device("cpu")
PROGRAMS = multiprocessors(CPU)


def test_few_queries_fill_the_device() -> None:
    """One program of 16 heads each would leave seven of eight multiprocessors idle."""
    assert key_parts(90, 4096, 1, 16, CPU) * 16 > 0.9 * PROGRAMS


def test_many_queries_fill_it_alone() -> None:
    assert key_parts(1024, 4096, 1, 16, CPU) == 1
    assert key_parts(128, 4096, 8, 16, CPU) == 1
    assert key_parts(128, 4096, 1, 128, CPU) == 1


def test_parts_pay_for_their_merge() -> None:
    """80 programs fill the device by more than half: a long piece of context is cut all the same, a shorter one not."""
    assert key_parts(600, 4096, 1, 16, CPU) == 3
    assert key_parts(600, 2048, 1, 16, CPU) == 1


def test_short_context_is_not_cut() -> None:
    assert key_parts(1, 512, 1, 1, CPU) == 1
    assert key_parts(0, 0, 1, 1, CPU) == 1


@settings(deadline=None)
@given(
    queries=st.lists(st.integers(1, 5000), min_size=1, max_size=20),
    keys=st.integers(1, 10_000),
    heads=st.sampled_from([1, 2, 5, 16, 20, 64, 128]),
    more=st.integers(0, 3000),
)
def test_memory_is_bounded(queries: list[int], keys: int, heads: int, more: int) -> None:
    """The bound is what that many tokens, and all that have more, are taken to need at most."""
    parts = key_parts(max(queries), keys, len(queries), heads, CPU)
    tokens = sum(queries)
    assert 1 <= parts <= MOST_KEY_PARTS
    assert parts == 1 or keys > (parts * FEWEST_TILES - 1) * 128
    assert parts * tokens <= most_partial(tokens, heads, CPU) <= most_partial(tokens + more, heads, CPU)


@settings(deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=3),
    parts=st.integers(1, 4),
)
def test_parts_together_are_the_whole(rows: list[tuple[int, int]], parts: int) -> None:
    """The reference cuts a row's keys wherever it likes."""
    counts = torch.tensor(rows, dtype=torch.int32).t()
    cu_q_B1, cu_k_B1 = (torch.nn.functional.pad(count.cumsum(0, dtype=torch.int32), (1, 0)) for count in counts)
    tokens, keys = int(cu_q_B1[-1]), int(cu_k_B1[-1])
    generator = torch.Generator().manual_seed(tokens + 10 * keys)
    q, k, k_rope, v = (
        torch.randn(shape, generator=generator) for shape in ((tokens, 2, 5), (keys, 2, 3), (keys, 2), (keys, 2, 4))
    )

    def attended(*lead: int) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.full((*lead, tokens, 2, 4), torch.nan), torch.full((*lead, tokens, 2), torch.nan)
        bounds = {"max_q": int(counts[0].max()), "max_k": int(counts[1].max())}
        mla_prefill(q, k, k_rope, v, cu_q_B1, cu_k_B1, out, lse, scale=0.5, causal=False, **bounds)
        return out, lse

    (want, want_lse), (out, lse) = attended(), attended(parts)
    assert torch.equal(torch.logsumexp(lse, 0).isneginf(), want_lse.isneginf())
    weight = (lse - want_lse.masked_fill(want_lse.isneginf(), 0.0)).exp()
    torch.testing.assert_close((weight.unsqueeze(-1) * out).sum(0), want)
    torch.testing.assert_close(torch.logsumexp(lse, 0), want_lse)
