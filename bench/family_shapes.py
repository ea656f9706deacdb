"""Published sizes of the families near DeepSeek's, as `config.json` values: whole models, and slices that fit one GPU.

A slice has the model's first layers: its dense ones, then some of experts. All else is the model's.
"""

from __future__ import annotations

from typing import Any

HY4_SLICE: dict[str, Any] = {
    "model_type": "hy_v4",
    "vocab_size": 120832,
    "hidden_size": 6144,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 5,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "indexer_types": ["full", "full", "shared", "shared", "shared"],
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_magnitude": 2.0,
    "max_position_embeddings": 1048576,
}
"""Hy4 with its dense layer and four of experts, two of which have indexers; and its draft layer."""
SARVAM: dict[str, Any] = {
    "model_type": "sarvam_mla",
    "vocab_size": 262144,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 32,
    "first_k_dense_replace": 1,
    "num_attention_heads": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "deepseek_yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 131072,
}
"""Sarvam-105B, whole: in bf16 of two H200, in FP8 of one."""
SARVAM_SLICE: dict[str, Any] = {**SARVAM, "num_hidden_layers": 6}
"""Its dense layer and five of experts."""
AXK1_SLICE: dict[str, Any] = {
    "model_type": "axk1",
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 192,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 32768,
}
"""A.X K1 with its dense layer and two of experts."""
AXK2_LIGHT: dict[str, Any] = {
    "model_type": "axk2",
    "vocab_size": 163840,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 48,
    "first_k_dense_replace": 1,
    "num_attention_heads": 32,
    "q_lora_rank": 384,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "gated_norm_rank": 16,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 2048,
    "max_position_embeddings": 131072,
}
"""A.X K2 Light, whole."""
AXK2_SLICE: dict[str, Any] = {**AXK2_LIGHT, "num_hidden_layers": 9}
"""Its dense layer and eight of experts."""
YOUTU: dict[str, Any] = {
    "model_type": "youtu",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1.6e6},
    "max_position_embeddings": 131072,
}
"""Youtu-LLM-2B, whole."""
