"""Shared experts, kept in units behind the routed ones, against the one network that a checkpoint makes of them, in
double precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from paged import CPU
from random_model import V2_LITE_HEADS
from torch import Tensor

from kernels.rms_norm import AddNorm
from workers.families.registry import parse_config
from workers.memory.scratch import Scratch
from workers.models import feed_forward
from workers.models.config import ModelConfig
from workers.models.feed_forward import MixtureOfExperts
from workers.models.general import GeneralOps
from workers.models.invariant import DeterministicOps
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh
from workers.weights.part import Part, Shard
from workers.weights.source import Shape, WeightSource

HIDDEN, WIDTH, EXPERTS = 48, 64, 8


class Tensors(WeightSource):
    """A checkpoint in memory, as one rank of a group reads it."""

    def __init__(self, tensors: dict[str, Tensor], mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__(mesh, dtype, CPU)
        self.tensors = tensors
        self.read: dict[str, Tensor] = {}
        """Number of times that each number was read."""

    def fill_part(self, into: Tensor, name: str, shape: Shape, index: tuple[slice, ...]) -> None:
        tensor = self.tensors[name]
        assert tuple(tensor.shape) == shape, name
        self.read.setdefault(name, torch.zeros(shape))[index] += 1
        into.copy_(tensor[index])

    def progress(self, text: str) -> None:
        """Says nothing."""


def checkpoint(shared: int) -> dict[str, Tensor]:
    """Random numbers that bf16 holds."""
    torch.manual_seed(shared)
    sizes = {f"experts.{expert}": WIDTH for expert in range(EXPERTS)}
    if shared:
        sizes["shared_experts"] = shared * WIDTH
    tensors = {"gate.weight": torch.randn(EXPERTS, HIDDEN)}
    for name, width in sizes.items():
        tensors[f"{name}.gate_proj.weight"] = torch.randn(width, HIDDEN) * HIDDEN**-0.5
        tensors[f"{name}.up_proj.weight"] = torch.randn(width, HIDDEN) * HIDDEN**-0.5
        tensors[f"{name}.down_proj.weight"] = torch.randn(HIDDEN, width) * WIDTH**-0.5
    return {name: tensor.bfloat16().float() for name, tensor in tensors.items()}


def config(shared: int) -> ModelConfig:
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "n_routed_experts": EXPERTS}
    return parse_config(V2_LITE_HEADS | sizes | {"n_shared_experts": shared})


def network(tensors: dict[str, Tensor], name: str, x_TE: Tensor) -> Tensor:
    gate, up, down = (tensors[f"{name}.{part}_proj.weight"].double() for part in ("gate", "up", "down"))
    return (F.silu(x_TE @ gate.T) * (x_TE @ up.T)) @ down.T


def wanted(tensors: dict[str, Tensor], x_TE: Tensor) -> Tensor:
    """The published model's mixture: softmax, the three best, and the shared network for every token."""
    x_TE = x_TE.double()
    score_TX = (x_TE @ tensors["gate.weight"].double().T).softmax(-1)
    weight_TK, id_TK = score_TX.topk(3)
    out_TE = torch.zeros_like(x_TE)
    for expert in range(EXPERTS):
        weight_T1 = (weight_TK * (id_TK == expert)).sum(1, keepdim=True)
        out_TE += weight_T1 * network(tensors, f"experts.{expert}", x_TE)
    if "shared_experts.gate_proj.weight" in tensors:
        out_TE += network(tensors, "shared_experts", x_TE)
    return out_TE


