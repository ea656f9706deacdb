"""Ranks that start ahead of Ray: who gets them, how they serve, and that they end with whoever they belong to. Without
Ray: plain processes take the places of the command, the scheduler and the actors."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest

from deploy.cluster.sessions import Sessions
from deploy.config.application import LogConfig, ServeConfig
from deploy.serve import app, early_imports, prestarted
from deploy.serve.ended_processes import runs
from deploy.serve.prestarted import Claimed, NotClaimed, PrestartedRanks, claim
from workers.channel.sockets import Addresses, last_words_have_left
from workers.config import DEMO_MODEL, EngineConfig
from workers.memory.keeper import WeightKeeper
from workers.processes.client import EngineClient
from workers.processes.launch import LocalReplica
from workers.protocol.front import EngineFault
from workers.protocol.messages import Request
from workers.protocol.plan import SamplingParams

ROOT = Path(__file__).resolve().parents[3]
LABELS = {"application": "latentserve", "replica": "engine#1"}
FEW = {"selftest": False, "max_rows": 4, "token_budget": 64, "cache_pages": 64}


def settings(*, model: str = "demo", ranks: int = 1, **more: Any) -> ServeConfig:
    engine = {"model": model, "device": "cpu", "tensor_parallel": ranks, **FEW}
    return ServeConfig.model_validate({"engine": engine, **more}).settled(gpus_there=False)


@contextmanager
def started(config: ServeConfig) -> Iterator[PrestartedRanks]:
    ranks = PrestartedRanks(config, Sessions())
    try:
        yield ranks
    finally:
        pids = [process.pid for process in ranks._processes]
        ranks.close()
        until(lambda: not any(map(runs, pids)))  # it waits a little, and a busy machine takes longer
        assert not ranks._folder.exists()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has(pid: int, memory: str) -> bool:
    """Whether a process has mapped anonymous files of this name."""
    return f"memfd:{memory}" in Path(f"/proc/{pid}/maps").read_text()


def schedule(config: EngineConfig, parent: Connection) -> None:
    """Process of a scheduler."""
    from workers.processes.scheduler_process import EngineFailed, SchedulerProcess

    process = SchedulerProcess(config)
    parent.send(process.addresses)
    with suppress(EngineFailed):
        process.run()
    last_words_have_left()  # a rank that is not told of the end would wait for it


def stand(path: Path, addresses: Addresses, keeper: Path | None, output: int, outcome: Connection) -> None:
    """Process of a rank's actor."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        prestarted.stand_for(path, addresses, keeper, LogConfig(), LABELS)
    except prestarted.RankFailed as error:
        outcome.send(str(error))
    else:
        outcome.send("ended")
    time.sleep(600)  # as an actor does


class Engine:
    """A scheduler and what stands for ranks that were claimed."""

    def __init__(self, config: EngineConfig, claimed: list[Claimed], keeper: Path | None, folder: Path) -> None:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        self.processes: list[BaseProcess] = [context.Process(target=schedule, args=(config, theirs))]
        self.processes[0].start()
        self.addresses: Addresses = ours.recv()
        self.outcomes: list[Connection] = []
        self.log = folder / "ranks.log"
        output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for rank in claimed:
            ours, theirs = context.Pipe()
            self.outcomes.append(ours)
            given = rank.path, self.addresses, keeper, output, theirs
            self.processes.append(context.Process(target=stand, args=given))
            self.processes[-1].start()
        os.close(output)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@asynccontextmanager
async def serving(
    config: ServeConfig, claimed: list[Claimed], folder: Path, keeper: Path | None = None
) -> AsyncIterator[tuple[Engine, EngineClient, list[str]]]:
    engine = Engine(config.engine, claimed, keeper, folder)
    client = EngineClient(config.engine, engine.addresses, "demo")
    told: list[str] = []
    client.on_progress.append(told.append)
    try:
        yield engine, client, told
        await client.close()
    finally:
        engine.kill()


async def tokens(client: EngineClient) -> list[int]:
    request = Request("r", (5, 6, 7, 8), SamplingParams(24, temperature=0.0))
    return [token for output in [output async for output in client.generate(request)] for token in output.tokens]


