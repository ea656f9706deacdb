"""Whole replicas under kills: the program that measures it finds nothing wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.soak
@pytest.mark.alone
def test_no_answer_is_lost_or_different() -> None:
    arguments = [sys.executable, "bench/dying_replicas.py", "--answers", "150", "--kills", "8"]
    done = subprocess.run(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout
    assert "0 lost, 0 different, 0 tokens twice" in done.stdout
