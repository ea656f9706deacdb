"""Routing against a naive rule in Python, and the two ways of computing experts against fp64 and each other."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AXK2Config, DeepseekV4Config
from transformers.models.axk2.modeling_axk2 import AXK2TopkRouter
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter, DeepseekV4TopKRouter

from kernels import moe
from kernels.matrix import BlockScaled, GroupScaled, Matrix
from kernels.moe import reference
from kernels.rms_norm import AddNorm
from kernels.routing_rule import RoutingRule, Scoring


def naive_route(
    logits: list[float], bias: list[float] | None, k: int, scoring: str, groups: int, top: int, norm: bool, scale: float
) -> tuple[list[int], list[float]]:
    if scoring == "softmax":
        total = sum(math.exp(x) for x in logits)
        scores = [math.exp(x) / total for x in logits]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    choice = scores if bias is None else [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(logits) // groups
    members = [list(range(g * size, (g + 1) * size)) for g in range(groups)]

    def rank(group: list[int]) -> float:
        best = sorted((choice[x] for x in group), reverse=True)
        return best[0] if bias is None else best[0] + best[1]

    open_groups = sorted(range(groups), key=lambda g: (-rank(members[g]), g))[:top] if groups > 1 else range(groups)
    allowed = [x for g in open_groups for x in members[g]]
    ids = sorted(allowed, key=lambda x: (-choice[x], x))[:k]
    weights = [scores[x] for x in ids]
    if norm:
        weights = [w / (sum(weights) + 1e-20) for w in weights]
    return ids, [w * scale for w in weights]


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    geometry=st.sampled_from([(8, 1, 1, 3), (8, 4, 2, 3), (8, 2, 1, 4), (12, 3, 2, 8)]),
    scoring=st.sampled_from(["softmax", "sigmoid"]),
    biased=st.booleans(),
    norm=st.booleans(),
)
def test_route_matches_the_rule(
    data: st.DataObject, geometry: tuple[int, int, int, int], scoring: Scoring, biased: bool, norm: bool
) -> None:
    experts, groups, top, k = geometry
    # Multiples of 1/4 that repeat: scores tie exactly, within and across groups.
    numbers = st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=experts, max_size=experts)
    logits = data.draw(st.lists(numbers, min_size=1, max_size=3))
    # Biases of which no two, and no sums of two, are as close as fp32 rounds, or none at all: only true ties are ties.
    bias = [number + 2.0 ** (x - 14) for x, number in enumerate(data.draw(numbers))] if biased else None
    ids = torch.empty(len(logits), k, dtype=torch.int64)
    weights = torch.empty(len(logits), k)
    moe.route(
        torch.tensor(logits),
        None if bias is None else torch.tensor(bias),
        ids,
        weights,
        RoutingRule(scoring, groups, top, norm, 2.5),
    )
    for token, row in enumerate(logits):
        want_ids, want_weights = naive_route(fp32(row), bias, k, scoring, groups, top, norm, 2.5)
        assert ids[token].tolist() == want_ids
        assert weights[token].tolist() == pytest.approx(want_weights, rel=1e-5)


def fp32(row: list[float]) -> list[float]:
    return torch.tensor(row).tolist()


def softmax(row: list[float]) -> list[float]:
    total = sum(math.exp(x) for x in row)
    return [math.exp(x) / total for x in row]


def test_ties_go_to_the_lowest_id() -> None:
    ids, weights = torch.empty(1, 3, dtype=torch.int64), torch.empty(1, 3)
    moe.route(torch.zeros(1, 64), torch.zeros(64), ids, weights, RoutingRule("sigmoid", 8, 2, True, 1.0))
    assert ids.tolist() == [[0, 1, 2]]
    moe.route(torch.zeros(1, 64), torch.zeros(64), ids, weights, RoutingRule("sigmoid", 1, 1, True, 1.0))
    assert ids.tolist() == [[0, 1, 2]]
    torch.testing.assert_close(weights, torch.full((1, 3), 1 / 3))


def test_experts_of_closed_groups_count_as_zero() -> None:
    """As transformers' router of A.X K2 has it. Those of the best group are below 0, so the other group's are chosen,
    whichever group is the best; of more than are wanted it is not said there which."""
    config = AXK2Config(
        hidden_size=16, n_routed_experts=6, num_experts_per_tok=3, n_group=2, topk_group=1, first_k_dense_replace=0
    )
    torch.manual_seed(0)
    router = AXK2TopkRouter(config)
    router.weight.data.normal_()
    router.e_score_correction_bias.fill_(-2.0)
    x = torch.randn(20, 16)
    with torch.no_grad():
        logit, want_weights, want_ids = router(x)
    ids, weights = torch.empty(20, 3, dtype=torch.int64), torch.empty(20, 3)
    rule = RoutingRule("sigmoid", 2, 1, True, 2.5, closed_at_zero=True)
    moe.route(logit, router.e_score_correction_bias, ids, weights, rule)
    order = want_ids.argsort(dim=1)
    assert torch.equal(ids, want_ids.gather(1, order))
    torch.testing.assert_close(weights, want_weights.gather(1, order))
    assert {tuple(row) for row in ids.tolist()} == {(0, 1, 2), (3, 4, 5)}


@pytest.mark.parametrize("given", [False, True])
def test_the_square_root_of_softplus(given: bool) -> None:
    """As transformers' routers of DeepSeek V4 have it: the best by score and bias, or those of a table."""
    config = DeepseekV4Config(hidden_size=16, n_routed_experts=12, num_experts_per_tok=4, vocab_size=30)
    torch.manual_seed(0)
    router = (DeepseekV4HashRouter if given else DeepseekV4TopKRouter)(config)
    router.weight.data.normal_(0, 3)
    x, token = torch.randn(20, 16), torch.randint(0, 30, (20,))
    if given:
        router.tid2eid.copy_(torch.rand(30, 12).argsort(1)[:, :4])
    else:
        router.e_score_correction_bias.normal_()
    with torch.no_grad():
        logit, want_weights, want_ids = router(x, token) if given else router(x)
    ids, weights = torch.empty(20, 4, dtype=torch.int64), torch.empty(20, 4)
    rule = RoutingRule("sqrt_softplus", 1, 1, True, 1.5)
    bias = None if given else router.e_score_correction_bias
    moe.route(logit, bias, ids, weights, rule, given=moe.GivenExperts(router.tid2eid, token) if given else None)
    order, want_order = (found.argsort(dim=1) for found in (ids, want_ids))
    assert torch.equal(ids.gather(1, order), want_ids.gather(1, want_order))
    torch.testing.assert_close(weights.gather(1, order), want_weights.gather(1, want_order))


