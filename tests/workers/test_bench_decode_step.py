"""The benchmark of decode steps builds its steps and runs them; what it times needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.workers.bench_shapes import SMALL
from workers.memory.scratch import Scratch


@pytest.mark.parametrize("width", [1, 3])
@torch.inference_mode()
def test_a_step_runs_and_moves_on(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    import decode_step as bench

    cpu = torch.device("cpu")
    model = bench.model_of(bench.V2_LITE | SMALL, width, torch.float32, cpu)
    case = bench.Case(model, 2, width, 100, room=8)
    output = case.step(Scratch(cpu)).run()
    accepted = output.decided_N[2 * width : 2 * width + 2]
    assert torch.equal(case.state.tensors.length_S[:2], 100 - width + 1 + accepted)
    assert int(output.decided_N[-1]) == 0
    case.rewind()
    assert case.state.tensors.length_S[:2].tolist() == [100 - width] * 2
