"""Processes in sessions of their own: who ends them, whatever became of who started them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest

from deploy.cluster import cleanup_process, sessions
from deploy.cluster.sessions import Sessions, Watch
from deploy.config.application import ServeConfig
from deploy.serve import app

# A daemon that is to end after its own child, as Ray's agents do, and what would start it under Ray.
DAEMON = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
STARTS = f"""
import os, signal, sys, time
from pathlib import Path
from types import ModuleType, SimpleNamespace
import subprocess
services = SimpleNamespace(ConsolePopen=subprocess.Popen)
sys.modules["ray"] = ModuleType("ray")
sys.modules["ray._private"] = SimpleNamespace(services=services)
from deploy.cluster.sessions import Sessions
ours = Sessions()
ours.keep(Path(sys.argv[1]))
with ours.of_their_own():
    daemon = services.ConsolePopen([sys.executable, "-c", {DAEMON + "; time.sleep(60)"!r}])
print(daemon.pid, flush=True)
time.sleep(60)
"""


def gone(condition) -> bool:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def starter(tmp_path: Path):
    """A process that started a daemon with a child, and their session."""
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    process = subprocess.Popen(
        [sys.executable, "-c", STARTS, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    session = int(process.stdout.readline())
    assert gone(lambda: len(cleanup_process.members({session})) == 2)
    yield process, session, folder
    process.kill()
    process.communicate()
    for pid in cleanup_process.members({session}):
        os.kill(pid, signal.SIGKILL)


def test_a_signal_to_the_group_does_not_reach_them_and_their_end_follows_a_kill(starter) -> None:
    process, session, folder = starter
    assert os.getpgid(session) != os.getpgid(process.pid)
    others = psutil.Process(process.pid).children()
    (ours,) = [child for child in others if child.pid != session]
    ours.send_signal(signal.SIGTERM)  # the cleanup process is needed last, and does not listen
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert gone(lambda: not cleanup_process.members({session}))
    assert gone(lambda: not folder.exists())
    assert gone(lambda: has_ended(ours))


def test_a_cleanup_process_that_has_hardly_begun_ignores_signals(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    held = cleanup_process.CleanupProcess(folder)
    held._process.send_signal(signal.SIGTERM)  # long before Python runs there
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    assert held._process.stdin is not None
    held._process.stdin.close()
    assert gone(lambda: not folder.exists())
    assert held._process.wait() == 0


def test_the_end_takes_what_does_not_end_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "LEAVE_S", 0.1)
    monkeypatch.setattr(sessions, "LIMIT_S", 60.0)
    folder = tmp_path / "folder"
    folder.mkdir()
    services = SimpleNamespace(ConsolePopen=subprocess.Popen)
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))  # whether or not it has been imported
    monkeypatch.setitem(sys.modules, "ray._private", SimpleNamespace(services=services))
    ours = Sessions()
    ours.keep(folder)
    with ours.of_their_own():
        daemon = services.ConsolePopen([sys.executable, "-c", DAEMON + "; time.sleep(60)"])
    assert services.ConsolePopen is subprocess.Popen
    try:
        assert not ours.look(ending=True)
        assert gone(lambda: len(cleanup_process.members({daemon.pid})) == 2)
        daemon.kill()
        assert gone(lambda: ours.look(ending=True))
        assert len(cleanup_process.members({daemon.pid})) == 1
    finally:
        ours.end()
    assert not cleanup_process.members({daemon.pid})
    assert not folder.exists()
    assert not ours.begun


def test_a_process_that_does_not_end_in_time_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is ended in each of the ways it should end; before, it is left alone."""
    ended, said = threading.Event(), []
    monkeypatch.setattr(sessions, "LOOK_S", 0.01)
    monkeypatch.setattr(sessions, "HURRY_S", 0.05)

    def leave(code: int) -> None:
        assert code == 0
        ended.set()

    monkeypatch.setattr(sessions.os, "_exit", leave)

    def watch(broken: bool, within_s: float, joined: bool = False) -> Watch:
        ended.clear()
        there = SimpleNamespace(begun=True, joined=joined, look=lambda ending: broken, end=lambda: None)
        return Watch(there, within_s, said.append)

    for order, broken, within_s in (("stop", False, 0.05), ("hurry", False, 60.0), ("stop", True, 60.0)):
        one = watch(broken, within_s)
        assert not ended.wait(0.1)
        getattr(one, order)()
        assert ended.wait(60), order
        assert ("somebody else" in said[-1]) == broken
    one = watch(False, 0.05)
    one.over()
    one.stop()
    assert not ended.wait(0.2)
    one = watch(False, 0.05)

    def over_meanwhile(ending: bool) -> bool:
        if ending:
            one.over()
        return ending

    one._sessions.look = over_meanwhile
    one.stop()
    assert not ended.wait(0.2)
    one = watch(False, 0.05, joined=True)  # it ends in its own time
    one.stop()
    assert not ended.wait(0.2)
    one.over()
    one = watch(True, 60.0, joined=True)
    one.stop()
    assert ended.wait(60)


@pytest.mark.parametrize("address", ["127.0.0.1", "[::1]"])
def test_a_ray_that_was_joined_has_ended_where_nobody_listens_any_more(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setattr(sessions, "KNOCK_PERIOD_S", 0.0)
    host = address.strip("[]")
    head = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = head.getsockname()[1]
    ours = Sessions()
    assert not ours.begun
    ours.join(f"{address}:{port}")
    assert ours.begun
    assert not any(ours.look(ending=True) for _ in range(5))
    head.close()
    assert not any(ours.look(ending=False) for _ in range(5))  # what asks Ray tells of it, after a minute
    looks = [ours.look(ending=True) for _ in range(sessions.KNOCKS)]
    assert looks == [False] * (sessions.KNOCKS - 1) + [True]
    with socket.create_server((host, port), family=head.family):
        assert not ours.look(ending=True)  # it had only begun anew


@pytest.mark.parametrize(("apart", "drained"), [(0.0, True), (60.0, False)])
def test_two_sigterms_at_once_are_one(monkeypatch: pytest.MonkeyPatch, apart: float, drained: bool) -> None:
    """`timeout` signals its command, then the group that it is in."""
    did: list[str] = []

    def stop(say) -> None:
        monkeypatch.setattr(app, "SAME_S", 30.0 - apart)
        signal.raise_signal(signal.SIGTERM)
        did.append("stop")

    def news() -> list[str]:
        """It serves and waits for signals."""
        signal.raise_signal(signal.SIGTERM)
        return []

    running = SimpleNamespace(
        url="http://", start_s={}, news=news, stop=stop, abandon=lambda say: did.append("abandon")
    )
    monkeypatch.setattr(app, "launch", lambda *_: running)
    monkeypatch.setattr(app, "NEWS_PERIOD_S", 0.01)
    app.start(ServeConfig.model_validate({"engine": {"model": "demo"}}), lambda line: None)
    assert did == (["stop"] if drained else ["abandon"])
