"""The routings that the benchmark of the experts times; times need a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.moe.schedule import ExpertsShape


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
