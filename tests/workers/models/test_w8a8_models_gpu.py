"""A model whose many tokens are rounded to FP8, on a GPU: as far off as that makes it, and only where it may be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import w8a8_models as models

from kernels.linear import supports_w8a8
from kernels.moe import schedule
from workers.models import w8a8

CUDA = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]


def test_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized, twin = models.checkpoints(tmp_path)
    want = models.exact(twin)
    dense, experts = [], []
    product, tiling = w8a8.w8a8_linear, schedule.w8a8
    monkeypatch.setattr(w8a8, "w8a8_linear", lambda *a: (dense.append(a[2].shape), product(*a)))
    monkeypatch.setattr(schedule, "w8a8", lambda *a: (experts.append(a[0]), tiling(*a))[1])
    plain_T = models.errors(twin, CUDA, want, quantize_activations=False)
    kept_T = models.errors(quantized, CUDA, want, quantize_activations=False)
    assert kept_T.median() < 1.2 * plain_T.median()
    assert not dense
    assert not experts
    rounded_T = models.errors(quantized, CUDA, want, quantize_activations=True)
    # The rounding of bf16 is 32 times as fine; its results are rounded more often.
    assert 2 * plain_T.median() < rounded_T.median() < 12 * plain_T.median()
    assert len(experts) == 2
    assert len(dense) == (11 if supports_w8a8(torch.device("cuda", torch.cuda.current_device())) else 0)