@pytest.mark.long
async def test_they_serve_and_leave_their_weights_to_those_after_them(tmp_path: Path) -> None:
    config, keeper, ranks = settings(ranks=2), WeightKeeper(), 2
    try:
        with started(config) as ahead:
            claimed = claim(ahead._folder, config, [-1] * ranks)
            assert [rank.pid for rank in claimed] == [process.pid for process in ahead._processes]
            ahead.served()  # those that somebody has go on
            until(lambda: all(has(rank.pid, "latentserve weights") for rank in claimed))  # before there is a keeper
            async with serving(config, claimed, tmp_path, keeper.path()) as (engine, client, told):
                await client.ready(300)
                assert list(client.start_s)[:2] == ["libraries", "weights"]
                assert any(line.startswith("rank 0: [") for line in told)
                found = await tokens(client)
                assert len(found) == 24
                await client.close()
                assert [outcome.recv() for outcome in engine.outcomes] == ["ended"] * ranks
            until(lambda: not any(runs(rank.pid) for rank in claimed))
        with LocalReplica(config.engine, keeper.path()) as replica:
            client = EngineClient(config.engine, replica.connect(), "demo")
            told = []
            client.on_progress.append(told.append)
            await client.ready(300)
            assert any("GiB of weights were kept" in line for line in told)
            assert await tokens(client) == found
            await client.close()
            replica.stop()
    finally:
        keeper.close()


@pytest.mark.long
async def test_an_engine_can_stand_by_for_them(tmp_path: Path) -> None:
    """It shares their weights and their cache, which they gave to a weight keeper that was not there when they had
    them."""
    config, keeper = settings(health={"standby": "hot"}), WeightKeeper()
    try:
        with started(config) as ahead:
            claimed = claim(ahead._folder, config, [-1])
            until(lambda: has(claimed[0].pid, "latentserve cache"))
            async with serving(config, claimed, tmp_path, keeper.path()) as (_, client, _):
                info = await client.ready(300)
                with LocalReplica(config.engine, keeper.path(), "standby") as replica:
                    standby = EngineClient(config.engine, replica.connect(), "demo")
                    assert (await standby.ready(300)).root == info.root
                    assert await tokens(standby) == await tokens(client)
                    await standby.close()
                    replica.stop()
    finally:
        keeper.close()


@pytest.mark.long
@pytest.mark.parametrize("victim", ["rank", "actor", pytest.param("front", marks=pytest.mark.soak)])
async def test_a_rank_and_who_stands_for_it_end_together(victim: str, tmp_path: Path) -> None:
    config = settings()
    with started(config) as ahead:
        [rank] = claim(ahead._folder, config, [-1])
        async with serving(config, [rank], tmp_path) as (engine, client, _):
            await client.ready(300)
            if victim == "rank":
                os.kill(rank.pid, signal.SIGKILL)
                engine.processes[1].join(60)
                assert engine.processes[1].exitcode == -signal.SIGKILL  # as a rank of Ray's that was killed
            elif victim == "actor":
                engine.processes[1].kill()
            else:
                os.kill(rank.pid, signal.SIGSTOP)
                rank.kill()  # it obeys nothing else
            until(lambda: not runs(rank.pid))


LOGGING = """
import json, logging, os, socket, sys
from pathlib import Path
os.dup2(os.memfd_create("said"), 2)
from deploy.serve.prestarted_rank import PrestartedRank
rank = PrestartedRank(Path("."), socket.socket(), json.loads(sys.argv[1]))
print("said early", file=sys.stderr, flush=True)
logging.getLogger("latentserve.early").warning("logged early")
connected = []
rank._link.connect = connected.append
there = [os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND) for _ in range(2)]
rank._connect(socket.socket(), json.loads(sys.argv[3]), there)
assert connected[0].requests == "ipc:///a/b", connected
logging.getLogger("workers.late").warning("logged late")
print("said late", flush=True)
print(os.getpriority(os.PRIO_PROCESS, 0), flush=True)
"""


