"""Tiny random checkpoints of DeepSeek V4 as DeepSeek publishes them, and the same models in transformers.

What transformers saves has names that it cannot read itself, so the names of checkpoints are written here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from quantized_checkpoints import fp8_exponents, mxfp4
from safetensors.torch import save_file
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

VOCAB = 131
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 2.0,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "num_hash_layers": 2,
    "compress_ratios": [0, 0, 4, 128, 4],
    "compress_rate_hca": 8,
    "sliding_window": 8,
    "index_n_heads": 32,
    "index_head_dim": 16,
    "index_topk": 6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": None,
}
"""Every kind of layer, with borders of the window, of entries and of pages close to each other. Indexers have many
heads: with few some entries score exactly 0, and it is not said which of them are attended to."""
YARN: dict[str, Any] = {
    "type": "yarn",
    "factor": 16,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}
_NAMES: dict[str, str] = {
    r"^model\.embed_tokens\.": "embed.",
    r"^model\.norm\.": "norm.",
    r"^lm_head\.": "head.",
    r"^model\.hc_head\.hc_": "hc_head_",
    r"^model\.layers\.": "layers.",
    r"\.input_layernorm\.": ".attn_norm.",
    r"\.post_attention_layernorm\.": ".ffn_norm.",
    r"\.attn_hc\.": ".hc_attn_",
    r"\.ffn_hc\.": ".hc_ffn_",
    r"\.self_attn\.compressor\.indexer\.(kv_proj|gate_proj|kv_norm|position_bias)": r".attn.indexer.compressor.\1",
    r"\.self_attn\.compressor\.indexer\.(scorer\.)?": ".attn.indexer.",
    r"\.self_attn\.": ".attn.",
    r"compressor\.kv_proj\.": "compressor.wkv.",
    r"compressor\.gate_proj\.": "compressor.wgate.",
    r"compressor\.kv_norm\.": "compressor.norm.",
    r"\.position_bias$": ".ape",
    r"\.attn\.sinks$": ".attn.attn_sink",
    r"\.q_a_proj\.": ".wq_a.",
    r"\.q_a_norm\.": ".q_norm.",
    r"\.q_b_proj\.": ".wq_b.",
    r"\.attn\.kv_proj\.": ".attn.wkv.",
    r"\.o_a_proj\.": ".wo_a.",
    r"\.o_b_proj\.": ".wo_b.",
    r"\.mlp\.": ".ffn.",
    r"\.gate\.e_score_correction_bias$": ".gate.bias",
    r"\.shared_experts\.gate_proj\.": ".shared_experts.w1.",
    r"\.shared_experts\.down_proj\.": ".shared_experts.w2.",
    r"\.shared_experts\.up_proj\.": ".shared_experts.w3.",
}
"""Parts of transformers' names, as patterns, and those of checkpoints; each is tried in turn."""


def tiny_v4(seed: int = 0, **overrides: Any) -> tuple[dict[str, Any], DeepseekV4ForCausalLM]:
    """The config.json of a tiny checkpoint, and transformers' model, of which every parameter is random, in fp32."""
    values = {**TINY, **overrides}
    given = {name: value for name, value in values.items() if name not in ("expert_dtype", "quantization_config")}
    given["compress_ratios"] = given["compress_ratios"][: given["num_hidden_layers"]]
    scaling = given.pop("rope_scaling", None)
    if scaling is not None:
        rope = {name: value for name, value in scaling.items() if name != "type"}
        given["rope_parameters"] = {**rope, "rope_type": scaling["type"]}
    with torch.random.fork_rng(devices=[]):
        model = DeepseekV4ForCausalLM(DeepseekV4Config(**given, attn_implementation="eager")).float().eval()
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        _randomize(name, tensor, generator, values["n_routed_experts"])
    return {"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"], **values}, model


