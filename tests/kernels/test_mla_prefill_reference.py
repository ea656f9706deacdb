"""The prefill reference and the merge against naive fp64 formulas."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import mla_prefill as prefill
from kernels.merge_attention import merge_attention
from kernels.mla_prefill import mla_prefill

HEADS, NOPE, ROPE, VALUE, SCALE = 3, 6, 4, 5, 0.4


class Case:
    """Ragged random rows; keys and values are strided views of one tensor, as the model passes them."""

    def __init__(self, rows: list[tuple[int, int]], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = rows
        queries, keys = sum(q for q, _ in rows), sum(k for _, k in rows)
        self.q = torch.randn(queries, HEADS, NOPE + ROPE, generator=generator)
        self.kv = torch.randn(keys, HEADS, NOPE + VALUE, generator=generator)
        self.k_rope = torch.randn(keys, ROPE + 2, generator=generator)[:, 2:]
        self.cu_q = torch.tensor(list(accumulate((q for q, _ in rows), initial=0)), dtype=torch.int32)
        self.cu_k = torch.tensor(list(accumulate((k for _, k in rows), initial=0)), dtype=torch.int32)

    def run(self, causal: bool) -> tuple[Tensor, Tensor]:
        out = torch.full((len(self.q), HEADS, VALUE), torch.nan)
        lse = torch.full((len(self.q), HEADS), torch.nan)
        k, v = self.kv[..., :NOPE], self.kv[..., NOPE:]
        longest_q, longest_k = max(q for q, _ in self.rows), max(k for _, k in self.rows)
        mla_prefill(
            self.q,
            k,
            self.k_rope,
            v,
            self.cu_q,
            self.cu_k,
            out,
            lse,
            scale=SCALE,
            causal=causal,
            max_q=longest_q,
            max_k=longest_k,
        )
        return out, lse

    def naive(self, causal: bool) -> tuple[Tensor, Tensor]:
        out = torch.zeros(len(self.q), HEADS, VALUE, dtype=torch.float64)
        lse = torch.full((len(self.q), HEADS), -torch.inf, dtype=torch.float64)
        t, begin = 0, 0
        for queries, keys in self.rows:
            for query in range(queries):
                seen = max(0, min(keys, query + 1 + keys - queries)) if causal else keys
                for head in range(HEADS):
                    key = torch.cat([self.kv[begin : begin + seen, head, :NOPE], self.k_rope[begin : begin + seen]], 1)
                    weight = (SCALE * (key.double() @ self.q[t, head].double())).exp()
                    if seen:
                        value = self.kv[begin : begin + seen, head, NOPE:].double()
                        out[t, head] = (weight[:, None] * value).sum(0) / weight.sum()
                        lse[t, head] = weight.sum().log()
                t += 1
            begin += keys
        return out, lse


ROWS = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 40)), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, causal=st.booleans(), block=st.sampled_from([1, 100, 1 << 24]), seed=st.integers(0, 1000))
def test_prefill_matches_fp64(rows: list[tuple[int, int]], causal: bool, block: int, seed: int) -> None:
    """Rows with fewer keys than queries leave their first queries with nothing to see."""
    case = Case(rows, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill, "SCORE_ELEMENTS", block)
        out, lse = case.run(causal)
    want_out, want_lse = case.naive(causal)
    torch.testing.assert_close(out.double(), want_out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)


@settings(max_examples=30, deadline=None)
@given(rows=ROWS, cut=st.integers(0, 40), seed=st.integers(0, 1000))
def test_merged_halves_equal_the_whole(rows: list[tuple[int, int]], cut: int, seed: int) -> None:
    """Either half, or both, may have no keys."""
    whole = Case(rows, seed)
    left, right = Case(rows, seed), Case(rows, seed)
    left.rows = [(q, min(k, cut)) for q, k in rows]
    right.rows = [(q, k - min(k, cut)) for q, k in rows]
    for half, before in ((left, True), (right, False)):
        keep = torch.cat([(torch.arange(k) < cut) == before for _, k in rows])
        half.kv, half.k_rope = half.kv[keep], half.k_rope[keep]
        half.cu_k = torch.tensor(list(accumulate((k for _, k in half.rows), initial=0)), dtype=torch.int32)
    (a, a_lse), (b, b_lse) = left.run(False), right.run(False)
    merge_attention(a, a_lse, b, b_lse, a, a_lse)
    want_out, want_lse = whole.naive(False)
    torch.testing.assert_close(a.double(), want_out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(a_lse.double(), want_lse, atol=1e-5, rtol=1e-5)


def test_merge_of_nothing_with_nothing_is_nothing() -> None:
    empty, empty_lse = torch.zeros(2, 3, 4), torch.full((2, 3), -torch.inf)
    out, lse = torch.full_like(empty, torch.nan), torch.full_like(empty_lse, torch.nan)
    merge_attention(empty, empty_lse, empty, empty_lse, out, lse)
    assert torch.equal(out, empty)
    assert torch.equal(lse, empty_lse)


def test_merge_is_in_natural_logarithms() -> None:
    """Two keys with scores s and t, one on each side: weights e^s and e^t, not powers of two."""
    one, two = torch.ones(1, 1, 1), torch.full((1, 1, 1), 2.0)
    s, t = torch.tensor([[0.3]]), torch.tensor([[1.7]])
    out, lse = torch.empty(1, 1, 1), torch.empty(1, 1)
    merge_attention(one, s, two, t, out, lse)
    weights = torch.tensor([0.3, 1.7], dtype=torch.float64).exp()
    assert out.item() == pytest.approx(((weights[0] + 2 * weights[1]) / weights.sum()).item(), abs=1e-6)
    assert lse.item() == pytest.approx(weights.sum().log().item(), abs=1e-6)


def test_merge_of_large_values_does_not_overflow() -> None:
    out, lse = torch.empty(1, 1, 1), torch.empty(1, 1)
    a, b = torch.tensor([[[1.0]]]), torch.tensor([[[3.0]]])
    merge_attention(a, torch.tensor([[900.0]]), b, torch.tensor([[900.0]]), out, lse)
    assert out.item() == pytest.approx(2.0)
    assert lse.item() == pytest.approx(900.0 + torch.log(torch.tensor(2.0)).item())
