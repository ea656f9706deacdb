"""Warming up with a few of the layers: it launches what all of them launch, and needs the memory that they need."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.moe import reference as moe_reference
from kernels.runtime import ahead
from kernels.runtime.ahead import Compiled
from tests.support.private_apis import untouched
from tests.tiny_models import write_tiny
from tests.workers.test_engine import engine
from workers.graphs.capture import compile_steps, warm_up
from workers.graphs.mixed_warm_up import warm_up_mixed_steps
from workers.memory.scratch import Scratch
from workers.models.segments import Segments
from workers.protocol.plan import DecodeBuckets, token_buckets
from workers.step.decode import DecodeStep
from workers.step.mixed import Stage
from workers.step.parts import StepParts

ROWS, BUDGET = 3, 40


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls of operators, with the shapes, strides and dtypes of the tensors: what chooses a kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        described = [
            (a.shape, a.stride(), a.dtype) if isinstance(a, torch.Tensor) else type(a)
            for a in (*args, *(kwargs or {}).values())
        ]
        self.seen.add(f"{func} {described}")
        return func(*args, **(kwargs or {}))


def run_all(parts: StepParts) -> tuple[set[str], int, int]:
    """Return what steps of all shapes call; bytes of the memory they share, and of that which segments use inside."""
    decode, scratch, inner = Scratch(parts.device), Scratch(parts.device), Scratch(parts.device)
    with torch.inference_mode(), Operations() as operations:
        for key in DecodeBuckets(ROWS, parts.width):
            DecodeStep(parts, key, decode).run()
        warm_up_mixed_steps(Stage(parts, BUDGET, scratch, inner))
    return operations.seen, max(decode.peak, scratch.peak), inner.peak


@pytest.mark.long
@pytest.mark.parametrize("width", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize(
    ("dense", "layers"),
    [(0, 3), *(pytest.param(*sizes, marks=pytest.mark.long) for sizes in [(2, 6), (3, 3), (1, 1), (1, 2)])],
)
def test_few_layers_launch_what_all_launch(
    dense: int, layers: int, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe_reference, "experts_grouped", moe_reference.experts_gathered)
    folder = write_tiny(tmp_path, "v3", num_hidden_layers=layers, first_k_dense_replace=dense)
    parts = engine(folder, width=width, max_rows=ROWS, token_budget=BUDGET, max_context=100).runner.parts
    few = replace(parts, model=parts.model.shallow())
    assert len(few.model.layers) <= 3
    seen, *memory = run_all(parts)
    assert run_all(few) == (seen, *memory)
    warmed = warm_up(parts, ROWS, BUDGET)
    assert [warmed.scratch, warmed.inner] == memory
    # 3 decode buckets, each whole and split; 3 token buckets, all segments but the last; one tail.
    assert warmed.graphs == 3 * (1 + 2) + 3 * (layers + 2 * (width > 1)) + 1


def test_a_smaller_step_may_need_more_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    feed, extra = DecodeStep._feed, 1 << 24

    def hungry(self: DecodeStep) -> Any:
        if self.key.rows == ROWS - 1:
            self._scratch.empty(extra, dtype=torch.uint8)
        return feed(self)

    monkeypatch.setattr(DecodeStep, "_feed", hungry)
    parts = engine(write_tiny(tmp_path, "v3"), width=2, max_rows=ROWS, token_budget=BUDGET).runner.parts
    assert warm_up(parts, ROWS, BUDGET).scratch > extra


def test_fewer_tokens_may_hand_on_more_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where sums of the residual streams of fewer tokens have more parts. Graphs of each bucket are captured in the
    memory that is measured here."""
    parts = engine(write_tiny(tmp_path, "v3"), width=2, max_rows=ROWS, token_budget=BUDGET).runner.parts
    buffers, (few, *_), extra = Segments.buffers, token_buckets(BUDGET), 1 << 24

    def hungry(self: Segments, tokens: int, scratch: Scratch, *rest: Any) -> Any:
        if tokens == few:
            scratch.empty(extra, dtype=torch.uint8)
        return buffers(self, tokens, scratch, *rest)

    monkeypatch.setattr(Segments, "buffers", hungry)
    warmed = warm_up(parts, ROWS, BUDGET)
    for tokens in token_buckets(BUDGET):
        memory = (
            Scratch(parts.device, torch.empty(size, dtype=torch.uint8)) for size in (warmed.scratch, warmed.inner)
        )
        Stage(parts, tokens, *memory)


def test_compiling_ahead_leaves_nothing_behind(tmp_path: Path) -> None:
    parts = engine(write_tiny(tmp_path, "v3"), width=2, max_rows=ROWS, token_budget=BUDGET).runner.parts
    for layer in parts.cache.layers:
        layer[1:].fill_(torch.nan)
    assert compile_steps(parts, ROWS, BUDGET, threads=1).kernels == 0  # a CPU has none
    assert all(bool(layer[1:].isnan().all()) for layer in parts.cache.layers)
    assert not parts.state.tensors.length_S.any()


def test_where_nothing_can_be_compiled_ahead_no_step_is_run_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = engine(write_tiny(tmp_path, "v3"), width=2, max_rows=ROWS, token_budget=BUDGET).runner.parts
    monkeypatch.delattr(triton, "AsyncCompileMode")
    with untouched(ahead) as lines:
        with monkeypatch.context() as patch:
            patch.setattr(DecodeStep, "run", lambda self: pytest.fail("a step was run"))
            assert compile_steps(parts, ROWS, BUDGET, threads=1) == Compiled()
        assert warm_up(parts, ROWS, BUDGET).graphs > 0
    assert len(lines) == 1
