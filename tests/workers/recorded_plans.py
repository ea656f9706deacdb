"""Plans of a crowd, recorded by an engine in the test's own process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.workers.crowd import crowd
from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.protocol.plan import StepPlan, StepResult
from workers.recording.file import Recorder, Recording, read_recording

VOCAB = 64
"""Vocabulary of the model in the folder."""


def recorded(folder: Path, file: Path, **settings: Any) -> tuple[Recording, InlineEngine]:
    """A crowd that is served by an engine whose plans are recorded."""
    defaults = {"width": 3, "max_rows": 6, "token_budget": 70, "cache_pages": 7, "max_context": 180, "device": "cpu"}
    config = EngineConfig(model=str(folder), selftest=False, record_plans=str(file), **{**defaults, **settings})
    run = InlineEngine(config)
    recorder = Recorder(config, run.replica.ready)
    plan, execute = run.scheduler.plan, run.runner.execute

    def planned() -> StepPlan | None:
        made = plan()
        if made is not None:
            recorder.plan(made)
        return made

    def executed(step: StepPlan) -> StepResult:
        result = execute(step)
        recorder.result(result)
        return result

    run.scheduler.plan, run.runner.execute = planned, executed  # type: ignore[method-assign]
    jobs = crowd(8, VOCAB, seed=5)
    run.generate([prompt for prompt, _ in jobs], [params for _, params in jobs])
    recorder.close()
    assert config.width == 1 or run.scheduler.stats().drafts_accepted > 0
    assert run.scheduler.stats().step_seconds["mixed"].count > 0
    return read_recording(recorder.path), run
