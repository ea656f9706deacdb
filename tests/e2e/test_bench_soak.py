"""The program that lets clients at a served model for an hour, in its short form: little load, and the memory of every
process is told."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.soak]

ROOT = Path(__file__).resolve().parents[2]
LIMITS = ("--limit", "60", "--growth-mib", "200")
"""Limits that do not depend on a quiet machine. Growth beyond them within a minute would be a body kept a request."""


def test_a_short_soak_tells_the_growth_of_every_process() -> None:
    asked = ("--minutes", "1.5", "--clients", "2", "--small", "2", "--pause", "0.2", *LIMITS)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "bench" / "soak.py"), *asked]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    [grown] = [line for line in ran.stdout.splitlines() if line.startswith("grown since warm")]
    for name in ("engine", "router", "SchedulerActor", "WorkerActor", "ServeController", "HAProxyManager", "haproxy"):
        assert f" {name} " in grown
    assert "nobody noticed, nothing is left" in ran.stdout