def write_v4(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Write a checkpoint of these tensors, by their published names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def published_v4(model: DeepseekV4ForCausalLM) -> dict[str, Tensor]:
    """The tensors of a model as a checkpoint calls and lays them out."""
    found: dict[str, Tensor] = {}
    for theirs, tensor in model.state_dict().items():
        name = theirs
        for pattern, ours in _NAMES.items():
            name = re.sub(pattern, ours, name)
        experts = name.rpartition(".")[0]
        if name.endswith(".ffn.experts.gate_up_proj"):
            for expert, matrix in enumerate(tensor):
                gate, up = matrix.chunk(2)
                found |= {f"{experts}.{expert}.w1.weight": gate, f"{experts}.{expert}.w3.weight": up}
        elif name.endswith(".ffn.experts.down_proj"):
            found |= {f"{experts}.{expert}.w2.weight": matrix for expert, matrix in enumerate(tensor)}
        else:
            found[name] = tensor
    return {name: tensor.clone() for name, tensor in found.items()}


def mtp_v4(config: Mapping[str, Any], seed: int) -> tuple[dict[str, Tensor], DeepseekV4ForCausalLM]:
    """Random tensors of the layer `mtp.0` of a checkpoint, which attends to a window alone, and transformers' model of
    one layer that has those which it has in common."""
    given = {name: value for name, value in config.items() if name in TINY}
    _, model = tiny_v4(seed, **{**given, "num_hidden_layers": 1, "compress_ratios": [0], "num_hash_layers": 0})
    others = ("embed.weight", "head.weight")
    tensors = {
        f"mtp.0.{name.removeprefix('layers.0.')}": tensor
        for name, tensor in published_v4(model).items()
        if name not in others
    }
    generator, hidden = torch.Generator().manual_seed(seed + 1), config["hidden_size"]
    for name in ("e_proj", "h_proj"):
        tensors[f"mtp.0.{name}.weight"] = torch.randn(hidden, hidden, generator=generator) / hidden**0.5
    for name in ("enorm", "hnorm"):
        tensors[f"mtp.0.{name}.weight"] = torch.rand(hidden, generator=generator) + 0.5
    return tensors, model


DSPARK: dict[str, Any] = {
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 4,
    "dspark_noise_token_id": VOCAB - 1,
    "dspark_target_layer_ids": [1, 3, 4],
    "dspark_markov_rank": 16,
}
"""What a config.json says of DSpark, beside a ratio of 0 for each of its stages."""


def dspark_v4(config: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """Random tensors of the stages `mtp.0` to `mtp.2` of DSpark, of a checkpoint whose config.json has `DSPARK`."""
    given = {name: value for name, value in config.items() if name in TINY}
    _, model = tiny_v4(seed, **{**given, "num_hidden_layers": 3, "compress_ratios": [0, 0, 0], "num_hash_layers": 0})
    tensors = {}
    for name, tensor in published_v4(model).items():
        if name not in ("embed.weight", "head.weight"):
            stage = name if name.startswith("layers.") else f"layers.2.{name}"
            tensors[f"mtp.{stage.removeprefix('layers.')}"] = tensor
    generator, hidden, vocab = torch.Generator().manual_seed(seed + 1), config["hidden_size"], config["vocab_size"]
    layers, rank = len(config["dspark_target_layer_ids"]), config["dspark_markov_rank"]
    shapes = {
        "mtp.0.main_proj.weight": (hidden, layers * hidden),
        "mtp.2.markov_head.markov_w1.weight": (vocab, rank),
        "mtp.2.markov_head.markov_w2.weight": (vocab, rank),
        "mtp.2.confidence_head.proj.weight": (1, hidden + rank),
    }
    for name, shape in shapes.items():
        scale = 0.5 if "confidence" in name else 2.0  # confidences on both sides of a half
        tensors[name] = scale * torch.randn(*shape, generator=generator) / shape[1] ** 0.5
    tensors["mtp.0.main_norm.weight"] = torch.rand(hidden, generator=generator) + 0.5
    return tensors


MXFP4_NAMES = r"\.experts\.\d+\.w[123]\.weight$"
FP8_NAMES = r"\.attn\.w\w+\.weight$|\.indexer\.wq_b\.weight$|\.shared_experts\.w[123]\.weight$"
FP8_NAMES += r"|\.([eh]|main)_proj\.weight$"
QUANTIZATION = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0"} | {
    "weight_block_size": [128, 128]
}
"""The quantization_config of published checkpoints; `expert_dtype` beside it says that experts are in MXFP4."""


def quantized_v4(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Random matrices in place of those that published checkpoints store quantized: the tensors of such a checkpoint,
    and those of a plain one that means the same."""
    written, meant = dict(tensors), dict(tensors)
    for seed, (name, tensor) in enumerate(tensors.items()):
        write = mxfp4 if re.search(MXFP4_NAMES, name) else fp8_exponents if re.search(FP8_NAMES, name) else None
        if write is None:
            continue
        made, numbers = write(name, *tensor.shape, seed=seed)
        meant[name] = torch.from_numpy(numbers)
        written |= {name if own == name else f"{name.removesuffix('.weight')}.scale": of for own, of in made.items()}
    return written, meant


@torch.no_grad()
def _randomize(name: str, tensor: Tensor, generator: torch.Generator, experts: int) -> None:
    if "inv_freq" in name:
        return
    if name.endswith("tid2eid"):
        score = torch.rand(tensor.shape[0], experts, generator=generator)
        tensor.copy_(score.argsort(1)[:, : tensor.shape[1]])
    elif "norm" in name:
        tensor.uniform_(0.5, 1.5, generator=generator)
    elif name.endswith(("sinks", "position_bias", "e_score_correction_bias", "base", "scale")):
        tensor.normal_(0.0, 0.5, generator=generator)
    else:
        tensor.normal_(0.0, 1.5 / tensor.shape[-1] ** 0.5, generator=generator)
