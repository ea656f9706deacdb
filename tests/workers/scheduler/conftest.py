"""What tests of the scheduler set up alike."""

from __future__ import annotations

import pytest

from workers.scheduler import disk_tier


@pytest.fixture
def short_prompts_are_worth_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load from disk takes no time besides that of its pages."""
    monkeypatch.setattr(disk_tier, "FIRST_S", 0.0)
