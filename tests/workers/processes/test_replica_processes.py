"""A replica of real processes: scheduler, ranks over gloo, client; what it generates and how it fails."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

from tests.tiny_models import write_tiny
from tests.workers.test_engine import engine, greedy, random_prompts
from workers.config import EngineConfig
from workers.processes import launch
from workers.processes.client import EngineClient
from workers.processes.launch import LocalReplica, local_engine
from workers.processes.scheduler_process import SchedulerProcess
from workers.protocol.front import EngineFault, Refused
from workers.protocol.messages import Figures, Request
from workers.protocol.plan import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("v3"), "v3", seed=3)


def config(folder: Path, **settings: Any) -> EngineConfig:
    defaults = {"width": 3, "max_rows": 8, "token_budget": 96, "cache_pages": 200, "device": "cpu"}
    defaults |= {"heartbeat_timeout_s": 60.0}  # processes of a busy machine are silent at times
    return EngineConfig(model=str(folder), **{**defaults, **settings})


async def collect(client: EngineClient, name: str, prompt: list[int], sampling: SamplingParams) -> list[int]:
    return [t async for out in client.generate(Request(name, tuple(prompt), sampling)) for t in out.tokens]


async def settled_figures(client: EngineClient) -> Figures:
    """Return what rank 0 told, once it no longer changes: heartbeats are half a second apart at the most."""
    before: Figures = {}
    while not client.stats.worker or client.stats.worker != before:
        before = client.stats.worker
        await asyncio.sleep(1.0)
    return before


@pytest.mark.long
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(4, marks=pytest.mark.long)])
async def test_ranks_share_one_model_and_give_the_tokens_of_one(folder: Path, ranks: int) -> None:
    prompts = random_prompts(10, 120, seed=50)
    expected = engine(folder, width=1).generate(prompts, greedy(24))
    lines: list[str] = []
    async with local_engine(config(folder, tensor_parallel=ranks), lines.append) as client:
        assert client.info.max_width == 3
        await client.health_check()
        jobs = [collect(client, f"r{i}", prompt, greedy(24)) for i, prompt in enumerate(prompts)]
        assert await asyncio.gather(*jobs) == expected
        assert client.stats.pages_total == 199
        steps = (await settled_figures(client))["graph_eager_steps"]
        assert steps == {"no graphs": sum(part.count for part in client.stats.step_seconds.values())}
    assert any("rank 0" in line for line in lines)


async def test_leaving_a_stream_early_frees_its_row(folder: Path) -> None:
    async with local_engine(config(folder)) as client:
        stream = client.generate(Request("a", (1, 2, 3), greedy(400)))
        await anext(stream)
        await stream.aclose()
        deadline = time.monotonic() + 60
        while client.stats.running or client.stats.pages_free != client.stats.pages_total:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)


async def test_refusals_reach_the_caller(folder: Path) -> None:
    async with local_engine(config(folder, max_rows=1, queue_limit=1)) as client:
        with pytest.raises(Refused, match="context of") as refusal:
            await collect(client, "long", [1] * 600, greedy(4))
        assert not refusal.value.overloaded
        streams = [client.generate(Request(f"r{i}", (1, 2), greedy(300))) for i in range(6)]
        results = await asyncio.gather(*(anext(stream) for stream in streams[:4]), return_exceptions=True)
        refused = [result for result in results if isinstance(result, Refused)]
        assert refused
        assert all(error.overloaded for error in refused)
        for stream in streams:
            await stream.aclose()


@asynccontextmanager
async def busy_replica(folder: Path, **settings: Any) -> AsyncIterator[tuple[LocalReplica, EngineClient, list[Any]]]:
    """A replica with streams under way; all its processes are gone afterwards."""
    settings = {"heartbeat_timeout_s": 4.0, "tensor_parallel": 2, **settings}
    replica = LocalReplica(config(folder, **settings))
    addresses = replica.connect()
    client = EngineClient(config(folder, **settings), addresses, "tiny")
    try:
        await client.ready(120)
        streams = [client.generate(Request(f"r{i}", (1 + i, 2), greedy(450))) for i in range(4)]
        for stream in streams:
            await anext(stream)
        yield replica, client, streams
    finally:
        for process in replica.processes:
            if process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGCONT)
        await client.close()
        await asyncio.to_thread(replica.stop, 0.5)
        assert not any(process.is_alive() for process in replica.processes)
        assert not Path(addresses.requests.removeprefix("ipc://")).parent.exists()


async def fail_all(streams: list[Any]) -> list[str]:
    async def drain(stream: Any) -> str:
        with pytest.raises(EngineFault) as fault:
            async for _ in stream:
                pass
        return str(fault.value)

    return await asyncio.gather(*(drain(stream) for stream in streams))


@pytest.mark.alone
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_killed_rank_ends_every_stream_at_once(folder: Path, rank: int) -> None:
    """That is, long before its silence would be noticed."""
    async with busy_replica(folder, heartbeat_timeout_s=600.0) as (replica, client, streams):
        pid = replica.workers[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        # Whoever watches the processes names the dead one; without a watcher the other rank's report ends the streams.
        if rank == 0:
            client.fail("rank 0 was killed")
        causes = await asyncio.wait_for(fail_all(streams), 60)
        assert len(set(causes)) == 1
        with pytest.raises(EngineFault):
            await client.health_check()


@pytest.mark.long
@pytest.mark.alone
async def test_a_stopped_rank_ends_every_stream(folder: Path) -> None:
    async with busy_replica(folder) as (replica, _client, streams):
        pid = replica.workers[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        causes = await asyncio.wait_for(fail_all(streams), 60)
        assert "rank 1 has been silent" in causes[0]


@pytest.mark.long
@pytest.mark.alone
async def test_a_step_that_hangs_ends_every_stream(folder: Path) -> None:
    """Streams end also where nobody is silent: here the other rank, which waits in the step for the stopped one, goes
    on to send heartbeats, and silence would be noticed much later."""
    async with busy_replica(folder, heartbeat_timeout_s=60.0, step_timeout_s=3.0) as (replica, _client, streams):
        pid = replica.workers[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        causes = await asyncio.wait_for(fail_all(streams), 30)
        assert len(set(causes)) == 1
        assert re.search(r"step \d+ made no progress for 3 s", causes[0])


@pytest.mark.long
@pytest.mark.alone
async def test_a_killed_scheduler_ends_every_stream(folder: Path) -> None:
    async with busy_replica(folder) as (replica, _client, streams):
        pid = replica.processes[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        causes = await asyncio.wait_for(fail_all(streams), 60)
        assert "scheduler has been silent" in causes[0]
        # The ranks have no one left to serve: they end by themselves.
        for worker in replica.workers:
            await asyncio.to_thread(worker.join, 60)
            assert worker.exitcode == 1


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("connected", [pytest.param(False, marks=pytest.mark.long), True])
async def test_nothing_outlives_a_killed_parent(folder: Path, connected: bool) -> None:
    code = (
        "import sys, time; from workers.processes.launch import LocalReplica; from workers.config import EngineConfig\n"
        "if __name__ == '__main__':\n"
        "    replica = LocalReplica(EngineConfig.model_validate_json(sys.argv[1]))\n"
        f"    {connected} and replica.connect()\n"
        "    print(*[p.pid for p in replica.processes], flush=True); time.sleep(60)"
    )
    script = folder / "parent.py"
    script.write_text(code)
    root = Path(__file__).resolve().parents[3]
    sockets = Path(tempfile.mkdtemp())  # short: a socket's path has at most 107 characters
    parent = subprocess.Popen(
        [sys.executable, script, config(folder).model_dump_json()],
        env={**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(sockets)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60  # they may still be importing, on a busy machine
    while any(runs(pid) for pid in pids):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    assert not [*sockets.glob("latentserve-*")]
    shutil.rmtree(sockets)


def dies(*_: Any) -> None:
    os._exit(3)


worker_main = launch._worker_main


def one_rank_dies(settings: EngineConfig, rank: int, *given: Any) -> None:
    if rank == 1:
        os._exit(3)
    worker_main(settings, rank, *given)


def one_rank_aborts(settings: EngineConfig, rank: int, *given: Any) -> None:
    if rank == 1:
        os.abort()
    worker_main(settings, rank, *given)


def tells_and_dies(settings: EngineConfig, sockets: Path, standby: bool, parent: Connection) -> None:
    parent.send(SchedulerProcess(settings, folder=sockets).addresses)
    os._exit(3)


@pytest.mark.parametrize(
    ("main", "failing", "cause"),
    [
        pytest.param("_scheduler_main", dies, "the scheduler ended while it started", marks=pytest.mark.long),
        pytest.param("_scheduler_main", tells_and_dies, "scheduler exited with code 3", marks=pytest.mark.long),
        pytest.param("_worker_main", one_rank_dies, "rank 1 exited with code 3", marks=pytest.mark.long),
        pytest.param(
            "_worker_main",
            one_rank_aborts,
            "rank 1 was ended by SIGABRT, by a library that could not go on; what it ",
            marks=pytest.mark.long,
        ),
    ],
)
async def test_a_process_that_dies_early_is_named_and_takes_the_others_along(
    folder: Path, monkeypatch: pytest.MonkeyPatch, main: str, failing: Any, cause: str
) -> None:
    monkeypatch.setattr(launch, main, failing)
    with LocalReplica(config(folder, tensor_parallel=2)) as replica:
        with pytest.raises(EngineFault) as fault:
            async with local_engine(config(folder, tensor_parallel=2), replica=replica):
                pass
        assert str(fault.value).startswith(cause)
    assert all(process.exitcode is not None for process in replica.processes)


@pytest.mark.parametrize("wait_s", [0.0, 0.3, *(pytest.param(s, marks=pytest.mark.long) for s in (0.6, 1.0))])
def test_a_start_that_is_given_up_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_s: float
) -> None:
    """Whether or not the scheduler listens already."""
    # Processes that start as those of commands do have this process's environment.
    monkeypatch.setattr(launch, "_start_method", lambda: multiprocessing.get_context("spawn"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with LocalReplica(config(folder, tensor_parallel=2)) as replica:
        assert [process.name for process in replica.processes] == ["scheduler", "rank 0", "rank 1"]
        time.sleep(wait_s)
        assert not replica.dead()
        begin = time.monotonic()
    assert time.monotonic() - begin < 15  # as long as a rank that serves has to end in order
    assert [process.exitcode for process in replica.processes] == [-signal.SIGKILL] * 3
    assert not list(tmp_path.iterdir())


async def test_processes_say_when_they_have_imported_what_they_need(folder: Path) -> None:
    with LocalReplica(config(folder, selftest=False)) as replica:
        assert not replica.imported
        while not replica.imported:
            await asyncio.sleep(0.02)
        assert not replica.dead()
        async with local_engine(config(folder, selftest=False), replica=replica) as client:
            assert await collect(client, "a", [1, 2, 3], greedy(2))
    with LocalReplica(config(folder)) as replica:
        for process in replica.processes:
            process.kill()
        while not replica.imported:
            await asyncio.sleep(0.02)
        assert replica.dead()


def never_connects(*given: Any) -> None:
    given[-1].recv()
    time.sleep(60)


async def test_a_rank_that_does_not_listen_yet_keeps_nobody_from_giving_the_start_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_worker_main", never_connects)

    async def start() -> None:
        async with local_engine(config(folder)):
            pass

    starting = asyncio.create_task(start())
    await asyncio.sleep(1.0)
    starting.cancel()
    begin = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert time.monotonic() - begin < 15  # as long as a rank that serves has to end in order


@pytest.mark.soak
async def test_the_time_to_start_counts_from_the_connection_on(folder: Path) -> None:
    settings = config(folder, start_timeout_s=20.0, selftest=False)
    with LocalReplica(settings) as replica:
        await asyncio.sleep(21.0)
        async with local_engine(settings, replica=replica) as client:
            assert await collect(client, "a", [1, 2, 3], greedy(2))


def break_the_file(model: Path) -> tuple[str, dict[str, Any]]:
    (model / "model.safetensors").write_bytes(b"not a checkpoint")
    return "rank .: .*model.safetensors", {}


def lose_a_tensor(model: Path) -> tuple[str, dict[str, Any]]:
    tensors = load_file(model / "model.safetensors")
    name = next(name for name in sorted(tensors) if ".layers.1." in name)
    del tensors[name]
    save_file(tensors, model / "model.safetensors")
    return f"(?s)rank .: .*{re.escape(name)}", {}


def be_of_another_type(model: Path) -> tuple[str, dict[str, Any]]:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "llama"}))
    return "rank .: .*llama", {}


def ask_for_too_much_memory(model: Path) -> tuple[str, dict[str, Any]]:
    return "rank .: .*memory", {"cache_pages": 10**8}


@pytest.mark.parametrize(
    "spoil",
    [
        break_the_file,
        lose_a_tensor,
        *(pytest.param(s, marks=pytest.mark.long) for s in (be_of_another_type, ask_for_too_much_memory)),
    ],
)
async def test_a_model_that_cannot_be_loaded_is_not_worth_another_try(tmp_path: Path, spoil: Any) -> None:
    """The first cause is told, and that it lasts. What `serve` makes of that is in e2e/test_failing_start."""
    model = write_tiny(tmp_path / "spoilt", "v3", seed=3)
    cause, settings = spoil(model)
    with pytest.raises(EngineFault, match=cause) as fault:
        async with local_engine(config(model, tensor_parallel=2, **settings)):
            pass
    assert fault.value.lasting


async def test_gpus_that_are_not_there_are_not_worth_another_try(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(EngineFault, match=r"rank .: .*torch sees no CUDA device") as fault:
        async with local_engine(config(folder, tensor_parallel=2, device="cuda")):
            pass
    assert fault.value.lasting
