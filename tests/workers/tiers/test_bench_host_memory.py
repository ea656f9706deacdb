"""The program that measures host memory finds pages where it should, and says so where it does not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [pytest.mark.soak, pytest.mark.alone]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "bench/host_memory.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)


def test_its_three_parts_run() -> None:
    """As its own text says to run it on a CPU."""
    done = run()
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d+ pages were saved, and none was found", done.stdout)
    assert re.search(r"first token: [\d.]+ ms from the device, [\d.]+ ms from host memory", done.stdout)
    of_device = re.search(r"beside a session on the device: .*; (\d+) pages from host memory", done.stdout)
    of_host = re.search(r"neighbors, from host memory: .*; (\d+) pages from host memory", done.stdout)
    assert of_device is not None
    assert of_host is not None
    assert int(of_device[1]) == 0 < int(of_host[1])


def test_a_cache_that_has_room_for_all_sessions_is_no_measurement() -> None:
    done = run("--cache-pages", "300", "--rounds", "1")
    assert done.returncode == 1
    assert "only 0 pages came back from host memory" in done.stderr