def test_given_experts_that_do_not_fit_are_refused() -> None:
    ids, weights = torch.empty(1, 3, dtype=torch.int64), torch.empty(1, 3)
    for count, groups in ((2, 1), (3, 2)):
        given = moe.GivenExperts(torch.zeros(1, count, dtype=torch.int32), torch.zeros(1, dtype=torch.int64))
        rule = RoutingRule("sigmoid", groups, 1, True, 1.0)
        with pytest.raises(ValueError, match="given experts are no 3"):
            moe.route(torch.zeros(1, 8), None, ids, weights, rule, given=given)


def test_the_bias_chooses_but_does_not_weigh() -> None:
    ids, weights = torch.empty(1, 1, dtype=torch.int64), torch.empty(1, 1)
    bias = torch.tensor([0.0, 5.0, 0.0, 0.0])
    moe.route(
        torch.tensor([[3.0, -1.0, 0.0, 0.0]]),
        bias,
        ids,
        weights,
        RoutingRule("sigmoid", 1, 1, False, 1.0),
    )
    assert ids.item() == 1
    assert weights.item() == pytest.approx(1 / (1 + math.e))


def naive_experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    width = down.shape[2]
    for token in range(len(x)):
        for k in range(ids.shape[1]):
            both = gate_up[ids[token, k]].double() @ x[token].double()
            gate, up = both[:width], both[width:]
            inner = gate / (1 + (-gate).exp()) * up
            out[token] += weights[token, k].double() * (down[ids[token, k]].double() @ inner)
    return out


