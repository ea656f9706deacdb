"""Steps in two halves that share the first of them give the tokens of eager steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from grammar_model import write_grammar_model
from test_constrained_steps import engine, jobs, served

from tests.workers.widths import restless
from workers.graphs import capture
from workers.graphs.capture import CapturedSplitStep, capture_split_steps, count_graphs, warm_up
from workers.memory.scratch import Scratch
from workers.protocol.plan import BatchLayout, DecodeBuckets, GraphKey, StepPlan
from workers.rank.runner import Runner
from workers.step.decode import DecodeStep
from workers.step.mixed import Stage


class Again:
    """Stand-in for a graph: a replay is another run, with results at the addresses of the first."""

    def __init__(self, call: Callable[[], Any], scratch: Scratch) -> None:
        self._call, self._scratch, self._begin = call, scratch, scratch._used

    def replay(self) -> None:
        self._scratch._used = self._begin
        self._call()


class SplitSteps:
    """Stand-in for `GraphRunner`, for steps with masks alone."""

    def __init__(self, patch: pytest.MonkeyPatch, runner: Runner) -> None:
        self.parts = runner.parts
        self.buckets = DecodeBuckets(self.parts.state.slots, self.parts.width, self.parts.adaptive)
        masks, measured = runner.masks and runner.masks.masks, Scratch(self.parts.device)
        with torch.inference_mode():
            for key in self.buckets.split_keys():
                DecodeStep(self.parts, key, measured).run(lambda: masks)
        scratch = Scratch(self.parts.device, torch.empty(measured.peak, dtype=torch.uint8))
        self.recorded = 0
        self.replayed: Counter[tuple[int, int]] = Counter()

        def record(device: torch.device, call: Callable[[], Any]) -> tuple[Again, Any]:
            self.recorded += 1
            again = Again(call, scratch)
            return again, call()

        patch.setattr(capture, "record", record)
        self._split_steps: dict[GraphKey, CapturedSplitStep] = {}
        for alike in self.buckets.forward_graph_keys():
            with torch.inference_mode():
                captured = capture_split_steps(self.parts, alike, scratch, masks)
            self._split_steps |= zip(alike, captured, strict=True)
        self._scratch = scratch

    def split_step(self, plan: StepPlan) -> CapturedSplitStep:
        key = self.buckets.split_key(plan.layout, plan.drafts)
        assert key is not None
        self.replayed[key.width, key.drafts] += 1
        # Nothing is left of what other steps were run for.
        self._scratch.fill(0xFF)
        for captured in self._split_steps.values():
            captured.step.slot_R.fill_(-1)
        step = self._split_steps[key].step
        step.slot_R.copy_(torch.tensor([*plan.decode_slots, *[-1] * (key.rows - len(plan.decode_slots))]))
        return self._split_steps[key]

    def captured(self, plan: StepPlan, *, dense: bool) -> None:
        return None

    def stage(self, layout: BatchLayout) -> Stage:
        return Stage(self.parts, layout.tokens, Scratch(self.parts.device), Scratch(self.parts.device))


def test_steps_that_differ_by_their_drafts_share_the_forward_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_grammar_model(tmp_path)
    want = served(engine(folder, width=1, max_rows=6), jobs(8))
    run = engine(folder, width="auto", max_rows=6)
    widths = iter([1, 1, 2, 2, 3, 3, 3, 4, 4, 2, 1] * 200)
    restless(run.scheduler, lambda: next(widths))
    graphs = SplitSteps(monkeypatch, run.runner)
    run.runner.graphs = graphs  # type: ignore[assignment]
    assert served(run, jobs(8)) == want
    assert set(graphs.replayed) == set(graphs.buckets.modes())
    # Of four buckets of rows: four widths, three of which draft as many as they feed, too.
    assert graphs.recorded == 4 * (4 + 7)


@pytest.mark.long
def test_graphs_are_counted_as_they_are_captured(tmp_path: Path) -> None:
    parts = engine(write_grammar_model(tmp_path), width="auto", max_rows=6).runner.parts
    buckets = DecodeBuckets(6, 4, adaptive=True)
    without = count_graphs(parts, 6, 150) - len(list(buckets.split_keys())) - len(buckets.forward_graph_keys())
    assert warm_up(parts, 6, 150).graphs == without + 4 * (4 + 7)
