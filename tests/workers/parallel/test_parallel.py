"""A lost peer is told from what a rank does wrong itself: one is the echo of another rank's failure, the other a first
cause."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.rank_processes import run_ranks
from workers.channel.ports import free_port
from workers.parallel.group import Group, PeerLost
from workers.parallel.mesh import Mesh

CPU = torch.device("cpu")


def collectives(group: Group) -> list[Callable[[], Any]]:
    """Return collectives of which each waits for every rank: rank 0's broadcast may leave before it is known to be
    alone."""
    x, sums = torch.zeros(4), torch.zeros(4)
    return [
        lambda: group.all_reduce(sums, sums),
        lambda: group.minimum(x),
        lambda: group.all_gather(x, torch.zeros(2, 4)),
        lambda: group.gather_bytes(b"x", CPU),
    ]


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 120
    while not file.exists():
        assert time.monotonic() < deadline, f"there is no {file.name}"
        time.sleep(0.01)


def deserted_rank(rank: int, folder: Path, timeout_s: float, silent: bool) -> None:
    (folder / f"began{rank}").touch()
    wait_for(folder / f"began{1 - rank}")  # the time for a collective is not for the start of a process
    group = Group.connect(Mesh.of(rank, 2), f"file://{folder}/rendezvous", CPU, timeout_s)
    for call in collectives(group):
        call()
    assert group.gather_bytes(b"", CPU) == [b"", b""]
    if rank == 0:
        for call in collectives(group):
            with pytest.raises(PeerLost):
                call()
        (folder / "lost").touch()
    if rank == 1 and silent:
        wait_for(folder / "lost")
    os._exit(0)


@pytest.mark.parametrize(
    ("timeout_s", "silent"),
    [pytest.param(30.0, False, marks=pytest.mark.long, id="ended"), pytest.param(6.0, True, id="silent")],
)
def test_a_rank_that_is_gone_or_silent_is_a_lost_peer(tmp_path: Path, timeout_s: float, silent: bool) -> None:
    run_ranks(deserted_rank, 2, tmp_path, timeout_s, silent)
    assert (tmp_path / "lost").exists()


def mistaken_rank(rank: int, folder: Path) -> None:
    group = Group.connect(Mesh.of(rank, 2), f"file://{folder}/rendezvous", CPU, 30.0)
    group.minimum(torch.zeros(1, dtype=torch.int64))  # so that none ends while the other one still connects
    with pytest.raises(RuntimeError, match="invalid tensor size") as mistake:
        group.all_gather(torch.zeros(4), torch.zeros(2, 3))
    assert not isinstance(mistake.value, PeerLost)
    (folder / str(rank)).touch()
    group.close()


def test_arguments_that_do_not_fit_are_a_mistake(tmp_path: Path) -> None:
    run_ranks(mistaken_rank, 2, tmp_path)
    assert {"0", "1"} <= {path.name for path in tmp_path.iterdir()}


def lonely_rank(rank: int, port: int, folder: Path) -> None:
    with pytest.raises(PeerLost):
        Group.connect(Mesh.of(1, 2), f"tcp://127.0.0.1:{port}", CPU, 0.5)
    (folder / "lost").touch()


def test_a_rendezvous_to_which_nobody_comes_is_a_lost_peer(tmp_path: Path) -> None:
    run_ranks(lonely_rank, 1, free_port(), tmp_path)
    assert (tmp_path / "lost").exists()


def nccl(summary: str, detail: str) -> RuntimeError:
    return dist.DistBackendError(f"NCCL error in: ProcessGroupNCCL.cpp:3690, {summary}, NCCL version 2.28.9\n{detail}")


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (nccl("remote process exited or there was a network error", "ncclRemoteError: A call failed"), True),
        (nccl("unhandled system error", "ncclSystemError: System call (e.g. socket, malloc)"), True),
        (nccl("unhandled cuda error", "ncclUnhandledCudaError: Call to CUDA function failed."), False),
        (nccl("invalid usage", "ncclInvalidUsage: This usually reflects invalid usage of NCCL library."), False),
        (nccl("invalid argument", "ncclInvalidArgument: Invalid value for an argument."), False),
        (dist.DistNetworkError("The client socket has timed out"), True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB"), False),
        (RuntimeError("Tensors must be CUDA and dense"), False),
    ],
)
def test_errors_on_a_gpu(monkeypatch: pytest.MonkeyPatch, error: RuntimeError, lost: bool) -> None:
    """Errors are worded as torch words them; none of them was made to happen."""

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(dist, "all_reduce", fail)
    x = torch.zeros(1)
    with pytest.raises(RuntimeError) as raised:
        Group(Mesh.of(0, 2)).all_reduce(x, x)
    assert isinstance(raised.value, PeerLost) is lost
    assert (raised.value.__cause__ if lost else raised.value) is error