@pytest.mark.parametrize("way", [reference.experts_gathered, reference.experts_grouped])
@pytest.mark.parametrize("tokens", [1, 2, 7, 40])
def test_experts_match_fp64(way: object, tokens: int) -> None:
    torch.manual_seed(tokens)
    experts, hidden, inner, k = 6, 10, 4, 3
    x, gate_up, down = (
        torch.randn(tokens, hidden),
        torch.randn(experts, 2 * inner, hidden),
        torch.randn(6, hidden, inner),
    )
    ids = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)])
    weights, out = torch.rand(tokens, k), torch.full((tokens, hidden), torch.nan)
    want, before = naive_experts(x, ids, weights, gate_up, down), torch.randn(tokens, hidden)
    way(x, ids, weights, gate_up, down, out)  # type: ignore[operator]
    torch.testing.assert_close(out.double(), want, atol=1e-4, rtol=1e-5)
    way(x, ids, weights, gate_up, down, out, 0.0, before)  # type: ignore[operator]
    torch.testing.assert_close(out.double(), want + before.double(), atol=1e-4, rtol=1e-5)


def test_both_ways_agree_in_bfloat16() -> None:
    torch.manual_seed(0)
    x, gate_up, down = (torch.randn(*shape).bfloat16() for shape in [(9, 32), (5, 16, 32), (5, 32, 8)])
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(9)])
    weights, a, b = torch.rand(9, 2), torch.empty_like(x), torch.empty_like(x)
    reference.experts_gathered(x, ids, weights, gate_up, down, a)
    reference.experts_grouped(x, ids, weights, gate_up, down, b)
    torch.testing.assert_close(a, b, atol=0.25, rtol=2**-6)  # sums of values near 30, rounded to 8 bits on the way


