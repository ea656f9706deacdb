"""The same steps on a GPU and on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from oracle import random_tokens
from paged import CPU, Paged, load_fp32
from tiny_models import KINDS, VOCAB, write_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_steps_agree_with_the_cpu(kind: str, tmp_path: Path) -> None:
    """Prefill, mixed and decode steps of two rows, drafts included; many tokens of a prefill and few of a decode
    step take different ways through the experts."""
    folder = write_tiny(tmp_path, kind, seed=1)
    sequences = [random_tokens(151, 0, VOCAB), random_tokens(90, 1, VOCAB)]
    results = []
    for device in (CPU, torch.device("cuda", 0)):
        model = load_fp32(folder, device=device)
        paged = Paged(model, sequences)
        outputs = []
        for decode, width, chunks in [([], 1, [(0, 70)]), ([0], 3, [(1, 65)]), ([0, 1], 2, []), ([1], 4, [(0, 40)])]:
            step = paged.plan(decode, width, chunks)
            hidden = paged.forward(step)
            outputs += [model.logits(hidden[row]).cpu() for row in sorted(hidden)]
            if model.has_draft_layer:
                drafts = paged.draft(step, hidden)
                outputs += [model.draft_logits(drafts[row]).cpu() for row in sorted(drafts)]
        results.append(outputs)
    for cpu, gpu in zip(*results, strict=True):
        torch.testing.assert_close(gpu, cpu, atol=1e-4, rtol=0)
