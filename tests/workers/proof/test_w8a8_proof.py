"""The proofs of steps whose activations are rounded to FP8, on a CPU that passes for a GPU with such products."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from w8a8_models import checkpoints

from tests.workers.test_engine import engine
from workers.memory.scratch import Scratch
from workers.models import execution_paths, general, w8a8
from workers.proof import decode_steps
from workers.proof.decode_steps import Candidate, SelfTest
from workers.proof.segments import SegmentProof
from workers.protocol.plan import BatchLayout
from workers.step.decode import DecodeStep
from workers.step.mixed import Stage
from workers.step.parts import StepParts

MOST = 0.12
"""Largest difference in logits: bf16 makes it a few hundredths in this model, FP8 a fifth."""


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StepParts:
    quantized, _ = checkpoints(tmp_path)
    monkeypatch.setattr(general, "supports_w8a8", lambda device: True)
    monkeypatch.setattr(execution_paths, "is_hopper", lambda device: True)
    monkeypatch.setitem(decode_steps.TOLERANCE, torch.bfloat16, MOST)
    return engine(quantized, width=2, max_rows=8, dtype="bfloat16", selftest=False).runner.parts


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Tokens of every product with FP8 weights outside of experts, below 0 where they are not rounded."""
    made: list[int] = []
    rounded, plain = w8a8.w8a8_linear, general.plain

    def rounding(x_TE: Tensor, *others: Any) -> None:
        made.append(len(x_TE))
        rounded(x_TE, *others)

    def dequantizing(weight: Any, *others: Any) -> Tensor:
        if weight.scales is not None:
            made.append(-1)
        return plain(weight, *others)

    monkeypatch.setattr(w8a8, "w8a8_linear", rounding)
    monkeypatch.setattr(general, "plain", dequantizing)
    return made


@pytest.mark.parametrize("plain", [True, False])
def test_steps_are_served_in_w8a8_and_compared_as_they_are(plain: bool, parts: StepParts, products: list[int]) -> None:
    key = BatchLayout(2, 8).graph_key(8, 1)
    step = DecodeStep(parts, key, Scratch(parts.device))
    replays: list[list[int]] = []

    def replay() -> Any:
        products.clear()
        output = step.run()
        replays.append([*products])
        products.clear()
        return output

    [found] = SelfTest(parts, plain=plain).run([Candidate(step, replay)])
    assert found.problems == ()
    assert found.logits_error < MOST
    assert all(min(made) > 0 for made in replays)


def test_a_fault_of_both_sides_is_found_without_w8a8(
    parts: StepParts, products: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefill path, the reference on a GPU, sees half of the context."""
    prefill = decode_steps.PrefillBatch
    monkeypatch.setattr(
        decode_steps, "PrefillBatch", lambda starts, *rest: prefill(tuple(start // 2 for start in starts), *rest)
    )
    step = DecodeStep(parts, BatchLayout(2, 8).graph_key(8, 1), Scratch(parts.device))
    [found] = SelfTest(parts, plain=False).run([Candidate(step, step.run)])
    assert any("away from the prefill path" in problem for problem in found.problems)
    assert -1 in products


def test_segments(parts: StepParts, products: list[int]) -> None:
    stage = Stage(parts, 48, Scratch(parts.device), Scratch(parts.device))
    [found] = SegmentProof(parts).run([stage])
    assert found.problems == ()
    assert -1 in products
    assert 48 in products
