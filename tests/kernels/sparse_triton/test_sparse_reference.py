"""The references of sparse attention against formulas in float64, and against dense attention where all is selected."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from index_recall import KINDS, recall
from sparse_case import Sparse

from kernels import sparse
from kernels.index_entry import is_int8
from kernels.mla_decode import mla_decode

ROWS = st.lists(st.tuples(st.integers(0, 150), st.integers(1, 4)), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(
    rows=ROWS,
    heads=st.integers(1, 9),
    selected=st.sampled_from([1, 3, 16, 64, 200]),
    fp8=st.booleans(),
    invariant=st.booleans(),
    seed=st.integers(0, 99),
)
def test_all_steps(
    rows: list[tuple[int, int]], heads: int, selected: int, fp8: bool, invariant: bool, seed: int
) -> None:
    case = Sparse(rows, heads=heads, selected=selected, fp8=fp8, invariant=invariant, seed=seed)
    case.write()
    case.check_keys()
    case.score()
    case.check_scores()
    case.select()
    case.check_selected()
    case.attend()
    case.check_attention()
    assert int(case.tensors["fault"]) == 0


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("width", [1, 3])
def test_everything_selected_equals_dense_attention_bit_for_bit(width: int, fp8: bool) -> None:
    case = Sparse([(150, width), (64, width), (40, width)], heads=3, selected=160, fp8=fp8, invariant=True)
    case.write()
    case.score()
    case.select()
    case.attend()
    t = case.tensors
    rows, heads = len(case.rows), case.heads
    out, lse = torch.empty(rows, width, heads, case.latent), torch.empty(rows, width, heads)
    length = torch.tensor([length for length, _ in case.rows], dtype=torch.int32)
    q = t["q"].view(rows, width, heads, -1)
    mla_decode(q, t["cache"], t["page"], length, out, lse, scale=case.scale, invariant=True)
    assert torch.equal(out.view_as(t["out"]), t["out"])
    assert torch.equal(lse.view_as(t["lse"]), t["lse"])


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_keys_and_queries_in_int8_that_are_not_finite_are_seen_in_their_own_scores(number: float) -> None:
    """A query tells by its weight, into which its scale was multiplied."""
    case = Sparse([(70, 2)], fp8=True)
    case.key[5, 3] = number
    case.write()
    case.tensors["weight"][1, 2] = torch.nan
    case.score()
    score = case.tensors["score"]
    assert score[0, :69].isnan().nonzero().tolist() == [[5]]
    assert score[1, :70].isnan().all()


@pytest.mark.parametrize(
    ("context", "least", "kind"),
    [
        *((16384, 0.99, kind) for kind in KINDS),
        *(
            pytest.param(131072, 0.985, kind, marks=pytest.mark.long if kind == "heavy tails" else pytest.mark.soak)
            for kind in KINDS
        ),
    ],
)
def test_recall_of_an_index_in_int8(context: int, least: float, kind: str) -> None:
    """The more there are to select from, the closer lie the scores of the last one that is and of the first that is
    not."""
    assert recall(kind, tokens=4, context=context) >= least


def test_of_equal_scores_the_lowest_positions_are_selected() -> None:
    score = torch.tensor([[0.0, 1.0, -0.0, 0.0, 2.0, float("nan"), -1.0, 0.0] + [9.0] * 56])
    selected, fault = torch.empty(1, 5, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    sparse.select_positions(score, torch.tensor([8], dtype=torch.int32), selected, fault)
    assert selected.tolist() == [[0, 1, 2, 4, 5]]


def test_what_lies_outside_is_counted_and_not_followed() -> None:
    case = Sparse([(100, 1), (70, 1), (0, 1)], heads=2, selected=64, fp8=False)
    case.plant_faults()
    case.score()
    assert int(case.tensors["fault"]) == 2
    case.check_scores()
    case.tensors["selected"][1, :3] = torch.tensor([-2, 1 << 20, 3], dtype=torch.int32)
    case.tensors["selected"][1, 3:] = -1
    case.tensors["fault"].zero_()
    case.tensors["row"][0] = 77
    case.tensors["selected"][[0, 2]] = -1
    case.tensors["selected"][0, 5:7] = 1
    case.attend()
    assert int(case.tensors["fault"]) == 4
    case.check_attention()


def test_a_slot_outside_the_index_cache_is_an_error() -> None:
    case = Sparse([(100, 1)])
    for slot in (-1, len(case.tensors["index"]) * 64):
        with pytest.raises(IndexError, match="outside"):
            sparse.write_index_keys(torch.zeros(1, 128), torch.tensor([slot]), case.tensors["index"])


@pytest.mark.parametrize("fp8", [False, True])
def test_tensors_of_another_kind_are_refused(fp8: bool) -> None:
    case = Sparse([(100, 2)], fp8=fp8)
    assert is_int8(case.tensors["index"]) == fp8
    steps = {
        case.score: ("index_q", "weight", "index", "page", "row", "bound", "score", "fault"),
        case.select: ("score", "bound", "selected", "fault"),
        case.attend: ("q", "cache", "page", "row", "selected", "out", "lse", "fault"),
    }
    for step, names in steps.items():
        for name in names:
            right = case.tensors[name]
            apart = torch.stack([right, right], -1)[..., 0]
            narrow = right.to(torch.int16)
            for wrong in {"out": (apart,), "fault": (narrow,)}.get(name, (apart, narrow)):
                case.tensors[name] = wrong
                with pytest.raises(ValueError, match=r"must be|wide"):
                    step()
            case.tensors[name] = right