def test_what_a_rank_says_and_logs_goes_where_its_actor_s_does(tmp_path: Path) -> None:
    """Also what came before there was an actor, with the labels that it has now."""
    log = tmp_path / "log"
    begin = {**prestarted.terms(settings(), 0, -1), "rendezvous": "", "log": LogConfig().model_dump(mode="json")}
    addresses = {"requests": "ipc:///a/b", "outputs": "", "plans": [""], "results": "", "pulse": "", "keys": None}
    nice = os.getpriority(os.PRIO_PROCESS, 0) + 1
    message = {"log": begin["log"], "labels": LABELS, "keeper": None, "addresses": addresses, "nice": nice}
    program = [sys.executable, "-c", LOGGING, json.dumps(begin), str(log), json.dumps(message)]
    ran = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, ""), log.read_text() + ran.stderr
    early, first, second, late, priority = log.read_text().splitlines()
    assert (early, late, int(priority)) == ("said early", "said late", nice)
    for line, message in ((first, "logged early"), (second, "logged late")):
        found = json.loads(line)
        assert (found["message"], found["process"], found["replica"]) == (message, "rank 0", "engine#1")


def spoilt(folder: Path) -> str:
    """A copy of the demo model that lacks a tensor, whose name is returned."""
    from safetensors.torch import load_file, save_file  # which imports torch

    shutil.copytree(DEMO_MODEL, folder)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(tensors) if ".layers.2." in name)
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    return name


@pytest.mark.long
async def test_a_rank_that_fails_once_it_is_claimed_says_why_as_any_other(tmp_path: Path) -> None:
    missing = spoilt(tmp_path / "model")
    config = settings(model=str(tmp_path / "model"))
    with started(config) as ahead:
        claimed = claim(ahead._folder, config, [-1])  # while it still imports
        async with serving(config, claimed, tmp_path) as (engine, client, _):
            with pytest.raises(EngineFault, match=missing) as fault:
                await client.ready(300)
            assert fault.value.lasting
            assert str(fault.value).startswith("rank 0: ")
            assert missing in engine.outcomes[0].recv()
            assert "Traceback" in engine.log.read_text()
            until(lambda: not runs(claimed[0].pid))


@pytest.mark.long
def test_a_rank_that_failed_before_is_not_claimed(tmp_path: Path) -> None:
    """The actors become the ranks, and say what is wrong once more, to whom it concerns."""
    missing = spoilt(tmp_path / "model")
    config = settings(model=str(tmp_path / "model"), ranks=2)
    with started(config) as ahead:
        pids = [process.pid for process in ahead._processes]
        until(lambda: not any(map(runs, pids)))
        with pytest.raises(NotClaimed, match=missing):
            claim(ahead._folder, config, [-1, -1])


def test_an_engine_gets_all_of_its_ranks_or_none() -> None:
    """None of those that it does not get is in its way any more."""
    config = settings(ranks=2)
    with started(config) as ahead:
        pids = [process.pid for process in ahead._processes]
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(NotClaimed, match="rank 1: it does not answer"):
            claim(ahead._folder, config, [-1, -1])
        assert not any(map(runs, pids))


@pytest.mark.parametrize("other", ["settings", "devices"])
def test_ranks_that_started_otherwise_are_not_claimed(other: str) -> None:
    config = settings(gpus_per_rank=1)
    with started(config) as ahead:
        [pid] = [process.pid for process in ahead._processes]
        wider = config.model_copy(update={"engine": config.engine.model_copy(update={"width": 1})})
        if other == "settings":
            with pytest.raises(NotClaimed, match="it started with another engine"):
                claim(ahead._folder, wider, [0])
            assert not runs(pid)
        else:
            with pytest.raises(NotClaimed, match="none has its devices"):
                claim(ahead._folder, config, [1])
            assert runs(pid)  # on a device that is not asked for
            claim(ahead._folder, config, [0])


def test_each_of_several_replicas_gets_an_engine() -> None:
    config = settings(replicas=2)
    with started(config) as ahead:
        claimed = [claim(ahead._folder, config, [-1]) for _ in range(2)]
        assert [rank.pid for [rank] in claimed] == [process.pid for process in ahead._processes]
        with pytest.raises(NotClaimed, match="another engine has it"):
            claim(ahead._folder, config, [-1])
        assert all(runs(rank.pid) for [rank] in claimed)


