"""End of a rank, after a Shutdown and after an error: what it tells, what it closes in which order, and that it ends
whatever its device and its peers are up to. On a GPU the graphs hold the collectives: here they are pretended."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, call

import pytest
import torch
import torch.distributed as dist

from tests.rank_processes import start_method
from workers.channel.ports import free_port
from workers.channel.sockets import Addresses, Binding
from workers.config import EngineConfig
from workers.graphs.guard import CaptureViolation
from workers.parallel.group import Group, PeerLost
from workers.processes.launch import _worker_main
from workers.protocol.captures import CapturePortion
from workers.protocol.messages import Fault, FromWorker, Ready, Shutdown, ToScheduler
from workers.protocol.plan import StepPlan
from workers.rank import link, worker_process
from workers.rank.captures import CaptureFailedError, Captures
from workers.rank.worker_process import run_worker

CONFIG = EngineConfig(model="demo", tensor_parallel=2, device="cpu")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """All that `run_worker` uses; its calls are recorded in their order."""
    world = Mock()
    for name in ("connect_sender", "connect_receiver", "HeartbeatThread"):
        monkeypatch.setattr(link, name, getattr(world, name))
    for name in ("check_environment", "pick_device", "Group", "Rank", "last_words_have_left"):
        monkeypatch.setattr(worker_process, name, getattr(world, name))
    world.pick_device.return_value = world.Rank.return_value.runner.device = torch.device("cpu")
    world.connect_receiver.return_value.receive.return_value = StepPlan(1, 2, 1, (0,))
    return world


def run(expected: type[Exception] | None = None) -> None:
    addresses = cast(Addresses, Mock(plans=["ipc://0", "ipc://1"]))
    if expected is None:
        run_worker(CONFIG, 1, addresses, "tcp://127.0.0.1:1")
    else:
        with pytest.raises(expected, match="the cause"):
            run_worker(CONFIG, 1, addresses, "tcp://127.0.0.1:1")


def order(world: Mock, *names: str) -> list[str]:
    return [name for name, *_ in world.mock_calls if name in names]


GRAPHS, GROUP = "Rank().runner.close", "Group.close"


def test_graphs_are_destroyed_before_the_process_group(world: Mock) -> None:
    """Collectives of these graphs would wait for ever for ranks that have left it."""
    world.connect_receiver.return_value.receive.return_value = Shutdown()
    run()
    assert order(world, GRAPHS, GROUP) == [GRAPHS, GROUP]
    assert world.Group.close.call_args == call(abort=False)


def test_after_an_error_the_cause_leaves_first_and_the_group_last(world: Mock) -> None:
    world.Rank.return_value.runner.launch.side_effect = ValueError("the cause")
    run(ValueError)
    told = [told.args[0] for told in world.connect_sender.return_value.send.call_args_list]
    assert told[-1] == Fault("rank 1: ValueError: the cause", 1, in_step=True)
    sent, flushed = "connect_sender().close", "last_words_have_left"
    assert order(world, sent, flushed, GRAPHS, GROUP) == [sent, flushed, GRAPHS, GROUP]
    assert world.Group.close.call_args == call(abort=True)  # the peers may never come to what is under way


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("the cause: out of memory"),
        CaptureViolation("the cause: a capture waits for the device"),
        KeyError("the cause"),
    ],
)
def test_what_fails_in_a_late_capture_is_blamed_on_no_stream(world: Mock, error: Exception) -> None:
    world.connect_receiver.return_value.receive.return_value = CapturePortion(1, ())
    replica = world.Rank.return_value
    replica.captures = Captures(replica.runner, world.Group.connect.return_value, None)
    replica.runner.graphs.capture.side_effect = error
    run(CaptureFailedError)
    told = [told.args[0] for told in world.connect_sender.return_value.send.call_args_list]
    why = f"graphs could not be captured while the replica served: {type(error).__name__}: {error}; with"
    assert told[-1].cause.startswith(f"rank 1: {why}")
    assert (told[-1].secondary, told[-1].lasting, told[-1].in_step) == (False, True, False)


def test_a_peer_that_is_lost_during_a_late_capture_is_no_fault_of_the_graphs(world: Mock) -> None:
    world.connect_receiver.return_value.receive.return_value = CapturePortion(1, ())
    replica = world.Rank.return_value
    replica.captures = Captures(replica.runner, world.Group.connect.return_value, None)
    replica.runner.graphs.capture.side_effect = PeerLost("the cause: a peer")
    run(PeerLost)
    told = [told.args[0] for told in world.connect_sender.return_value.send.call_args_list]
    assert told[-1] == Fault("rank 1: PeerLost: the cause: a peer", 1, secondary=True)


@pytest.mark.parametrize("known_to", ["the error", "its cause", "what it was raised after"])
def test_graphs_of_a_replica_that_never_came_to_be_are_destroyed_too(world: Mock, known_to: str) -> None:
    """Such a replica may have failed its self-test: only the error still knows the graphs."""
    events: list[str] = []

    class Graphs:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            events.append("graphs")

    def capture() -> None:
        graphs = Graphs()
        raise RuntimeError(f"the cause {graphs is None}")

    def fail(*_: Any) -> None:
        try:
            capture()
        except RuntimeError as error:
            if known_to == "the error":
                raise
            raise RuntimeError("the cause") from (error if known_to == "its cause" else None)

    world.Rank.side_effect = fail
    world.Group.close.side_effect = lambda **_: events.append("group")
    run(RuntimeError)
    assert events == ["graphs", "group"]


def test_graphs_that_stay_keep_the_group_and_hide_no_cause(world: Mock, caplog: pytest.LogCaptureFixture) -> None:
    """NCCL would wait for them."""
    world.Rank.return_value.runner.launch.side_effect = ValueError("the cause")
    world.Rank.return_value.runner.close.side_effect = RuntimeError("not now")
    run(ValueError)
    assert order(world, GRAPHS, GROUP) == [GRAPHS]
    assert [record.getMessage() for record in caplog.records] == [
        "rank 1 ends with live graphs or group: RuntimeError: not now"
    ]


def test_on_a_lost_device_nothing_is_closed(world: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = torch.AcceleratorError("the cause: an illegal memory access")
    world.pick_device.return_value = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", Mock(return_value=Mock(query=Mock(side_effect=lost))))
    world.Rank.return_value.runner.launch.side_effect = lost
    run(torch.AcceleratorError)
    assert order(world, GRAPHS, GROUP) == []


def test_a_device_that_was_never_used_is_left_alone(world: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    world.pick_device.return_value = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", Mock(side_effect=AssertionError("a context for nothing")))
    world.Group.connect.side_effect = ValueError("the cause")
    run(ValueError)
    assert order(world, GRAPHS, GROUP) == [GROUP]


LIMIT_S = 1.0
"""Seconds of a rank whose graphs hang."""


class PretendedRank:
    """Rank of a model of one all-reduce a step; rank 1 fails in step 2. `closing` says how its graphs take their
    end."""

    def __init__(self, folder: Path, closing: str, group: Group) -> None:
        self.folder, self.closing, self.group = folder, closing, group
        self.hangs = closing.startswith("hangs")
        self.ready = Ready(group.mesh.world.rank, 2, 64, 100, 1, ())
        self.runner = self
        self.grammars = None
        self.mover = self.disk = self.captures = self.take_over = None
        self.device = torch.device("cpu")
        self.stats = SimpleNamespace(figures=dict)

    def launch(self, plan: StepPlan) -> Any:
        if self.closing == "waits for its peer" and self.group.mesh.world.rank == 0:
            time.sleep(600)  # alive, and it will never come
        elif plan.step == 1:
            self.sum = dist.all_reduce(torch.zeros(4), async_op=True)
        elif self.group.mesh.world.rank == 1:
            raise ValueError("the cause")
        return SimpleNamespace(finished=True)

    def collect(self, _: Any) -> Ready:
        return self.ready  # something to send

    def close(self) -> None:
        if self.group.mesh.world.rank == 0:
            return
        deadline = time.monotonic() + 60
        while not self.hangs and not (self.folder / "heard").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        heard, live = self.hangs or (self.folder / "heard").exists(), dist.is_initialized()
        (self.folder / "graphs").write_text(f"{time.monotonic()} closed; cause heard: {heard}; group alive: {live}")
        if self.closing == "raises":
            raise RuntimeError("not now")
        if self.closing == "hangs":
            time.sleep(600)
        if self.closing == "hangs with the lock":
            ctypes.PyDLL(None).sleep(600)


def rank_process(rank: int, parent: Connection, folder: Path, closing: str) -> None:
    os.dup2(os.open(folder / f"stderr{rank}", os.O_WRONLY | os.O_CREAT), 2)

    def pretended(_config: EngineConfig, group: Group, *_: Any) -> PretendedRank:
        return PretendedRank(folder, closing, group)

    setattr(worker_process, "Rank", pretended)  # noqa: B010
    worker_process.CLOSING_LIMIT_S = LIMIT_S if closing.startswith("hangs") else 120.0
    _, imports = Pipe(duplex=False)
    _worker_main(CONFIG, rank, None, "alone", imports, parent)


@contextmanager
def two_ranks(folder: Path, closing: str) -> Iterator[tuple[Binding, list[BaseProcess]]]:
    """Start two ranks, both ready, with the scheduler's end of their channel."""
    binding = Binding(2, None, ToScheduler, FromWorker)
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    context = start_method()
    ranks: list[BaseProcess] = []
    try:
        for rank in range(2):
            ours, theirs = context.Pipe()
            ranks.append(context.Process(target=rank_process, args=(rank, theirs, folder, closing)))
            ranks[-1].start()
            ours.send((binding.addresses, rendezvous, None))
        for _ in range(2):
            receive(binding, Ready)
        yield binding, ranks
    finally:
        for process in ranks:
            process.kill()
            process.join()
        binding.close()


