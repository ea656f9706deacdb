"""config.json: what is read from it, and the errors that name what is not supported."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from published_configs import AXK1, GLM, K2, K25, LARGE3_PARAMS, SARVAM, SMALL4, SMALL4_PARAMS, V2_LITE, V3, YOUTU
from transformers import AXK1Config, DeepseekV3Config, Glm4MoeLiteConfig, Mistral4Config, SarvamMLAConfig, YoutuConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding
from transformers.models.mistral4.modeling_mistral4 import Mistral4Attention, get_llama_4_attn_scale

from kernels.routing_rule import RoutingRule
from workers.families.registry import load_config, parse_config
from workers.models.config import ConfigError, QueryScaling, Rope, Routing
from workers.models.rope import frequencies, query_scale_table, rotation_table, softmax_scale


def test_reads_deepseek_v3() -> None:
    config = parse_config(V3)
    assert (config.num_layers, config.num_heads, config.cache_width, config.draft_layers) == (61, 128, 576, 1)
    assert config.routing.rule.groups == 8
    assert config.routing.rule.normalize
    assert config.is_dense(2)
    assert not config.is_dense(3)
    assert config.eos_ids == (1,)
    assert config.rope.yarn is not None
    assert config.rope.yarn.factor == 40


def test_reads_deepseek_v2_lite_and_kimi_k2() -> None:
    lite = parse_config(V2_LITE)
    assert lite.q_lora_rank is None
    assert (lite.routing.rule.scoring, lite.routing.bias, lite.draft_layers) == ("softmax", False, 0)
    assert replace(parse_config({**V3, "model_type": "kimi_k2"}), model_type="deepseek_v3") == parse_config(V3)


def test_reads_glm_flash() -> None:
    """The config is read as a DeepSeek V3 of its sizes, which makes its draft layer that of DeepSeek V3, too."""
    config = parse_config(GLM)
    twin = parse_config({**GLM, "model_type": "deepseek_v3"})
    assert replace(config, model_type="deepseek_v3") == twin
    assert (config.num_layers, config.num_dense_layers, config.draft_layers, config.cache_width) == (47, 1, 1, 576)
    assert config.rope == Rope(1e6, interleaved=True)


def test_glm_says_which_layers_are_dense() -> None:
    kinds = ["dense"] * 2 + ["sparse"] * 45
    bare = {name: value for name, value in GLM.items() if name != "first_k_dense_replace"}
    assert parse_config({**GLM, "mlp_layer_types": kinds}).num_dense_layers == 2
    assert parse_config(bare).num_dense_layers == 1
    for wrong in (kinds[1:], kinds[::-1], "dense", ["dense", "odd"]):
        with pytest.raises(ConfigError, match="mlp_layer_types must have 47 entries"):
            parse_config({**GLM, "mlp_layer_types": wrong})
    with pytest.raises(ConfigError, match=r"partial_rotary_factor = 0\.5"):
        parse_config({**GLM, "partial_rotary_factor": 0.5})


def test_glm_written_by_transformers_reads_the_same(tmp_path: Path) -> None:
    """Defaults that it leaves away included."""
    Glm4MoeLiteConfig(**{**GLM, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}).save_pretrained(
        tmp_path
    )
    written = json.loads((tmp_path / "config.json").read_text())
    assert "mlp_layer_types" in written
    assert replace(load_config(tmp_path), draft_layers=1) == parse_config(GLM)
    assert parse_config({name: value for name, value in GLM.items() if "scaling" not in name}) == parse_config(GLM)


@pytest.mark.parametrize("inner", ["kimi_k2", "deepseek_v3", None])
def test_reads_the_text_part_of_kimi_k25(inner: str | None, tmp_path: Path) -> None:
    values = {**K25, "text_config": {**K2, "model_type": inner}}
    assert replace(parse_config(values), model_type="deepseek_v3") == parse_config(K2)
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert load_config(tmp_path).eos_ids == (*parse_config(K2).eos_ids, 5, 6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text_config": None}, ["text_config must be an object"]),
        ({"text_config": {**K2, "model_type": "llama"}}, ["text_config.model_type", "'llama'", "'kimi_k2'"]),
        ({"text_config": {**K2, "hidden_size": "x"}}, ["text_config.hidden_size", "integer"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config", "awq"]),
        ({"text_config": {**K2, "quantization_config": {}}}, ["text_config.quantization_config"]),
    ],
)
def test_errors_of_kimi_k25_name_the_field(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config({**K25, **changes})
    for word in words:
        assert word in str(error.value)


def test_end_ids_are_those_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V3))
    assert load_config(tmp_path).eos_ids == (1,)
    generation = tmp_path / "generation_config.json"
    for given, found in (
        ({"eos_token_id": [2, 7]}, (1, 2, 7)),
        ({"eos_token_id": 3}, (1, 3)),
        ({"eos_token_id": [7, 1]}, (1, 7)),
        ({"temperature": 0.6}, (1,)),
    ):
        generation.write_text(json.dumps(given))
        assert load_config(tmp_path).eos_ids == found
    generation.write_text('{"eos_token_id": 129280}')
    with pytest.raises(ConfigError, match=r"must be token ids below vocab_size = 129280, not \[1, 129280\]"):
        load_config(tmp_path)
    generation.write_text("[]")
    with pytest.raises(ConfigError, match=r"generation_config.json does not hold a JSON object"):
        load_config(tmp_path)


@pytest.mark.parametrize("wrong", [-1, 129280, "1", True, 1.0, [1, None]])
def test_end_ids_that_are_no_tokens_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="eos_token_id must be token ids"):
        parse_config({**V3, "eos_token_id": wrong})


def test_several_end_ids() -> None:
    assert parse_config({**V3, "eos_token_id": [1, 5]}).eos_ids == (1, 5)
    assert parse_config({**V3, "eos_token_id": None}).eos_ids == ()


YARN = V3["rope_scaling"]


@pytest.mark.parametrize(
    "rope",
    [
        None,
        YARN,
        {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        {**YARN, "mscale": 0.5},
        {**YARN, "mscale_all_dim": 0.0},
        {**YARN, "attention_factor": 1.3},
        {**YARN, "beta_fast": 16, "beta_slow": 2, "factor": 7.5},
        {**YARN, "truncate": False},
        {**YARN, "original_max_position_embeddings": 8},  # the interpolated band is empty
        {"rope_type": "default", "rope_theta": 5e5},
    ],
)
def test_rope_is_that_of_transformers(rope: dict[str, Any] | None) -> None:
    theirs = DeepseekV3Config(**{**V3, "rope_scaling": rope})
    ours = parse_config({**V3, "rope_scaling": rope})
    kind = theirs.rope_parameters["rope_type"]
    compute = ROPE_INIT_FUNCTIONS.get(kind, DeepseekV3RotaryEmbedding.compute_default_rope_parameters)
    frequency, magnitude = compute(theirs)
    got_frequency, got_magnitude = frequencies(ours.rope, 64)
    torch.testing.assert_close(got_frequency, frequency, atol=0, rtol=1e-6)
    assert got_magnitude == pytest.approx(magnitude, rel=1e-12)

    cos, sin = DeepseekV3RotaryEmbedding(theirs)(torch.empty(1), torch.arange(500)[None])
    table = rotation_table(ours.rope, 64, 500, torch.device("cpu"))[:500]
    torch.testing.assert_close(table[:, 0::2], cos[0, :, :32], atol=1e-4, rtol=0)
    torch.testing.assert_close(table[:, 1::2], sin[0, :, :32], atol=1e-4, rtol=0)

    with torch.device("meta"):
        attention = DeepseekV3Attention(theirs, 0)
    assert softmax_scale(ours) == pytest.approx(attention.scaling, rel=1e-12)


def test_written_back_by_transformers_it_reads_the_same(tmp_path: Path) -> None:
    """transformers moves rope_scaling and rope_theta into rope_parameters."""
    DeepseekV3Config(**V3).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in written
    assert "rope_scaling" not in written
    assert load_config(tmp_path) == parse_config(V3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llama"}, ["model_type", "'llama'", "deepseek_v3", "kimi_k2"]),
        ({"model_type": None}, ["lacks model_type"]),
        ({"hidden_size": None}, ["lacks hidden_size"]),
        ({"hidden_size": "big"}, ["hidden_size", "integer", "'big'"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "at least 1"]),
        ({"kv_lora_rank": True}, ["kv_lora_rank", "integer"]),
        ({"rms_norm_eps": "1e-6"}, ["rms_norm_eps", "number"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "true or false"]),
        ({"qk_rope_head_dim": 63}, ["qk_rope_head_dim", "even"]),
        ({"attention_bias": True}, ["attention_bias", "not supported"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "'silu'"]),
        ({"moe_layer_freq": 2}, ["moe_layer_freq", "2"]),
        ({"scoring_func": "softmax"}, ["scoring_func", "'softmax'", "'sigmoid'"]),
        ({"topk_method": "greedy"}, ["topk_method", "'greedy'", "'noaux_tc'"]),
        ({"num_nextn_predict_layers": 2}, ["num_nextn_predict_layers", "2"]),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            ["quantization_config", "FP8", "weight_block_size"],
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, ["rope_scaling.type", "'linear'", "'yarn'"]),
        ({"rope_scaling": {"type": "yarn"}}, ["rope_scaling.factor"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling", "object"]),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ({"n_group": 7}, ["n_routed_experts = 256", "n_group = 7"]),
        ({"topk_group": 9}, ["topk_group = 9"]),
        ({"n_group": 256, "topk_group": 8}, ["n_group = 256", "1 expert a group"]),
        ({"num_experts_per_tok": 200}, ["num_experts_per_tok = 200", "128"]),
    ],
)
def test_errors_name_the_field(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config({**V3, **changes})
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm_topk_prob": True}, ["norm_topk_prob", "deepseek_v2"]),
        ({"mlp_bias": True}, ["mlp_bias"]),
        ({"scoring_func": "sigmoid"}, ["scoring_func", "'softmax'"]),
        ({"num_nextn_predict_layers": 1}, ["num_nextn_predict_layers", "deepseek_v2"]),
    ],
)
def test_errors_of_v2_name_the_field(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config({**V2_LITE, **changes})
    for word in words:
        assert word in str(error.value)


def test_reads_youtu(tmp_path: Path) -> None:
    config = parse_config(YOUTU)
    assert (config.routing, config.num_dense_layers, config.moe_intermediate_size) == (None, config.num_layers, 0)
    assert (config.num_layers, config.num_heads, config.cache_width, config.draft_layers) == (32, 16, 576, 0)
    assert config.tied_embeddings
    assert config.rope == Rope(1.6e6, interleaved=True)
    bare = {name: value for name, value in YOUTU.items() if name != "tie_word_embeddings"}
    assert parse_config(bare) == parse_config({**YOUTU, "n_routed_experts": 0}) == config
    assert not parse_config({**YOUTU, "tie_word_embeddings": False}).tied_embeddings
    assert parse_config({**YOUTU, "model_type": "youtu_llm"}) == replace(config, model_type="youtu_llm")
    YoutuConfig(**YOUTU).save_pretrained(tmp_path)
    assert load_config(tmp_path) == config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_routed_experts": 8}, ["n_routed_experts (youtu) = 8"]),
        ({"num_nextn_predict_layers": 1}, ["num_nextn_predict_layers (youtu) = 1"]),
        ({"num_mtp_layers": 1}, ["num_mtp_layers (youtu) = 1"]),
        ({"num_key_value_heads": 4}, ["num_key_value_heads = 4", "16"]),
        ({"mlp_bias": True}, ["mlp_bias"]),
        ({"index_topk": 2048}, ["index_topk (youtu)"]),
    ],
)
def test_errors_of_youtu_name_the_field(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config({**YOUTU, **changes})
    for word in words:
        assert word in str(error.value)


def test_reads_sarvam(tmp_path: Path) -> None:
    """The config is read as a DeepSeek V3 of its sizes, in either names, with one group of experts."""
    config = parse_config(SARVAM)
    given = {name: value for name, value in SARVAM.items() if name not in ("num_experts", "num_shared_experts")}
    v3 = {**given, "n_routed_experts": 128, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    yarn = {**SARVAM["rope_scaling"], "type": "yarn"}
    twin = parse_config({**v3, "model_type": "deepseek_v3", "rope_scaling": yarn})
    assert replace(config, model_type="deepseek_v3") == twin
    assert parse_config(v3) == config
    assert (config.num_layers, config.num_dense_layers, config.q_lora_rank, config.draft_layers) == (32, 1, None, 0)
    moved = {**yarn, "rope_type": "deepseek_yarn", "rope_theta": 10000}
    assert parse_config({**v3, "rope_scaling": None, "rope_theta": None, "rope_parameters": moved}) == config
    for name in ("num_shared_experts", "first_k_dense_replace", "routed_scaling_factor", "rms_norm_eps"):
        assert parse_config({other: value for other, value in SARVAM.items() if other != name}) == config
    grouped = parse_config({**SARVAM, "n_group": 16, "topk_group": 2})
    assert grouped.routing is not None
    assert (grouped.routing.rule.groups, grouped.routing.rule.top_groups) == (16, 2)
    SarvamMLAConfig(**SARVAM).save_pretrained(tmp_path)
    assert load_config(tmp_path) == config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_routed_experts": 64}, ["num_experts = 128", "n_routed_experts = 64", "must be equal"]),
        ({"num_nextn_predict_layers": 1}, ["num_nextn_predict_layers (sarvam_mla) = 1"]),
        ({"moe_router_enable_expert_bias": False}, ["moe_router_enable_expert_bias = False"]),
        ({"score_function": "softmax"}, ["score_function = 'softmax'", "'sigmoid'"]),
        ({"moe_shared_expert_intermediate_size": 1024}, ["moe_shared_expert_intermediate_size = 1024", "2048"]),
        ({"num_key_value_heads": 8}, ["num_key_value_heads = 8", "64"]),
        ({"rope_scaling": None}, ["rope_scaling (sarvam_mla) = None", "deepseek_yarn"]),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, ["rope_scaling.type", "'linear'"]),
        ({"moe_layer_freq": 2}, ["moe_layer_freq"]),
    ],
)
def test_errors_of_sarvam_name_the_field(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config({**SARVAM, **changes})
    for word in words:
        assert word in str(error.value)


def test_reads_axk1(tmp_path: Path) -> None:
    config = parse_config(AXK1)
    assert config.routing is not None
    assert config.routing.normed
    assert (config.routing.rule.groups, config.routing.rule.top_groups) == (8, 4)
    assert (config.num_layers, config.num_dense_layers, config.draft_layers) == (61, 1, 0)
    for changes in ({"topk_method": "greedy"}, {"num_nextn_predict_layers": 0}, {"num_mtp_layers": 1}):
        assert parse_config({**AXK1, **changes}) == config
    twin = parse_config({**AXK1, "model_type": "deepseek_v3", "num_nextn_predict_layers": 0})
    assert twin.routing is not None
    assert replace(twin, model_type="axk1", routing=replace(twin.routing, normed=True)) == config
    names = ("n_group", "topk_group", "routed_scaling_factor", "n_shared_experts", "rms_norm_eps")
    bare = {name: value for name, value in AXK1.items() if name not in (*names, "first_k_dense_replace")}
    assert parse_config(bare) == config
    AXK1Config(first_k_dense_replace=2).save_pretrained(tmp_path)
    assert load_config(tmp_path) == replace(config, num_dense_layers=2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q_lora_rank": None}, ["q_lora_rank = None", "'axk1'"]),
        ({"num_key_value_heads": 8}, ["num_key_value_heads = 8", "64"]),
        ({"scoring_func": "softmax"}, ["scoring_func (axk1) = 'softmax'"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"mlp_layer_types": ["sparse"] + ["dense"] * 60}, ["mlp_layer_types must have 61 entries"]),
        ({"moe_layer_freq": 2}, ["moe_layer_freq"]),
        ({"llama_4_scaling": {"beta": 0.1}}, ["llama_4_scaling"]),
    ],
)
def test_errors_of_axk1_name_the_field(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config({**AXK1, **changes})
    for word in words:
        assert word in str(error.value)


def test_model_types_in_capitals() -> None:
    """vLLM's class of A.X K1 writes its name so."""
    assert replace(parse_config({**AXK1, "model_type": "AXK1"}), model_type="axk1") == parse_config(AXK1)


