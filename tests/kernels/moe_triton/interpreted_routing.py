"""Routing in the repaired interpreter. Run with TRITON_INTERPRET=1, see test_interpreted.py."""

from tests.support import interpreter

interpreter.repair()

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from routing_case import DEMO, MODELS, Routing  # noqa: E402

GEOMETRIES = [
    (8, 1, 1, 3),
    (8, 4, 2, 3),
    (8, 2, 1, 4),
    (12, 3, 2, 8),
    (5, 1, 1, 5),
    (40, 5, 4, 16),
    (512, 1, 1, 16),
    (1, 1, 1, 1),
]
"""Experts, groups, open groups, chosen."""


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_models(model: str, ties: bool) -> None:
    case = Routing(9, **MODELS[model], ties=ties)
    case.run()
    case.check()


@pytest.mark.parametrize("parts", [1, 5, 16])
@pytest.mark.parametrize("model", MODELS)
def test_parts_of_logits_are_added(model: str, parts: int) -> None:
    case = Routing(3, **MODELS[model], parts=parts)
    case.run()
    case.check()


@settings(max_examples=150, deadline=None)
@given(
    geometry=st.sampled_from(
        [
            (8, 1, 1, 3),
            (8, 4, 2, 3),
            (8, 2, 1, 4),
            (12, 3, 2, 8),
            (5, 1, 1, 5),
            (40, 5, 4, 16),
            (512, 1, 1, 16),
            (1, 1, 1, 1),
        ]
    ),
    tokens=st.integers(1, 5),
    scoring=st.sampled_from(["softmax", "sigmoid", "sqrt_softplus"]),
    biased=st.booleans(),
    normalize=st.booleans(),
    ties=st.booleans(),
    shared=st.integers(0, 2),
    seed=st.integers(0, 10**6),
)
def test_any_geometry(
    geometry: tuple[int, int, int, int],
    tokens: int,
    scoring: str,
    biased: bool,
    normalize: bool,
    ties: bool,
    shared: int,
    seed: int,
) -> None:
    experts, groups, top, chosen = geometry
    case = Routing(tokens, experts, chosen, groups, top, scoring, biased, normalize, 2.5, shared, ties=ties, seed=seed)
    case.run()
    case.check(least_clear=0.0)


@pytest.mark.parametrize(("rows", "padded"), [(6, (0, 5)), (3, (1,)), (1, (0,))])
def test_tokens_of_padded_rows_go_nowhere(rows: int, padded: tuple[int, ...]) -> None:
    case = Routing(6, **DEMO, shared=1, rows=rows, padded=padded)
    case.tensors["logit"][padded[0] * 6 // rows] = torch.nan
    case.run()
    ids, weight = case.tensors["id"].view(rows, -1), case.tensors["weight"].view(rows, -1)
    for row in range(rows):
        assert bool((ids[row] == -1).all()) == (row in padded)
        assert bool((weight[row] == 0).all()) == (row in padded)
    alive = torch.tensor([row not in padded for row in range(rows)])
    want_ids, want_weight = (x.view(rows, -1) for x in case.expected())
    assert torch.equal(ids[alive], want_ids[alive])
    torch.testing.assert_close(weight[alive].double(), want_weight[alive], rtol=3e-6, atol=1e-9)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf, torch.inf, 1e30])
@pytest.mark.parametrize("model", ["V2-Lite", "V3"])
def test_ids_exist_and_differ_whatever_the_logits(model: str, value: float) -> None:
    case = Routing(3, **MODELS[model])
    case.tensors["logit"][0] = value
    case.tensors["logit"][1, ::2] = value
    case.run()
    for row in case.tensors["id"].tolist():
        assert len(set(row)) == case.chosen
        assert all(0 <= expert < case.experts for expert in row)


@pytest.mark.parametrize("given", [False, True])
def test_scores_of_any_size(given: bool) -> None:
    """From those that nearly vanish to those beyond where softplus is its argument."""
    case = Routing(4, **{**MODELS["V4"], "biased": False, "given": given})
    for tensors in (case.tensors, case.inputs):
        tensors["logit"].copy_(torch.linspace(-80, 60, tensors["logit"].numel()).view(4, -1))
    case.run()
    case.check()


def test_shared_experts_follow_the_routed_ones() -> None:
    case = Routing(4, **DEMO, shared=2)
    case.run()
    assert case.tensors["id"][:, 2:].tolist() == [[8, 9]] * 4
    assert case.tensors["weight"][:, 2:].tolist() == [[1.0, 1.0]] * 4
    case.check()
