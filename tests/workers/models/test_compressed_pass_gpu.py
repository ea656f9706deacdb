"""The pass of DeepSeek V4 on a GPU, on its kernels: eager passes give transformers' logits, as their references do on a
CPU; captured and mixed steps pass the self-test and give transformers' tokens, and as many drafts stand as on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_compressed_pass import Steps
from test_deepseek_v4_reference import CHUNKS, KINDS, TOLERANCE, case, far
from torch import Tensor
from typing_extensions import override

from kernels.runtime.repeat import Repeat
from tests.deepseek_v4_layout import VOCAB, mtp_v4, published_v4, tiny_v4, write_v4
from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.memory.scratch import Scratch
from workers.models import model as models_model
from workers.models.attention import compressed_rows
from workers.models.batch import Batch
from workers.models.compressed_pass import CompressedPass
from workers.protocol.plan import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda", 0)


def moved(batch: Any) -> Any:
    """The same with its tensors, and those of its rows, on the GPU."""
    found = {}
    for own in fields(batch):
        value = getattr(batch, own.name)
        if isinstance(value, Tensor):
            found[own.name] = value.to(DEVICE)
        elif is_dataclass(value) and own.name in ("decode", "prefill"):
            found[own.name] = moved(value)
    return replace(batch, **found)


class OnGpu(Steps):
    """Rows whose tokens go through the segments on a GPU."""

    @override
    def passed(self, token_T: Tensor, batch: Batch) -> Tensor:
        return super().passed(token_T.to(DEVICE), moved(batch)).cpu()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunks", ["whole", "two rows", "across every border", "rejected drafts"])
def test_logits_are_transformers(kind: str, chunks: str) -> None:
    given = case(kind, DEVICE)
    assert isinstance(given.model.segments, CompressedPass)
    assert far(given, CHUNKS[chunks], kind=OnGpu) < TOLERANCE


@pytest.mark.parametrize("kind", ["plain", "published ratios"])
def test_repeated_launches_give_transformers_logits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory that is the same for every layer: the first one of each kind launches for itself."""
    honest, launched, layers = Repeat.__call__, list[int](), list[int]()

    def noted(self: Repeat, index: int, call: Callable[[], None]) -> None:
        def own() -> None:
            launched.append(index)
            call()

        layers.append(index)
        honest(self, index, own)

    monkeypatch.setattr(Repeat, "__call__", noted)
    monkeypatch.setattr(compressed_rows, "attending", lambda entries: 7)
    size = {"dtype": torch.uint8, "device": DEVICE}
    monkeypatch.setattr(models_model, "Scratch", lambda device: Scratch(device, torch.empty(1 << 27, **size)))
    for chunks in ("two rows", "rejected drafts"):
        assert far(case(kind, DEVICE), CHUNKS[chunks], kind=OnGpu) < TOLERANCE
    assert set(launched) == {0} < set(layers)


@pytest.mark.parametrize("most", [1, 7])
def test_tokens_that_attend_in_turn_give_transformers_logits(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed_rows, "attending", lambda entries: most)
    assert far(case("plain", DEVICE), CHUNKS["two rows"], kind=OnGpu) < TOLERANCE


def engine(folder: Path, device: torch.device, **settings: Any) -> InlineEngine:
    sizes = {"max_rows": 3, "token_budget": 48, "cache_pages": 40, "max_context": 300}
    return InlineEngine(EngineConfig(model=str(folder), device=device.type, **{**sizes, **settings}), device)


@pytest.mark.parametrize(("drafter", "width"), [("none", 1), ("ngram", 3), ("mtp", 2), ("mtp", 4)])
def test_captured_and_mixed_steps_give_transformers_tokens(drafter: str, width: int, tmp_path: Path) -> None:
    """With the layer that drafts (mtp), which has no entry of the first position, as many drafts are accepted as on a
    CPU, whose layer is held against transformers'."""
    config, model = tiny_v4(seed=1)
    tensors = published_v4(model)
    if drafter == "mtp":
        tensors |= mtp_v4(config, seed=1)[0]
        config = {**config, "num_nextn_predict_layers": 1, "compress_ratios": [*config["compress_ratios"], 0]}
    write_v4(tmp_path, config, tensors)
    random = torch.Generator().manual_seed(0)
    asked = [torch.randint(0, VOCAB, (length,), generator=random).tolist() * 2 for length in (30, 20, 7, 70)]
    settings: dict[str, Any] = {"drafter": drafter, "width": width, "dtype": "float32"}
    run, plain = engine(tmp_path, DEVICE, **settings), engine(tmp_path, torch.device("cpu"), selftest=False, **settings)
    (report,) = run.reports[-1:]
    assert report.passed, [bucket.problems for bucket in report.buckets]
    assert {bucket.kind for bucket in report.buckets} == {"decode", "masked", "mixed", "tail"}
    found = run.generate(asked, SamplingParams(30, temperature=0.0))
    with torch.inference_mode():
        for prompt, got in zip(asked, found, strict=True):
            ids, most = torch.tensor([prompt]), {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **most)
            assert got == out[0, len(prompt) :].tolist()
    assert run.runner.stats.replays > 0
    assert run.runner.stats.mixed_steps > 0
    assert run.scheduler.stats().bad_rows == 0
    assert plain.generate(asked, SamplingParams(30, temperature=0.0)) == found
    if drafter == "mtp":
        accepted = [own.scheduler.stats().drafts_accepted for own in (run, plain)]
        assert accepted[0] == accepted[1] > 0