def test_ranks_that_nobody_asked_for_end_once_the_application_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings()
    with started(config) as ahead:
        for name, value in ahead.environment.items():
            monkeypatch.setenv(name, value)
        assert prestarted.folder() == ahead._folder
        ahead.served()
        assert prestarted.folder() is None
        until(lambda: not any(runs(process.pid) for process in ahead._processes))


def test_ranks_end_with_a_front_that_asked_for_them() -> None:
    config = settings()
    with started(config) as ahead:
        [rank] = claim(ahead._folder, config, [-1])
        rank._channel.close()
        until(lambda: not runs(rank.pid))


COMMAND = """
import sys, time
sys.path.insert(0, sys.argv[1])
from test_prestarted import PrestartedRanks, Sessions, settings
ranks = PrestartedRanks(settings(ranks=2), Sessions())
print(ranks._folder, *(process.pid for process in ranks._processes), flush=True)
time.sleep(600)
"""


def test_ranks_end_with_a_command_that_is_killed() -> None:
    arguments = [sys.executable, "-c", COMMAND, str(Path(__file__).parent)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        folder, *pids = command.stdout.readline().split()
        assert Path(folder).stat().st_mode & 0o077 == 0
        assert all(os.getsid(int(pid)) == int(pid) for pid in pids)  # no signal to the command's group reaches them
        assert all(map(runs, map(int, pids)))
        command.kill()
        until(lambda: not any(map(runs, map(int, pids))))
        until(lambda: not Path(folder).exists())


def test_a_rank_that_has_ended_keeps_its_process_id() -> None:
    """Sessions are ended by the ids of who led them: another process that got the id would be killed in its place."""
    with started(settings()) as ahead:
        [process] = ahead._processes
        os.kill(process.pid, signal.SIGKILL)
        until(lambda: not runs(process.pid))
        time.sleep(0.2)
        assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE


def test_ranks_have_what_ray_gives_its_workers() -> None:
    """Without the score a node that is out of memory ends all workers but those that have it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    try:
        with started(settings()) as ahead:
            [process] = ahead._processes
            assert Path(f"/proc/{process.pid}/oom_score_adj").read_text().strip() == "1000"
            assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (min(hard, 65536), hard)
            until(lambda: psutil.Process(process.pid).environ().get("TMPDIR") == str(ahead._folder))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


KEEPS = COMMAND.replace("Sessions())", "sessions)").replace("ranks =", "sessions = Sessions()\nranks =")
KEEPS = KEEPS.replace("print(", "from pathlib import Path\nsessions.keep(Path(sys.argv[2]))\nprint(")


def test_a_killed_command_leaves_no_folder_of_ranks_that_ended_before(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    arguments = [sys.executable, "-c", KEEPS, str(Path(__file__).parent), str(kept)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        folder, *pids = command.stdout.readline().split()
        for pid in map(int, pids):
            os.kill(pid, signal.SIGKILL)
        until(lambda: not any(map(runs, map(int, pids))))
        command.kill()
        until(lambda: not kept.exists())
        until(lambda: not Path(folder).exists())


def test_what_is_killed_with_the_command_is_cleaned_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are stuck end with the sessions of Ray's daemons. Nobody waits for what does not end by itself."""
    monkeypatch.setattr("deploy.cluster.sessions.LEAVE_S", 600.0)
    sessions, folder = Sessions(), tmp_path / "ranks"
    folder.mkdir()
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as stuck:
        sessions.add(stuck.pid, folder)
        sessions.keep(tmp_path / "folder")
        sessions.end()
        try:
            assert stuck.wait(60) == -signal.SIGKILL
        finally:
            stuck.kill()
        assert not folder.exists()


def test_a_signal_at_the_very_end_of_a_start_ends_ray_too(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Ranks:
        def __init__(self) -> None:
            self.environment: dict[str, str] = {}

        def __len__(self) -> int:
            return 1

        def served(self) -> None:
            raise KeyboardInterrupt

        def close(self) -> None:
            done.append("ranks")

    class Up:
        ahead = None
        proxies = None

        def __init__(self, *_: Any) -> None:
            pass

        def started(self, *_: Any) -> None:
            pass

        def abandon(self) -> None:
            done.append("Ray")

    class Connection:
        own = True

        def __init__(self, *_: Any) -> None:
            pass

    monkeypatch.setattr(app, "RayConnection", Connection)
    monkeypatch.setattr(app, "Running", Up)
    monkeypatch.setattr(prestarted, "begin", lambda *_: Ranks())
    monkeypatch.setattr(early_imports, "begin", lambda *_: None)
    monkeypatch.setattr(app, "_enter", lambda *_, **__: False)
    for name in ("_check_capacity", "_deploy", "_wait"):
        monkeypatch.setattr(app, name, lambda *_: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(KeyboardInterrupt):
        app.launch(ServeConfig.model_validate({"engine": {"model": "demo", "device": "cpu"}, "port": 0}), print)
    assert done == ["Ray", "ranks"]


@pytest.mark.parametrize(
    ("switch", "cores", "gpus", "more", "starts"),
    [
        (None, 2, 0, {}, False),
        (None, 1000, 0, {}, True),
        ("1", 2, 0, {}, True),
        ("0", 1000, 0, {}, False),
        ("1", 2, 1, {"gpus_per_rank": 1}, True),
        (None, 1000, 1, {"gpus_per_rank": 1}, True),
        ("1", 2, 1, {"gpus_per_rank": 1, "replicas": 2}, False),
        ("1", 2, 1, {"gpus_per_rank": 0.5}, False),
    ],
)
def test_when_ranks_start_ahead(
    switch: str | None, cores: int, gpus: int, more: dict[str, Any], starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(prestarted.SWITCH, raising=False)
    if switch is not None:
        monkeypatch.setenv(prestarted.SWITCH, switch)
    monkeypatch.setattr(prestarted, "PrestartedRanks", lambda config, sessions: config)
    config = ServeConfig.model_validate({"engine": {"model": "demo", "device": "cpu"}, **more})
    found: Any = prestarted.begin(config, cores, gpus, Sessions())
    assert (found is not None) is starts
    if starts:
        assert found.gpus_per_rank is not None  # as the replica has it


def test_ranks_of_a_ray_that_is_joined_do_not_start_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose GPUs these are is not known before."""

    class Joins(Exception):
        pass

    def join(*_: Any) -> None:
        raise Joins

    monkeypatch.setattr(app, "RayConnection", join)
    monkeypatch.setattr(prestarted, "begin", lambda *_: pytest.fail("nobody has assigned them a GPU"))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(Joins):
        app.launch(ServeConfig.model_validate({"engine": {"model": "demo", "device": "cpu"}}), lambda line: None)


def test_a_start_that_fails_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(Exception):
        pass

    seen: list[Any] = []

    def ranks() -> list[int]:
        found = []
        for each in psutil.Process().children():
            with suppress(psutil.Error):  # what other tests started may have ended
                if prestarted.MODULE in each.cmdline():
                    found.append(each.pid)
        return found

    def start(*given: Any) -> None:
        # `Popen` returns while the kernel still executes the program: its command line is empty for a moment more.
        until(lambda: bool(ranks()))
        [pid] = ranks()
        seen.extend([pid, given[-1]])
        raise Fails

    monkeypatch.setattr(app, "RayConnection", start)
    monkeypatch.setenv(prestarted.SWITCH, "1")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    said: list[str] = []
    with pytest.raises(Fails):
        app.launch(ServeConfig.model_validate({"engine": {"model": "demo", "device": "cpu"}, "port": 0}), said.append)
    pid, more = seen
    assert not runs(pid)
    assert said == ["1 rank starts ahead of Ray"]
    assert {prestarted.FOLDER, early_imports.PRELOADED} <= set(more)
    assert early_imports.EARLY not in more  # for actors that import nothing
    assert not Path(more[prestarted.FOLDER]).exists()


def test_a_process_for_a_rank_is_spoken_to_before_it_imports_torch() -> None:
    names = "{'torch', 'ray', 'transformers'}"
    program = f"import sys, deploy.serve.prestarted_rank; print(sorted({names} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (ran.stdout, ran.returncode) == ("[]\n", 0), ran.stderr
