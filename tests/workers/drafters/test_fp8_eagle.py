"""A draft model of Mistral in FP8 beside a model in bf16, and prompts whose greedy answers rounding cannot change, held
against transformers on a CPU. `test_mistral_eagle_gpu.py` compares with that."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_mistral_eagle import TARGET, good, hidden_of, oracle, plain

from tests.tiny_mistral_eagle import save
from tests.tiny_models import VOCAB, write_tiny
from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.protocol.plan import SamplingParams

SIZES = {"hidden_size": 256, "intermediate_size": 256, "q_lora_rank": 128, "kv_lora_rank": 128} | {
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
}
"""Matrices have whole blocks of 128 features, of which kernels for FP8 weights make most."""
WIDTH, ANSWER = 2, 4
LEAST_MARGIN = 0.18
"""Of the two best logits, in standard deviations of all: bf16 rounds away 0.02 on average here."""
SEEDS = (8, 9, 14, 18, 21, 37, 117, 125, 161, 182, 202, 275)
"""Of prompts in whose answers, and in all drafts on the way, no other logit comes as close to the best as that."""


def write_pair(root: Path) -> tuple[Path, Path]:
    """Write a model, and a draft model of its layers in FP8, one scale for each matrix, which answers much as it does:
    both folders."""
    folder = write_tiny(root / "target", TARGET, seed=3, **SIZES)
    plain_one = good(folder, root)
    params = json.loads((plain_one / "params.json").read_text())
    params["yarn"]["apply_scale"] = False  # which the formulas do not have
    params["quantization"] = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(plain_one / "consolidated.safetensors").items():
        tensors[name] = tensor
        if tensor.dim() == 2:
            scale, own = tensor.abs().max() / 448, name.removesuffix("weight")
            tensors |= {name: (tensor / scale).to(torch.float8_e4m3fn), f"{own}qscale_weight": scale}
            tensors[f"{own}qscale_act"] = torch.tensor(0.5)
    return folder, save(root / "in FP8", params, tensors)


def prompt_of(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(3 + seed % 10)]


def margin(logit_V: torch.Tensor) -> float:
    """How far the best logit is from the next, in standard deviations of all."""
    best, other = logit_V.topk(2).values
    return float((best - other) / logit_V.std())


@torch.inference_mode()
def answer(folder: Path, draft: Path, prompt: list[int]) -> tuple[list[int], float]:
    """Transformers' greedy answer in float64, and the least margin of its tokens and of the drafts behind each."""
    drafter, head_VE, tokens, least = plain(folder, draft), oracle(folder).lm_head.weight, list(prompt), torch.inf
    for _ in range(ANSWER):
        hidden_SE = hidden_of(folder, tokens)
        logit_V = hidden_SE[-1] @ head_VE.T
        tokens.append(int(logit_V.argmax()))
        least, read = min(least, margin(logit_V)), tokens[1:]
        for _ in range(WIDTH - 1):
            own_SE = drafter.hidden(hidden_SE, read)
            logit_V = own_SE[-1] @ drafter.head_VE.T
            least, read = min(least, margin(logit_V)), [*read, int(logit_V.argmax())]
            hidden_SE = torch.cat([hidden_SE, own_SE[-1:]])
    return tokens[len(prompt) :], least


def engine(folder: Path, draft: Path | None, device: str, **changes: Any) -> InlineEngine:
    settings = {"width": WIDTH, "max_rows": 4, "token_budget": 16, "cache_pages": 40, "max_context": 200}
    settings |= {"dtype": "bfloat16", "draft_model": None if draft is None else str(draft)}
    config = EngineConfig(model=str(folder), device=device, **{**settings, **changes})
    return InlineEngine(config, torch.device(device))


def generated(made: InlineEngine) -> tuple[list[list[int]], int, int]:
    """Answers to the prompts, and drafts that were offered and accepted."""
    found = made.generate([prompt_of(seed) for seed in SEEDS], SamplingParams(ANSWER, temperature=0.0))
    stats = made.scheduler.stats()
    return found, stats.drafts_offered, stats.drafts_accepted


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("fp8-eagle"))


def test_a_model_in_bf16_with_a_draft_model_in_fp8_gives_transformers_tokens(pair: tuple[Path, Path]) -> None:
    wanted = [answer(*pair, prompt_of(seed)) for seed in SEEDS]
    assert min(least for _, least in wanted) > LEAST_MARGIN
    found, offered, accepted = generated(engine(*pair, "cpu", selftest=False))
    assert found == [tokens for tokens, _ in wanted]
    assert 0.2 * offered < accepted < 0.9 * offered
    in_fp32 = engine(*pair, "cpu", selftest=False, dtype="float32")
    assert generated(in_fp32) == (found, offered, accepted)
