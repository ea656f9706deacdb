"""The program that measures deaths of a GPU finds that every stream goes on, here after an error and a step without
end."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.soak
@pytest.mark.alone
def test_streams_go_on_after_either_death() -> None:
    sizes = ["--prompt", "20", "--streams", "2", "--tokens", "60", "--token-budget", "64", "--step-timeout", "15"]
    arguments = [sys.executable, "bench/device_deaths.py", *sizes]
    done = subprocess.run(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout
    assert "stray: rank 0: RuntimeError: a planted error" in done.stdout
    assert re.search(r"endless: step \d+ made no progress for 15 s", done.stdout)
    assert done.stdout.count("gap of 2 streams") == 2
    assert done.stdout.count("; 0 with wrong tokens") == 2
