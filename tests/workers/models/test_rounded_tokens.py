"""Where many tokens are rounded to FP8, and what products they make then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rounded_models as models
import torch
from random_model import V2_LITE_HEADS
from torch import Tensor

from kernels.rms_norm import AddNorm
from workers.families.registry import parse_config
from workers.memory.scratch import Scratch
from workers.models import many_tokens
from workers.models import ways as choice
from workers.models.invariant import InvariantTokens
from workers.models.many_tokens import FEWEST_ROUNDED, DecodeTokens, ManyTokens
from workers.models.ways import Ways
from workers.parallel.group import Group
from workers.weights.weight import Format, Formats, Weight

TOKENS = 64


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Hopper GPU."""
    monkeypatch.setattr(many_tokens, "multiplies_rounded", lambda device: True)


def weight(outputs: int = 256, features: int = 512, block: tuple[int, int] = (128, 128)) -> Weight:
    torch.manual_seed(1)
    data = (torch.randn(outputs, features) * 64).to(torch.float8_e4m3fn)
    scales = (torch.rand(-(-outputs // block[0]), -(-features // block[1])) + 0.5) * features**-0.5 / 64
    return Weight(data, Format.FP8_BLOCKS, scales, block)


def tokens(count: int = TOKENS, features: int = 512) -> Tensor:
    torch.manual_seed(2)
    return (torch.randn(count, features) * torch.exp2(4 * torch.rand(count, features))).bfloat16()


def rounded(x: Tensor) -> Tensor:
    """What is left of `x`, by the recipe's own words."""
    groups = x.double().unflatten(1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True) / 448
    return ((groups / scale).float().to(torch.float8_e4m3fn).double() * scale).flatten(1)


def distance(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize(("count", "features"), [(TOKENS, 512), (TOKENS, 640), (41, 512), (99, 128)])
@pytest.mark.parametrize("kind", [ManyTokens, DecodeTokens])
def test_products_are_those_of_rounded_activations(kind: type[ManyTokens], count: int, features: int) -> None:
    """Of any number of tokens, though products take four at a time."""
    x, matrix = tokens(count, features), weight(features=features)
    way = kind(Group(), rounds=True)
    exact = x.double() @ matrix.dequantised(torch.float64).t()
    want = rounded(x) @ matrix.dequantised(torch.float64).t()
    out = torch.full((count, 256), torch.nan, dtype=torch.bfloat16)
    scratch = Scratch(x.device, torch.full((1 << 20,), 0xFF, dtype=torch.uint8))
    way.linear(x, matrix, out, scratch)
    assert distance(out, want) < 2**-8
    assert distance(out, exact) > 2**-7


@pytest.mark.parametrize("rounds", [False, True])
def test_the_product_behind_attention(rounds: bool) -> None:
    x, matrix, way = tokens(), weight(), ManyTokens(Group(), rounds=rounds)
    want = (rounded(x) if rounds else x.double()) @ matrix.dequantised(torch.float64).t()
    norm = AddNorm(torch.zeros(TOKENS, 256, dtype=torch.bfloat16), torch.ones(256).bfloat16(), 1e-6)
    way.add(x, matrix, norm, torch.empty_like(norm.residual_TE), Scratch(x.device))
    assert distance(norm.residual_TE, want) < 2**-8


def test_the_gate_of_a_dense_network() -> None:
    x, matrix, way = tokens(), weight(), ManyTokens(Group(), rounds=True)
    gate, up = (rounded(x) @ matrix.dequantised(torch.float64).t()).chunk(2, 1)
    got = way.gated(x, matrix, Scratch(x.device))
    assert distance(got, torch.nn.functional.silu(gate) * up) < 2**-7


@pytest.mark.parametrize(("rounds", "count"), [(False, TOKENS), (True, TOKENS), (True, 50)])
def test_a_dense_network(rounds: bool, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the gate makes is rounded at once."""
    made = []
    fused = many_tokens.silu_mul_quantise
    monkeypatch.setattr(many_tokens, "silu_mul_quantise", lambda *a, **k: (made.append(a[0].shape), fused(*a, **k)))
    x, gate_up, down = tokens(count), weight(1024, 512), weight(256, 512)
    way = ManyTokens(Group(), rounds=rounds)
    gate_up_TF = torch.empty(count, 1024, dtype=torch.bfloat16)
    way.linear(x, gate_up, gate_up_TF, Scratch(x.device))
    gate, up = gate_up_TF.double().chunk(2, 1)
    act = torch.nn.functional.silu(gate) * up
    want = (rounded(act) if rounds else act) @ down.dequantised(torch.float64).t()
    norm = AddNorm(torch.zeros(count, 256, dtype=torch.bfloat16), torch.ones(256).bfloat16(), 1e-6)
    out = torch.empty_like(norm.residual_TE)
    way.add_gated(x, gate_up, down, norm, out, Scratch(x.device))
    assert distance(norm.residual_TE, want) < (2**-8 if rounds else 2**-7)  # bf16 once, or twice
    assert made == ([(count, 1024)] if rounds else [])
    want = norm.residual_TE.double()
    assert distance(out, want / (want.square().mean(1, keepdim=True) + 1e-6).sqrt()) < 2**-8


@pytest.mark.parametrize(
    ("why", "way", "x", "matrix", "dtype"),
    [
        ("it is forbidden", ManyTokens(Group()), tokens(), weight(), torch.bfloat16),
        ("invariant mode", InvariantTokens(Group()), tokens(), weight(), torch.bfloat16),
        ("few tokens", ManyTokens(Group(), rounds=True), tokens(8), weight(), torch.bfloat16),
        ("other blocks", ManyTokens(Group(), rounds=True), tokens(), weight(block=(64, 128)), torch.bfloat16),
        ("a size", ManyTokens(Group(), rounds=True), tokens(features=576), weight(256, 576), torch.bfloat16),
        ("fp32", ManyTokens(Group(), rounds=True), tokens().float(), weight(), torch.float32),
        ("fp32 results", ManyTokens(Group(), rounds=True), tokens(), weight(), torch.float32),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_activations_stay_as_they_are(why: str, way: ManyTokens, x: Tensor, matrix: Weight, dtype: torch.dtype) -> None:
    want = x.double() @ matrix.dequantised(x.dtype).double().t()
    out = torch.full((len(x), 256), torch.nan, dtype=dtype)
    way.linear(x, matrix, out, Scratch(x.device))
    assert distance(out, want) < 2**-8, why


def test_a_gpu_without_such_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_tokens, "multiplies_rounded", lambda device: False)
    way, x, matrix = ManyTokens(Group(), rounds=True), tokens(), weight()
    out = torch.full((TOKENS, 256), torch.nan, dtype=torch.bfloat16)
    way.linear(x, matrix, out, Scratch(x.device))
    assert distance(out, x.double() @ matrix.dequantised(torch.bfloat16).double().t()) < 2**-8


def ways(
    monkeypatch: pytest.MonkeyPatch, *, invariant: bool = False, rounds: bool = True, form: Format = Format.FP8_BLOCKS
) -> Ways:
    monkeypatch.setattr(choice, "is_hopper", lambda device: device.type == "cuda")
    return Ways(parse_config(V2_LITE_HEADS), Group(), Formats(others={form}), invariant=invariant, rounds=rounds)


@pytest.mark.parametrize(
    ("changes", "tokens", "dtype", "device", "rounds"),
    [
        ({}, FEWEST_ROUNDED, torch.bfloat16, "cuda", True),
        ({}, FEWEST_ROUNDED - 1, torch.bfloat16, "cuda", False),
        ({}, FEWEST_ROUNDED, torch.float32, "cuda", False),
        ({}, FEWEST_ROUNDED, torch.bfloat16, "cpu", False),
        ({"invariant": True}, 4096, torch.bfloat16, "cuda", False),
        ({"rounds": False}, 4096, torch.bfloat16, "cuda", False),
        ({"form": Format.INT4_GROUPS}, 4096, torch.bfloat16, "cuda", False),
    ],
)
def test_passes_that_may_round(
    changes: dict[str, Any],
    tokens: int,
    dtype: torch.dtype,
    device: str,
    rounds: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = ways(monkeypatch, **changes)
    assert found.rounds(tokens, dtype, torch.device(device)) is rounds
    wanted = changes.get("rounds", True) and not changes.get("invariant", False)
    assert found.any.rounds is wanted


def test_no_number_of_tokens_lies_between_the_ways() -> None:
    """It would have kernels of its own, of which a rehearsal knows nothing."""
    assert FEWEST_ROUNDED == many_tokens.FEWEST_ROUNDED_EXPERTS == choice.MOST_FP8 + 1


def test_a_context_in_which_nothing_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ways(monkeypatch)
    never = ways(monkeypatch, rounds=False)
    with found.nothing_rounded(), never.nothing_rounded():
        assert not found.any.rounds
    assert found.any.rounds
    assert not never.any.rounds
    with pytest.raises(KeyError), found.nothing_rounded():
        raise KeyError
    assert found.any.rounds


def test_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All products with FP8 weights outside of experts; how far off that makes it."""
    quantised, twin = models.checkpoints(tmp_path)
    want, made = models.exact(twin), []
    product = many_tokens.rounded_linear
    monkeypatch.setattr(many_tokens, "rounded_linear", lambda *a: (made.append(a[2].shape), product(*a)))
    kept_T = models.errors(quantised, want.device, want, rounds=False)
    assert not made
    rounded_T = models.errors(quantised, want.device, want, rounds=True)
    attention, network = [(640, 512), (512, 512), (512, 512)], [(1024, 512), (512, 512)]
    assert made == [*attention, *network, *attention, *attention]
    # The rounding of bf16 is 32 times as fine; its results are rounded more often.
    assert 2 * kept_T.median() < rounded_T.median() < 12 * kept_T.median()
