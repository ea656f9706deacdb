"""EAGLE as Mistral publishes it on a GPU: a draft model in FP8 (`--draft-model`) beside a model in bf16, in captured
and mixed steps. Tokens are those without drafts, and as many drafts are accepted as on a CPU (test_fp8_eagle.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_fp8_eagle import SEEDS, answer, engine, generated, prompt_of, write_pair

from workers.drafters.eagle import Eagle
from workers.weights.formats import PLAIN

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("fp8-eagle"))


@pytest.mark.parametrize("activations", ["bf16", "auto"])
def test_captured_and_mixed_steps_give_the_tokens_without_drafts(activations: str, pair: tuple[Path, Path]) -> None:
    """Where many tokens' activations may be rounded to FP8 (auto), other drafts may stand."""
    made = engine(*pair, "cuda", activations=activations)
    drafter = made.runner.parts.drafter
    assert isinstance(drafter, Eagle)
    assert drafter.join_EF.format is not PLAIN
    (report,) = made.reports[-1:]
    assert report.passed, [bucket.problems for bucket in report.buckets]
    assert {"decode", "mixed", "tail"} <= {bucket.kind for bucket in report.buckets}
    found, offered, accepted = generated(made)
    without, *_ = generated(engine(pair[0], None, "cuda", width=1, selftest=False))
    assert found == without == [answer(*pair, prompt_of(seed))[0] for seed in SEEDS]
    assert made.runner.stats.replays > 0
    assert made.runner.stats.mixed_steps > 0
    assert made.scheduler.stats().bad_rows == 0
    of_cpu, _, accepted_there = generated(engine(*pair, "cpu", selftest=False))
    assert of_cpu == found
    if activations == "bf16":
        assert accepted == accepted_there
    assert accepted > 0.2 * offered > 0
