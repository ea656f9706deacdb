"""Which processes of a replica have ended: the memory of a cache is mapped anew only once all have."""

from __future__ import annotations

import os
import platform
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.serve.actors import ReplicaProcesses
from deploy.serve.ended_processes import runs

SLEEPS = "import time; print('up', flush=True); time.sleep(600)"
ITS_MAIN_THREAD_ENDS = f"""
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
print("up", flush=True)
ctypes.CDLL(None).syscall({60 if platform.machine() == "x86_64" else 93}, 0)  # exit(2) ends a thread alone
"""


@contextmanager
def process(program: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has begun with this program. Nobody hears of its end before this does."""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as made:
        try:
            assert made.stdout is not None
            assert made.stdout.readline() == "up\n"
            yield made
        finally:
            made.kill()


def state(pid: int) -> str:
    """As /proc has it: Z where it has ended, or its main thread has, and nobody was told yet."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("descriptors", [True, False])
def test_a_process_has_ended_once_all_of_its_threads_have(descriptors: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a Python without descriptors of processes, as builds for old systems are."""
    if not descriptors:
        monkeypatch.delattr(os, "pidfd_open")
    with process(SLEEPS) as made:
        assert runs(made.pid)
        made.send_signal(signal.SIGSTOP)
        until(lambda: state(made.pid) == "T")
        assert runs(made.pid)
        made.kill()
        until(lambda: state(made.pid) == "Z")
        assert not runs(made.pid)  # though it is still there
        made.wait()
        assert not runs(made.pid)
    with process(ITS_MAIN_THREAD_ENDS) as made:
        until(lambda: state(made.pid) == "Z")
        assert runs(made.pid)  # the other thread does
        made.kill()
        until(lambda: not runs(made.pid))


@pytest.fixture
def many_files() -> Iterator[None]:
    """So many open files, as of a front with about a thousand streams, that another one gets a number above 1,023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    yield
    for descriptor in opened:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
async def test_a_front_with_a_thousand_streams_waits_for_them() -> None:
    with process(SLEEPS) as made:
        processes = ReplicaProcesses.__new__(ReplicaProcesses)
        processes._local_pids = [made.pid]
        assert not await processes.gone(0.01)
        made.kill()
        assert await processes.gone(60)


def test_what_cannot_be_found_out_counts_as_running(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(pid: int) -> int:
        raise OSError(24, "Too many open files")

    with process(SLEEPS) as made:
        monkeypatch.setattr(os, "pidfd_open", full)
        assert runs(made.pid)
