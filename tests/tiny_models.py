"""Tiny random checkpoints in the official layout, written by transformers, for tests against transformers.

    folder = write_tiny(tmp_path, kind="v3", seed=1, num_hidden_layers=2)

Every parameter is random, norms and routing biases included, and large enough that greedy tokens differ from place to
place. `KINDS` and `SPARSE_KINDS` list the architectures; overrides are fields of the transformers config.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.hyv4_layout import published

VOCAB = 131

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": None,
}

_OF_EXPERTS = (
    "moe_intermediate_size",
    "n_shared_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "first_k_dense_replace",
)

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
}

SCALED: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
    "partial_rotary_factor": 8 / 24,
    "apply_scale": True,
}
"""Rope of a Mistral 4, with borders of the query's scale at multiples of 16. transformers does not read `apply_scale`,
and answers as if it were true: only so is it the reference of what has an `mscale_all_dim`."""

KINDS: dict[str, dict[str, Any]] = {
    "v2": {"topk_method": "greedy", "n_shared_experts": 2, "routed_scaling_factor": 1.0},
    "v2-no-q-lora": {
        "topk_method": "greedy",
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.5,
    },
    "v2-groups": {
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.0,
        "rope_parameters": YARN,
    },
    "v3": {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    "v3-yarn": {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "rope_parameters": YARN, "rms_norm_eps": 1e-2},
    "v3-one-group": {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "rope_interleave": False},
    "v3-no-q-lora": {"n_group": 4, "topk_group": 3, "q_lora_rank": None, "rope_parameters": {**YARN, "mscale": 0.5}},
    "v3-tied": {"n_group": 4, "topk_group": 2, "tie_word_embeddings": True},
    "glm": {"num_attention_heads": 20, "num_key_value_heads": 20, "qk_nope_head_dim": 24, "v_head_dim": 32}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "routed_scaling_factor": 1.8},
    "youtu": {"rope_parameters": {"rope_type": "default", "rope_theta": 1.6e6}},
    "youtu-no-q-lora": {"q_lora_rank": None, "rope_parameters": YARN, "tie_word_embeddings": False}
    | {"rope_interleave": False, "rms_norm_eps": 1e-2},
    "axk1": {"n_group": 4, "topk_group": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "axk1-no-bias": {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 2, "num_hidden_layers": 4}
    | {"rope_parameters": YARN, "n_shared_experts": 2},
    "sarvam": {"n_group": 1, "topk_group": 1, "q_lora_rank": None, "routed_scaling_factor": 2.5}
    | {"rope_parameters": {**YARN, "mscale_all_dim": 1.0}},
    "mistral4": {"num_experts_per_tok": 2, "kv_lora_rank": 16, "first_k_dense_replace": 0, "rope_parameters": SCALED},
    "mistral4-dense": {"n_shared_experts": 2, "routed_scaling_factor": 1.5, "norm_topk_prob": False}
    | {"rope_parameters": {**SCALED, "mscale": 0.0, "mscale_all_dim": 0.0, "factor": 2.0, "llama_4_scaling_beta": 0.5}}
    | {"rope_interleave": False, "tie_word_embeddings": True},
    "mistral3": {"num_experts_per_tok": 2, "rope_parameters": SCALED},
    "kimi": {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "num_experts_per_tok": 4}
    | {"rope_parameters": {**YARN, "rope_theta": 50000.0, "mscale_all_dim": 1.0}},
}
"""Names beginning with v3 or glm have a multi-token-prediction layer. Those of Kimi and mistral3 are the text part of a
model that sees."""

WITHOUT_DRAFTS = ("v2", "kimi", "youtu", "axk1", "axk2", "sarvam", "mistral4", "mistral3")
"""Families whose published models have no multi-token-prediction layer."""

_INDEXER: dict[str, Any] = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 16}
SPARSE_KINDS: dict[str, dict[str, Any]] = {
    "v32": {"n_group": 4, "topk_group": 2, "rope_parameters": YARN, **_INDEXER},
    "glm5": {"n_group": 1, "topk_group": 1, "qk_nope_head_dim": 24, "v_head_dim": 32, "num_hidden_layers": 4}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, **_INDEXER}
    | {"indexer_types": ["full", "full", "shared", "shared"]},
    "axk2": {"gated_norm_rank": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, **_INDEXER},
    "axk2-groups": {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 2, "rope_parameters": YARN, **_INDEXER}
    | {"n_shared_experts": 2, "norm_topk_prob": False, "tie_word_embeddings": True},
    "hyv4": {"n_group": 1, "topk_group": 1, "num_hidden_layers": 4, "swiglu_limit": 0.5, **_INDEXER}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "routed_scaling_factor": 2.827}
    | {"indexer_types": ["full", "full", "shared", "full"], "pad_token_id": None},
    "hyv4-vl": {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 2, "rope_parameters": YARN, **_INDEXER}
    | {"n_shared_experts": 2, "norm_topk_prob": False, "tie_word_embeddings": True, "swiglu_limit": 1.0}
    | {"hc_mult": 2, "hc_magnitude": 1.5, "hc_eps": 1e-3, "rms_norm_eps": 1e-2, "pad_token_id": None}
    | {"indexer_types": ["full", "shared", "shared"]},
}
"""Architectures with sparse attention. Those of V3.2, GLM-5 and Hy4, but for the one
that sees, have a multi-token-prediction layer. Where indexers have
fewer heads, some tokens score exactly 0, which all heads' products below 0 make, and it is not said which of them are
attended to."""


def random_tokens(count: int, seed: int, vocab: int) -> list[int]:
    """Return `count` random token ids below `vocab`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (count,), generator=generator).tolist()


