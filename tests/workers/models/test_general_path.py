"""Launches of the products of many tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from random_model import V2_LITE_HEADS

from kernels import moe
from kernels.matrix import BlockScaled
from kernels.rms_norm import AddNorm
from workers.families.registry import parse_config
from workers.memory.scratch import Scratch
from workers.models import general, w8a8
from workers.models.general import DecodeOps, GeneralOps
from workers.models.invariant import DeterministicOps
from workers.models.layer_ops import Gated, Mixture
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh
from workers.weights.weight import Weight


@pytest.mark.parametrize("able", [False, True])
def test_experts_are_launched_dependently_where_the_device_can(able: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launches are those that bench/moe.py times."""
    asked = []
    monkeypatch.setattr(general, "launches_dependently", lambda device: able)
    monkeypatch.setattr(moe, "experts", lambda *_, dependent, **__: asked.append(dependent))
    x_TE, id_TK = torch.zeros(2, 16), torch.zeros(2, 1, dtype=torch.int64)
    router_XE, gate_up_XFE, down_XEI = (Weight(torch.zeros(shape)) for shape in ((1, 16), (1, 32, 16), (1, 16, 16)))
    mixture = Mixture(parse_config(V2_LITE_HEADS).routing, router_XE, None, gate_up_XFE, down_XEI)
    norm = AddNorm(torch.zeros(2, 16), torch.ones(16), 1e-6)
    choice, out_TE = (id_TK, torch.ones(2, 1)), torch.zeros(2, 16)
    GeneralOps(Group()).experts(x_TE, *choice, mixture, norm, out_TE, Scratch(x_TE.device))
    assert asked == [able]


@pytest.mark.parametrize(
    ("quantize_activations", "tokens", "want"),
    [
        (False, 100, False),
        (True, w8a8.MIN_TOKENS_W8A8_EXPERTS, True),
        (True, w8a8.MIN_TOKENS_W8A8_EXPERTS - 1, False),
    ],
)
def test_experts_are_told_whether_they_may_quantize(
    quantize_activations: bool, tokens: int, want: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(moe, "experts", lambda *_, quantize_activations, **__: asked.append(quantize_activations))
    x_TE, id_TK = torch.zeros(tokens, 16), torch.zeros(tokens, 1, dtype=torch.int64)
    router_XE, gate_up_XFE, down_XEI = (Weight(torch.zeros(shape)) for shape in ((1, 16), (1, 32, 16), (1, 16, 16)))
    mixture = Mixture(parse_config(V2_LITE_HEADS).routing, router_XE, None, gate_up_XFE, down_XEI)
    norm = AddNorm(torch.zeros(tokens, 16), torch.ones(16), 1e-6)
    ops, choice = GeneralOps(Group(), quantize_activations=quantize_activations), (id_TK, torch.ones(tokens, 1))
    ops.experts(x_TE, *choice, mixture, norm, torch.zeros(tokens, 16), Scratch(x_TE.device))
    assert asked == [want]


@pytest.mark.parametrize(
    ("kind", "ranks", "want"), [(DecodeOps, 1, 5), (DecodeOps, 2, 0), (GeneralOps, 1, 0), (DeterministicOps, 1, 0)]
)
def test_sums_are_left_in_parts_where_nobody_else_needs_them(
    kind: type[GeneralOps], ranks: int, want: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All-reduce needs a sum, and invariant mode has an order of its own."""
    monkeypatch.setattr(general, "parts_of", lambda tokens, weight_FE: 5)
    own = kind(Group(Mesh.of(0, ranks)))
    assert own.parts(17, Weight(torch.zeros(2, 2))) == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "tokens", "stored"),
    [
        *((DecodeOps, 8, True), (GeneralOps, 1, True), (GeneralOps, 8, True), (GeneralOps, 9, False)),
        (DeterministicOps, 1, False),
    ],
)
def test_few_tokens_are_multiplied_by_fp8_weights_as_they_are_stored(
    kind: type[GeneralOps], tokens: int, stored: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In invariant mode they are dequantized, as for many tokens. Scales are powers of two, as DeepSeek V4 has them."""
    random, widened = torch.Generator().manual_seed(tokens), []
    data = torch.randn(200, 256, generator=random).to(torch.float8_e4m3fn)
    scales = torch.exp2(torch.randint(-9, 3, (2, 2), generator=random).float())
    honest = general.dequantize
    monkeypatch.setattr(general, "dequantize", lambda *given: widened.append(honest(*given)))
    x_TE, out_TF = torch.randn(tokens, 256, generator=random).to(dtype), torch.empty(tokens, 200, dtype=dtype)
    kind(Group()).linear(x_TE, Weight(BlockScaled(data, scales)), out_TF, Scratch(x_TE.device))
    assert bool(widened) != stored
    scale_FE = scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)
    want = x_TE.double() @ (data.double() * scale_FE.double()).T
    torch.testing.assert_close(out_TF.double(), want, rtol=2**-8, atol=1e-3 * float(want.abs().max()))


@pytest.mark.parametrize("kind", [GeneralOps, DeterministicOps])
@pytest.mark.parametrize("tokens", [1, 8, 9])
def test_products_with_fp8_weights_in_a_pass_of_fp64_are_summed_in_fp64(kind: type[GeneralOps], tokens: int) -> None:
    """Such a pass is what others are held against, however few its tokens are. Scales are powers of two, so that
    nothing is rounded before."""
    random = torch.Generator().manual_seed(tokens)
    data = torch.randn(200, 256, generator=random).to(torch.float8_e4m3fn)
    scales = torch.exp2(torch.randint(-9, 3, (2, 2), generator=random).float())
    x_TE = torch.randn(tokens, 256, generator=random, dtype=torch.float64)
    out_TF = torch.empty(tokens, 200, dtype=torch.float64)
    kind(Group()).linear(x_TE, Weight(BlockScaled(data, scales)), out_TF, Scratch(x_TE.device))
    scale_FE = scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)
    want = x_TE @ (data.double() * scale_FE.double()).T
    torch.testing.assert_close(out_TF, want, rtol=0.0, atol=1e-13 * float(want.abs().max()))


