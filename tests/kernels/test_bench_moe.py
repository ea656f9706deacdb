"""The routings that the benchmark of the experts times, and the tiles it can try; times need a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.moe.schedule import PRODUCTS, ExpertsShape, Product

pytestmark = pytest.mark.soak


@pytest.mark.parametrize(("rows", "others"), [(16, 16), (32, 64), (128, 128)])
def test_tiles_of_any_height_can_be_tried(rows: int, others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    import moe as bench

    product = Product(64, 32, 2, 4)
    tiling = bench.with_product(ExpertsShape(40, 3, 16, 2048, 1408), "down", rows, product)
    assert (tiling.rows, tiling.gate_up, tiling.down) == (rows, PRODUCTS[others][0], product)


@pytest.mark.parametrize("shared", [0, 1, 2])
def test_every_token_has_the_shared_experts_and_chooses_the_others(
    shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    import moe as bench

    shape = ExpertsShape(40, 3 + shared, 16 + shared, 32, 16, shared=shared)
    gate_up, down = torch.randn(shape.experts, 32, 32).bfloat16(), torch.randn(shape.experts, 32, 16).bfloat16()
    case = bench.problem(shape, gate_up, down)
    for id in case.ids:
        assert (id[:, 3:] == torch.arange(16, 16 + shared)).all()
        assert all(len({*row}) == 3 and max(row) < 16 for row in id[:, :3].tolist())
        assert len(id[:, :3].unique()) > 12
    assert 12 + shared < case.active <= 16 + shared
