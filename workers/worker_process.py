"""One rank's process: load, report ready, then run step plans until told to stop."""

from __future__ import annotations

import time
from collections import deque

import torch

from workers.channel import Addresses, HeartbeatThread, Receiver, Sender, connect_receiver, connect_sender
from workers.config import EngineConfig
from workers.environment import check_environment
from workers.messages import Fault, Progress, Shutdown, ToWorker
from workers.parallel import PeerLost, TensorParallel
from workers.replica import Replica, pick_device
from workers.runner import Launched, Runner

COLLECTIVE_TIMEOUT_S = 120.0


def _serve(runner: Runner, plans: Receiver, results: Sender, rank: int) -> None:
    """Run plans as they come. On a GPU the next step is launched before the last one's tokens are waited for: a plan
    comes while a step runs, so that neither of the two is waited for alone."""
    launched: deque[Launched] = deque()
    ahead = 1 if runner.device.type == "cuda" else 0
    while True:
        plan = plans.receive(timeout_ms=0 if launched else None)
        if isinstance(plan, Shutdown):
            return
        if plan is not None:
            launched.append(runner.launch(plan))
        if len(launched) > ahead or (launched and launched[0].finished):
            result = runner.collect(launched.popleft())
            if rank == 0:
                results.send(result)


def run_worker(
    config: EngineConfig, rank: int, addresses: Addresses, rendezvous: str, device_index: int | None = None
) -> None:
    """Main loop of one rank; returns after a Shutdown. On an error reports the cause to the scheduler and raises it.

    `rendezvous` is a torch.distributed URL (tcp://host:port) all ranks share; unused with one rank.
    """
    results = connect_sender(addresses.results)
    plans = connect_receiver(addresses.plans[rank], ToWorker)
    heartbeat = HeartbeatThread(addresses, rank, silence_s=2 * config.heartbeat_timeout_s)
    loading = False
    try:
        check_environment()
        torch.set_num_threads(1)
        device = pick_device(config, device_index)
        begin = time.perf_counter()

        def progress(text: str) -> None:
            results.send(Progress(rank, f"[{time.perf_counter() - begin:5.1f} s] {text}"))

        group = TensorParallel.connect(rank, config.tensor_parallel, rendezvous, device, COLLECTIVE_TIMEOUT_S)
        loading = True
        replica = Replica(config, group, device, progress, results.send)
        loading = False
        if rank == 0:
            heartbeat.figures = replica.runner.stats.figures
        results.send(replica.ready)
        _serve(replica.runner, plans, results, rank)
        replica.runner.close()
        group.close()
    except BaseException as error:
        lost = isinstance(error, PeerLost)
        results.send(Fault(f"rank {rank}: {type(error).__name__}: {error}", rank, lost, loading and not lost))
        raise
    finally:
        heartbeat.close()
        results.close()
        plans.close()