@pytest.mark.parametrize("path", [GeneralOps, DeterministicOps])
def test_shared_experts_of_their_own_are_summed_over_ranks_with_the_others(
    path: type[GeneralOps], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, but in invariant mode. Two ranks with the same weights add what one does whose results are doubled."""
    torch.manual_seed(0)
    sums: list[torch.Tensor] = []

    def doubled(self: Group, part: torch.Tensor, out: torch.Tensor) -> None:
        if self.summed.size > 1:
            sums.append(out)
            out.copy_(2 * part)

    def added(self: Group, part: torch.Tensor, parts: torch.Tensor, out: torch.Tensor) -> None:
        doubled(self, part, out)

    monkeypatch.setattr(Group, "all_reduce", doubled)
    monkeypatch.setattr(Group, "ordered_sum", added)
    x_TE, norm_E = torch.randn(3, 16), torch.rand(16) + 0.5

    def mixture(factor: float) -> Mixture:
        random = torch.Generator().manual_seed(1)
        shapes = ((8, 16), (8, 32, 16), (8, 16, 16), (32, 16), (16, 16))
        router, gate_up, down, own_gate_up, own_down = (torch.randn(shape, generator=random) for shape in shapes)
        own = Gated(Weight(own_gate_up), Weight(factor * own_down))
        routing = replace(parse_config(V2_LITE_HEADS).routing, shared_experts=0)
        return Mixture(routing, Weight(router), None, Weight(gate_up), Weight(factor * down), own)

    found = []
    for ranks, factor in ((1, 2.0), (2, 1.0)):
        norm, out = AddNorm(torch.ones(3, 16), norm_E, 1e-6), torch.empty(3, 16)
        path(Group(Mesh.of(0, ranks))).add_experts(x_TE, mixture(factor), norm, out, Scratch(x_TE.device), None)
        found.append((norm.residual_TE, out))
        if ranks == 2:
            assert len(sums) == (1 if path is GeneralOps else 2)
        sums.clear()
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


def test_clamped_shared_experts_are_what_the_routed_ones_are_added_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call sums both, in float32, where there is one residual stream as well."""
    random = torch.Generator().manual_seed(1)
    shapes = ((8, 16), (8, 32, 16), (8, 16, 16), (32, 16), (16, 16), (3, 16))
    router, gate_up, down, own_gate_up, own_down, x_TE = (torch.randn(shape, generator=random) for shape in shapes)
    own = Gated(Weight(own_gate_up), Weight(own_down))
    routing = replace(parse_config(V2_LITE_HEADS).routing, shared_experts=0, limit=0.5, shared_limit=True)
    mixture = Mixture(routing, Weight(router), None, Weight(gate_up), Weight(down), own)
    norm, out, added = AddNorm(torch.zeros(3, 16), torch.ones(16), 1e-6), torch.empty(3, 16), []
    ops, scratch, honest = GeneralOps(Group()), Scratch(x_TE.device), moe.experts

    def experts(*given: torch.Tensor, before_TE: torch.Tensor | None = None, **more: Any) -> None:
        added.append(before_TE is not None)
        honest(*given, before_TE=before_TE, **more)

    monkeypatch.setattr(moe, "experts", experts)
    ops.add_experts(x_TE, mixture, norm, out, scratch, None)
    assert added == [True]

    def network(x_TE: torch.Tensor, gate_up_FE: torch.Tensor, down_EI: torch.Tensor) -> torch.Tensor:
        gate, up = (x_TE.double() @ gate_up_FE.double().T).chunk(2, -1)
        return (F.silu(gate.clamp(max=0.5)) * up.clamp(-0.5, 0.5)) @ down_EI.double().T

    want = network(x_TE, own_gate_up, own_down)
    for token, (ids, weights) in enumerate(zip(*ops.route(x_TE, mixture, scratch), strict=True)):
        for expert, weight in zip(ids.tolist(), weights.tolist(), strict=True):
            want[token] += weight * network(x_TE[token], gate_up[expert], down[expert])
    torch.testing.assert_close(norm.residual_TE.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.double(), F.rms_norm(want, (16,), eps=1e-6), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 8, 9])
