"""Process of one rank: load, report ready, then run step plans until told to stop."""

from __future__ import annotations

import faulthandler
import gc
import logging
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch
from msgspec.structs import replace

from workers.channel.sockets import Addresses, Receiver, Sender, last_words_have_left
from workers.config import EngineConfig
from workers.environment import check_environment
from workers.grammar.compiler import Compiler
from workers.memory.keeper import KeeperClient
from workers.parallel.group import Group, PeerLost
from workers.protocol.captures import CapturePortion, Waiting
from workers.protocol.grammar import CompileGrammar, ForgetGrammar
from workers.protocol.messages import Fault, Progress, Ready, Shutdown, TakeOver
from workers.protocol.tiers import DiskMoves, Moves
from workers.rank.captures import CaptureFailedError, Captures, SelfTestFailedError
from workers.rank.device import passed_over, pick_device
from workers.rank.link import Link
from workers.rank.rank import Rank
from workers.rank.role import Role
from workers.rank.runner import Launched, Runner
from workers.rank.sharing import share_out
from workers.rank.start_times import StartTimes
from workers.tiers.disk_mover import DiskMover
from workers.tiers.mover import PageMover

logger = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT_S = 120.0
_SPEAK = (ValueError, RuntimeError, MemoryError)
"""Errors of a start whose text is for the user, who asked for what cannot be had; all others are defects."""
LIBRARIES = "libraries"
"""Part of the start of a rank that began before its scheduler."""
CLOSING_LIMIT_S = 10.0
"""Seconds for graphs and group to close; whoever ends a replica in order waits longer (`launch.SHUTDOWN_TIMEOUT_S`)."""


def _serve(
    runner: Runner,
    plans: Receiver,
    results: Sender,
    grammars: Compiler | None = None,
    mover: PageMover | None = None,
    disk: DiskMover | None = None,
    captures: Captures | None = None,
    take_over: Callable[[], Ready] | None = None,
    *,
    samples: bool,
) -> None:
    """Run plans as they come; a rank that `samples` sends their results. On a GPU the next step is launched before the
    last one's tokens are waited for: a plan comes while a step runs, so that neither of the two is waited for alone.
    While the step cannot end the loop sleeps, and a plan wakes it (`workers.rank.waiting`)."""
    launched: deque[Launched] = deque()
    ahead = 1 if runner.device.type == "cuda" else 0
    while True:
        if launched and (done := launched[0].done) is not None:
            done.rest(plans.wait)
        plan = plans.receive(timeout_ms=0 if launched else None)
        if isinstance(plan, Shutdown):
            return
        if isinstance(plan, CompileGrammar | ForgetGrammar):
            assert grammars is not None, "grammars are of ranks that sample"
            grammars.heed(plan)
            continue
        if isinstance(plan, Moves):
            assert mover is not None, "pages are copied where there is host memory for them"
            mover.move(plan)
            continue
        if isinstance(plan, DiskMoves):
            assert disk is not None, "pages are copied where there is a disk for them"
            disk.move(plan)
            continue
        if isinstance(plan, CapturePortion):
            assert captures is not None, "graphs are captured where some were left at the start"
            while launched:  # nobody is to wait for these as long as it takes
                result = runner.collect(launched.popleft())
                if samples:
                    results.send(result)
            results.send(captures.capture(plan))
            continue
        if isinstance(plan, TakeOver):
            assert take_over is not None, "a rank that stands by takes the place of another"
            while launched:
                runner.collect(launched.popleft())  # of a rehearsal, for which nobody waits any more
            results.send(take_over())
            continue
        if plan is not None:
            launched.append(runner.launch(plan))
        if len(launched) > ahead or (launched and launched[0].finished):
            result = runner.collect(launched.popleft())
            if samples:
                results.send(result)


