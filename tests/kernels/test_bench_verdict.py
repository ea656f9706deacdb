"""Verdict of the benchmarks of kernels on wrong results, and on the fastest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.soak


@pytest.fixture
def verdict(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    import verdict

    return verdict


def test_the_fastest_of_the_right_ones(verdict) -> None:
    results = {"a": (3.0, 0.002), "b": (2.0, 0.003), "c": (1.0, 0.5), "d": (1.0, torch.nan)}
    said = verdict.verdict("8 tokens", results)
    assert said == ("-> 8 tokens: WRONG: c (error 5.0e-01); WRONG: d (error nan); fastest: b; a takes 1.50x its time")
    assert verdict.verdict("8 tokens", {"c": (1.0, 0.5)}) == "-> 8 tokens: WRONG: c (error 5.0e-01)"


def test_errors_are_those_of_the_worst_vector(verdict) -> None:
    wanted = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(0))
    assert verdict.error(wanted.bfloat16(), wanted) < verdict.MOST_ERROR / 2
    found = wanted.clone()
    found[4, 1] *= 1.25
    assert verdict.error(found, wanted) == pytest.approx(0.25)
    found[0, 0, 0] = torch.nan
    assert not verdict.error(found, wanted) <= verdict.MOST_ERROR
