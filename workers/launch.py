"""A replica without Ray: its scheduler and its ranks as child processes of this one. For the command line and tests."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess

from workers.channel import Addresses, last_words_have_left, remove_sockets
from workers.client import EngineClient
from workers.config import EngineConfig
from workers.engine import EngineFault
from workers.graphs.report import SelfTestReport
from workers.ports import free_port

logger = logging.getLogger("latentserve.launch")

SHUTDOWN_TIMEOUT_S = 15.0
FAILED_TIMEOUT_S = 0.5


def _start_method() -> SpawnContext | ForkServerContext:
    """Processes of a replica start anew: this one may have threads and CUDA, which do not survive a fork."""
    return multiprocessing.get_context("spawn")


def _scheduler_main(config: EngineConfig, addresses: Connection) -> None:
    from workers.scheduler_process import EngineFailed, SchedulerProcess

    _end_with_parent()
    process = SchedulerProcess(config)
    addresses.send(process.addresses)
    addresses.close()
    try:
        process.run()
    except EngineFailed:
        raise SystemExit(1) from None  # the front was told the cause
    finally:
        last_words_have_left()


def _worker_main(config: EngineConfig, rank: int, addresses: Addresses, rendezvous: str) -> None:
    from workers.worker_process import run_worker

    _end_with_parent()
    try:
        run_worker(config, rank, addresses, rendezvous, device_index=rank)
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


def _end_with_parent() -> None:
    """Exit when the parent is gone, however it went."""
    parent = multiprocessing.parent_process()
    if parent is not None:

        def follow() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=follow, name="follow-parent", daemon=True).start()


class LocalReplica:
    """The child processes of one replica."""

    def __init__(self, config: EngineConfig) -> None:
        """Starts them all; they load in parallel."""
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads a rank on a busy machine are slower than one
        # A rank that fails takes the rendezvous along; of those that wait there torch would tell frame by frame.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        context = _start_method()
        ours, theirs = context.Pipe()
        scheduler = context.Process(target=_scheduler_main, args=(config, theirs), daemon=True, name="scheduler")
        with _interrupts_are_ours():
            scheduler.start()
        theirs.close()
        try:
            self.addresses: Addresses = ours.recv()
        except EOFError:
            raise EngineFault("the scheduler ended while it started") from None
        rendezvous = f"tcp://127.0.0.1:{free_port()}"
        self.workers: list[BaseProcess] = [
            context.Process(
                target=_worker_main, args=(config, rank, self.addresses, rendezvous), daemon=True, name=f"rank {rank}"
            )
            for rank in range(config.tensor_parallel)
        ]
        with _interrupts_are_ours():
            for worker in self.workers:
                worker.start()
        self.processes = [scheduler, *self.workers]

    def dead(self) -> str:
        """Which process is gone, with its exit code; empty while all live."""
        for process in self.processes:
            if process.exitcode is not None:
                return f"{process.name} exited with code {process.exitcode}"
        return ""

    def stop(self, failed: bool = False) -> None:
        """Wait for the processes to end by themselves, not long where one `failed`; then end them."""
        deadline = time.monotonic() + (FAILED_TIMEOUT_S if failed else SHUTDOWN_TIMEOUT_S)
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0.0))
            if process.exitcode is None:
                if not failed:
                    logger.warning("%s did not end by itself and is killed", process.name)
                process.kill()
                process.join()
        remove_sockets(self.addresses)


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
) -> AsyncIterator[EngineClient]:
    """A ready engine on this machine; everything it started has ended when the block is left. `on_selftest` hears what
    the self-test found, before EngineFault is raised if it failed."""
    replica = LocalReplica(config)
    client = EngineClient(config, replica.addresses, name or config.model)
    if progress is not None:
        client.on_progress.append(progress)
    if on_selftest is not None:
        client.on_selftest.append(on_selftest)
    watcher = asyncio.create_task(_watch_processes(replica, client))
    try:
        await client.ready(config.start_timeout_s)
        yield client
    finally:
        watcher.cancel()
        failed = client.fault is not None
        await client.close()
        await asyncio.to_thread(replica.stop, failed)
