"""DSpark on a GPU, on kernels: in captured and mixed steps tokens are transformers', and as many drafts are accepted as
on a CPU, where each draft is held against the formulas (test_dspark.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_dspark import BLOCK, CONFIG, check, note_drafts, prompts, tensors

from tests.deepseek_v4_layout import tiny_v4, write_v4
from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.drafters.dspark import DsparkDrafter
from workers.protocol.plan import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICES = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, _ = tiny_v4(seed=1)
    return write_v4(tmp_path_factory.mktemp("dspark"), {**config, **CONFIG}, tensors())


def engine(folder: Path, device: torch.device, **settings: Any) -> InlineEngine:
    sizes = {"max_rows": 3, "token_budget": 48, "cache_pages": 40, "max_context": 300, "dtype": "float32"}
    return InlineEngine(EngineConfig(model=str(folder), device=device.type, **{**sizes, **settings}), device)


def greedy(prompt: list[int], tokens: int) -> list[int]:
    """What transformers' model answers."""
    _, model = tiny_v4(seed=1)
    ids, most = torch.tensor([prompt]), {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None}
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **most)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("width", "least"), [(BLOCK + 1, 0.0), (BLOCK + 1, 0.4), (2, 0.4), ("auto", 0.1)])
def test_captured_and_mixed_steps_give_transformers_tokens(width: Any, least: float, folder: Path) -> None:
    """With drafts that are left out, and without. Which are, no choice of a width by measured times may change."""
    asked = [prompt * 2 for prompt in prompts(30, 20, 7, 70)]
    settings: dict[str, Any] = {"width": width, "least_draft_confidence": least}
    on_gpu = engine(folder, DEVICES[0], **settings)
    assert isinstance(on_gpu.runner.parts.drafter, DsparkDrafter)
    (report,) = on_gpu.reports[-1:]
    assert report.passed, [bucket.problems for bucket in report.buckets]
    assert {bucket.kind for bucket in report.buckets} == {"decode", "masked", "mixed", "tail"}
    found = on_gpu.generate(asked, SamplingParams(30, temperature=0.0))
    assert found == [greedy(prompt, 30) for prompt in asked]
    assert on_gpu.runner.stats.replays > 0
    assert on_gpu.runner.stats.mixed_steps > 0
    assert on_gpu.scheduler.stats().bad_rows == 0
    if width == "auto":
        return
    on_cpu = engine(folder, DEVICES[1], selftest=False, **settings)
    assert on_cpu.generate(asked, SamplingParams(30, temperature=0.0)) == found
    accepted = [own.scheduler.stats().drafts_accepted for own in (on_gpu, on_cpu)]
    assert accepted[0] == accepted[1] > 0


@pytest.mark.parametrize("length", [1, 8, 47, 150])
def test_drafts_are_those_of_the_formulas(length: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their logits and confidences, in eager steps: behind prompts in one chunk or several, behind rejected
    drafts, and behind a snapshot."""
    drafted, (prompt,) = note_drafts(monkeypatch), prompts(length, seed=length)
    run = engine(folder, DEVICES[0], max_rows=1, width=BLOCK + 1, selftest=False, graphs=False)
    answers = [run.generate([prompt], SamplingParams(6, temperature=0.0))[0] for _ in range(3)]
    assert answers == [greedy(prompt, 6)] * 3
    assert check(drafted, [[*prompt, *answers[0]]]) >= 15
    assert (run.scheduler.stats().cached_tokens > 0) == (length > 128)
    assert all(drafts.confidence for drafts in drafted)