def receive(binding: Binding, kind: type) -> Any:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if isinstance(message := binding.results.receive(timeout_ms=100), kind):
            return message
    raise TimeoutError(f"no {kind.__name__}")


@pytest.mark.parametrize(
    "closing",
    [
        pytest.param("closes", marks=pytest.mark.long),
        "raises",
        pytest.param("hangs", marks=pytest.mark.long),
        "hangs with the lock",
        "waits for its peer",
    ],
)
def test_a_rank_that_failed_tells_why_and_ends(tmp_path: Path, closing: str) -> None:
    with two_ranks(tmp_path, closing) as (binding, ranks):
        for step in (1, 2):
            for plans in binding.plans:
                plans.send(StepPlan(step, 2, 1, (0,)))
        assert receive(binding, Fault) == Fault("rank 1: ValueError: the cause", 1, in_step=True)
        (tmp_path / "heard").touch()
        ranks[1].join(60)
        assert ranks[1].exitcode == 1
        begun, _, found = (tmp_path / "graphs").read_text().partition(" ")
        if closing.startswith("hangs"):
            assert time.monotonic() - float(begun) > LIMIT_S / 2
    assert found == "closed; cause heard: True; group alive: True"
    said = (tmp_path / "stderr1").read_text()
    if closing == "raises":
        assert said == "rank 1 ends with live graphs or group: RuntimeError: not now\n"
    elif closing.startswith("hangs"):
        assert said.startswith("Timeout")
        assert "in close" in said
        assert "the cause" not in said  # that the scheduler has
    else:
        assert said == ""


@pytest.mark.parametrize("closing", ["closes", "hangs", pytest.param("hangs with the lock", marks=pytest.mark.long)])
def test_a_rank_that_was_told_to_stop_ends(tmp_path: Path, closing: str) -> None:
    (tmp_path / "heard").touch()  # there is nothing to hear
    with two_ranks(tmp_path, closing) as (binding, ranks):
        for plans in binding.plans:
            plans.send(Shutdown())
        ranks[1].join(60)
        assert ranks[1].exitcode == (0 if closing == "closes" else 1)
        ranks[0].join(60)
        assert ranks[0].exitcode == 0
    assert (tmp_path / "graphs").read_text().endswith("group alive: True")
    assert ("in close" in (tmp_path / "stderr1").read_text()) is (closing != "closes")