def test_reads_mistral_small_4(tmp_path: Path) -> None:
    config = parse_config(SMALL4)
    assert (config.num_layers, config.num_dense_layers, config.draft_layers, config.cache_width) == (36, 0, 0, 320)
    assert config.routing is not None
    assert (config.routing.rule.scoring, config.routing.rule.normalize, config.routing.bias) == ("softmax", True, False)
    assert config.query_scaling == QueryScaling(0.1, 8192)
    assert softmax_scale(config) == pytest.approx(128**-0.5, rel=1e-12)
    assert frequencies(config.rope, 64)[1] == 1.0
    text = SMALL4["text_config"]
    scaled = parse_config({**text, "rope_parameters": {**text["rope_parameters"], "apply_scale": True}})
    assert softmax_scale(scaled) == pytest.approx(Mistral4Attention(Mistral4Config(), 0).scaling, rel=1e-12)
    assert frequencies(scaled.rope, 64)[1] == 1.0
    assert replace(parse_config({**text, "tie_word_embeddings": False}), model_type="mistral3") == config
    bare = {
        name: value for name, value in text.items() if name not in ("n_group", "norm_topk_prob", "n_shared_experts")
    }
    assert parse_config({**SMALL4, "text_config": bare}) == config
    without = {**text, "rope_parameters": {**text["rope_parameters"], "llama_4_scaling_beta": None}}
    assert parse_config(without).query_scaling is None
    Mistral4Config().save_pretrained(tmp_path)
    assert replace(load_config(tmp_path), model_type="mistral3") == config