def computed(
    tensors: dict[str, Tensor],
    x_TE: Tensor,
    mesh: Mesh,
    kind: type[GeneralOps] = GeneralOps,
    behind: int | None = None,
    **live: Any,
) -> tuple[Tensor, Tensors]:
    """Compute this rank's part of the sum: on an empty residual stream the stream itself, and its norm what is given
    on. `behind`: shared experts kept behind the routed ones, if not all."""
    source = Tensors(tensors, mesh, x_TE.dtype)
    shared = tensors.get("shared_experts.up_proj.weight", torch.empty(0)).shape[0] // WIDTH
    experts = MixtureOfExperts(source, "", config(shared))
    units = shared if behind is None else behind
    assert experts.mixture.gate_up_XFE.shape == (EXPERTS + units, 2 * WIDTH // mesh.experts.size, HIDDEN)
    sum_TE, out_TE = torch.zeros_like(x_TE), torch.full_like(x_TE, torch.nan)
    norm = AddNorm(sum_TE, torch.linspace(0.5, 2, HIDDEN, dtype=x_TE.dtype), 1e-6)
    kind(Group()).add_experts(x_TE, experts.mixture, norm, out_TE, Scratch(CPU), **({"live_R": None} | live))
    torch.testing.assert_close(
        out_TE, F.rms_norm(sum_TE.float(), (HIDDEN,), norm.weight_E.float(), 1e-6).to(x_TE.dtype)
    )
    return sum_TE, source


@pytest.mark.parametrize("kind", [GeneralOps, DeterministicOps])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", [0, 1, 2, 3])
def test_units_are_the_network(shared: int, dtype: torch.dtype, kind: type[GeneralOps]) -> None:
    tensors = checkpoint(shared)
    x_TE = torch.randn(50, HIDDEN).to(dtype)
    got, want = computed(tensors, x_TE, Mesh(), kind)[0], wanted(tensors, x_TE)
    error = (got.double() - want).norm(dim=1) / want.norm(dim=1)
    # bf16: activations, at times experts' results, and the sum are rounded to 8 bits; fp32: sums of a hundred terms.
    assert float(error.max()) < (2**-7 if dtype == torch.bfloat16 else 2e-6)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("shared", [0, 1, 2, 3])
def test_ranks_shares_add_up_to_the_network(shared: int, size: int) -> None:
    """The ranks together read every number of the experts once."""
    tensors = checkpoint(shared)
    x_TE = torch.randn(50, HIDDEN)
    sum_TE, read = torch.zeros(50, HIDDEN, dtype=torch.float64), dict.fromkeys(tensors, torch.zeros(()))
    for rank in range(size):
        part_TE, source = computed(tensors, x_TE, Mesh.of(rank, size))
        sum_TE += part_TE
        read = {name: read[name] + source.read[name] for name in tensors}
    torch.testing.assert_close(sum_TE, wanted(tensors, x_TE), rtol=1e-5, atol=1e-5)
    for name, times in read.items():
        assert bool((times == (size if name == "gate.weight" else 1)).all()), name


@pytest.mark.parametrize("shared", [1, 2])
def test_padding_wakes_no_shared_expert(shared: int) -> None:
    tensors = checkpoint(shared)
    x_TE = torch.randn(6, HIDDEN)
    x_TE[2:4] = torch.nan
    live_R = torch.tensor([1, 0, 1])
    got, _ = computed(tensors, x_TE, Mesh(), live_R=live_R)
    alive = live_R.repeat_interleave(2) > 0
    assert bool((got[~alive] == 0).all())
    torch.testing.assert_close(got[alive].double(), wanted(tensors, x_TE[alive]), rtol=1e-5, atol=1e-5)


def test_a_part_that_does_not_exist_is_refused() -> None:
    rows = Shard(0, "experts")
    for part in ({"shard": rows, "unit": 2, "units": 2}, {"shard": rows, "unit": -1, "units": 2}, {"units": 2}):
        with pytest.raises(ValueError, match=r"w: part -?\d of 2 of dimension (0|None) does not exist"):
            Part("w", 4, 3, **part)


@pytest.mark.parametrize("kind", [GeneralOps, DeterministicOps])
@pytest.mark.parametrize("shared", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2])
def test_shared_experts_of_another_format_are_a_network_of_their_own(
    size: int, shared: int, kind: type[GeneralOps], monkeypatch: pytest.MonkeyPatch
) -> None:
    """INT4 experts stand beside shared ones in bf16: the sum is the same, and every number is read once."""
    monkeypatch.setattr(feed_forward, "_apart", lambda *_: True)
    tensors = checkpoint(shared)
    x_TE = torch.randn(50, HIDDEN)
    sum_TE, read = torch.zeros_like(x_TE), {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for rank in range(size):
        part_TE, source = computed(tensors, x_TE, Mesh.of(rank, size), kind, behind=0)
        sum_TE += part_TE
        read = {name: read[name] + source.read[name] for name in tensors}
    torch.testing.assert_close(sum_TE.double(), wanted(tensors, x_TE), rtol=1e-5, atol=1e-5)
    for name, times in read.items():
        assert bool((times == (size if name == "gate.weight" else 1)).all()), name
