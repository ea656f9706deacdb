"""The same checkpoints in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV3Config,
    HYV4Config,
    HYV4ForCausalLM,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from tests.hyv4_layout import in_transformers

logging.set_verbosity_error()
logging.disable_progress_bar()


def load_oracle(folder: Path) -> Any:
    """transformers' model of a checkpoint folder, fp32. Of one that sees the whole, whose eyes are random."""
    if (hyv4 := _hyv4(folder)) is not None:
        return hyv4
    config = _sarvam(folder) or AutoConfig.from_pretrained(folder)
    kind = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText
    return kind.from_pretrained(folder, config=config, dtype=torch.float32).eval()


def _hyv4(folder: Path) -> Any:
    """The text part of a Hy4; None of others. In the class that transformers 5.23 has, too, whose norms of latents get
    the epsilon that those of `HYV4VLTextModel` have, which 5.24 has brought."""
    values = json.loads((folder / "config.json").read_text())
    if values["model_type"] not in ("hy_v4", "hy_v4_vl") or f"{values['model_type']}_text" in CONFIG_MAPPING:
        return None  # from 5.24 on transformers reads the whole of one that sees as it is published
    text = values.get("text_config", values)
    model = HYV4ForCausalLM(HYV4Config(**{name: value for name, value in text.items() if name != "model_type"}))
    tensors, last = load_file(folder / "model.safetensors"), f"model.layers.{text['num_hidden_layers'] - 1}."
    if f"{last}input_layernorm.weight" not in tensors:  # asked for as a layer of the model
        tensors = {name.replace("model.mtp_layers.0.", last): tensor for name, tensor in tensors.items()}
    beside = ("vit.", "model.mtp_layers.", *(last + own for own in ("enorm", "hnorm", "eh_proj", "final_layernorm")))
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(beside)}
    left = model.load_state_dict(in_transformers(tensors, text), strict=False)
    assert not left.unexpected_keys
    without_streams = {name for name in left.missing_keys if name.startswith((f"{last}attn_hc.", f"{last}ffn_hc."))}
    assert len(without_streams) in (0, 6)
    assert {*left.missing_keys} - without_streams <= ({"lm_head.weight"} if text["tie_word_embeddings"] else set())
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm):
            norm.variance_epsilon = text["rms_norm_eps"]
    return model.float().eval()


def _sarvam(folder: Path) -> Any:
    """The config of a Sarvam-105B as that of the DeepSeek V3 that it is, as transformers reads it from 5.24 on, where
    it has no model of its own either; None of others."""
    values = json.loads((folder / "config.json").read_text())
    if values["model_type"] != "sarvam_mla":
        return None
    names = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
    rope = {name: value for name, value in values["rope_scaling"].items() if name != "type"}
    own = {"model_type", "head_dim", "rope_scaling", "architectures"}
    kept = {names.get(name, name): value for name, value in values.items() if name not in own}
    return DeepseekV3Config(**kept, n_group=1, topk_group=1, rope_scaling={**rope, "rope_type": "yarn"})


@torch.no_grad()
def oracle_logits(model: Any, tokens: list[int]) -> Tensor:
    """Logits after every token, [T, vocabulary]."""
    logits: Tensor = model(torch.tensor([tokens], device=model.device)).logits[0]
    return logits
