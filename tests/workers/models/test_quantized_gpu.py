"""Models of quantized checkpoints on a GPU: on every path no further from fp32 than the same numbers in bf16 are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from oracle import load_oracle, oracle_logits
from paged import ALONE, load_fp32
from quantized_pairs import CHECKPOINTS, PROMPTS, SPARSE, WIDE, checkpoints, logits
from torch import Tensor

from workers.families import load_model
from workers.models.execution_paths import ExecutionPaths

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
ALL_EXPERTS = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 8, "n_routed_experts": 8}
"""Sizes with which every token takes all experts: rounding a choice between experts would make another token."""
DENSE = [name for name in CHECKPOINTS if name not in SPARSE]
"""Rounding makes another choice of the tokens that sparse attention reads, too."""


def distances(got: list[Tensor], want: list[Tensor]) -> Tensor:
    """Every token's."""
    pairs = zip(got, want, strict=True)
    return torch.cat([(got.float().cpu() - theirs).norm(dim=1) / theirs.norm(dim=1) for got, theirs in pairs])


@pytest.mark.parametrize("name", DENSE)
def test_logits_are_no_further_from_fp32_than_those_of_transformers_in_bf16(name: str, tmp_path: Path) -> None:
    """The model of transformers has the same numbers, in bf16 as well."""
    quantized, twin = checkpoints(tmp_path, name, **ALL_EXPERTS)
    want = logits(load_fp32(twin))[: len(PROMPTS)]
    oracle = load_oracle(twin).to(CUDA, torch.bfloat16)
    theirs = [oracle_logits(oracle, prompt)[: len(own)] for prompt, own in zip(PROMPTS, want, strict=True)]
    model = load_model(quantized, group=ALONE, dtype=torch.bfloat16, device=CUDA, max_positions=512)
    ours_T, theirs_T = distances(logits(model)[: len(PROMPTS)], want), distances(theirs, want)
    assert ours_T.median() < theirs_T.median(), (ours_T, theirs_T)


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("path", ["fastest", "many", "invariant"])
def test_logits_are_as_exact_as_in_bf16(name: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized, twin = checkpoints(tmp_path, name, **ALL_EXPERTS, **(WIDE if path == "invariant" else {}))
    want = logits(load_fp32(twin))
    if path == "many":
        monkeypatch.setattr(ExecutionPaths, "takes_small_batch", lambda *_: False)

    def errors(folder: Path) -> Tensor:
        """Every token's."""
        model = load_model(
            folder, group=ALONE, dtype=torch.bfloat16, device=CUDA, max_positions=512, invariant=path == "invariant"
        )
        return distances(logits(model), want)

    ours_T, theirs_T = errors(quantized), errors(twin)
    assert ours_T.max() < 2 * theirs_T.max(), (ours_T, theirs_T)
    assert ours_T.median() < 1.2 * theirs_T.median(), (ours_T, theirs_T)
