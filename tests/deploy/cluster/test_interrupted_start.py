"""A signal that comes while the driver connects to Ray, or hands the application over."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
import ray
from ray._private import services

from deploy.cluster import connection
from deploy.cluster.connection import RayConnection
from deploy.cluster.head_node import ATTEMPTS
from deploy.cluster.sessions import Sessions
from deploy.config.application import ServeConfig
from deploy.serve import app, entrance
from workers.environment import EnvironmentProblem


def test_a_start_ends_without_ray_where_its_import_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: RayConnection, *_: object) -> None:
        monkeypatch.setitem(sys.modules, "ray", None)  # to import it fails
        raise KeyboardInterrupt

    monkeypatch.setattr(RayConnection, "_start", interrupted)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(KeyboardInterrupt):
        RayConnection(ServeConfig.model_validate({"engine": {"model": "demo"}}), lambda line: None)


def test_a_start_that_is_interrupted_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are gone include those that its own processes started; what this process started before stays."""
    nested = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    earlier = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started: list[psutil.Process] = []

    def interrupted(self: RayConnection, *_: object) -> None:
        process = psutil.Process(subprocess.Popen([sys.executable, "-c", nested + "time.sleep(60)"]).pid)
        while not process.children():
            time.sleep(0.01)
        started.extend([process, *process.children()])
        raise KeyboardInterrupt

    monkeypatch.setattr(RayConnection, "_start", interrupted)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    try:
        with pytest.raises(KeyboardInterrupt):
            RayConnection(ServeConfig.model_validate({"engine": {"model": "demo"}}), lambda line: None)
        assert len(psutil.wait_procs(started, 60)[0]) == 2
        assert earlier.poll() is None
    finally:
        for process in [earlier, *started]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        earlier.wait()


TIMED_OUT = (
    "The current node timed out during startup. This could happen because some of the raylet failed to startup or the "
    "GCS has become overloaded."
)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (Exception(TIMED_OUT), f"Ray does not start on this machine: {TIMED_OUT} If the machine is busy "),
        (ConnectionError("Could not read 'session_name' from GCS."), "Ray does not start on this machine: Could not "),
        (ray.exceptions.RpcError("Deadline Exceeded\nin C++", 4), "Ray does not start on this machine: Deadline Exc"),
        (RuntimeError("Timed out waiting for file /tmp/port"), "Ray does not start on this machine: Timed out wait"),
        (RuntimeError("Failed to start GCS.  Last 0 lines:\n\n."), "Ray does not start on this machine: Failed to sta"),
        (TypeError("a defect"), ""),
        (RuntimeError("a defect"), ""),
    ],
)
def test_a_ray_that_does_not_come_up_in_time_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, line: str
) -> None:
    attempts = []

    def init(**settings: object) -> None:
        """As Ray does, it leaves a daemon that has started."""
        attempts.append(services.ConsolePopen([sys.executable, "-c", "import time; time.sleep(60)"]))
        raise error

    said: list[str] = []
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = ServeConfig.model_validate({"engine": {"model": "demo"}})
    with pytest.raises(EnvironmentProblem if line else type(error)) as raised:
        RayConnection(config, said.append)
    assert str(raised.value).startswith(line or "a defect")
    assert "\n" not in str(raised.value)
    assert len(attempts) == (ATTEMPTS if line else 1)
    assert sum(one.startswith("Ray has not come up: ") for one in said) == len(attempts) - 1
    assert all(attempt.wait(60) for attempt in attempts)  # killed


def test_a_ray_that_comes_up_at_the_second_attempt_is_not_taken_for_one_that_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempts = []

    def init(**settings: object) -> None:
        attempts.append(services.ConsolePopen(["/bin/sh", "-c", "exec sleep 60"]))
        if len(attempts) == 1:
            attempts[0].args = ["raylet"]
            attempts[0].kill()
            attempts[0].wait()
            assert sessions.look(ending=False)
            raise Exception(TIMED_OUT)

    sessions = Sessions()
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    connection = RayConnection(ServeConfig.model_validate({"engine": {"model": "demo"}}), lambda line: None, sessions)
    try:
        assert len(attempts) == 2
        assert not sessions.look(ending=True)
    finally:
        connection.close()
    assert attempts[1].wait(60)


