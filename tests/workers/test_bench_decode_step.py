"""The benchmark of decode steps builds its steps and runs them; what it times needs a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from workers.scratch import Scratch

FILE = Path(__file__).parents[2] / "bench" / "decode_step.py"
SMALL: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
}


@pytest.mark.parametrize("width", [1, 3])
@torch.inference_mode()
def test_a_step_runs_and_moves_on(width: int) -> None:
    spec = importlib.util.spec_from_file_location("bench_decode_step", FILE)
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    cpu = torch.device("cpu")
    case = bench.Case(bench.model_of(bench.V2_LITE | SMALL, width, torch.float32, cpu), 2, width, 100)
    output = case.step(Scratch(cpu)).run()
    accepted = output.decided_N[2 * width : -1]
    assert torch.equal(case.state.tensors.length_S[:2], 100 - width + 1 + accepted)
    assert int(output.decided_N[-1]) == 0
    case.rewind()
    assert case.state.tensors.length_S[:2].tolist() == [100 - width] * 2
    # One of the two layers has experts, each of three matrices.
    assert bench.floor_bytes(case, 3) - bench.floor_bytes(case, 2) == 4 * 3 * 64 * 32
