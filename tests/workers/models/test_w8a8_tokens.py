"""Places where many tokens are rounded to FP8, and the products they make then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import w8a8_models as models
from random_model import V2_LITE_HEADS
from torch import Tensor

from kernels import rounded_norm
from kernels.rms_norm import AddNorm
from workers.families.registry import parse_config
from workers.memory.scratch import Scratch
from workers.models import execution_paths as choice
from workers.models import general, w8a8
from workers.models.execution_paths import ExecutionPaths
from workers.models.general import DecodeOps, GeneralOps
from workers.models.invariant import DeterministicOps
from workers.parallel.group import Group
from workers.weights.formats import FP8_BLOCKS, INT4_GROUPS, MXFP4, MXFP8
from workers.weights.formats.format import Format
from workers.weights.formats.fp8_blocks import MOST_FP8
from workers.weights.weight import Formats, Weight

TOKENS = 64


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let products be possible as on a Hopper GPU."""
    monkeypatch.setattr(general, "supports_w8a8", lambda device: True)


def weight(outputs: int = 256, features: int = 512, block: tuple[int, int] = (128, 128)) -> Weight:
    torch.manual_seed(1)
    data = (torch.randn(outputs, features) * 64).to(torch.float8_e4m3fn)
    scales = (torch.rand(-(-outputs // block[0]), -(-features // block[1])) + 0.5) * features**-0.5 / 64
    return Weight(data, FP8_BLOCKS, scales, block)


def tokens(count: int = TOKENS, features: int = 512) -> Tensor:
    torch.manual_seed(2)
    return (torch.randn(count, features) * torch.exp2(4 * torch.rand(count, features))).bfloat16()


def rounded(x: Tensor) -> Tensor:
    """Round `x` by the recipe's own words."""
    groups = x.double().unflatten(1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True) / 448
    return ((groups / scale).float().to(torch.float8_e4m3fn).double() * scale).flatten(1)


def distance(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize(("count", "features"), [(TOKENS, 512), (TOKENS, 640), (41, 512), (99, 128)])
@pytest.mark.parametrize("kind", [GeneralOps, DecodeOps])
def test_products_are_those_of_quantized_activations(kind: type[GeneralOps], count: int, features: int) -> None:
    """The number of tokens may be any, though products take four at a time."""
    x, matrix = tokens(count, features), weight(features=features)
    ops = kind(Group(), quantize_activations=True)
    exact = x.double() @ matrix.dequantized(torch.float64).t()
    want = rounded(x) @ matrix.dequantized(torch.float64).t()
    out = torch.full((count, 256), torch.nan, dtype=torch.bfloat16)
    scratch = Scratch(x.device, torch.full((1 << 20,), 0xFF, dtype=torch.uint8))
    ops.linear(x, matrix, out, scratch)
    assert distance(out, want) < 2**-8
    assert distance(out, exact) > 2**-7


@pytest.mark.parametrize("quantize_activations", [False, True])
def test_the_product_behind_attention(quantize_activations: bool) -> None:
    x, matrix, ops = tokens(), weight(), GeneralOps(Group(), quantize_activations=quantize_activations)
    want = (rounded(x) if quantize_activations else x.double()) @ matrix.dequantized(torch.float64).t()
    norm = AddNorm(torch.zeros(TOKENS, 256, dtype=torch.bfloat16), torch.ones(256).bfloat16(), 1e-6)
    ops.add(x, matrix, norm, torch.empty_like(norm.residual_TE), Scratch(x.device))
    assert distance(norm.residual_TE, want) < 2**-8


def test_the_gate_of_a_dense_network() -> None:
    x, matrix, ops = tokens(), weight(), GeneralOps(Group(), quantize_activations=True)
    gate, up = (rounded(x) @ matrix.dequantized(torch.float64).t()).chunk(2, 1)
    got = ops.gated(x, matrix, Scratch(x.device))
    assert distance(got, torch.nn.functional.silu(gate) * up) < 2**-7


@pytest.mark.parametrize(("quantize_activations", "count"), [(False, TOKENS), (True, TOKENS), (True, 50)])
def test_a_dense_network(quantize_activations: bool, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate's result is rounded at once."""
    made = []
    fused = general.silu_mul_quantize
    monkeypatch.setattr(general, "silu_mul_quantize", lambda *a, **k: (made.append(a[0].shape), fused(*a, **k)))
    x, gate_up, down = tokens(count), weight(1024, 512), weight(256, 512)
    ops = GeneralOps(Group(), quantize_activations=quantize_activations)
    gate_up_TF = torch.empty(count, 1024, dtype=torch.bfloat16)
    ops.linear(x, gate_up, gate_up_TF, Scratch(x.device))
    gate, up = gate_up_TF.double().chunk(2, 1)
    act = torch.nn.functional.silu(gate) * up
    want = (rounded(act) if quantize_activations else act) @ down.dequantized(torch.float64).t()
    norm = AddNorm(torch.zeros(count, 256, dtype=torch.bfloat16), torch.ones(256).bfloat16(), 1e-6)
    out = torch.empty_like(norm.residual_TE)
    ops.add_gated(x, gate_up, down, norm, out, Scratch(x.device))
    assert distance(norm.residual_TE, want) < (2**-8 if quantize_activations else 2**-7)  # bf16 once, or twice
    assert made == ([(count, 1024)] if quantize_activations else [])
    want = norm.residual_TE.double()
    assert distance(out, want / (want.square().mean(1, keepdim=True) + 1e-6).sqrt()) < 2**-8


@pytest.mark.parametrize(
    ("why", "ops", "x", "matrix", "dtype"),
    [
        ("it is forbidden", GeneralOps(Group()), tokens(), weight(), torch.bfloat16),
        ("invariant mode", DeterministicOps(Group()), tokens(), weight(), torch.bfloat16),
        ("few tokens", GeneralOps(Group(), quantize_activations=True), tokens(8), weight(), torch.bfloat16),
        (
            "other blocks",
            GeneralOps(Group(), quantize_activations=True),
            tokens(),
            weight(block=(64, 128)),
            torch.bfloat16,
        ),
        (
            "a size",
            GeneralOps(Group(), quantize_activations=True),
            tokens(features=576),
            weight(256, 576),
            torch.bfloat16,
        ),
        ("fp32", GeneralOps(Group(), quantize_activations=True), tokens().float(), weight(), torch.float32),
        ("fp32 results", GeneralOps(Group(), quantize_activations=True), tokens(), weight(), torch.float32),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_activations_stay_as_they_are(why: str, ops: GeneralOps, x: Tensor, matrix: Weight, dtype: torch.dtype) -> None:
    want = x.double() @ matrix.dequantized(x.dtype).double().t()
    out = torch.full((len(x), 256), torch.nan, dtype=dtype)
    ops.linear(x, matrix, out, Scratch(x.device))
    assert distance(out, want) < 2**-8, why


def test_a_gpu_without_such_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(general, "supports_w8a8", lambda device: False)
    ops, x, matrix = GeneralOps(Group(), quantize_activations=True), tokens(), weight()
    out = torch.full((TOKENS, 256), torch.nan, dtype=torch.bfloat16)
    ops.linear(x, matrix, out, Scratch(x.device))
    assert distance(out, x.double() @ matrix.dequantized(torch.bfloat16).double().t()) < 2**-8


@pytest.mark.parametrize("count", [9, TOKENS])
@pytest.mark.parametrize("pieces", [False, True])
def test_norms_that_are_rounded_as_they_are_made(pieces: bool, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as where each product rounds what it reads: the norm of a pass's first rows, of a latent, behind
    attention and behind a network. What is rounded is rounded once. `pieces`: the product behind attention leaves
    some, which are added up as the norm is made."""
    rows, ids = tokens(200), torch.arange(count) * 3 % 200
    down, up, out, gate_up = weight(384, 512), weight(512, 256), weight(512, 512), weight(1024, 512)
    behind, results, made = weight(512, 512), [], []
    fused = general.w8a8_add_norm
    monkeypatch.setattr(general, "w8a8_add_norm", lambda *a, **k: (made.append(a[1]), fused(*a, **k)))
    for rounds_norms in (False, True):
        of = {behind.matrix.data.data_ptr(): (1, 1, 1)} if pieces and rounds_norms else {}
        for module in (general, rounded_norm):
            monkeypatch.setattr(module, "w8a8_pieces", lambda count, matrix, of=of: of.get(matrix.data.data_ptr()))
        formats, scratch = Formats(), Scratch(rows.device)
        ops = GeneralOps(Group(), quantize_activations=True, formats=formats)
        formats.others.update([FP8_BLOCKS] if rounds_norms else [])  # as a model is built
        norm = AddNorm(torch.empty(count, 512, dtype=torch.bfloat16), torch.rand(512).add_(0.5).bfloat16(), 1e-6)
        norm.weight_E.copy_(torch.linspace(0.5, 1.5, 512))
        x, other = (ops.allocate_normed(count, 512, torch.bfloat16, 1e-6, scratch) for _ in range(2))
        assert isinstance(x, w8a8.RoundedRows) is rounds_norms
        ops.enter(rows, ids, norm, x)
        down_TF, q_TF = (torch.empty(count, size, dtype=torch.bfloat16) for size in (384, 512))
        latent = ops.latent_linear(x, down, torch.ones(256).bfloat16(), 1e-6, down_TF, scratch)
        assert isinstance(latent, w8a8.RoundedRows) is rounds_norms
        ops.linear(latent, up, q_TF, scratch)
        ops.add(q_TF, behind, norm, other, scratch)
        ops.add_gated(other, gate_up, out, norm, x, scratch)
        ops.linear(x, out, q_TF, scratch)
        results.append((down_TF, q_TF, norm.residual_TE, general.tensor_of(x)))
    for plain, rounded_ in zip(*results, strict=True):
        assert torch.equal(plain, rounded_)
    assert len(made) == pieces


def test_few_tokens_and_odd_sizes_are_not_rounded() -> None:
    formats, scratch = Formats(experts={FP8_BLOCKS}), Scratch(torch.device("cpu"))
    ops = GeneralOps(Group(), quantize_activations=True, formats=formats)
    for count, features, dtype in ((8, 512, torch.bfloat16), (9, 576, torch.bfloat16), (9, 512, torch.float32)):
        assert isinstance(ops.allocate_normed(count, features, dtype, 1e-6, scratch), Tensor)


def ways(
    monkeypatch: pytest.MonkeyPatch,
    *,
    invariant: bool = False,
    quantize_activations: bool = True,
    form: Format = FP8_BLOCKS,
) -> ExecutionPaths:
    monkeypatch.setattr(choice, "is_hopper", lambda device: device.type == "cuda")
    return ExecutionPaths(
        parse_config(V2_LITE_HEADS),
        Group(),
        Formats(others={form}),
        invariant=invariant,
        quantize_activations=quantize_activations,
    )


@pytest.mark.parametrize(
    ("changes", "tokens", "dtype", "device", "quantize_activations"),
    [
        ({}, w8a8.MIN_TOKENS_W8A8, torch.bfloat16, "cuda", True),
        ({}, w8a8.MIN_TOKENS_W8A8 - 1, torch.bfloat16, "cuda", False),
        ({}, w8a8.MIN_TOKENS_W8A8, torch.float32, "cuda", False),
        ({}, w8a8.MIN_TOKENS_W8A8, torch.bfloat16, "cpu", False),
        ({"invariant": True}, 4096, torch.bfloat16, "cuda", False),
        ({"quantize_activations": False}, 4096, torch.bfloat16, "cuda", False),
        ({"form": INT4_GROUPS}, 4096, torch.bfloat16, "cuda", False),
        ({"form": MXFP4}, 4096, torch.bfloat16, "cuda", True),
        ({"form": MXFP8}, 4096, torch.bfloat16, "cuda", False),
    ],
)
def test_passes_that_may_quantize(
    changes: dict[str, Any],
    tokens: int,
    dtype: torch.dtype,
    device: str,
    quantize_activations: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = ways(monkeypatch, **changes)
    assert found.quantizes_activations(tokens, dtype, torch.device(device)) is quantize_activations
    wanted = changes.get("quantize_activations", True) and not changes.get("invariant", False)
    assert found.any.quantize_activations is wanted


def test_no_number_of_tokens_lies_between_the_ways() -> None:
    """Such a number would have kernels of its own, of which the warm-up knows nothing."""
    assert w8a8.MIN_TOKENS_W8A8 == w8a8.MIN_TOKENS_W8A8_EXPERTS == MOST_FP8 + 1


def test_a_context_without_w8a8(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ways(monkeypatch)
    never = ways(monkeypatch, quantize_activations=False)
    with found.without_w8a8(), never.without_w8a8():
        assert not found.any.quantize_activations
    assert found.any.quantize_activations
    assert not never.any.quantize_activations
    with pytest.raises(KeyError), found.without_w8a8():
        raise KeyError
    assert found.any.quantize_activations


def test_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All products with FP8 weights outside of experts; how far off that makes it."""
    quantized, twin = models.checkpoints(tmp_path)
    want, made = models.exact(twin), []
    product = w8a8.w8a8_linear
    monkeypatch.setattr(w8a8, "w8a8_linear", lambda *a: (made.append(a[2].shape), product(*a)))
    kept_T = models.errors(quantized, want.device, want, quantize_activations=False)
    assert not made
    rounded_T = models.errors(quantized, want.device, want, quantize_activations=True)
    attention, network = [(640, 512), (512, 512), (512, 512)], [(1024, 512), (512, 512)]
    assert made == [*attention, *network, *attention, *attention]
    # The rounding of bf16 is 32 times as fine; its results are rounded more often.
    assert 2 * kept_T.median() < rounded_T.median() < 12 * kept_T.median()
