"""The same checkpoints in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, DeepseekV3Config
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()


def load_oracle(folder: Path) -> Any:
    """transformers' model of a checkpoint folder, fp32. Of one that sees the whole, whose eyes are random."""
    config = _sarvam(folder) or AutoConfig.from_pretrained(folder)
    kind = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText
    return kind.from_pretrained(folder, config=config, dtype=torch.float32).eval()


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


def random_tokens(count: int, seed: int, vocab: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (count,), generator=generator).tolist()
