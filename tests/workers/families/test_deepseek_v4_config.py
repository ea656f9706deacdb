"""What a config.json of DeepSeek V4 says, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_v4_layout import TINY, YARN, mtp_v4, published_v4, tiny_v4, write_v4
from published_configs import V4_FLASH, V4_PRO
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

from workers.config import EngineConfig
from workers.families.loading import load_model
from workers.families.registry import parse_config
from workers.fit.settings import Unfit, check_fit
from workers.models.config import CompressedLayer, ConfigError
from workers.models.rope import frequencies
from workers.parallel.group import Group

WINDOW, SPARSE, HEAVY = CompressedLayer(0), CompressedLayer(4, indexed=True), CompressedLayer(128)


def test_reads_flash() -> None:
    config = parse_config(V4_FLASH)
    compression, routing, streams = config.compression, config.routing, config.streams
    assert compression is not None
    assert routing is not None
    assert streams is not None
    assert compression.layers == (WINDOW, WINDOW, *(SPARSE, HEAVY) * 20, SPARSE)
    assert [compression.layers.count(kind) for kind in (WINDOW, SPARSE, HEAVY)] == [2, 21, 20]
    assert (config.num_layers, config.num_heads, config.cache_width, config.qk_rope_head_dim) == (43, 64, 512, 64)
    assert (compression.window, compression.top_k, compression.output_groups, compression.output_rank) == (
        128,
        512,
        8,
        1024,
    )
    assert (routing.experts, routing.experts_per_token, routing.hash_layers, routing.limit) == (256, 6, 3, 10.0)
    assert (routing.rule.scoring, routing.rule.scale, routing.rule.normalize) == ("sqrt_softplus", 1.5, True)
    assert (streams.count, streams.magnitude, streams.mixing_steps) == (4, 2.0, 20)
    assert (config.draft_layers, config.max_positions, config.eos_ids) == (1, 1048576, (1,))


def test_reads_pro() -> None:
    config = parse_config(V4_PRO)
    assert config.compression is not None
    assert config.compression.layers == (HEAVY, HEAVY, *(SPARSE, HEAVY) * 29, SPARSE)
    assert [config.compression.layers.count(kind) for kind in (WINDOW, SPARSE, HEAVY)] == [0, 30, 31]
    assert (config.num_heads, config.hidden_size, config.q_lora_rank) == (128, 7168, 1536)


@pytest.mark.parametrize("values", [V4_FLASH, V4_PRO], ids=["flash", "pro"])
def test_written_by_transformers_it_reads_the_same(values: dict[str, Any], tmp_path: Path) -> None:
    rope = {name: value for name, value in values["rope_scaling"].items() if name != "type"} | {"rope_type": "yarn"}
    given = {name: value for name, value in values.items() if name not in ("rope_scaling", "model_type")}
    given["compress_ratios"] = given["compress_ratios"][: given["num_hidden_layers"]]
    DeepseekV4Config(**given, rope_parameters=rope).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert {"compress_rates", "layer_types", "mlp_layer_types"} <= {*written}
    assert parse_config(written) == parse_config(values)


@pytest.mark.parametrize("scaling", [None, YARN])
def test_ropes_are_those_of_transformers(scaling: dict[str, Any] | None) -> None:
    values = TINY if scaling is None else {**TINY, "rope_scaling": scaling}
    _, model = tiny_v4(**({} if scaling is None else {"rope_scaling": scaling}))
    embedding = model.model.rotary_emb
    assert isinstance(embedding, DeepseekV4RotaryEmbedding)
    config = parse_config({**values, "model_type": "deepseek_v4"})
    assert config.compression is not None
    for rope, name in ((config.rope, "main"), (config.compression.rope, "compress")):
        frequency_I, magnitude = frequencies(rope, config.qk_rope_head_dim)
        torch.testing.assert_close(frequency_I, getattr(embedding, f"{name}_inv_freq"), rtol=1e-6, atol=0)
        assert magnitude == getattr(embedding, f"{name}_attention_scaling") == 1.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 64}, ["num_key_value_heads"]),
        ({"scoring_func": "sigmoid"}, ["scoring_func", "sqrtsoftplus"]),
        ({"norm_topk_prob": False}, ["norm_topk_prob"]),
        ({"n_shared_experts": 2}, ["n_shared_experts"]),
        ({"hidden_act": "gelu"}, ["hidden_act"]),
        ({"tie_word_embeddings": True}, ["tie_word_embeddings"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"expert_dtype": "nvfp4"}, ["expert_dtype", "fp4"]),
        ({"swiglu_limit": 0.0}, ["swiglu_limit"]),
        ({"compress_ratios": [0, 0, 4]}, ["compress_ratios", "43"]),
        ({"compress_ratios": [0, 0, 5] * 20}, ["compress_ratios", "128"]),
        ({"compress_ratios": None}, ["compress_ratios"]),
        ({"layer_types": ["full_attention"] * 43}, ["layer_types", "sliding_attention"]),
        ({"compress_rate_hca": 48}, ["48", "64"]),
        ({"compress_rates": 4}, ["compress_rates"]),
        ({"o_groups": 7}, ["o_groups", "64"]),
        ({"qk_rope_head_dim": 63}, ["qk_rope_head_dim"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "qk_rope_head_dim"]),
        ({"index_head_dim": 32}, ["index_head_dim"]),
        ({"mlp_layer_types": ["moe"] * 42 + ["hash_moe"]}, ["mlp_layer_types"]),
        ({"rope_scaling": {"type": "longrope", "factor": 2}}, ["longrope"]),
        ({"rope_scaling": 4}, ["rope_scaling"]),
        ({"engram_layer_ids": [1, 14]}, ["engram_layer_ids", "deepseek_v4"]),
        ({"kv_source_layers": [2, 8]}, ["kv_source_layers"]),
        ({"q_lora_rank": None}, ["q_lora_rank"]),
        ({"num_nextn_predict_layers": 2}, ["num_nextn_predict_layers"]),
        ({"compress_ratios": [0, 0, *[4, 128] * 20, 4, 4]}, ["compress_ratios of the layer that drafts"]),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}}, ["weight_block_size"]),
    ],
)
def test_errors_name_the_field(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config({**V4_FLASH, **changes})
    for word in words:
        assert word in str(error.value)


def test_a_gpu_refuses_it_by_name(tmp_path: Path) -> None:
    """Before anything is started where it is known that ranks run on GPUs. A CPU serves it."""
    config, model = tiny_v4()
    write_v4(tmp_path, config, published_v4(model))
    engine = EngineConfig(model=str(tmp_path))
    for device, gpus in (("cuda", None), ("auto", 2)):
        with pytest.raises(Unfit, match="no GPU serves it yet: its pass and its kernels"):
            check_fit(engine.model_copy(update={"device": device}), gpus=gpus)
    check_fit(engine, gpus=2, served=False)
    check_fit(engine, gpus=0)
    check_fit(engine.model_copy(update={"device": "cpu"}), gpus=2)


def test_layers_for_dspark_stay_on_the_disk(tmp_path: Path) -> None:
    """They have the names of the layer for multi-token prediction, and would be read as that."""
    dspark = {"dspark_block_size": 4, "dspark_markov_rank": 256}
    assert parse_config({**V4_FLASH, **dspark}).draft_layers == 0
    assert parse_config({**V4_FLASH, "num_nextn_predict_layers": 0}).draft_layers == 0
    config, model = tiny_v4()
    extra, _ = mtp_v4(config, seed=1)
    given = {**config, **dspark, "num_nextn_predict_layers": 1}
    write_v4(tmp_path, given, {**published_v4(model), **extra, "mtp.0.main_proj.weight": torch.ones(64, 192)})
    told: list[str] = []
    loaded = load_model(
        tmp_path, group=Group(), dtype=torch.float32, device=torch.device("cpu"), max_positions=64, progress=told.append
    )
    assert loaded.drafter is None
    assert any("left out: the draft layer of the checkpoint (mtp.*)" in line and "DSpark" in line for line in told)
