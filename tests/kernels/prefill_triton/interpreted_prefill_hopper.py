"""Hopper's prefill kernel in the interpreter, under drawn schedules. Run with TRITON_INTERPRET=1, see
test_prefill_interpreted.py."""

from kernels.testing import gluon_interpreter, interpreter

interpreter.repair()
gluon_interpreter.install()

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from prefill_case import REAL, Case  # noqa: E402

from kernels.mla_prefill.launch import HOPPER  # noqa: E402
from kernels.testing.gluon_partitions import SCHEDULE  # noqa: E402

LENGTHS = (0, 1, 63, 64, 65, 127, 128, 129, 300)


def check(
    rows: list[tuple[int, int]], causal: bool, heads: int = 1, max_q: int | None = None, schedule: int = 0
) -> Case:
    case = Case(rows, heads=heads, dtype=torch.bfloat16, seed=schedule, **REAL)
    SCHEDULE.seed(schedule)
    case.run(causal, HOPPER, max_q)
    case.check(causal)
    return case


@pytest.mark.parametrize("keys", LENGTHS)
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(keys: int, causal: bool) -> None:
    """Every number of queries against so many keys: empty rows, tails, more queries than keys and the other way round,
    with diagonals anywhere in a tile."""
    check([(queries, keys) for queries in LENGTHS], causal, schedule=keys)


@pytest.mark.parametrize("causal", [False, True])
def test_own_keys_of_ragged_rows_and_heads(causal: bool) -> None:
    check([(n, n) for n in (65, 1, 0, 129, 64, 300)], causal, heads=3)  # more pairs than are taken together


def test_the_grid_may_be_too_large() -> None:
    check([(20, 20), (3, 9), (0, 0)], True, max_q=700)


@pytest.mark.parametrize("causal", [False, True])
def test_fp32_results(causal: bool) -> None:
    case = Case([(129, 200), (5, 0)], dtype=torch.bfloat16, out_dtype=torch.float32, **REAL)
    case.run(causal, HOPPER)
    case.check(causal)


@pytest.mark.parametrize("schedule", range(12))
def test_schedules(schedule: int) -> None:
    """Enough tiles to go round the rings several times."""
    check([(130, 900)], schedule % 2 == 0, schedule=schedule)


@settings(max_examples=12, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 400)), min_size=1, max_size=3).filter(
        lambda rows: any(q for q, _ in rows)
    ),
    causal=st.booleans(),
    schedule=st.integers(0, 1000),
)
def test_any_rows(rows: list[tuple[int, int]], causal: bool, schedule: int) -> None:
    check(rows, causal, schedule=schedule)


def test_a_row_alone_equals_the_row_in_a_batch() -> None:
    rows = [(20, 20), (1, 140), (140, 7), (3, 0), (129, 257)]
    case = check(rows, True, heads=2)
    for row in (0, 1, 4):
        q, k = case.cu_q[row], case.cu_k[row]
        alone = Case([rows[row]], heads=2, dtype=torch.bfloat16, **REAL)
        count_q, count_k = rows[row]
        alone.q[3 : 3 + count_q] = case.q[q : q + count_q]
        alone.kv[3 : 3 + count_k] = case.kv[k : k + count_k]
        alone.latent[3 : 3 + count_k] = case.latent[k : k + count_k]
        alone.run(True, HOPPER)
        assert torch.equal(alone.out[3 : 3 + count_q], case.out[q : q + count_q])
        assert torch.equal(alone.lse[3 : 3 + count_q], case.lse[q : q + count_q])