def test_reads_mistral_large_3(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text(json.dumps(LARGE3_PARAMS))
    config = load_config(tmp_path)
    sizes = (config.num_layers, config.num_dense_layers, config.hidden_size, config.num_heads, config.cache_width)
    assert sizes == (61, 3, 7168, 128, 576)
    assert (config.intermediate_size, config.moe_intermediate_size, config.max_positions) == (16384, 4096, 294912)
    rule = RoutingRule("softmax", 1, 1, True, 1.0)
    assert config.routing == Routing(experts=128, experts_per_token=4, shared_experts=1, bias=False, rule=rule)
    assert config.query_scaling == QueryScaling(0.1, 8192)
    assert softmax_scale(config) == pytest.approx(192**-0.5, rel=1e-12)
    assert frequencies(config.rope, 64)[1] == 1.0
    assert config.eos_ids == (2,)


def test_params_of_mistral_say_what_its_config_does(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text(json.dumps(SMALL4_PARAMS))
    own = load_config(tmp_path)
    assert softmax_scale(own) == pytest.approx(128**-0.5, rel=1e-12)
    text = {**SMALL4["text_config"], "tie_word_embeddings": False}
    for apply_scale in (False, True):
        yarn = {**SMALL4_PARAMS["yarn"], "apply_scale": apply_scale}
        (tmp_path / "params.json").write_text(json.dumps({**SMALL4_PARAMS, "yarn": yarn}))
        said = {**text, "rope_parameters": {**text["rope_parameters"], "apply_scale": apply_scale}}
        assert load_config(tmp_path) == parse_config(said)
    scaling = {"beta": 0.2, "original_max_position_embeddings": 4096}
    (tmp_path / "params.json").write_text(json.dumps({**SMALL4_PARAMS, "llama_4_scaling": scaling}))
    assert load_config(tmp_path).query_scaling == QueryScaling(0.2, 4096)
    for changes, word in (
        ({"yarn": {**SMALL4_PARAMS["yarn"], "apply_scale": "no"}}, "apply_scale must be true or false"),
        ({"yarn": {"factor": 128, "original_max_position_embeddings": 8192}}, "yarn lacks apply_scale, true or false"),
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"moe": {**SMALL4_PARAMS["moe"], "use_load_balancing_bias": True}}, "use_load_balancing_bias"),
        ({"moe": {**SMALL4_PARAMS["moe"], "renorm_strategy": "LOGITS"}}, "renorm_strategy"),
        ({"moe": {**SMALL4_PARAMS["moe"], "num_expert_groups": 8}}, "n_group"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"use_biases": True}, "use_biases"),
        ({"causal": False}, "causal"),
        ({"quantization": {"qformat_weight": "int8"}}, "quant_method"),
    ):
        (tmp_path / "params.json").write_text(json.dumps({**SMALL4_PARAMS, **changes}))
        with pytest.raises(ConfigError, match=word):
            load_config(tmp_path)
    (tmp_path / "params.json").write_text("[")
    (tmp_path / "config.json").write_text(json.dumps(V3))  # counts where both are there
    assert load_config(tmp_path) == parse_config(V3)
    (tmp_path / "config.json").write_text(json.dumps(SMALL4))
    with pytest.raises(ConfigError, match=r"params\.json beside it is no JSON"):
        load_config(tmp_path)
    for apply_scale in (False, True):
        yarn = {**SMALL4_PARAMS["yarn"], "apply_scale": apply_scale}
        (tmp_path / "params.json").write_text(json.dumps({**SMALL4_PARAMS, "yarn": yarn}))
        said = {**text, "rope_parameters": {**text["rope_parameters"], "apply_scale": apply_scale}}
        assert load_config(tmp_path) == parse_config({**SMALL4, "text_config": said})
    said = {**text, "rope_parameters": {**text["rope_parameters"], "apply_scale": False}}
    (tmp_path / "config.json").write_text(json.dumps({**SMALL4, "text_config": said}))
    assert load_config(tmp_path) == parse_config(SMALL4)
    (tmp_path / "params.json").write_text(json.dumps({"dim": 4096}))
    assert load_config(tmp_path) == parse_config(SMALL4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "ministral3"}, ["text_config.model_type = 'ministral3'", "'mistral4'"]),
        ({"q_lora_rank": None}, ["text_config.q_lora_rank = None", "'mistral4'"]),
        ({"num_key_value_heads": 8}, ["num_key_value_heads = 8", "32"]),
        ({"n_group": 4}, ["n_group (mistral4) = 4"]),
        ({"topk_group": 2}, ["topk_group (mistral4) = 2"]),
        ({"num_local_experts": 64}, ["num_local_experts = 64", "n_routed_experts = 128"]),
        ({"num_nextn_predict_layers": 1}, ["num_nextn_predict_layers (mistral4) = 1"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"rope_parameters": None}, ["rope_parameters (mistral4) = None", "yarn"]),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, ["rope_parameters (mistral4)", "yarn"]),
    ],
)
def test_errors_of_mistral_name_the_field(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config({**SMALL4, "text_config": {**SMALL4["text_config"], **changes}})
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"partial_rotary_factor": 1.0}, "partial_rotary_factor"),
        ({"apply_scale": 1}, "apply_scale must be true or false"),
    ],
)
def test_errors_of_the_rope_of_mistral_name_the_field(changes: dict[str, Any], word: str) -> None:
    text = SMALL4["text_config"]
    with pytest.raises(ConfigError, match=re.escape(word)):
        parse_config({**text, "rope_parameters": {**text["rope_parameters"], **changes}})


def test_the_scale_of_queries_is_that_of_transformers() -> None:
    """Scales are compared at the borders of the published model, and far behind them, in fp32."""
    scaling = parse_config(SMALL4).query_scaling
    table = query_scale_table(scaling, 1 << 20, torch.device("cpu"))
    position = torch.tensor([0, 8191, 8192, 16383, 16384, 24575, 24576, 131071, 131072, (1 << 20) - 1])
    theirs = get_llama_4_attn_scale(position.unsqueeze(0), 0.1, 8192).flatten()
    assert table is not None
    assert table[8191] == 1.0 < table[8192] == table[16383] < table[16384]
    torch.testing.assert_close(table[position], theirs, atol=0, rtol=2e-7)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="JSON object"):
        load_config(tmp_path)
