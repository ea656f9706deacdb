"""The engine with a draft model as Mistral publishes it, under random schedules against the reference."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.tiny_mistral_eagle import write_eagle
from tests.workers.model_based.drive import Bench
from tests.workers.model_based.schedules import random_schedule


@pytest.mark.long
def test_random_schedules(tmp_path: Path) -> None:
    """Of a model whose queries are scaled anew at every 16th position."""
    bench, steps, seed, seen = Bench(tmp_path / "mistral4", "mistral4"), 0, 100_000, Counter[str]()
    bench.drafts["eagle"] = write_eagle(tmp_path / "eagle", bench.folder, fp8=True)
    while steps < 1000:
        schedule = random_schedule(seed)
        others = ("draft_model", "drafter")
        engine: dict[str, Any] = {name: value for name, value in schedule.engine.items() if name not in others}
        outcome = bench.run(replace(schedule, engine={**engine, "draft_model": "eagle"}))
        assert not outcome.problem, f"schedule {seed}: {outcome.problem}"
        steps, seed, seen = steps + outcome.steps, seed + 1, seen + outcome.seen
    assert seen["drafts of eagle"] > 100
    assert seen["drafts accepted"] > 0
    assert min(seen["preemptions"], seen["bad rows"], seen["cached tokens"]) > 0
