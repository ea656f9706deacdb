"""The description of the model in its folder: config.json in Hugging Face's layout, or params.json in Mistral's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

CONFIG: Final = "config.json"
PARAMS: Final = "params.json"
"""File of Mistral's own layout, beside consolidated*.safetensors. A folder that holds both layouts is read as Hugging
Face's, but for what config.json has no word for (`_with_apply_scale`)."""

_NAMES: Final = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
    "tied_embeddings": "tie_word_embeddings",
}
_OF_EXPERTS: Final = {
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "expert_hidden_dim": "moe_intermediate_size",
    "num_shared_experts": "n_shared_experts",
    "first_k_dense_replace": "first_k_dense_replace",
    "route_every_n": "moe_layer_freq",
    "routed_scale": "routed_scaling_factor",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
}
_OF_YARN: Final = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
}
_POSITIONS: Final = 128_000
"""Positions of a params.json that does not give them, as vLLM reads it."""
_ENDS: Final = 2
"""Mistral's end-of-sequence id, which params.json does not name."""


def config_file(folder: Path) -> Path | None:
    """The file that says what model a folder holds; None if there is none."""
    return next((folder / name for name in (CONFIG, PARAMS) if (folder / name).is_file()), None)


def config_values(folder: Path) -> dict[str, Any]:
    """The values of its config.json, or those that one would have of the model of its params.json. OSError or
    ValueError where it cannot be read."""
    file = config_file(folder) or folder / CONFIG
    values = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError(f"{file} does not hold a JSON object")
    return of_params(values) if file.name == PARAMS else _with_apply_scale(values, folder / PARAMS)


def _with_apply_scale(values: dict[str, Any], params: Path) -> dict[str, Any]:
    """The values of a config.json, whose rope has `apply_scale` if it is that of a `mistral4` and the params.json
    beside it says so. What config.json itself says counts."""
    seen = isinstance(values.get("text_config"), dict)
    text = values["text_config"] if seen else values
    ropes = {name: text[name] for name in ("rope_parameters", "rope_scaling") if text.get(name)}
    if text.get("model_type") != "mistral4" or not params.is_file():
        return values
    if not ropes or any(not isinstance(rope, dict) or "apply_scale" in rope for rope in ropes.values()):
        return values
    try:
        yarn = json.loads(params.read_text(encoding="utf-8"))["yarn"]
        text = {**text, **{name: {**rope, "apply_scale": yarn["apply_scale"]} for name, rope in ropes.items()}}
    except (KeyError, TypeError):
        return values
    except ValueError as error:
        raise ValueError(f"{params.name} beside it is no JSON: {error}") from error
    return {**values, "text_config": text} if seen else text


def of_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json that says what a params.json does, of model_type `mistral4`. What that model_type does not have
    keeps its name, under which it is refused: `params.json` is not told from `config.json` behind this. ValueError
    where it says too little."""
    given = dict(params)
    values: dict[str, Any] = {"model_type": "mistral4", "eos_token_id": _ENDS}
    moe, yarn, scaling = (given.pop(name, None) or {} for name in ("moe", "yarn", "llama_4_scaling"))
    quantization = given.pop("quantization", None) or given.pop("quantization_config", None)
    values |= {_OF_EXPERTS.get(name, f"moe.{name}"): value for name, value in dict(moe).items()}
    if not moe:
        values["n_routed_experts"] = 0  # all layers are dense
    values |= {_NAMES.get(name, name): value for name, value in given.items()}
    rope = {_OF_YARN.get(name, name): value for name, value in dict(yarn).items()}
    if yarn and "apply_scale" not in yarn:
        # Engines take it for true, and converters for false.
        raise ValueError("yarn lacks apply_scale, true or false, which says whether the softmax scale is corrected")
    rope["rope_type"] = "yarn" if yarn else "default"
    if "rope_theta" in values:
        rope["rope_theta"] = values["rope_theta"]
    if scaling:
        rope["llama_4_scaling_beta"] = scaling.get("beta")
        values["llama_4_original_positions"] = scaling.get("original_max_position_embeddings")
    values["rope_parameters"] = rope
    values.setdefault("max_position_embeddings", _POSITIONS)
    if quantization is not None:
        values["quantization_config"] = _quantization(quantization)
    return values


def _quantization(given: Any) -> Any:
    """Mistral's own words for FP8 with a scale for each tensor; other libraries' as they are."""
    if not isinstance(given, dict) or given.get("qformat_weight") != "fp8_e4m3":
        return given
    scheme = {"NO_SCALES": "dynamic", "TENSOR": "static", None: "static"}
    activations = given.get("qscheme_act")
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": scheme.get(activations, activations),
        "weight_block_size": None,
    }