def _forget_frames(error: BaseException) -> None:
    """Clear the frames that `error`, and all that led to it, went through."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            left += one.__cause__, one.__context__


def _close(rank: int, runner: Runner | None, device: torch.device | None, error: BaseException | None = None) -> None:
    """Destroy the graphs, then leave the group: NCCL lets nobody leave, nor abort, while a graph holds its collectives.

    Each of the two may wait for ever, for a device or for a peer, and some of it while it holds Python's lock. So past
    `CLOSING_LIMIT_S` the process exits, code 1, and says on stderr where it stood. After an `error` what fails here is
    only logged, and collectives under way are broken off: peers may never come to them.
    """
    faulthandler.dump_traceback_later(CLOSING_LIMIT_S, exit=True, file=2)
    try:
        if device is not None and device.type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # Raises if the device is lost, and then all that follows would fail or wait, each graph with a warning.
            torch.cuda.current_stream(device).query()
        if error is not None:
            _forget_frames(error)  # they hold the graphs of a replica that was never completed
            gc.collect()
        if runner is not None:
            runner.close()
        Group.close(abort=error is not None)
    except Exception as failure:
        logger.warning("rank %d ends with live graphs or group: %s: %s", rank, type(failure).__name__, failure)
        if error is None:
            raise
    finally:
        faulthandler.cancel_dump_traceback_later()


def run_worker(
    config: EngineConfig,
    rank: int,
    addresses: Addresses,
    rendezvous: str,
    device_index: int | None = None,
    keeper: Path | None = None,
    waiting: Waiting = None,
    role: Role = "alone",
) -> None:
    """Main loop of one rank; returns after a Shutdown. On an error reports the cause to the scheduler and raises it.
    Before either, graphs and group are closed; where that takes too long the process exits instead (`_close`).

    `rendezvous` is a torch.distributed URL (tcp://host:port) all ranks share; unused with one rank. `keeper`: of
    weights, given to all ranks or to none; one on whose node there is no such socket finds nothing kept. `waiting`
    and `role`: see `Rank`.
    """
    link = Link(config, rank)
    link.connect(addresses)
    run_linked(config, rank, link, rendezvous, device_index, keeper, waiting, role)


def run_linked(
    config: EngineConfig,
    rank: int,
    link: Link,
    rendezvous: str,
    device_index: int | None = None,
    keeper: Path | KeeperClient | None = None,
    waiting: Waiting = None,
    role: Role = "alone",
    libraries_s: float | None = None,
) -> None:
    """`run_worker` of a rank that others may connect to its scheduler later: it loads, captures and proves, and waits
    for that before it says that it is ready. One that fails before anybody has promised to connect it raises the
    cause, which nobody else hears. `libraries_s`: seconds of its imports, which become a part of its start."""
    device: torch.device | None = None
    runner: Runner | None = None
    loading = serving = False
    try:
        check_environment()
        torch.set_num_threads(1)
        loading = True
        device = pick_device(config, device_index)
        loading = False
        begin = time.perf_counter()

        def progress(text: str) -> None:
            link.send(Progress(rank, f"[{time.perf_counter() - begin:5.1f} s] {text}"))

        if note := passed_over(config, device):
            progress(note)
        mesh = config.mesh(rank)
        group = Group.connect(mesh, rendezvous, device, COLLECTIVE_TIMEOUT_S)
        loading = True
        times = StartTimes()
        group = share_out(config, group, device, COLLECTIVE_TIMEOUT_S, progress, standby=role != "alone")
        if config.cache_shards == "auto":
            times.end("choice of shards")
        news = link.news
        heard = link.send, news, news.progress, news.moved, news.of_tiers
        built = Rank(config, group, device, progress, *heard, keeper, waiting, times, role)
        loading = False
        runner = built.runner
        # The model, its graphs and segments stay: no step is to wait while they are searched for garbage.
        gc.collect()
        gc.freeze()
        # Streams that wait go on, and most have no grammar.
        if built.grammars is not None and waiting in (None, 0, "auto"):
            built.grammars.finish_preparing()
        link.wait()
        if mesh.world.first:
            link.heartbeat.figures = runner.stats.figures
        ready = built.ready
        if libraries_s is not None:
            ready = replace(ready, start_s={LIBRARIES: libraries_s, **ready.start_s})
        link.send(ready)
        if built.disk is not None and mesh.world.first:
            for found in built.disk.found():
                link.send(found)
        serving = True
        helpers = built.grammars, built.mover, built.disk, built.captures, built.take_over
        _serve(runner, link.plans, link.results, *helpers, samples=mesh.heads.first)
        if built.disk is not None:
            built.disk.close()
        if built.mover is not None:
            built.mover.close()
    except BaseException as error:
        lost = isinstance(error, PeerLost)
        # Another start would capture the same graphs, and no stream is to blame for what is wrong with them.
        of_graphs = isinstance(error, SelfTestFailedError | CaptureFailedError)
        speaks = (loading or of_graphs) and isinstance(error, _SPEAK) and str(error)
        cause = str(error) if speaks else f"{type(error).__name__}: {error}"
        lasting, in_step = (loading or of_graphs) and not lost, serving and not lost and not of_graphs
        link.send(Fault(f"rank {rank}: {cause}", rank, lost, lasting, in_step))
        if link.fail():
            link.hang_up()
            last_words_have_left()  # before anything that could end this process
        _close(rank, runner, device, error)
        raise
    link.hang_up()
    _close(rank, runner, device)
