"""Quantized checkpoints beside plain ones of the same numbers, and passes that go every way through their models."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from paged import Paged
from quantized_checkpoints import FP8_NAMES, HYV4_NAMES, INT4_NAMES, quantize
from safetensors.torch import save_file
from tiny_models import VOCAB, random_tokens, write_tiny
from torch import Tensor

from workers.models.model import Model

SIZES: dict[str, Any] = {
    "hidden_size": 160,
    "intermediate_size": 320,
    "moe_intermediate_size": 192,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
}
"""Sizes that end in the middle of blocks."""
WIDE: dict[str, Any] = {"moe_intermediate_size": 512}
"""Sizes of experts that invariant mode does not keep plain, because eight ranks could share them."""
CHECKPOINTS = {
    "fp8": ("v3-yarn", "fp8", FP8_NAMES),
    "fp8 without query latent": ("v2-no-q-lora", "fp8", FP8_NAMES),
    "int4": ("kimi", "int4", INT4_NAMES),
    "fp8 of GLM": ("glm", "fp8", FP8_NAMES),
    "fp8 of V3.2": ("v32", "fp8", FP8_NAMES),
    "fp8 of GLM-5": ("glm5", "fp8", FP8_NAMES),
    "fp8 of A.X K2": ("axk2", "fp8", FP8_NAMES),
    "mxfp8 of Hy4": ("hyv4", "mxfp8", HYV4_NAMES),
}
SPARSE = ("fp8 of V3.2", "fp8 of GLM-5", "fp8 of A.X K2", "mxfp8 of Hy4")
PROMPTS = [random_tokens(count, count, VOCAB) for count in (90, 41, 9)]
STEPS: list[tuple[list[int], int, list[tuple[int, int]]]] = [
    ([], 1, [(0, 40), (1, 30)]),
    ([0], 2, [(1, 10), (2, 5)]),
    ([0, 2], 1, []),
    ([0], 7, []),
    ([], 1, [(0, 38)]),
    ([2], 2, []),
]
"""Row 0's prompt and the others' in chunks, alone and beside decode rows, and in steps of decode rows alone."""


def checkpoints(folder: Path, name: str, **overrides: Any) -> tuple[Path, Path]:
    """A quantized checkpoint, and a plain one of the same numbers."""
    kind, form, names = CHECKPOINTS[name]
    sizes = SIZES if "no-q-lora" not in kind else {**SIZES, "q_lora_rank": None}
    quantized = write_tiny(folder / "quantized", kind, seed=1, **{**sizes, **overrides})
    twin = Path(shutil.copytree(quantized, folder / "twin"))
    save_file(quantize(quantized, form, names), twin / "model.safetensors")
    return quantized, twin


def logits(model: Model) -> list[Tensor]:
    """Compute the logits of every token, and those of the draft layer where there is one."""
    paged = Paged(model, PROMPTS)
    got: list[list[Tensor]] = [[] for _ in PROMPTS]
    drafted = []
    for decode, width, chunks in STEPS:
        step = paged.plan(decode, width, chunks)
        hidden = paged.forward(step)
        for row, states in hidden.items():
            got[row].append(model.logits(states))
        if model.drafter is not None:
            drafted += [model.drafter.logits(states) for states in paged.draft(step, hidden).values()]
    return [torch.cat(parts) for parts in got] + drafted