def write_tiny(folder: Path | str, kind: str = "v3", seed: int = 0, **overrides: Any) -> Path:
    """Write a random checkpoint of `kind` to `folder` (made if need be) and return it. Weights are fp32.

    Equal arguments give equal tensors; they are computed once a process.
    """
    config, tensors = _tiny(kind, seed, json.dumps(overrides, sort_keys=True))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_tiny_headers(folder: Path | str, kind: str = "v3", **overrides: Any) -> Path:
    """Write what `write_tiny` does but the numbers: the file has its header and its size, and takes no room on disk.

    For tests that ask what a checkpoint of any size holds, and read none of it.
    """
    config, tensors = _tiny(kind, 0, json.dumps(overrides, sort_keys=True), "meta")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_headers(tensors, folder / "model.safetensors")
    return folder


def save_headers(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Write a safetensors file of tensors on the meta device, whose numbers are a hole in the file."""
    entries, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        dtype = _SAFETENSORS_DTYPES[tensor.dtype]
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(file, 8 + len(header) + end)


_SAFETENSORS_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int32: "I32",
}


def add_draft_tables(folder: Path, layers: int = 3, first_row: int | None = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the draft layer of a checkpoint an embedding and a head, and return them: the model's as far as `first_row`,
    random behind it; None: the model's."""
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    tables = []
    for name, model in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        table = tensors.get(f"{model}.weight", tensors["model.embed_tokens.weight"]).clone()
        if first_row is not None:
            _randomize(name, table[first_row:], generator)
        tensors[f"model.layers.{layers}.{name}.weight"] = table
        tables.append(table)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tables[0], tables[1]


@cache
def _tiny(kind: str, seed: int, overrides: str, device: str = "cpu") -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    import transformers

    family = kind.partition("-")[0]
    name = {
        "v2": "DeepseekV2",
        "v3": "DeepseekV3",
        "kimi": "DeepseekV3",
        "glm": "Glm4MoeLite",
        "v32": "DeepseekV32",
        "glm5": "GlmMoeDsa",
        "youtu": "Youtu",
        "axk1": "AXK1",
        "axk2": "AXK2",
        "hyv4": "HYV4",
        "sarvam": "DeepseekV3",
        "mistral4": "Mistral4",
        "mistral3": "Mistral4",
    }[family]
    config_class, model_class = (getattr(transformers, name + what) for what in ("Config", "ForCausalLM"))
    values = {**_COMMON, **(KINDS | SPARSE_KINDS)[kind], **json.loads(overrides)}
    drafts = values.pop("num_nextn_predict_layers", 1) if family not in WITHOUT_DRAFTS and kind != "hyv4-vl" else 0
    layers = values["num_hidden_layers"]
    if "indexer_types" in values:
        values["indexer_types"] = values["indexer_types"][:layers] + ["full"] * drafts
    if family in ("glm", "hyv4"):
        dense = values.pop("first_k_dense_replace")
        values["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (layers + drafts - dense)
    if family == "youtu":
        values = {name: value for name, value in values.items() if name not in _OF_EXPERTS}
    # The draft layer's block is an ordinary last layer, so one layer more is made and its config then says one fewer.
    config = config_class(**{**values, "num_hidden_layers": layers + drafts})
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]), torch.device(device):
        model = model_class(config).float().eval()
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        _randomize(name, parameter, generator)
        if family == "axk2":
            _fit_axk2(name, parameter)
    if family == "hyv4":
        return _hyv4(model, layers, drafts, generator, device, sees=kind == "hyv4-vl")
    written, tensors = _saved(model)
    if drafts:
        tensors |= _around_drafts(f"model.layers.{layers}.", values["hidden_size"], generator, device)
    written |= {"num_hidden_layers": layers}
    if family == "axk1":
        _as_published(tensors, layers, values["hidden_size"], bias=kind != "axk1-no-bias", device=device)
    if family not in WITHOUT_DRAFTS or family == "kimi":
        written |= {"num_nextn_predict_layers": drafts}
    for name in ("mlp_layer_types", "layer_types", "indexer_types"):
        if name in written:
            written[name] = written[name][:layers]
    if family == "sarvam":
        written = _as_sarvam(written)
    if family == "mistral3":
        return _seeing_mistral(written, tensors)
    return _seeing(written, tensors) if family == "kimi" else (written, tensors)


