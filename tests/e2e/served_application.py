"""A whole application in a process of its own, driven over HTTP, with everything it started accounted for."""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 400
STOP_TIMEOUT_S = 120
"""Seconds until the server must have ended. On a slow machine that other tests load, a start takes two minutes."""

SERVE = """
import sys
from deploy.serve.app import start
from deploy.config.application import ServeConfig
start(ServeConfig.load(sys.argv[1]))
"""


class Server:
    """An application that was started; `url` once it serves."""

    def __init__(self, config: dict, folder: Path, code: str = SERVE) -> None:
        file = folder / "serve.yaml"
        file.write_text(json.dumps(config))  # JSON is YAML
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("RAY_") and "proxy" not in name.lower()
        }
        environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)]), "OMP_NUM_THREADS": "1"}
        environment["RAY_AUTH_TOKEN"] = secrets.token_hex(16)  # not the user's own
        environment |= {"LATENTSERVE_PRESTARTED_RANKS": "0"}  # as on a machine with few cores, whatever this one is
        self.lines: list[str] = []
        self._begun = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(file)],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""
        self.start_s = 0.0
        """Seconds until it served: what else starts on this machine is compared with it."""

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def wait(self) -> "Server":
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (found := self.find(r"serving .* at (http://\S+)/v1")):
            assert self.process.poll() is None, "ended while starting:\n" + "\n".join(self.lines)
            assert time.monotonic() < deadline, "not up in time:\n" + "\n".join(self.lines)
            time.sleep(0.1)
        self.url, self.start_s = found, time.monotonic() - self._begun
        return self

    def find(self, pattern: str) -> str:
        for line in list(self.lines):
            if found := re.search(pattern, line):
                return found[1]
        return ""

    def pids(self, title: str = "") -> list[int]:
        """Return the ids of all processes that it started, or of those whose title begins so."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if " ".join(process.cmdline()).startswith(title):
                    found.append(process.pid)
            except psutil.Error:
                continue
        return sorted(found)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.ended()

    def ended(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Exit code, once all that it said is in `lines`."""
        code = self.process.wait(timeout_s)
        self._reader.join(60)
        return code


def alive(pids: list[int]) -> list[str]:
    found = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{pid} {' '.join(process.cmdline())[:100]}")
        except psutil.NoSuchProcess:
            continue
    return found


def wait_gone(pids: list[int], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while left := alive(pids):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)
