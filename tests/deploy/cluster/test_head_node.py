"""A Ray of our own: what it starts, what happens meanwhile, and that nobody waits for its dashboard."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
import json, os, sys, threading, time
import httpx, psutil
from deploy.cluster import connection as module
from deploy.config.application import ServeConfig

DAEMONS = ("gcs_server", "raylet/raylet", "dashboard/dashboard.py", "log_monitor.py")

def daemons():
    commands = []
    for process in psutil.Process().children():
        try:
            commands.append(process.cmdline()[:4])
        except psutil.Error:
            pass
    return [name for name in DAEMONS if any(name in " ".join(command) for command in commands)]

class Imports:  # notes the packages that each thread looks for while both may
    def __init__(self):
        self.both, self.packages = False, {"MainThread": set(), "meanwhile": set()}

    def find_spec(self, name, path=None, target=None):
        if self.both:
            self.packages.setdefault(threading.current_thread().name, set()).add(name.split(".")[0])

seen = {}
imports = Imports()
sys.meta_path.insert(0, imports)
short_start = module.short_start

def observed(address, then):
    def just_before():
        seen["before the node"] = [name for name in daemons() if name != "dashboard/dashboard.py"]
        imports.both = True
        then()
    return short_start(address, just_before)

def meanwhile():
    seen["aside"] = threading.current_thread() is not threading.main_thread()
    import ray.serve
    imports.both = False
    raise RuntimeError("is dropped")

module.short_start = observed
dashboard = sys.argv[1] == "dashboard"
settings = {"engine": {"model": "demo", "device": "cpu"}, "dashboard": dashboard}
connection = module.RayConnection(ServeConfig.model_validate(settings), lambda line: None, None, meanwhile)
try:
    import ray
    seen["imported"] = "ray.serve" in sys.modules
    seen["imported twice"] = sorted(imports.packages["MainThread"] & imports.packages["meanwhile"])
    seen["works"] = ray.get(ray.remote(lambda: 4).options(num_cpus=0).remote())
    seen["there"], seen["news"] = daemons(), connection.news()
    if dashboard:
        (process,) = [p for p in psutil.Process().children() if "dashboard.py" in " ".join(p.cmdline()[:4])]
        seen["nicer"] = process.nice() == min(os.getpriority(os.PRIO_PROCESS, 0) + 10, 19)
        deadline = time.monotonic() + 300
        while "answers" not in seen and time.monotonic() < deadline:
            try:
                address = ray._private.worker._global_node.webui_url
                seen["answers"] = httpx.get(f"http://{address}/", trust_env=False).status_code
            except httpx.HTTPError:
                time.sleep(0.5)
        process.kill()
        while not (lines := connection.news()) and time.monotonic() < deadline:
            time.sleep(0.1)
        seen["ended"] = len(lines), "dashboard.log" in lines[0], connection.news()
finally:
    connection.close()
seen["left"] = daemons()
print(json.dumps(seen))
"""


def start(dashboard: str) -> dict:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"PYTHONPATH": str(ROOT), "RAY_AUTH_TOKEN": "0" * 32}
    command = [sys.executable, "-c", PROGRAM, dashboard]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.cluster
@pytest.mark.long
def test_without_a_dashboard_nothing_is_started_in_its_place() -> None:
    seen = start("none")
    assert seen["before the node"] == ["gcs_server"]
    assert seen["imported twice"] == []
    assert (seen["aside"], seen["imported"], seen["works"]) == (True, True, 4)
    assert seen["there"] == ["gcs_server", "raylet/raylet"]
    assert (seen["news"], seen["left"]) == ([], [])


@pytest.mark.cluster
@pytest.mark.soak
def test_a_dashboard_comes_up_beside_the_node_and_its_end_is_told_once() -> None:
    seen = start("dashboard")
    assert seen["before the node"] == ["gcs_server"]
    assert seen["imported twice"] == []
    assert seen["there"] == ["gcs_server", "raylet/raylet", "dashboard/dashboard.py"]
    assert (seen["aside"], seen["imported"], seen["works"], seen["news"]) == (True, True, 4, [])
    assert (seen["nicer"], seen["answers"]) == (True, 200)
    assert seen["ended"] == [1, True, []]
    assert seen["left"] == []
