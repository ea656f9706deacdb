"""The benchmark of the kernels between large products: what it runs, checks and counts. Times of a GPU need one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.support.interpreter import interpreted_pytest

pytestmark = pytest.mark.soak

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    import token_wise

    return token_wise


def test_its_kernels_in_the_interpreter() -> None:
    interpreted_pytest([Path(__file__).with_name("interpreted_bench_token_wise.py")])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_says_that_it_needs_a_gpu() -> None:
    done = subprocess.run([sys.executable, BENCH / "token_wise.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "no GPU here that torch can use: times of these kernels need one\n"


def test_arguments(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    everything = bench.arguments([])
    assert (everything.tokens, everything.rows, everything.widths) == (
        [1, 16, 64, 256, 2048],
        [1, 4, 16, 64, 256],
        [1, 4],
    )
    assert bench.arguments(["--tokens", "1,8192"]).tokens == [1, 8192]
    for wrong in ("0", "1,-4"):
        with pytest.raises(SystemExit):
            bench.arguments([f"--rows={wrong}"])
        assert "numbers must be positive" in capsys.readouterr().err
