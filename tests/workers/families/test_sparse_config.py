"""config.json of models with sparse attention: what is read from it, and what is refused by its name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from published_configs import AXK2, GLM, GLM52, HY4, V3, V32
from transformers import AXK2Config, DeepseekV32Config, GlmMoeDsaConfig, HYV4Config, HYV4VLConfig

from kernels.routing_rule import RoutingRule
from workers.families.registry import load_config, parse_config
from workers.models.config import ConfigError, Indexing, ResidualStreams, Routing


def test_reads_deepseek_v32() -> None:
    """The config is read as a DeepSeek V3 with an indexer in every layer."""
    config, twin = parse_config(V32), parse_config(V3)
    assert config.indexing == Indexing(heads=64, features=128, top_k=2048, interleaved=False, shared=(False,) * 61)
    assert (config.routing, config.rope, config.draft_layers) == (twin.routing, twin.rope, 1)
    assert twin.indexing is None


def test_reads_glm_5() -> None:
    config = parse_config(GLM52)
    indexing = config.indexing
    assert indexing is not None
    assert (indexing.heads, indexing.features, indexing.top_k, indexing.interleaved) == (32, 128, 2048, True)
    full = [layer for layer in range(78) if not indexing.is_shared(layer)]
    assert full == [0, 1, *range(2, 78, 4)]
    assert not indexing.is_shared(78)  # the layer that drafts has an indexer
    assert (config.num_dense_layers, config.num_heads, config.cache_width, config.draft_layers) == (3, 64, 576, 1)
    assert (config.routing.rule.groups, config.routing.rule.scale, config.rope.theta) == (1, 2.5, 8e6)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_freq": 3},
        {"index_topk_freq": 0},
        {"index_topk_pattern": "FFSFSSSF"},
        {"index_topk_pattern": ["full", *["shared"] * 7]},
        {"index_topk_pattern": "FSSSSSSS", "index_topk_freq": 2},
        {"indexer_types": ["full", "shared"] * 4, "index_topk_pattern": "FSSSSSSS"},
    ],
)
def test_shared_layers_are_those_of_transformers(fields: dict[str, Any], tmp_path: Path) -> None:
    """However a config.json says which they are; and as transformers writes it, which leaves defaults away."""
    bare = {name: value for name, value in GLM52.items() if not name.startswith("index")} | {"num_hidden_layers": 8}
    theirs = GlmMoeDsaConfig(**bare, **fields)
    ours = parse_config({**bare, **fields}).indexing
    assert ours is not None
    assert ours.shared == tuple(kind == "shared" for kind in theirs.indexer_types)
    theirs.save_pretrained(tmp_path)
    assert load_config(tmp_path).indexing == ours


def test_deepseek_v32_written_by_transformers_reads_the_same(tmp_path: Path) -> None:
    rope = {**V32["rope_scaling"], "rope_type": "yarn", "rope_theta": 10000}
    DeepseekV32Config(**{**V32, "rope_scaling": None, "rope_parameters": rope}).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "deepseek_v32"
    assert load_config(tmp_path) == parse_config(V32)
    # As some versions of transformers write, others, vLLM and llama.cpp.
    for kind in ("indexed_attention", "deepseek_sparse_attention", "sparse_attention", "sparse"):
        assert parse_config({**V32, "layer_types": [kind] * 61}) == parse_config(V32)


def test_reads_axk2(tmp_path: Path) -> None:
    config = parse_config(AXK2)
    assert config.indexing == Indexing(heads=16, features=128, top_k=2048, interleaved=False, shared=(False,) * 48)
    assert (config.norm_gate_rank, config.output_gate, config.rope.interleaved) == (16, "query", True)
    assert (config.num_layers, config.num_dense_layers, config.draft_layers, config.cache_width) == (48, 1, 0, 160)
    rule = RoutingRule("sigmoid", 1, 1, True, 2.5)
    assert config.routing == Routing(experts=128, experts_per_token=8, shared_experts=1, bias=True, rule=rule)
    AXK2Config().save_pretrained(tmp_path)
    assert load_config(tmp_path) == config
    names = ("n_group", "topk_group", "routed_scaling_factor", "n_shared_experts", "rms_norm_eps", "gated_norm_rank")
    own = (*names, "index_n_heads", "index_head_dim", "index_topk", "first_k_dense_replace", "norm_topk_prob")
    assert parse_config({name: value for name, value in AXK2.items() if name not in own}) == config
    kinds = ["dense"] + ["sparse"] * 47
    for changes in ({"num_nextn_predict_layers": 1}, {"layer_types": ["indexed_attention"] * 48}, {"head_dim": 32}):
        assert parse_config({**AXK2, "first_k_dense_replace": None, "mlp_layer_types": kinds, **changes}) == config
    other = {name: value for name, value in AXK2.items() if name != "n_routed_experts"}
    assert parse_config({**other, "num_local_experts": 128}) == config
    twin = parse_config({**AXK2, "model_type": "deepseek_v32", "n_group": 1, "topk_group": 1})
    assert replace(twin, model_type="axk2", norm_gate_rank=16, output_gate="query") == config


def test_reads_the_groups_of_axk2() -> None:
    config = parse_config({**AXK2, "n_group": 8, "topk_group": 4})
    assert config.routing.rule == RoutingRule("sigmoid", 8, 4, True, 2.5, closed_at_zero=True)
    assert parse_config({**AXK2, "n_group": 1, "topk_group": 1}) == parse_config(AXK2)


def test_reads_hy4(tmp_path: Path) -> None:
    config = parse_config(HY4)
    full = (0, 1, *range(5, 78, 4))
    assert config.indexing == Indexing(
        heads=32,
        features=128,
        top_k=2048,
        interleaved=True,
        shared=tuple(layer not in full for layer in range(78)),
        roped_last=True,
        wide=True,
        key_norm_eps=1e-5,
    )
    rule = RoutingRule("sigmoid", 1, 1, True, 2.827)
    routing = Routing(experts=256, experts_per_token=8, shared_experts=1, bias=True, rule=rule, limit=10.0)
    assert config.routing == routing
    assert config.streams == ResidualStreams(4, magnitude=2.0, eps=1e-6)
    assert (config.output_gate, config.sinks, config.wide_head, config.latent_norm_eps) == ("input", True, True, 1e-5)
    assert (config.num_layers, config.num_dense_layers, config.draft_layers, config.cache_width) == (78, 1, 1, 576)
    assert (config.rope.theta, config.rope.interleaved, config.num_heads) == (1e7, True, 64)
    assert not config.indexing.is_shared(78)  # the layer that drafts has an indexer
    own = ("n_group", "topk_group", "routed_scaling_factor", "n_shared_experts", "rms_norm_eps", "swiglu_limit")
    own += ("index_head_dim", "index_topk", "hc_mult", "hc_magnitude", "hc_eps", "norm_topk_prob")
    own += ("num_nextn_predict_layers", "indexer_types", "mlp_layer_types", "layer_types")
    assert parse_config({name: value for name, value in HY4.items() if name not in own}) == config
    for keys in (None, 8, 32, 64):  # says nothing where every head has keys of its own
        assert parse_config({**HY4, "num_key_value_heads": keys}) == config
    assert not parse_config({**HY4, "enable_lm_head_fp32": False}).wide_head
    switches = ("enable_ihc", "gated_mla", "gating_type", "learnable_sink", "use_dsa", "use_mla", "enable_lm_head_fp32")
    assert parse_config({name: value for name, value in HY4.items() if name not in switches}) == config
    HYV4Config(**HY4).save_pretrained(tmp_path)
    assert load_config(tmp_path) == config
    sees = {"model_type": "hy_v4_vl", "text_config": {**HY4, "model_type": "hy_v4_vl_text"}, "vision_config": {}}
    assert parse_config(sees) == replace(config, model_type="hy_v4_vl")
    HYV4VLConfig(text_config=HY4).save_pretrained(tmp_path)
    assert load_config(tmp_path) == replace(config, model_type="hy_v4_vl")
    rope = {**HY4["rope_parameters"], "mrope_section": [12, 10, 10]}
    assert parse_config({**sees, "text_config": {**HY4, "rope_parameters": rope}, "eos_token_id": [120025]}) == replace(
        config, model_type="hy_v4_vl"
    )
    for key in ("rope_type", "type"):  # of text it is plain rope
        named = {name: value for name, value in rope.items() if name != "rope_type"} | {key: "mrope"}
        text = {**HY4, "rope_parameters": None, "rope_scaling": named}
        assert parse_config({**sees, "text_config": text}) == replace(config, model_type="hy_v4_vl")


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (HY4, {"swiglu_limit": 0.0}, ["swiglu_limit = 0.0", "10.0"]),
        (HY4, {"swiglu_limit": "10"}, ["swiglu_limit", "a number"]),
        (HY4, {"hc_mult": 0}, ["hc_mult", "at least 1"]),
        (HY4, {"q_lora_rank": None}, ["q_lora_rank = None", "hy_v4", "latent"]),
        (HY4, {"num_local_experts": 64}, ["num_local_experts = 64", "n_routed_experts = 256"]),
        (HY4, {"num_nextn_predict_layers": 2}, ["num_nextn_predict_layers = 2"]),
        (HY4, {"index_share_for_mtp_iteration": True}, ["index_share_for_mtp_iteration = True"]),
        (HY4, {"indexer_types": ["shared"] * 78}, ["indexer_types", "first layer"]),
        (HY4, {"attention_bias": True}, ["attention_bias"]),
        (HY4, {"gating_type": "headwise"}, ["gating_type (hy_v4) = 'headwise'", "supported: 'elementwise'"]),
        (HY4, {"gated_mla": False}, ["gated_mla (hy_v4) = False"]),
        (HY4, {"learnable_sink": False}, ["learnable_sink (hy_v4) = False"]),
        (HY4, {"enable_ihc": False}, ["enable_ihc (hy_v4) = False"]),
        (HY4, {"use_dsa": False}, ["use_dsa (hy_v4) = False"]),
        (HY4, {"use_mla": 1}, ["use_mla (hy_v4) = 1", "True"]),
        (HY4, {"enable_lm_head_fp32": 0}, ["enable_lm_head_fp32", "true or false"]),
        (
            HY4,
            {"model_type": "hy_v4_vl", "text_config": {**HY4, "learnable_sink": False}},
            ["text_config.learnable_sink (hy_v4) = False"],
        ),
        (HY4, {"rope_interleave": False}, ["rope_interleave (hy_v4) = False"]),
        (HY4, {"layer_types": ["sparse", "full_attention"] * 39}, ["layer_types", "'sparse_attention'"]),
        (HY4, {"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e7}}, ["type = 'mrope'", "yarn"]),
        (HY4, {"mlp_layer_types": ["sparse", "dense"] * 39}, ["mlp_layer_types must have 78 entries"]),
        (HY4, {"model_type": "hy_v4_vl"}, ["text_config must be an object"]),
        (
            HY4,
            {"model_type": "hy_v4_vl", "text_config": {**HY4, "model_type": "hy_v3"}},
            ["text_config.model_type", "'hy_v3'"],
        ),
        (AXK2, {"q_lora_rank": None}, ["q_lora_rank = None", "axk2", "latent"]),
        (AXK2, {"n_group": 8}, ["n_group = 8", "topk_group = None", "give both"]),
        (AXK2, {"topk_group": 2}, ["n_group = None", "topk_group = 2", "give both"]),
        (AXK2, {"n_group": 3, "topk_group": 1}, ["n_routed_experts = 128", "n_group = 3"]),
        (AXK2, {"n_group": 2, "topk_group": 3}, ["topk_group = 3", "n_group = 2"]),
        (AXK2, {"attention_output_gate": False}, ["attention_output_gate (axk2) = False", "supported: True"]),
        (AXK2, {"attn_gate_fused": False}, ["attn_gate_fused (axk2) = False"]),
        (AXK2, {"gated_norm": False}, ["gated_norm (axk2) = False"]),
        (AXK2, {"gated_norm_rank": 0}, ["gated_norm_rank", "at least 1"]),
        (AXK2, {"num_local_experts": 64}, ["num_local_experts = 64", "n_routed_experts = 128"]),
        (AXK2, {"num_key_value_heads": 8}, ["num_key_value_heads = 8", "32"]),
        (AXK2, {"attention_bias": True}, ["attention_bias"]),
        (AXK2, {"hidden_act": "gelu"}, ["hidden_act = 'gelu'"]),
        (AXK2, {"scoring_func": "softmax"}, ["scoring_func (axk2) = 'softmax'"]),
        (AXK2, {"moe_layer_freq": 2}, ["moe_layer_freq"]),
        (AXK2, {"mlp_layer_types": ["sparse"] + ["dense"] * 47}, ["mlp_layer_types must have 48 entries"]),
        (AXK2, {"layer_types": ["full_attention"] * 48}, ["layer_types", "indexed_attention"]),
        (AXK2, {"rope_interleave": False}, ["rope_interleave (axk2) = False"]),
        (AXK2, {"index_head_dim": 16}, ["index_head_dim = 16", "qk_rope_head_dim = 32"]),
        (AXK2, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, ["'linear'", "yarn"]),
        (V32, {"q_lora_rank": None}, ["q_lora_rank = None", "deepseek_v32", "latent"]),
        (V32, {"index_topk": 0}, ["index_topk", "at least 1"]),
        (V32, {"index_head_dim": 32}, ["index_head_dim = 32", "qk_rope_head_dim = 64"]),
        (V32, {"index_head_dim": 100}, ["index_head_dim = 100", "multiple of 16"]),
        (V32, {"rope_interleave": False}, ["rope_interleave (deepseek_v32) = False", "True"]),
        (V32, {"indexer_rope_interleave": True}, ["indexer_rope_interleave (deepseek_v32) = True", "False"]),
        (GLM52, {"indexer_rope_interleave": False}, ["indexer_rope_interleave (glm_moe_dsa) = False", "True"]),
        (V32, {"layer_types": ["full_attention"] * 61}, ["layer_types", "indexed_attention"]),
        (GLM52, {"indexer_types": ["full"] * 77}, ["indexer_types", "78 layers"]),
        (GLM52, {"indexer_types": ["full", "none"] * 39}, ["indexer_types", "'full' or 'shared'"]),
        (GLM52, {"indexer_types": ["shared", "full"] * 39}, ["indexer_types", "first layer"]),
        (GLM52, {"indexer_types": None, "index_skip_topk_offset": 0}, ["index_topk_pattern", "first layer"]),
        (GLM52, {"partial_rotary_factor": 0.5}, ["partial_rotary_factor = 0.5"]),
        (V32, {"llama_4_scaling": {"beta": 0.1}}, ["llama_4_scaling", "not supported"]),
        (V3, {"llama_4_scaling": {"beta": 0.1}}, ["llama_4_scaling", "not supported"]),
        (V32, {"rope_scaling": {**V3["rope_scaling"], "llama_4_scaling_beta": 0.1}}, ["llama_4_scaling_beta = 0.1"]),
        (V3, {"attn_temperature_tuning": True}, ["attn_temperature_tuning"]),
        (V3, {"index_topk": 2048}, ["index_topk (deepseek_v3) = 2048"]),
        (GLM, {"index_topk": 2048}, ["index_topk (glm4_moe_lite) = 2048"]),
    ],
)
def test_what_is_not_understood_is_refused_by_its_name(
    config: dict[str, Any], changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config({**config, **changes})
    for word in words:
        assert word in str(error.value)
