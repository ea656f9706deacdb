"""A quantized checkpoint whose sizes products of FP8 (W8A8) activations take, and one prompt through its model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from paged import ALONE, Paged, load_fp32
from quantized_checkpoints import FP8_NAMES, quantize
from safetensors.torch import save_file
from tiny_models import VOCAB, random_tokens, write_tiny
from torch import Tensor

from workers.families import load_model
from workers.models.model import Model

SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 512,
    "kv_lora_rank": 64,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 8,
    "n_routed_experts": 8,
}
"""Whole blocks; and every token takes all experts, for of a choice rounding makes another token."""
TOKENS = 96


def checkpoints(folder: Path) -> tuple[Path, Path]:
    """A quantized checkpoint, and a plain one of the same numbers."""
    quantized = write_tiny(folder / "quantized", "v3-one-group", seed=1, **SIZES)
    twin = Path(shutil.copytree(quantized, folder / "twin"))
    save_file(quantize(quantized, "fp8", FP8_NAMES), twin / "model.safetensors")
    return quantized, twin


def logits(model: Model) -> Tensor:
    """Compute the logits of every token of a prompt, in fp32 on the host."""
    paged = Paged(model, [random_tokens(TOKENS, TOKENS, VOCAB)])
    return model.logits(paged.forward(paged.plan([], 1, [(0, TOKENS)]))[0]).cpu()


def errors(folder: Path, device: torch.device, want: Tensor, *, quantize_activations: bool) -> Tensor:
    """Every token's, of the model in bf16, in norms of what is wanted."""
    model = load_model(
        folder,
        group=ALONE,
        dtype=torch.bfloat16,
        device=device,
        max_positions=512,
        quantize_activations=quantize_activations,
    )
    return (logits(model) - want).norm(dim=1) / want.norm(dim=1)


def exact(twin: Path) -> Tensor:
    """Compute in fp32 with the numbers of a checkpoint."""
    return logits(load_fp32(twin))
