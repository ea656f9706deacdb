"""A replica of a model with latent attention of each family that attends to all tokens and has no layer that drafts, in
process, against transformers' generate."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.page import PAGE_TOKENS
from tests.tiny_models import VOCAB, write_tiny
from tests.workers.harness import InlineEngine
from tests.workers.models.oracle import load_oracle
from workers.config import EngineConfig
from workers.protocol.plan import SamplingParams

pytestmark = pytest.mark.long


QUICK = [("mistral4", 4), ("mistral4", 1), ("mistral3", 2), ("axk1", 3), ("sarvam", 4), ("youtu", 3)]
EVERY = [(kind, width) for kind in ("mistral4", "axk1", "axk1-no-bias", "sarvam", "youtu") for width in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("kind", "width"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.soak) for case in EVERY if case not in QUICK)],
)
def test_greedy_tokens_are_transformers_tokens(kind: str, width: int, tmp_path: Path) -> None:
    """Of prompts in mixed steps, six for four rows, and then of one that begins as another did, whose pages it finds;
    the scale of a Mistral's queries changes every 16 tokens. The self-test has passed on poisoned caches."""
    write_tiny(tmp_path, kind, seed=1)
    settings: dict[str, Any] = {"max_rows": 4, "token_budget": 48, "cache_pages": 40, "max_context": 300}
    drafter = "ngram" if width > 1 else "none"
    run = InlineEngine(EngineConfig(model=str(tmp_path), device="cpu", width=width, drafter=drafter, **settings))
    assert run.replica.selftest is not None
    assert run.replica.selftest.passed
    random_ids = random.Random(0)
    asked = [[random_ids.randrange(VOCAB) for _ in range(length)] for length in (5, 17, 90, 140, 64, 33)]
    params, oracle = SamplingParams(24, temperature=0.0), load_oracle(tmp_path)
    got = run.generate(asked, params)
    assert run.scheduler.stats().step_seconds["mixed"].count > 0
    before = run.scheduler.stats().cached_tokens
    asked.append(asked[3][: 2 * PAGE_TOKENS] + asked[0])
    got += run.generate(asked[-1:], params)
    assert run.scheduler.stats().cached_tokens - before == 2 * PAGE_TOKENS
    for prompt, answer in zip(asked, got, strict=True):
        ids = torch.tensor([prompt])
        more = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
        with torch.inference_mode():
            want = oracle.generate(ids, **more)[0, len(prompt) :].tolist()
        assert answer == want, len(prompt)
    assert run.scheduler.stats().bad_rows == 0
