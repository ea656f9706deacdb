"""A replica without Ray: its scheduler and its ranks as child processes of this one. For the command line and tests."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from workers.channel.ports import free_port
from workers.channel.sockets import Addresses, channel_folder, last_words_have_left
from workers.config import EngineConfig
from workers.processes.client import EngineClient
from workers.protocol.captures import Waiting
from workers.protocol.front import EngineFault
from workers.protocol.report import SelfTestReport
from workers.rank.libraries import load_libraries
from workers.rank.role import Role

logger = logging.getLogger("latentserve.launch")

SHUTDOWN_TIMEOUT_S = 15.0
FAILED_TIMEOUT_S = 0.5
_OF_SIGNALS: dict[int, str] = {
    signal.SIGKILL: ", perhaps by the system, which does that where memory runs out (dmesg says so)",
    signal.SIGABRT: ", by a library that could not go on; what it printed on stderr says why",
}
"""Most frequent cause of a signal that nobody here sends."""


def _start_method() -> SpawnContext | ForkServerContext:
    """Processes of a replica start anew: this one may have threads and CUDA, which do not survive a fork."""
    return multiprocessing.get_context("spawn")


def _scheduler_main(config: EngineConfig, sockets: Path, standby: bool, parent: Connection) -> None:
    _end_with_parent(partial(shutil.rmtree, sockets, ignore_errors=True))
    from workers.processes.scheduler_process import EngineFailed, SchedulerProcess, collect_young_garbage_alone

    collect_young_garbage_alone()
    process = SchedulerProcess(config, folder=sockets, standby=standby)
    parent.send(process.addresses)
    # Until the ranks may start: they are given `start_timeout_s` from then on. The end of the pipe tells.
    parent.poll(None)
    parent.close()
    try:
        process.run()
    except EngineFailed:
        raise SystemExit(1) from None  # the front was told the cause
    finally:
        last_words_have_left()


def _worker_main(
    config: EngineConfig, rank: int, keeper: Path | None, role: Role, imports: Connection, parent: Connection
) -> None:
    _end_with_parent()
    load_libraries()  # the scheduler binds meanwhile
    imports.close()
    from workers.rank.worker_process import run_worker

    try:
        addresses, rendezvous, waiting = parent.recv()
    except (EOFError, ConnectionError):
        raise SystemExit(1) from None  # the start was given up
    parent.close()
    try:
        run_worker(config, rank, addresses, rendezvous, rank, keeper, waiting, role)
    except Exception:
        os._exit(1)  # the scheduler was told the cause; an orderly exit can hang on a peer that is gone


@contextmanager
def _interrupts_are_ours() -> Iterator[None]:
    """Children started in the block never see Ctrl-C, which a terminal sends to them too: their parent ends them."""
    # Started on its own by the first child otherwise, and it would unblock the signal.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent(last: Callable[[], object] = lambda: None) -> None:
    """Exit when the parent is gone, however it went; `last` is called before."""
    parent = multiprocessing.parent_process()
    if parent is not None:

        def follow() -> None:
            parent.join()
            last()
            os._exit(1)

        threading.Thread(target=follow, name="follow-parent", daemon=True).start()


class LocalReplica:
    """The child processes of one replica. Those left at the end of a `with` block are killed."""

    def __init__(
        self,
        config: EngineConfig,
        keeper: Path | None = None,
        role: Role = "alone",
    ) -> None:
        """Starts them all. They import what they need, which takes ranks seconds, and wait for `connect`. `keeper`: of
        weights, for whoever starts replicas one after the other, see `WeightKeeper.path`. `role`: see `Rank`."""
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads per rank on a busy machine are slower than one
        # A rank that fails takes the rendezvous along; of those that wait there torch would tell frame by frame.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        context = _start_method()
        self.begin = time.perf_counter()
        # Made here and not where it is used: whoever is killed cannot tell what it has made.
        self._sockets = channel_folder()
        self._pipes: list[Connection] = []
        self._imports: list[Connection] = []
        """Pipes that ranks close once they have imported what they need."""
        self.processes: list[BaseProcess] = []
        """The scheduler, then the ranks."""

        def start(name: str, main: Callable[..., None], *arguments: object) -> None:
            ours, theirs = context.Pipe()
            self._pipes.append(ours)
            process = context.Process(target=main, args=(config, *arguments, theirs), daemon=True, name=name)
            process.start()
            theirs.close()  # the end of the process is the end of the pipe
            self.processes.append(process)

        try:
            with _interrupts_are_ours():
                start("scheduler", _scheduler_main, self._sockets, role == "standby")
                for rank in range(config.mesh().world.size):
                    ours, theirs = context.Pipe(duplex=False)
                    self._imports.append(ours)
                    start(f"rank {rank}", _worker_main, rank, keeper, role, theirs)
                    theirs.close()
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> LocalReplica:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def workers(self) -> list[BaseProcess]:
        """The ranks."""
        return self.processes[1:]

    @property
    def imported(self) -> bool:
        """Whether scheduler and ranks have imported what they need, or have ended, which `dead` tells. Before
        `connect`."""
        return all(pipe.poll() for pipe in (self._pipes[0], *self._imports))

    def connect(self, waiting: Waiting = None) -> Addresses:
        """Wait until the scheduler listens, and let the ranks load; they do so in parallel. Returns where the front
        connects, which it must do soon. EngineFault if the scheduler ended instead. `waiting`: number of streams that
        wait for it; None: all graphs are captured before it is ready; see `Waiting`."""
        scheduler, *ranks = self._pipes
        try:
            addresses: Addresses = scheduler.recv()
        except (EOFError, ConnectionError):
            raise EngineFault("the scheduler ended while it started") from None
        rendezvous = f"tcp://127.0.0.1:{free_port()}"
        for pipe in ranks:
            with suppress(ConnectionError):  # one that ended already: `dead` tells
                pipe.send((addresses, rendezvous, waiting))
        self._close_pipes()
        return addresses

    def _close_pipes(self) -> None:
        for pipe in (*self._pipes, *self._imports):
            pipe.close()
        self._pipes.clear()
        self._imports.clear()

    def dead(self) -> str:
        """Return which process is gone, and how it ended; empty while all live."""
        for process in self.processes:
            if process.exitcode is not None:
                return f"{process.name} {_ended(process.exitcode)}"
        return ""

    def stop(self, failed: bool = False) -> None:
        """Wait for the processes to end by themselves, not long where one or the start `failed`; then end them."""
        deadline = time.monotonic() + (FAILED_TIMEOUT_S if failed else SHUTDOWN_TIMEOUT_S)
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0.0))
            if process.exitcode is None and not failed:
                logger.warning("%s did not end by itself and is killed", process.name)
        self.kill()

    def kill(self) -> None:
        """End the processes that have not ended; harmless when repeated."""
        for process in self.processes:
            if process.exitcode is None:
                process.kill()
                process.join()
        self._close_pipes()
        shutil.rmtree(self._sockets, ignore_errors=True)


def _ended(code: int) -> str:
    """Describe by its exit code how a process ended that could not tell it itself."""
    if code >= 0:
        return f"exited with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"was ended by {name}{_OF_SIGNALS.get(-code, '')}"


async def _watch_processes(replica: LocalReplica, client: EngineClient) -> None:
    while not (dead := replica.dead()):
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.5)  # a process that failed in order has told its cause by now
    client.fail(dead)


@asynccontextmanager
async def local_engine(
    config: EngineConfig,
    progress: Callable[[str], None] | None = None,
    name: str | None = None,
    on_selftest: Callable[[SelfTestReport], None] | None = None,
    replica: LocalReplica | None = None,
) -> AsyncIterator[EngineClient]:
    """A ready engine on this machine; everything it started has ended when the block is left. `on_selftest` hears what
    the self-test found, before EngineFault is raised if it failed. `replica`: one of `config` that was started already
    and is not connected yet."""
    with replica or LocalReplica(config) as replica:
        client = EngineClient(config, replica.connect(), name or config.model)
        if progress is not None:
            client.on_progress.append(progress)
        if on_selftest is not None:
            client.on_selftest.append(on_selftest)
        watcher = asyncio.create_task(_watch_processes(replica, client))
        ready = False
        try:
            await client.ready(config.start_timeout_s)
            ready = True
            yield client
        finally:
            watcher.cancel()
            # While they start there is nothing to end in order, and a rank may not listen yet.
            failed = client.fault is not None or not ready
            await client.close()
            await asyncio.to_thread(replica.stop, failed)
