"""Shares of the experts in invariant mode: those of two, four and eight ranks add up to the sums of one, bit for bit.

Every share is loaded here by itself, so one GPU is enough; what ranks then do with their sums other tests try, on as
many GPUs as there are ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels import moe
from tests.quantized_checkpoints import FP8_NAMES, INT4_NAMES, quantize
from tests.tiny_models import write_tiny
from workers.config import DEMO_MODEL
from workers.families import load_model
from workers.models.feed_forward import MixtureOfExperts
from workers.models.invariant import GROUPS
from workers.parallel.group import Group
from workers.parallel.mesh import INVARIANT_RANKS, Mesh
from workers.weights.formats import PLAIN

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]
TOKENS = 37


@dataclass(frozen=True)
class Alone(Group):
    """One rank, of several that are not there."""

    def minimum(self, x: Tensor) -> Tensor:
        """Return what this rank has."""
        return x


@pytest.fixture(scope="module", params=["plain", "fp8", "int4", "fp8, wide", "int4, wide"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model; and models of whose quantized experts 8 ranks cannot share one, or can."""
    form, _, wide = request.param.partition(", ")
    if form == "plain":
        return DEMO_MODEL
    made = tmp_path_factory.mktemp(form + wide)
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 64}
    write_tiny(made, "v3", seed=3, moe_intermediate_size=512 if wide else 128, **sizes)
    quantize(made, form, FP8_NAMES if form == "fp8" else INT4_NAMES)
    return made


def sums(folder: Path, rank: int, ranks: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Compute this rank's share of every layer's experts for some tokens, [T, G, E] a layer."""
    model = load_model(
        folder,
        group=Alone(Mesh.of(rank, ranks)),
        dtype=dtype,
        device=device,
        max_positions=128,
        invariant=True,
        progress=None,
    )
    choose = torch.Generator().manual_seed(7)
    found = []
    for layer in model.layers:
        if not isinstance(layer.feed_forward, MixtureOfExperts):
            continue
        weights = layer.feed_forward.mixture.gate_up_XFE, layer.feed_forward.mixture.down_XEI
        assert all((weight.format is not PLAIN) == ("wide" in folder.name) for weight in weights)
        gate_up_XFE, down_XEI = (weight.matrix for weight in weights)
        experts, hidden = down_XEI.shape[:2]
        x_TE = torch.randn(TOKENS, hidden, generator=choose).to(device, dtype)
        id_TK = torch.rand(TOKENS, experts, generator=choose).argsort(dim=1)[:, :3].to(device)
        weight_TK = torch.rand(TOKENS, 3, generator=choose).to(device)
        part_TGE = torch.zeros(TOKENS, GROUPS // ranks, hidden, device=device)
        moe.add_experts(x_TE, id_TK, weight_TK, gate_up_XFE, down_XEI, part_TGE)
        found.append(part_TGE)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_shares_add_up_to_the_bits_of_one(folder: Path, device: str, dtype: torch.dtype) -> None:
    want = sums(folder, 0, 1, torch.device(device), dtype)
    assert len(want) >= 2
    for ranks in INVARIANT_RANKS[1:]:
        shares = [sums(folder, rank, ranks, torch.device(device), dtype) for rank in range(ranks)]
        for whole, *parts in zip(want, *shares, strict=True):
            assert whole.abs().amax() > 0
            assert torch.equal(torch.cat(parts, dim=1), whole), f"{ranks} ranks"
