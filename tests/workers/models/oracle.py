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
    HYV4Config,
    HYV4ForCausalLM,
)
from transformers.utils import logging

from tests.hyv4_layout import in_transformers

logging.set_verbosity_error()
logging.disable_progress_bar()


def load_oracle(folder: Path) -> Any:
    """transformers' model of a checkpoint folder, fp32. Of one that sees the whole, whose eyes are random."""
    if (hyv4 := _hyv4(folder)) is not None:
        return hyv4
    config = AutoConfig.from_pretrained(folder)
    kind = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText
    return kind.from_pretrained(folder, config=config, dtype=torch.float32).eval()


def _hyv4(folder: Path) -> Any:
    """A Hy4 that does not see, None of others: in the class that transformers has for it, whose rope takes halves of
    the rows and whose norms of latents have an epsilon of their own, with rows and epsilons as `HYV4VLTextModel`, the
    text part of one that sees, takes those of published weights."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "hy_v4":
        return None
    model = HYV4ForCausalLM(HYV4Config(**{name: value for name, value in config.items() if name != "model_type"}))
    tensors, last = load_file(folder / "model.safetensors"), f"model.layers.{config['num_hidden_layers'] - 1}."
    if f"{last}input_layernorm.weight" not in tensors:  # asked for as a layer of the model
        tensors = {name.replace("model.mtp_layers.0.", last): tensor for name, tensor in tensors.items()}
    beside = ("model.mtp_layers.", *(last + own for own in ("enorm", "hnorm", "eh_proj", "final_layernorm")))
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(beside)}
    left = model.load_state_dict(in_transformers(tensors, config), strict=False)
    assert not left.unexpected_keys
    without_streams = {name for name in left.missing_keys if name.startswith((f"{last}attn_hc.", f"{last}ffn_hc."))}
    assert len(without_streams) in (0, 6)
    assert {*left.missing_keys} - without_streams <= ({"lm_head.weight"} if config["tie_word_embeddings"] else set())
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm):
            norm.variance_epsilon = config["rms_norm_eps"]
    return model.float().eval()


@torch.no_grad()
def oracle_logits(model: Any, tokens: list[int]) -> Tensor:
    """Logits after every token, [T, vocabulary]."""
    logits: Tensor = model(torch.tensor([tokens], device=model.device)).logits[0]
    return logits
