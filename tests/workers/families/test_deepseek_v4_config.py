"""What a config.json of DeepSeek V4 says, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_v4_layout import DSPARK, TINY, YARN, dspark_v4, mtp_v4, published_v4, tiny_v4, write_v4
from published_configs import V4_FLASH, V4_FLASH_DSPARK, V4_PRO
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

from workers.families.deepseek_v4 import MOST_BLOCK
from workers.families.loading import load_model
from workers.families.registry import parse_config
from workers.models.config import CompressedLayer, ConfigError, Dspark
from workers.models.model import Model
from workers.models.rope import LOOKAHEAD, frequencies
from workers.parallel.group import Group
from workers.weights.checkpoint import WeightsError

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


def test_reads_dspark() -> None:
    config = parse_config(V4_FLASH_DSPARK)
    assert config.dspark == Dspark(3, 5, 128799, (40, 41, 42), 256)
    assert config.draft_layers == 3
    assert parse_config(V4_FLASH).dspark is None
    # As it was published first.
    first = {**V4_FLASH_DSPARK, "num_nextn_predict_layers": 1, "compress_ratios": V4_FLASH["compress_ratios"]}
    assert parse_config(first).dspark == config.dspark
    off = parse_config({**V4_FLASH_DSPARK, "num_nextn_predict_layers": 0})
    assert (off.dspark, off.draft_layers) == (None, 0)


def test_a_block_has_rotations_behind_the_context() -> None:
    assert MOST_BLOCK == LOOKAHEAD


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dspark_markov_rank": None}, ["dspark_block_size", "dspark_markov_rank is missing"]),
        ({"dspark_block_size": None, "dspark_noise_token_id": None}, ["dspark_block_size, dspark_noise_token_id is"]),
        ({"dspark_block_size": 0}, ["dspark_block_size"]),
        ({"dspark_block_size": 17}, ["dspark_block_size = 17", "16"]),
        ({"dspark_noise_token_id": 129280}, ["dspark_noise_token_id = 129280", "129280"]),
        ({"dspark_markov_rank": "256"}, ["dspark_markov_rank"]),
        ({"dspark_target_layer_ids": [41, 42, 43]}, ["dspark_target_layer_ids", "43 layers"]),
        ({"dspark_target_layer_ids": [42, 41, 40]}, ["dspark_target_layer_ids", "in order"]),
        ({"dspark_target_layer_ids": [40, 40, 42]}, ["dspark_target_layer_ids", "different"]),
        ({"dspark_target_layer_ids": []}, ["dspark_target_layer_ids"]),
        ({"dspark_target_layer_ids": 40}, ["dspark_target_layer_ids"]),
        ({"num_nextn_predict_layers": 2}, ["num_nextn_predict_layers", "dspark_*"]),
        ({"compress_ratios": [0, 0, *[4, 128] * 20, 4, 0, 4, 0]}, ["compress_ratios of the layers that draft"]),
        ({"compress_ratios": [0, 0, *[4, 128] * 20, 4, 0, 0]}, ["compress_ratios of the layers that draft"]),
        ({"dspark_n_routed_experts": 128}, ["dspark_n_routed_experts"]),
    ],
)
def test_dspark_fields_that_do_not_fit_are_refused(changes: dict[str, Any], words: list[str]) -> None:
    """They are no reason to take its layers for those of multi-token prediction, which have partly the same names."""
    with pytest.raises(ConfigError) as error:
        parse_config({**V4_FLASH_DSPARK, **changes})
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("declared", ["mtp", "dspark"])
def test_layers_that_draft_are_not_taken_for_the_others(declared: str, tmp_path: Path) -> None:
    """A config.json that declares multi-token prediction beside the layers of DSpark, and the other way round."""
    config, model = tiny_v4()
    dspark = {**config, **DSPARK, "compress_ratios": [*config["compress_ratios"], 0, 0, 0]}
    if declared == "mtp":
        given: dict[str, Any] = {**config, "num_nextn_predict_layers": 1}
        extra, lacking, left = dspark_v4(dspark, seed=1), "mtp.0.enorm.weight", "mtp.0.main_proj.weight"
    else:
        given, (extra, _) = dspark, mtp_v4(config, seed=1)
        lacking, left = "mtp.0.main_proj.weight", "mtp.0.enorm.weight"
    write_v4(tmp_path, given, {**published_v4(model), **extra})
    with pytest.raises(WeightsError) as error:
        load(tmp_path)
    assert "missing" in str(error.value)
    for name in (lacking, left):
        assert name in str(error.value)
    assert load(tmp_path, draft_layer=False).drafter is None


def test_layers_that_draft_and_are_not_declared_stay_on_the_disk(tmp_path: Path) -> None:
    assert parse_config({**V4_FLASH, "num_nextn_predict_layers": 0}).draft_layers == 0
    config, model = tiny_v4()
    dspark = {**config, **DSPARK, "compress_ratios": [*config["compress_ratios"], 0, 0, 0]}
    tensors = {**published_v4(model), **dspark_v4(dspark, seed=1)}
    write_v4(tmp_path, {**dspark, "num_nextn_predict_layers": 0}, tensors)
    told: list[str] = []
    assert load(tmp_path, progress=told.append).drafter is None
    assert any("left out: the draft layer of the checkpoint (mtp.*)" in line and "dspark_*" in line for line in told)
    # And one that is declared may be missing.
    write_v4(tmp_path, dspark, published_v4(model))
    assert load(tmp_path).drafter is None


def load(folder: Path, **settings: Any) -> Model:
    return load_model(
        folder, group=Group(), dtype=torch.float32, device=torch.device("cpu"), max_positions=64, **settings
    )
