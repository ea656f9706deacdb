"""Prefill attention and the merge in the repaired interpreter. Run with TRITON_INTERPRET=1, see
test_interpreted.py."""

from tests.support import interpreter

interpreter.repair()

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from prefill_case import Case  # noqa: E402
from torch import Tensor  # noqa: E402

from kernels.merge_attention import launch_merge_attention, merge_attention_reference  # noqa: E402
from kernels.mla_prefill.launch import PrefillTiling  # noqa: E402

RAGGED = [(20, 20), (1, 40), (40, 7), (3, 0), (17, 33), (16, 16)]
"""Chunks with context, rows with fewer keys than queries, rows without any."""


def check(case: Case, causal: bool, tiles: PrefillTiling | None = None, max_q: int | None = None) -> None:
    case.run(causal, tiles, max_q)
    case.check(causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ragged_rows(dtype: torch.dtype, causal: bool) -> None:
    check(Case(RAGGED, dtype=dtype), causal, PrefillTiling(16, 16, 4, 1))


@pytest.mark.parametrize("causal", [False, True])
def test_the_tiling_of_the_launcher(causal: bool) -> None:
    check(Case([(5, 70), (150, 150)], heads=1, dtype=torch.bfloat16), causal)
    check(Case([(5, 70), (40, 40)], heads=1), causal)


@pytest.mark.parametrize(("nope", "rope", "value"), [(12, 4, 5), (16, 16, 40), (24, 20, 16)])
def test_features_that_fill_no_tile(nope: int, rope: int, value: int) -> None:
    check(Case(RAGGED, heads=3, nope=nope, rope=rope, value=value), True, PrefillTiling(16, 16, 4, 1))


def test_fp32_results_of_bfloat16_inputs() -> None:
    check(Case(RAGGED, dtype=torch.bfloat16, out_dtype=torch.float32), False, PrefillTiling(16, 16, 4, 1))


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_parts_of_the_keys(parts: int) -> None:
    """There are more parts than some rows have tiles, and than some have keys."""
    case = Case([*RAGGED, (2, 100)], dtype=torch.bfloat16, out_dtype=torch.float32)
    case.cut(parts, 16)
    check(case, False, PrefillTiling(16, 16, 4, 1))


def test_the_grid_may_be_too_large() -> None:
    check(Case([(20, 20), (3, 9)]), True, PrefillTiling(16, 16, 4, 1), max_q=70)


def test_more_pairs_of_row_and_head_than_are_taken_together() -> None:
    check(
        Case([(20, 20), (3, 9), (33, 40)] * 2, heads=7, nope=16, rope=16, value=16), True, PrefillTiling(16, 16, 4, 1)
    )


@settings(max_examples=12, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 50)), min_size=1, max_size=3).filter(
        lambda rows: any(q for q, _ in rows)
    ),
    causal=st.booleans(),
    queries=st.sampled_from([16, 32]),
    keys=st.sampled_from([16, 32]),
    seed=st.integers(0, 100),
)
def test_any_rows(rows: list[tuple[int, int]], causal: bool, queries: int, keys: int, seed: int) -> None:
    check(Case(rows, heads=1, nope=16, rope=16, value=16, seed=seed), causal, PrefillTiling(queries, keys, 4, 1))


def test_a_row_alone_equals_the_row_in_a_batch() -> None:
    case = Case(RAGGED, dtype=torch.bfloat16)
    case.run(True, PrefillTiling(16, 16, 4, 1))
    for row in (0, 1, 4):
        q, k = case.cu_q[row], case.cu_k[row]
        rows = [case.rows[row]]
        alone = Case(rows, dtype=torch.bfloat16)
        count_q, count_k = rows[0]
        alone.q[3 : 3 + count_q] = case.q[q : q + count_q]
        alone.kv[3 : 3 + count_k] = case.kv[k : k + count_k]
        alone.latent[3 : 3 + count_k] = case.latent[k : k + count_k]
        alone.run(True, PrefillTiling(16, 16, 4, 1))
        assert torch.equal(alone.out[3 : 3 + count_q], case.out[q : q + count_q])
        assert torch.equal(alone.lse[3 : 3 + count_q], case.lse[q : q + count_q])


@pytest.mark.parametrize("causal", [False, True])
def test_a_row_that_is_no_number_changes_nothing_of_its_neighbours(causal: bool) -> None:
    whole, broken = Case(RAGGED), Case(RAGGED)
    q, k = (slice(cu[1], cu[2]) for cu in (broken.cu_q, broken.cu_k))
    for values, own in ((broken.q, q), (broken.kv, k), (broken.latent, k)):
        values[own] = torch.nan
    for case in (whole, broken):
        case.run(causal, PrefillTiling(16, 16, 4, 1))
    for a, b in ((whole.out, broken.out), (whole.lse, broken.lse)):
        assert torch.equal(a[: q.start], b[: q.start])
        assert torch.equal(a[q.stop :], b[q.stop :])


@settings(max_examples=20, deadline=None)
@given(
    tokens=st.integers(0, 20),
    heads=st.integers(1, 5),
    value=st.sampled_from([5, 32, 128]),
    parts=st.integers(0, 4),
    in_place=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 100),
)
def test_merge(tokens: int, heads: int, value: int, parts: int, in_place: bool, dtype: torch.dtype, seed: int) -> None:
    """fp32 parts into either dtype, parts without keys among them, in strided rows. With `parts` at 0 the second side
    is one result, and not a part of some."""
    generator = torch.Generator().manual_seed(seed)

    def results(*shape: int) -> tuple[Tensor, Tensor]:
        part = torch.full((*shape, value + 3), torch.nan)[..., :value]
        part.copy_(torch.randn(part.shape, generator=generator))
        log = torch.randn(shape, generator=generator) * 20
        empty = torch.rand(shape, generator=generator) < 0.3
        part[empty], log[empty] = 0.0, -torch.inf
        return part, log

    a, a_log = results(tokens, heads)
    b, b_log = results(parts, tokens, heads) if parts else results(tokens, heads)
    want, want_log = formula(a, a_log, b, b_log)
    found, found_log = torch.zeros(tokens, heads, value), torch.zeros(tokens, heads)
    merge_attention_reference(a, a_log, b, b_log, found, found_log)
    torch.testing.assert_close(found, want, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found_log, want_log, atol=1e-5, rtol=1e-6)
    if in_place:
        out, out_log = a, a_log
    else:
        out, out_log = torch.full((tokens, heads, value), torch.nan, dtype=dtype), torch.full_like(a_log, torch.nan)
    launch_merge_attention(a, a_log, b, b_log, out, out_log)
    torch.testing.assert_close(out.float(), want, atol=1e-6, rtol=2**-8 if out.dtype == torch.bfloat16 else 1e-5)
    torch.testing.assert_close(out_log, want_log, atol=1e-5, rtol=1e-6)


def formula(a: Tensor, a_log: Tensor, b: Tensor, b_log: Tensor) -> tuple[Tensor, Tensor]:
    """The union's result, in float64."""
    parts = b.shape[0] if b.ndim == 4 else 1
    out = torch.cat([a.unsqueeze(0), b.view(parts, *a.shape)]).double()
    log = torch.cat([a_log.unsqueeze(0), b_log.view(parts, *a_log.shape)]).double()
    total = torch.logsumexp(log, 0)
    weight = (log - total.masked_fill(total == -torch.inf, 0.0)).exp()
    return (weight.unsqueeze(-1) * out).sum(0).float(), total.float()
