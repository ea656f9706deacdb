"""How products are launched."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kernels import moe
from kernels.moe import AddNorm
from workers.memory.scratch import Scratch
from workers.models import products
from workers.models.products import InvariantProducts, Mixture, Products
from workers.parallel.group import TensorParallel
from workers.weights.weight import Weight


@pytest.mark.parametrize("able", [False, True])
def test_experts_are_launched_dependently_where_the_device_can(able: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As bench/moe.py times them."""
    asked = []
    monkeypatch.setattr(products, "launches_dependently", lambda device: able)
    monkeypatch.setattr(moe, "experts", lambda *_, dependent, **__: asked.append(dependent))
    x_TE, id_TK = torch.zeros(2, 16), torch.zeros(2, 1, dtype=torch.int64)
    mixture = Mixture(id_TK, torch.ones(2, 1), Weight(torch.zeros(1, 32, 16)), Weight(torch.zeros(1, 16, 16)))
    norm = AddNorm(torch.zeros(2, 16), torch.ones(16), 1e-6)
    Products(TensorParallel()).experts(x_TE, mixture, norm, torch.zeros(2, 16), Scratch(x_TE.device))
    assert asked == [able]


@pytest.mark.parametrize(("kind", "ranks", "want"), [(Products, 1, 5), (Products, 2, 0), (InvariantProducts, 1, 0)])
def test_sums_are_left_in_parts_where_nobody_else_needs_them(
    kind: type[Products], ranks: int, want: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All-reduce needs a sum, and invariant mode has an order of its own."""
    monkeypatch.setattr(products, "parts_of", lambda tokens, weight_FE: 5)
    own = kind(TensorParallel())
    monkeypatch.setattr(own, "group", SimpleNamespace(size=ranks))
    assert own.parts(17, Weight(torch.zeros(2, 2))) == want