def _around_drafts(prefix: str, hidden: int, generator: torch.Generator, device: str) -> dict[str, torch.Tensor]:
    """What a layer that drafts has beside a layer's tensors."""
    tensors = {}
    for name, shape in {
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "eh_proj.weight": (hidden, 2 * hidden),
        "shared_head.norm.weight": (hidden,),
    }.items():
        tensors[prefix + name] = torch.empty(shape, device=device)
        _randomize(name, tensors[prefix + name], generator)
    return tensors


def _as_published(tensors: dict[str, torch.Tensor], layers: int, hidden: int, *, bias: bool, device: str) -> None:
    """Give dense layers the norm that published checkpoints of A.X K1 store and do not use, and without `bias` take the
    routers' away, as there."""
    for layer in range(layers):
        name = f"model.layers.{layer}.post_mlp_layernorm.weight"
        tensors.setdefault(name, torch.full((hidden,), float("nan"), device=device))
    for name in [name for name in tensors if name.endswith("e_score_correction_bias") and not bias]:
        del tensors[name]


def _as_sarvam(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a DeepSeek V3 with one group of experts as it would be published of a Sarvam-105B."""
    config = {name: value for name, value in config.items() if name != "num_nextn_predict_layers"}
    rope, groups = config.pop("rope_parameters"), (config.pop("n_group"), config.pop("topk_group"))
    assert rope.pop("rope_type") == "yarn"
    assert groups == (1, 1)
    return config | {
        "model_type": "sarvam_mla",
        "architectures": ["SarvamMLAForCausalLM"],
        "num_experts": config.pop("n_routed_experts"),
        "num_shared_experts": config.pop("n_shared_experts"),
        "head_dim": config["kv_lora_rank"] + config["qk_rope_head_dim"],
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": {**rope, "type": "deepseek_yarn"},
        "use_qk_norm": True,
    }


def _saved(model: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The config.json and the tensors that transformers saves of a model."""
    if model.device.type == "meta":
        from transformers.core_model_loading import revert_weight_conversion

        model.config.architectures, model.config.dtype = [type(model).__name__], "float32"
        tensors = revert_weight_conversion(model, model.state_dict())
        if model.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        return _saved_config(model.config), tensors
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = load_file(Path(folder) / "model.safetensors")
        return json.loads((Path(folder) / "config.json").read_text()), tensors


def _saved_config(config: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        written: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
        return written


def _seeing(text: dict[str, Any], tensors: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The checkpoint of a Kimi K2.5 that has this text part, with some of the tensors by which it would see."""
    config = {
        "model_type": "kimi_k25",
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": text | {"model_type": "kimi_k2"},
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1},
        "projection_hidden_size": 32,
        "tie_word_embeddings": False,
    }
    eyes = {"vision_tower.patch_embed.proj.bias": torch.zeros(32), "mm_projector.pre_norm.bias": torch.zeros(32)}
    return config, {f"language_model.{name}": tensor for name, tensor in tensors.items()} | eyes


def _seeing_mistral(
    text: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The checkpoint of a Mistral Small 4 that has this text part, with some of the tensors by which it would see."""
    config = {
        "model_type": "mistral3",
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
        | {"num_attention_heads": 2, "head_dim": 16, "image_size": 28, "patch_size": 14},
        "image_token_index": 10,
        "spatial_merge_size": 2,
    }
    eyes = {
        "vision_tower.ln_pre.weight": torch.ones(32),
        "multi_modal_projector.norm.weight": torch.ones(32),
    }
    return config, {f"language_model.{name}": tensor for name, tensor in tensors.items()} | eyes


def _hyv4(
    model: Any, layers: int, drafts: int, generator: torch.Generator, device: str, *, sees: bool
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The config.json and the tensors of a Hy4, whose layer that drafts has one residual stream."""
    tensors, last = dict(model.state_dict()), f"model.layers.{layers}."
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    if drafts:
        for name in [name for name in tensors if name.startswith((f"{last}attn_hc.", f"{last}ffn_hc."))]:
            del tensors[name]
        tensors |= _around_drafts(last, model.config.hidden_size, generator, device)
    written = _saved_config(model.config) | {"architectures": ["HYV4ForCausalLM"]}
    for name in ("mlp_layer_types", "layer_types", "indexer_types"):
        written[name] = written[name][:layers]
    written |= {"num_hidden_layers": layers, "num_nextn_predict_layers": drafts}
    tensors = published(tensors, written)
    return _seeing_hyv4(written, tensors) if sees else (written, tensors)


def _seeing_hyv4(
    text: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The checkpoint of a Hy4 that has this text part, with some of the tensors by which it would see."""
    config = {
        "model_type": "hy_v4_vl",
        "architectures": ["HYV4VLForConditionalGeneration"],
        "text_config": text | {"model_type": "hy_v4_vl_text"},
        "vision_config": {"model_type": "hy_v4_vl_vision", "hidden_size": 32, "intermediate_size": 32}
        | {"num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4, "max_image_size": 16}
        | {"out_hidden_size": text["hidden_size"]},
        "tie_word_embeddings": text["tie_word_embeddings"],
        "image_token_id": 10,
        "video_token_id": 11,
    }
    text_rope = config["text_config"]["rope_parameters"]
    assert isinstance(text_rope, dict)
    config["text_config"] |= {"rope_parameters": text_rope | {"mrope_section": [2, 1, 1]}}
    return config, tensors | {"vit.perceive.norm.weight": torch.ones(32)}


@torch.no_grad()
def _fit_axk2(name: str, tensor: torch.Tensor) -> None:
    if "e_score_correction_bias" in name:
        # Experts of other groups count as 0: no other may lie below, or which of these are chosen is not said.
        tensor.add_(1.0)
    elif "q_gate_proj" in name:
        # It reads a latent before its norm, too, which is larger, and large scores show every rounding.
        tensor.mul_(0.5)


@torch.no_grad()
def _randomize(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
    if "inv_freq" in name or tensor.is_meta:
        return
    if "norm" in name and "bias" not in name:
        tensor.uniform_(0.5, 1.5, generator=generator)
    elif "norm.bias" in name or "e_score_correction_bias" in name:
        tensor.normal_(0.0, 0.2, generator=generator)
    else:
        tensor.normal_(0.0, 1.5 / tensor.shape[-1] ** 0.5, generator=generator)
