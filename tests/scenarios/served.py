"""Replicas for scenarios: eager, or with what stands for graphs; on a CPU, or on a GPU with real ones.

On a CPU a replay is another run of a step that was made for its bucket beforehand: padded rows and tokens are there,
and what a capture would freeze can freeze in the run on padding that precedes it. A fault is planted before that.

To extend: a drafter is a line in `DRAFTERS`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_draft_models import write_draft
from tests.tiny_models import VOCAB, write_tiny
from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.graphs.stats import GraphStats
from workers.memory.scratch import Scratch
from workers.protocol.plan import BatchLayout, GraphKey, SamplingParams, StepPlan, TokenBuckets
from workers.step.decode import DecodeStep
from workers.step.mixed import Stage
from workers.step.parts import StepOutput, StepParts

Place = tuple[str, bool]
"""Device, and whether steps are replayed."""
DRAFT = "demo-eagle3"
DRAFTERS: dict[str, dict[str, Any]] = {"mtp": {}, "ngram": {"drafter": "ngram"}, "eagle3": {"draft_model": DRAFT}}
"""Settings of the engine by what drafts. On a CPU another draft model stands for the demo model's."""
Fault = Callable[[pytest.MonkeyPatch, StepParts], None]
Job = tuple[list[int], SamplingParams]


def places(gpu: pytest.MarkDecorator) -> tuple[Any, ...]:
    """A CPU, eager and replayed, and a GPU with real graphs. `gpu` is `pytest.mark.gpu`, by whose name in a test's file
    the program that runs GPU tests finds it."""
    missing = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return ("cpu", False), ("cpu", True), pytest.param(("cuda", True), marks=(gpu, missing))


def named(place: Place) -> str:
    """Return the place for the name of a test."""
    return f"{place[0]} {'replayed' if place[1] else 'eager'}"


class StandIn:
    """A step that was made for a bucket."""

    def __init__(self, step: DecodeStep) -> None:
        self.step = step

    def replay(self) -> StepOutput:
        """Run it once more."""
        return self.step.run()


class StandInGraphs:
    """Stand-in for `GraphRunner` on a GPU."""

    @torch.inference_mode()
    def __init__(self, parts: StepParts, token_budget: int, stats: GraphStats) -> None:
        self.buckets, self.token_buckets = parts.buckets(parts.state.slots), TokenBuckets(token_budget)
        self._parts, self._stats = parts, stats
        self._steps: dict[GraphKey, DecodeStep] = {}
        self.replayed: Counter[GraphKey] = Counter()
        for key in self.buckets:
            self._steps[key] = DecodeStep(parts, key, Scratch(parts.device))
            self._steps[key].run()

    def captured(self, plan: StepPlan, *, dense: bool) -> StandIn | None:
        """Return the captured step of a plan, as `GraphRunner` does."""
        key = self.buckets.key(plan.layout, plan.drafts, dense=dense)
        if key is None:
            self._stats.eager[f"width {plan.width}, {plan.drafts} drafts"] += 1
            return None
        self._stats.replays += 1
        self.replayed[key] += 1
        slots = [*plan.decode_slots, *[-1] * (key.rows - len(plan.decode_slots))]
        self._steps[key].slot_R.copy_(torch.tensor(slots, dtype=torch.int64))
        return StandIn(self._steps[key])

    def stage(self, layout: BatchLayout) -> Stage:
        """Return the stage of a layout, as `GraphRunner` does."""
        self._stats.mixed_steps += 1
        tokens = self.token_buckets.key(layout).tokens
        return Stage(self._parts, tokens, Scratch(self._parts.device), Scratch(self._parts.device))


def tiny(folder: Path) -> Path:
    """The model of the scenarios on a CPU; on a GPU it is the demo model, whose sizes kernels take."""
    config = {"eagle_aux_hidden_state_layer_ids": [1, 0, 1]}
    write_draft(folder / DRAFT, "mla", hidden_size=48, vocab_size=VOCAB, draft_vocab=90, **config)
    return write_tiny(folder, "v3", seed=3, num_hidden_layers=2)


def replica(
    folder: Path,
    place: Place,
    fault: Fault | None = None,
    patch: pytest.MonkeyPatch | None = None,
    **settings: Any,
) -> InlineEngine:
    """A replica in this process, with a fault planted before anything is captured."""
    device, replayed = place
    defaults = {"width": 3, "max_rows": 8, "token_budget": 96, "cache_pages": 60, "max_context": 256}
    model = "demo" if device == "cuda" else str(folder)
    given = {"model": model, "device": device, "dtype": "float32", "graphs": False, "selftest": False}
    if device != "cuda" and "draft_model" in settings:
        settings["draft_model"] = str(folder / DRAFT)
    run = InlineEngine(EngineConfig(**{**given, **defaults, **settings}), torch.device(device))
    runner = run.runner
    if fault is not None and patch is not None:
        fault(patch, runner.parts)
    if replayed and device == "cuda":
        runner.capture()
    elif replayed:
        runner.graphs = StandInGraphs(runner.parts, run.scheduler.config.token_budget, runner.stats)  # type: ignore[assignment]
    return run


def poison_null_page(run: InlineEngine) -> None:
    """NaN in the page of nobody, before every step anew."""
    execute = run.runner.execute

    def poisoned(plan: StepPlan) -> Any:
        for layer in run.runner.parts.cache.layers:
            layer[0] = torch.nan
        return execute(plan)

    run.runner.execute = poisoned  # type: ignore[method-assign]


def greedy_jobs(count: int, longest: int, tokens: int, seed: int = 1) -> list[Job]:
    """Random prompts, each continued by up to so many tokens."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(10, 120) for _ in range(rng.randint(1, longest))] for _ in range(count)]
    return [(prompt, SamplingParams(tokens - index % 3, temperature=0.0)) for index, prompt in enumerate(prompts)]


def serve(run: InlineEngine, jobs: list[Job]) -> list[list[int]]:
    """The tokens of all jobs, asked for at once."""
    return run.generate([prompt for prompt, _ in jobs], [params for _, params in jobs])


@cache
def _alone(folder: Path, device: str, count: int, longest: int, tokens: int, seed: int) -> list[list[int]]:
    run = replica(folder, (device, False), width=1, prefix_cache=False, max_rows=1)
    return [serve(run, [job])[0] for job in greedy_jobs(count, longest, tokens, seed)]


def alone(folder: Path, device: str, count: int, longest: int, tokens: int, seed: int = 1) -> list[list[int]]:
    """Generate the answers of `greedy_jobs` of these numbers one at a time, eagerly, without drafts."""
    return _alone(folder, device, count, longest, tokens, seed)