@pytest.mark.parametrize("ends", [True, False])
def test_a_start_that_fails_keeps_its_environment_while_another_thread_imports(
    monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """But not for long."""
    seen: list[str | None] = []
    begun, waits, over = threading.Event(), threading.Event(), threading.Event()

    def meanwhile() -> None:
        begun.set()
        assert (waits if ends else over).wait(60)
        seen.append(os.environ.get("LATENTSERVE_OF_THIS_START"))

    def interrupted(self: RayConnection, *_: object) -> None:
        self._export({"LATENTSERVE_OF_THIS_START": "1"})
        self._beside.start()
        assert begun.wait(60)
        raise KeyboardInterrupt

    join = threading.Thread.join

    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        waits.set()
        join(thread, timeout)

    monkeypatch.setattr(RayConnection, "_start", interrupted)
    monkeypatch.setattr(threading.Thread, "join", joined)
    monkeypatch.setattr(connection, "MEANWHILE_S", 60.0 if ends else 0.1)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = ServeConfig.model_validate({"engine": {"model": "demo"}})
    try:
        with pytest.raises(KeyboardInterrupt):
            RayConnection(config, lambda line: None, None, meanwhile)
    finally:
        waits.set()
    assert seen == (["1"] if ends else [])
    assert "LATENTSERVE_OF_THIS_START" not in os.environ
    over.set()


@pytest.mark.parametrize(("code", "raised"), [(signal.SIGTERM, KeyboardInterrupt), (1, SystemExit)])
def test_rays_handler_of_sigterm_ends_a_start_as_ours_does(code: int, raised: type[BaseException]) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def connect() -> None:
        with connection._our_signal_handlers():
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
            if code == signal.SIGTERM:
                signal.raise_signal(signal.SIGTERM)
            sys.exit(code)

    with pytest.raises(raised):
        connect()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("there", [False, True])
def test_an_application_that_is_just_handed_over_is_taken_back(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    """Unless there was one before, which goes on."""
    calls: list[str] = []
    waited: list[bool] = []

    def begin(location: str, host: str, port: int, *, beside: bool) -> entrance.Proxies:
        waited.append(not beside)
        return entrance.Proxies()

    class Running(app.Running):
        def __init__(self, config: ServeConfig, connection: RayConnection) -> None:
            self.config, self._connection, self._to_delete = config, connection, True

    def hand_over(*_: object, **options: object) -> None:
        calls.append("handed over")
        raise KeyboardInterrupt

    joined = SimpleNamespace(own=False, close=lambda: calls.append("left"))
    status = SimpleNamespace(applications=[app.APPLICATION] if there else [])
    monkeypatch.setattr(app, "RayConnection", lambda *_: joined)
    monkeypatch.setattr(app, "Running", Running)
    for name in ("_check_entrance", "_check_capacity", "build_app"):
        monkeypatch.setattr(app, name, lambda *_: None)
    monkeypatch.setattr("deploy.serve.progress.clear", lambda application: None)
    monkeypatch.setattr("deploy.serve.entrance.begin", begin)
    monkeypatch.setattr("ray.serve.status", lambda: status)
    monkeypatch.setattr("ray.serve.run_many", hand_over)
    monkeypatch.setattr("ray.serve.delete", lambda application, **options: calls.append(f"deleted {application}"))
    config = ServeConfig.model_validate({"engine": {"model": "demo"}, "ray_address": "auto"})
    with pytest.raises(KeyboardInterrupt):
        app.launch(config, lambda line: None)
    assert calls == ["handed over", *([] if there else [f"deleted {app.APPLICATION}"]), "left"]
    assert waited == [True]  # for proxies of a cluster that was joined


def test_a_signal_whose_interrupt_an_import_dropped_stops_what_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[str] = []
    running = SimpleNamespace(url="http://", start_s={}, news=list, stop=lambda say: did.append("stop"))

    def launch(*_: object) -> SimpleNamespace:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        return running

    monkeypatch.setattr(app, "launch", launch)
    app.start(ServeConfig.model_validate({"engine": {"model": "demo"}}), lambda line: None)
    assert did == ["stop"]
