"""Rows whose logits are no numbers, beside others on a GPU: nobody else's tokens change by a bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.workers.harness import InlineEngine
from tests.workers.test_nonfinite_rows import bits, good_jobs, mixed, nonfinite_jobs, serve, settings, write_poisoned

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [1, 3])
def test_everybody_else_goes_on_bit_for_bit(width: int, dtype: str, graphs: bool, tmp_path: Path) -> None:
    """Other requests go on in graphs, whose decisions name the non-finite rows, and on eager steps."""
    config = settings(write_poisoned(tmp_path), width=width, dtype=dtype, graphs=graphs, device="cuda", invariant=True)
    device = torch.device("cuda")
    expected = serve(InlineEngine(config, device), good_jobs())
    jobs, places = mixed(good_jobs(), nonfinite_jobs())
    records = serve(InlineEngine(config, device), jobs)
    assert [bits(records[place]) for place in places] == [bits(record) for record in expected]
    ended = [record for place, record in enumerate(records) if place not in places]
    assert [(record.finish, record.tokens) for record in ended] == [("failed", [])] * len(nonfinite_jobs())


@pytest.mark.parametrize("width", [1, 3])
def test_outside_of_invariant_mode_all_are_served(width: int, tmp_path: Path) -> None:
    """Requests are served on the paths that only this mode takes: expanded prefill and few tokens."""
    config = settings(write_poisoned(tmp_path), width=width, dtype="bfloat16", device="cuda")
    jobs, places = mixed(good_jobs(), nonfinite_jobs())
    records = serve(InlineEngine(config, torch.device("cuda")), jobs)
    assert [record.finish for place, record in enumerate(records) if place in places] == ["length"] * len(places)
    assert {record.finish for place, record in enumerate(records) if place not in places} == {"failed"}
