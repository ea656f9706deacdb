"""The same checkpoints in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()


def load_oracle(folder: Path) -> Any:
    """transformers' model of a checkpoint folder, fp32. Of one that sees the whole, whose eyes are random."""
    config = AutoConfig.from_pretrained(folder)
    kind = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def oracle_logits(model: Any, tokens: list[int]) -> Tensor:
    """Logits after every token, [T, vocabulary]."""
    logits: Tensor = model(torch.tensor([tokens], device=model.device)).logits[0]
    return logits


def random_tokens(count: int, seed: int, vocab: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (count,), generator=generator).tolist()
