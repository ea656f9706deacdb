"""bench/generated.py makes a checkpoint of DeepSeek V4, whose matrices are in MXFP4 and FP8, as its layers load it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.families.loading import load_model
from workers.families.registry import load_config
from workers.models.deepseek_v4_model import CompressedModel
from workers.parallel.group import Group
from workers.protocol.plan import SamplingParams
from workers.weights.formats import FP8_BLOCKS, MXFP4

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"vocab_size": 160, "hidden_size": 128, "moe_intermediate_size": 64, "num_attention_heads": 4, "head_dim": 64}
SIZES |= {"qk_rope_head_dim": 16, "q_lora_rank": 64, "o_groups": 2, "o_lora_rank": 32, "index_n_heads": 4}
SIZES |= {"index_head_dim": 32, "index_topk": 8, "n_routed_experts": 16, "num_experts_per_tok": 2}


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "bench")
    import generated

    return generated


def test_a_slice_of_v4_is_read_and_generates(generated: ModuleType, tmp_path: Path) -> None:
    values = generated.first_layers(generated.V4_FLASH | SIZES, 4)
    generated.write_folder(values, generated.GENERATED["v4-flash"][1], tmp_path, size=1 << 17)
    config = load_config(tmp_path)
    assert config.compression is not None
    assert [layer.ratio for layer in config.compression.layers] == [0, 0, 4, 128]
    assert config.draft_layers == 1
    given = EngineConfig(model=str(tmp_path), device="cpu", drafter="mtp", width=2, max_rows=2, max_context=256)
    with generated.installed():
        engine = InlineEngine(given, torch.device("cpu"))
    model = engine.runner.parts.model
    assert isinstance(model, CompressedModel)
    experts = model.blocks[0].experts
    assert experts.gate_up_XFE.format is MXFP4
    assert model.blocks[0].attention.q_down_AE.format is FP8_BLOCKS
    assert experts.expert_YK is not None
    assert 0 <= int(experts.expert_YK.min()) <= int(experts.expert_YK.max()) < 16
    assert len(experts.expert_YK.unique()) == 16
    (tokens,) = engine.generate([[1, 2, 3] * 50], SamplingParams(4, temperature=0.0))
    assert len(tokens) == 4
    assert engine.scheduler.stats().bad_rows == 0


def test_bytes_of_a_step_are_those_of_the_experts_it_wakes(generated: ModuleType, tmp_path: Path) -> None:
    import shapes

    values = generated.first_layers(generated.V4_FLASH | SIZES, 4)
    generated.write_folder(values, generated.GENERATED["v4-flash"][1], tmp_path, size=1 << 17)
    with generated.installed():
        model = load_model(tmp_path, group=Group(), dtype=torch.bfloat16, device=torch.device("cpu"), max_positions=256)
    expert = 3 * 64 * 128 // 2 + 3 * 64 * 128 // 32
    assert shapes.weight_bytes(model, 6) - shapes.weight_bytes(model, 4) == 4 * 2 * expert
    attention = 64 * 128 + 4 * 64 * 64 + 64 * 128 + 2 * 32 * 2 * 64 + 128 * 2 * 32
    assert shapes.weight_bytes(model, 0) > 160 * 128 * 2 + 4 * (attention + 3 * 64 * 128)