def scaled(experts: int, rows: int, features: int, format: str) -> tuple[Matrix, Tensor]:
    """Random experts' matrices, and what they are in fp64."""
    if format == "plain":
        plain = torch.randn(experts, rows, features).bfloat16() / 8
        return plain, plain.double()
    if format == "int4":
        data, scales = torch.randint(0, 256, (experts, rows, features // 2)), torch.rand(experts, rows, features // 32)
        groups = GroupScaled(data.to(torch.uint8), scales.bfloat16() / 16)
        numbers = torch.stack([data & 15, data >> 4], -1).flatten(-2).double() - 8
        return groups, numbers * groups.scales.double().repeat_interleave(32, 2)
    codes, scales = torch.randn(experts, rows, features) * 64, torch.rand(experts, -(-rows // 16), -(-features // 64))
    blocks = BlockScaled(codes.to(torch.float8_e4m3fn), scales / 256, 16, 64)
    wide = blocks.scales.double().repeat_interleave(16, 1)[:, :rows].repeat_interleave(64, 2)[..., :features]
    return blocks, blocks.data.double() * wide


@pytest.mark.parametrize("groups", [0, 1, 4])
@pytest.mark.parametrize("formats", [("fp8", "fp8"), ("int4", "int4"), ("plain", "fp8"), ("int4", "plain")])
def test_scaled_experts_match_fp64(formats: tuple[str, str], groups: int) -> None:
    """bf16: what the gate makes is rounded to 8 bits, and the output once more; of plain weights each product is."""
    torch.manual_seed(groups)
    (gate_up, wide_up), (down, wide_down) = scaled(5, 128, 96, formats[0]), scaled(5, 96, 64, formats[1])
    x, weights = torch.randn(9, 96).bfloat16(), torch.rand(9, 2)
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(9)])
    ids[3] = torch.tensor([-1, 5])
    some = torch.arange(9) != 3
    want = naive_experts(x[some], ids[some], weights[some], wide_up, wide_down)
    if groups:
        sum = torch.ones(9, groups, 96)
        moe.add_experts(x, ids, weights, gate_up, down, sum)
        out = sum.double().sum(1) - groups
    else:
        rounded = torch.full_like(x, torch.nan)
        moe.experts(x, ids, weights, gate_up, down, rounded)
        out = rounded.double()
    assert bool((out[3] == 0).all())
    error = torch.linalg.vector_norm(out[some] - want, dim=1) / torch.linalg.vector_norm(want, dim=1)
    assert error.max() < 2**-7


def test_what_a_sum_is_added_to() -> None:
    torch.manual_seed(0)
    x, gate_up, down = torch.randn(9, 10), torch.randn(6, 8, 10), torch.randn(6, 10, 4)
    ids, weights = torch.stack([torch.randperm(6)[:3] for _ in range(9)]), torch.rand(9, 3)
    ids[4] = -1
    before, alone, out = torch.randn(9, 20)[:, :10], torch.empty_like(x), torch.empty_like(x)
    moe.experts(x, ids, weights, gate_up, down, alone)
    moe.experts(x, ids, weights, gate_up, down, out, before_TE=before)
    torch.testing.assert_close(out.double(), before.double() + alone.double(), rtol=1e-6, atol=1e-5)
    assert torch.equal(out[4], before[4])
    norm = AddNorm(torch.zeros_like(x), torch.ones(10), 1e-6)
    for wrong in ({"before_TE": before[:8]}, {"before_TE": before, "add_norm": norm}):
        with pytest.raises(ValueError, match=r"a sum of \(9, 10\) is added to rows of as many features"):
            moe.experts(x, ids, weights, gate_up, down, out, **wrong)


@pytest.mark.parametrize("way", [reference.experts_gathered, reference.experts_grouped])
def test_addresses_past_two_to_the_31_elements(way: object) -> None:
    """Only the last expert's weights become resident."""
    torch.manual_seed(0)
    hidden, inner = 1 << 12, 1 << 9
    experts = 2**31 // (2 * inner * hidden) + 2
    gate_up = torch.empty(experts, 2 * inner, hidden, dtype=torch.bfloat16)
    down = torch.empty(experts, hidden, inner, dtype=torch.bfloat16)
    gate_up[-1], down[-1] = torch.randn(2 * inner, hidden) / 64, torch.randn(hidden, inner) / 20
    assert (experts - 1) * gate_up.stride(0) > 2**31 - 1
    x, out = torch.randn(1, hidden).bfloat16(), torch.empty(1, hidden, dtype=torch.bfloat16)
    ids, weights = torch.tensor([[experts - 1]]), torch.ones(1, 1)
    way(x, ids, weights, gate_up, down, out)  # type: ignore[operator]
    want = naive_experts(x, torch.tensor([[0]]), weights, gate_up[-1:], down[-1:])
    torch.testing.assert_close(out.double(), want, atol=0.05, rtol=0.05)


def test_hopper_is_told_of_tokens_that_it_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "is_hopper", lambda device: True)
    monkeypatch.setattr(moe, "multiprocessors", lambda device: 132)
    x, id, down = torch.zeros(4, 80, dtype=torch.bfloat16), torch.zeros(4, 1, dtype=torch.int64), torch.zeros(2, 64, 32)
    assert moe.experts_shape(x[:, 8:72], id, down).hopper == 132
    assert moe.experts_shape(x[:, 4:68], id, down).hopper == 0
    assert moe.experts_shape(torch.zeros(4, 68, dtype=torch.bfloat16)[:, :64], id, down).hopper == 0