@pytest.mark.parametrize("kind", [GeneralOps, DecodeOps, DeterministicOps])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_products_behind_a_latent(kind: type[GeneralOps], dtype: torch.dtype, tokens: int) -> None:
    """The latent's norm, which is pending between few tokens' products with FP8 weights, and what is made beside it."""
    random = torch.Generator().manual_seed(tokens)

    def matrix(rows: int, features: int) -> Weight:
        data = torch.randn(rows, features, generator=random).to(torch.float8_e4m3fn)
        scales = torch.exp2(torch.randint(-9, 3, (rows // 16, features // 128), generator=random).float())
        return Weight(BlockScaled(data, scales, 16, 128))

    down, asked = matrix(144, 256), [matrix(96, 128), matrix(32, 128)]
    x, norm = torch.randn(tokens, 256, generator=random).to(dtype), torch.randn(128, generator=random).to(dtype)
    latent = torch.full((tokens, 144), torch.nan, dtype=dtype)
    outs = [torch.full((tokens, weight.shape[0]), torch.nan, dtype=dtype) for weight in asked]
    kind(Group()).through_latent(x, down, norm, 1e-5, latent, list(zip(asked, outs, strict=True)), Scratch(x.device))
    made = x.double() @ down.matrix.float().double().T
    normed = F.rms_norm(made[:, :128], (128,), norm.double(), 1e-5)
    bound = {torch.bfloat16: 2**-7, torch.float32: 1e-6, torch.float64: 1e-12}[dtype]
    wanted = [normed @ weight.matrix.float().double().T for weight in asked]
    for got, want in zip([latent[:, 128:], *outs], [made[:, 128:], *wanted], strict=True):
        assert float((got.double() - want).norm() / want.norm()) < bound
