"""Ranks of a start take the processes that import what they need while Ray Serve starts, and nobody else does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json
import time
import psutil
from deploy.cluster import connection
from deploy.config.application import ServeConfig
from deploy.serve import app, early_imports

connection.visible_gpus = app.visible_gpus = lambda: 2  # ranks on CPUs reserve what Ray believes to be GPUs
plain, deploy = early_imports.environment, app._deploy
early_imports.environment = lambda config, cores: plain(config, 1000)
early_imports.KEPT_S = 600  # however slow the machine is
ahead = []

def for_ranks():
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            if process.environ().get(early_imports.PROCESS) == "rank":
                found[process.pid] = process.name()
        except psutil.Error:
            pass  # it has ended
    return found

def hand_over(*given):
    deadline = time.monotonic() + 300
    while len(found := for_ranks()) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)  # Ray says at once that it starts them, and then does
    ahead.extend(found)  # before Serve has heard of the application
    deploy(*given)

app._deploy = hand_over
engine = {"model": "demo", "device": "cpu", "tensor_parallel": 2}
config = ServeConfig.model_validate({"engine": engine, "gpus_per_rank": 1.0, "port": 0, "dashboard": False})
running = app.launch(config)
there = for_ranks()
running.stop()
print(json.dumps({"ahead": ahead, "there": there}))
"""


def test_ranks_take_the_processes_that_were_started_ahead() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "LATENTSERVE_PRESTARTED_RANKS": "0"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert len(found["ahead"]) == 2
    assert {int(pid) for pid in found["there"]} == set(found["ahead"])
    assert all(name.startswith("ray::WorkerActor") for name in found["there"].values())
