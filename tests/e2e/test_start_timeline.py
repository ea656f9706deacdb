"""The timeline that bench/start.py prints of a start of the demo model."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.soak]

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("ahead", "ranks"), [("0", "ray::WorkerActor"), ("1", "python deploy")])
def test_it_shows_every_process_and_who_imports_what(tmp_path: Path, ahead: str, ranks: str) -> None:
    """Also of ranks that start ahead of Ray."""
    found = tmp_path / "starts.json"
    command = [
        sys.executable,
        "bench/start.py",
        "--json",
        str(found),
        "--",
        "--tensor-parallel",
        "2",
        "--device",
        "cpu",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LATENTSERVE_PRESTARTED_RANKS": ahead}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    last = ran.stdout.splitlines()[-1]
    assert re.fullmatch(r"first token after [\d.]+ s; [\d.]+ s of processor time in \d+ processes", last)
    (start,) = json.loads(found.read_text())
    importing = {"torch": set(), "ray.serve": set(), "pandas": set()}
    for process in start["processes"]:
        for one in process["imports"]:
            if one["module"] in importing:
                importing[one["module"]].add(process["name"].partition(".")[0])
                assert process["first"] <= one["begin"] + 0.1
                assert one["begin"] + one["wall_s"] < start["token_s"]
                assert 0 < one["cpu_s"] <= process["cpu_s"] + 0.1
    assert importing["torch"] == {ranks}
    assert importing["pandas"] == set()  # neither in the command nor in a process of Ray that it started
    assert ("python deploy.serve.prestarted_rank" in ran.stdout) is (ahead == "1")
    assert "ray::ServeController" in importing["ray.serve"]
    assert max(process["cpu_s"] for process in start["processes"]) < start["token_s"] * (os.cpu_count() or 1)
