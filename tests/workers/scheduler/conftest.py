"""What tests of the scheduler set up alike."""

from __future__ import annotations

import pytest

from workers.scheduler import read_pace


@pytest.fixture
def short_prompts_are_worth_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load from disk takes no time besides that of its pages."""
    monkeypatch.setattr(read_pace, "FIRST_S", 0.0)
