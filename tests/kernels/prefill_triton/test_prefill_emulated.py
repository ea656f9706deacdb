"""Hopper's prefill kernel as it was compiled, run by the PTX emulator under drawn schedules."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prefill_case import REAL, SMALL, Case

from kernels.mla_prefill.launch import HOPPER
from tests.support.ptx import emulated

pytestmark = pytest.mark.long

LENGTHS = (0, 1, 63, 64, 65, 127, 128, 129, 300)
QUERIES = (0, 1, 64, 65, 129)


def check(
    rows: list[tuple[int, int]],
    causal: bool,
    heads: int = 1,
    max_q: int | None = None,
    schedule: int = 0,
    sizes: dict[str, int] = REAL,
) -> Case:
    case = Case(rows, heads=heads, dtype=torch.bfloat16, seed=schedule, **sizes)
    with emulated(schedule) as launches:
        case.run(causal, HOPPER, max_q)
    assert len(launches) == 1
    case.check(causal)
    return case


@pytest.mark.parametrize("sizes", [REAL, SMALL], ids=["128", "64"])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(causal: bool, sizes: dict[str, int]) -> None:
    """Empty rows, tails, more queries than keys and the other way round, with diagonals anywhere in a tile."""
    rows = [(QUERIES[(i + shift) % len(QUERIES)], keys) for shift in (0, 2) for i, keys in enumerate(LENGTHS)]
    check(rows, causal, schedule=int(causal), sizes=sizes)


@pytest.mark.parametrize("sizes", [REAL, SMALL], ids=["128", "64"])
def test_own_keys_of_ragged_rows_and_heads(sizes: dict[str, int]) -> None:
    check([(n, n) for n in (65, 1, 0, 129)], True, heads=3, sizes=sizes)  # more pairs than are taken together


@pytest.mark.parametrize("parts", [2, 3])
def test_parts_of_the_keys(parts: int) -> None:
    """Parts with an odd number of tiles and an even one, with a tail, and without any key."""
    case = Case([(65, 700), (1, 128), (20, 0)], dtype=torch.bfloat16, out_dtype=torch.float32, **REAL)
    case.cut(parts, HOPPER.keys)
    with emulated(parts):
        case.run(False, HOPPER)
    case.check(False)


def test_the_grid_may_be_too_large() -> None:
    check([(20, 20), (3, 9), (0, 0)], True, max_q=700)


@pytest.mark.parametrize("sizes", [REAL, SMALL], ids=["128", "64"])
def test_fp32_results(sizes: dict[str, int]) -> None:
    case = Case([(65, 200), (5, 0)], dtype=torch.bfloat16, out_dtype=torch.float32, **sizes)
    with emulated():
        case.run(True, HOPPER)
    case.check(True)


@pytest.mark.parametrize("schedule", range(4))
def test_schedules(schedule: int) -> None:
    """Enough tiles to go round the rings several times."""
    check([(66, 900)], schedule % 2 == 0, schedule=schedule, sizes=SMALL if schedule > 1 else REAL)


@settings(max_examples=4, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 140), st.integers(0, 300)), min_size=1, max_size=3).filter(
        lambda rows: any(q for q, _ in rows)
    ),
    causal=st.booleans(),
    schedule=st.integers(0, 1000),
)
def test_any_rows(rows: list[tuple[int, int]], causal: bool, schedule: int) -> None:
    check(rows, causal, schedule=schedule)


def test_a_row_alone_equals_the_row_in_a_batch() -> None:
    rows = [(20, 20), (1, 140), (40, 7), (3, 0), (66, 57)]
    case = check(rows, True, heads=2)
    for row in (0, 1, 4):
        q, k = case.cu_q[row], case.cu_k[row]
        alone = Case([rows[row]], heads=2, dtype=torch.bfloat16, **REAL)
        count_q, count_k = rows[row]
        alone.q[3 : 3 + count_q] = case.q[q : q + count_q]
        alone.kv[3 : 3 + count_k] = case.kv[k : k + count_k]
        alone.latent[3 : 3 + count_k] = case.latent[k : k + count_k]
        with emulated(row):
            alone.run(True, HOPPER)
        assert torch.equal(alone.out[3 : 3 + count_q], case.out[q : q + count_q])
        assert torch.equal(alone.lse[3 : 3 + count_q], case.lse[q : q + count_q])


def test_hoppers_own_kernel_refuses_what_it_cannot_do() -> None:
    case = Case([(4, 8)], dtype=torch.bfloat16, **REAL)
    with pytest.raises(ValueError, match="one tiling"):
        case.run(True, replace(HOPPER, keys=64))
    case.latent = torch.zeros(len(case.latent), 24 + 64 + 1, dtype=torch.bfloat16)[:, :-1]
    with pytest.raises(ValueError, match="k_SO must begin"):
        case.run(True, HOPPER)
    with pytest.raises(ValueError, match="bfloat16 with features"):
        Case([(4, 8)], **REAL).run(True, HOPPER)
    with pytest.raises(ValueError, match="bfloat16 with features"):
        Case([(4, 8)], dtype=torch.bfloat16).run(True, HOPPER)
