"""The weight keeper: what it holds for whom, and that it ends with who started it, whatever happens to that one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from workers.memory import keeper
from workers.memory.keeper import KeeperClient, LaterKeeper, WeightKeeper


@pytest.fixture
def kept() -> Iterator[WeightKeeper]:
    made = WeightKeeper()
    yield made
    made.close()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """One whose path leaves room for a socket's name, as pytest's own may not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


def file_with(text: bytes) -> int:
    descriptor = os.memfd_create("test")
    os.write(descriptor, text)
    return descriptor


def contents(descriptors: list[int]) -> list[bytes]:
    found = [os.pread(descriptor, 100, 0) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    return found


def held_by(pid: int) -> list[str]:
    """Return the anonymous files that a process has open. A keeper has let go what it is to let go before it answers,
    and closes the connection that it answered at after that: so a link to that one may be gone when it is read."""
    held = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(each)
            held += [target] if "memfd:" in target else []
    return held


def until(condition: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_descriptors_come_back_and_open_the_same_memory(kept: WeightKeeper) -> None:
    client = KeeperClient(kept.path())
    assert client.ask("rank 0", "a") is None
    files = [file_with(str(number).encode()) for number in range(300)]  # more than one message of the kernel's takes
    client.keep("rank 0", {"fingerprint": "a", "size": 7, "list": [1]}, files)
    for descriptor in files:
        os.close(descriptor)
    for _ in range(2):
        found = client.ask("rank 0", "a")
        assert found is not None
        assert found[0] == {"fingerprint": "a", "size": 7, "list": [1]}
        assert contents(found[1]) == [str(number).encode() for number in range(300)]


def test_what_has_another_fingerprint_is_let_go(kept: WeightKeeper) -> None:
    client, file = KeeperClient(kept.path()), file_with(b"old")
    client.keep("rank 0", {"fingerprint": "a"}, [file])
    client.keep("rank 1", {"fingerprint": "a"}, [file])
    os.close(file)
    assert kept.pid is not None
    assert len(held_by(kept.pid)) == 2
    assert client.ask("rank 0", "b") is None
    assert len(held_by(kept.pid)) == 1
    assert client.ask("rank 0", "a") is None
    client.forget("rank 1")
    assert held_by(kept.pid) == []


def test_what_is_kept_anew_takes_the_place_of_the_old(kept: WeightKeeper) -> None:
    client = KeeperClient(kept.path())
    for text in (b"old", b"new"):
        file = file_with(text)
        client.keep("rank 0", {"fingerprint": "a"}, [file])
        os.close(file)
    found = client.ask("rank 0", "a")
    assert found is not None
    assert contents(found[1]) == [b"new"]
    assert kept.pid is not None
    assert len(held_by(kept.pid)) == 1


def test_everything_is_dropped_on_demand(
    kept: WeightKeeper, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))
    monkeypatch.setattr(keeper, "_SHORT", str(short_folder))
    assert keeper.drop_all() == {}
    folder, file = kept.path().parent, file_with(b"x")
    (short_folder / "latentserve-weights-of-one-that-was-killed").mkdir()
    KeeperClient(kept.path()).keep("rank 0", {"fingerprint": "a", "size": 1 << 20}, [file])
    os.close(file)
    assert keeper.drop_all() == {folder: {"rank 0": 1 << 20}}
    assert kept.pid is not None
    assert held_by(kept.pid) == []
    assert keeper.drop_all() == {folder: {}}


def test_it_says_what_is_missing_and_whether_it_lives() -> None:
    made = WeightKeeper()
    assert made.lacks(["rank 0, cache"]) == "no weight keeper could be started"
    client, file = KeeperClient(made.path()), file_with(b"x")
    client.keep("rank 0, cache", {"fingerprint": "a", "size": 1}, [file])
    os.close(file)
    assert made.lacks(["rank 0, cache"]) == ""
    assert made.lacks(["rank 0, cache", "rank 1, cache"]) == "the weight keeper has nothing of rank 1, cache"
    client.drop()
    assert made.lacks(["rank 0, cache"]) == "the weight keeper has nothing of rank 0, cache"
    assert made.pid is not None
    os.kill(made.pid, signal.SIGKILL)
    until(lambda: psutil.Process(made.pid).status() == psutil.STATUS_ZOMBIE)
    assert made.lacks(["rank 0, cache"]) == "the weight keeper has ended"
    made.close()


def test_values_are_remembered(kept: WeightKeeper) -> None:
    client = KeeperClient(kept.path())
    assert client.recall("proof") is None
    client.note("proof", [1, {"a": None}])
    assert client.recall("proof") == [1, {"a": None}]


def test_nonsense_and_silence_concern_nobody_else(kept: WeightKeeper) -> None:
    client = KeeperClient(kept.path())
    client.note("a", 1)
    for said in (b"", b"\xff" * 40, b"\x02" + bytes(11) + b"[]", b"\x03" + bytes(11) + b"{}x"):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(kept.path()))
            stranger.sendall(said)
    with pytest.raises(OSError, match="unknown kind"):
        client._talk({"kind": "eat"})
    assert client.recall("a") == 1


