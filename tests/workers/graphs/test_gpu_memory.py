"""Device memory of a replica at its limits: what requests ask for was taken before the cache was sized."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny_models import write_tiny
from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.protocol.plan import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VOCAB, ROWS, WIDTH = 129_280, 1024, 3
ALLOWANCE = 64 << 20
"""Bytes that steps may take on their way: what a top-k and copies of a plan need, and no [rows, vocabulary], which
would be 1.5 GiB here."""


def test_log_probabilities_and_penalties_of_every_row_need_no_more_memory(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "v3", seed=3, num_hidden_layers=1, vocab_size=VOCAB)
    config = EngineConfig(
        model=str(folder),
        device="cuda",
        width=WIDTH,
        max_rows=ROWS,
        token_budget=ROWS * WIDTH + 1024,
        max_context=128,
        selftest=False,
    )
    run = InlineEngine(config, torch.device("cuda"))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    params = [
        SamplingParams(6, temperature=0.5, seed=i, repetition_penalty=1.1, presence_penalty=0.3, logprobs=20)
        for i in range(ROWS)
    ]
    tokens = run.generate([[i % VOCAB, 5, 7] for i in range(ROWS)], params)
    assert {len(row) for row in tokens} == {6}
    entries = [entry for record in run.finished.values() for output in record.outputs for entry in output.logprobs]
    assert len(entries) == 6 * ROWS
    assert torch.cuda.max_memory_allocated() - before <= ALLOWANCE
    assert torch.cuda.memory_allocated() - before <= 1 << 20
