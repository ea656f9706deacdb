"""Sums of products, against double precision."""

from __future__ import annotations

import pytest
import torch

from kernels import moe
from workers.models import products
from workers.models.products import Experts, Products
from workers.parallel import TensorParallel
from workers.scratch import Scratch


def test_shared_experts_are_added_without_a_rounding_of_their_own() -> None:
    """And without memory: a sum of its own would be written, read and added by one more kernel of every layer."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    x_TE, gate_up_XFE, down_XEI = random(50, 64), random(4, 64, 64), random(4, 64, 32)
    shared_TI, shared_EI = random(50, 96), random(64, 96)
    id_TK = torch.rand(50, 4, generator=generator).argsort(1)[:, :2]
    weight_TK = torch.rand(50, 2, generator=generator)
    routed_TE, out_TE = torch.empty(2, 50, 64, dtype=torch.bfloat16)
    scratch = Scratch(torch.device("cpu"))
    weights = (id_TK, weight_TK, gate_up_XFE, down_XEI)
    Products(TensorParallel()).experts(x_TE, Experts(*weights, None, None), routed_TE, scratch)
    Products(TensorParallel()).experts(x_TE, Experts(*weights, shared_TI, shared_EI), out_TE, scratch)
    wanted_TE = (routed_TE.double() + shared_TI.double() @ shared_EI.double().t()).bfloat16()
    # fp32 may fall on the other side of the middle between two bf16 numbers, which two roundings do for a tenth of all.
    assert (out_TE == wanted_TE).float().mean() > 0.99
    assert torch.allclose(out_TE.float(), wanted_TE.float(), rtol=2**-7)
    assert scratch.peak == 0


@pytest.mark.parametrize("able", [False, True])
def test_experts_are_launched_dependently_where_the_device_can(able: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As bench/moe.py times them."""
    asked = []
    monkeypatch.setattr(products, "launches_dependently", lambda device: able)
    monkeypatch.setattr(moe, "experts", lambda *_, dependent, **__: asked.append(dependent))
    x_TE, id_TK = torch.zeros(2, 16), torch.zeros(2, 1, dtype=torch.int64)
    mixture = Experts(id_TK, torch.ones(2, 1), torch.zeros(1, 32, 16), torch.zeros(1, 16, 16), None, None)
    Products(TensorParallel()).experts(x_TE, mixture, torch.zeros(2, 16), Scratch(x_TE.device))
    assert asked == [able]