def test_one_that_was_killed_is_started_again_and_keeps_nothing(kept: WeightKeeper) -> None:
    path, pid = kept.path(), kept.pid
    KeeperClient(path).note("a", 1)
    assert kept.path() == path
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    with pytest.raises((ConnectionError, FileNotFoundError)):
        KeeperClient(path).recall("a")
    assert KeeperClient(kept.path()).recall("a") is None
    assert kept.pid != pid
    assert not path.exists()


def test_one_that_does_not_end_at_once_keeps_nobody_waiting(
    kept: WeightKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose memory the kernel frees slowly: it is stopped, and the signal that ends it comes later."""
    folder, process = kept.path().parent, kept._process
    assert process is not None
    monkeypatch.setattr(keeper, "_KILLED_S", 0.1)
    monkeypatch.setattr(process, "kill", lambda: process.send_signal(signal.SIGSTOP))
    closing = threading.Thread(target=kept.close, daemon=True)
    closing.start()
    closing.join(60)
    process.send_signal(signal.SIGKILL)
    assert not closing.is_alive()
    assert not folder.exists()
    process.wait()


STARTER = """
import os, sys, time
from workers.memory.keeper import KeeperClient, LaterKeeper, WeightKeeper
kept = WeightKeeper()
file = os.memfd_create("weights")
KeeperClient(kept.path()).keep("rank 0", {"fingerprint": "a"}, [file])
print(kept.pid, kept.path().parent, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_who_started_it_and_leaves_nothing(number: int) -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pid, folder = starter.stdout.readline().split()
        assert len(held_by(int(pid))) == 1
        os.kill(int(pid), signal.SIGTERM)  # as a service manager does, to every process: its starter may drain
        assert KeeperClient(Path(folder) / "keeper").recall("a") is None
        starter.send_signal(number)
        starter.wait()
    until(lambda: not psutil.pid_exists(int(pid)))
    until(lambda: not Path(folder).exists())


def test_it_imports_nothing_but_the_standard_library(kept: WeightKeeper) -> None:
    KeeperClient(kept.path()).note("a", 1)
    assert kept.pid is not None
    process = psutil.Process(kept.pid)
    loaded = {Path(each.path).name for each in process.memory_maps()}
    assert not any(name.startswith(("libtorch", "libcuda", "_multiarray", "libc10")) for name in loaded)
    assert process.memory_info().rss < 40 << 20


def test_what_came_before_there_was_a_keeper_is_handed_to_it(kept: WeightKeeper) -> None:
    before = held_by(os.getpid())
    early = LaterKeeper()
    descriptor = file_with(b"weights")
    early.keep("rank 0", {"fingerprint": "a", "size": 7, "list": (1,)}, [descriptor])
    early.keep("rank 0, cache", {"fingerprint": "b", "size": 7}, [descriptor])
    os.close(descriptor)
    early.note("proof", {"passed": True})
    early.forget("rank 0, cache")
    found = early.ask("rank 0", "a")
    assert found is not None
    assert found[0] == {"fingerprint": "a", "size": 7, "list": [1]}  # as a keeper gives it
    assert contents(found[1]) == [b"weights"]
    assert early.recall("proof") == {"passed": True}
    assert early.slots() == {"rank 0"}

    early.hand_over(kept.path())
    assert held_by(os.getpid()) == before
    early.note("later", 1)
    others = KeeperClient(kept.path())
    assert (others.slots(), others.recall("proof"), others.recall("later")) == ({"rank 0"}, {"passed": True}, 1)
    found = others.ask("rank 0", "a")
    assert found is not None
    assert contents(found[1]) == [b"weights"]


@pytest.mark.parametrize("there", [False, True])
def test_without_a_keeper_nothing_stays(short_folder: Path, there: bool) -> None:
    """Where none could be started, or the one that was has ended."""
    before = held_by(os.getpid())
    early = LaterKeeper()
    descriptor = file_with(b"weights")
    early.keep("rank 0", {"fingerprint": "a", "size": 7}, [descriptor])
    os.close(descriptor)
    with pytest.raises(OSError, match="No such file") if there else contextlib.nullcontext():
        early.hand_over(short_folder / "keeper" if there else None)
    assert held_by(os.getpid()) == before
    with pytest.raises(OSError, match="No such file" if there else "there is no weight keeper"):
        early.note("later", 1)
