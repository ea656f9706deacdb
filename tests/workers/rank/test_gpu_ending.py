"""Ranks with graphs that hold collectives, when one of them fails: each ends by itself and says nothing that the
scheduler was not told."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.test_gpu_engine import params, prompts
from workers.config import EngineConfig
from workers.processes import launch
from workers.processes.launch import local_engine
from workers.protocol.front import EngineFault
from workers.protocol.messages import Request
from workers.protocol.plan import StepPlan
from workers.rank.runner import Launched, Runner
from workers.rank.worker_process import CLOSING_LIMIT_S

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpus,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices"),
]

CONFIG = EngineConfig(
    model="demo",
    device="cuda",
    tensor_parallel=2,
    width=3,
    max_rows=4,
    token_budget=64,
    cache_pages=60,
    selftest=False,
)
FAILING_STEP = 5


def failing_main(config: EngineConfig, rank: int, *given: Any) -> None:
    """A rank's process; rank 1 fails in a step, in the host's code or on the device."""
    folder, failure = os.environ["FAILING_RANK"].split("\n")
    launch_step = Runner.launch

    def fail(runner: Runner, plan: StepPlan) -> Launched:
        if rank == 1 and plan.step == FAILING_STEP:
            if failure == "device":
                assert runner.graphs is not None
                torch.zeros(4, device=runner.device)[torch.full((1,), 9, device=runner.device)].tolist()
            raise ValueError("the cause")
        return launch_step(runner, plan)

    setattr(Runner, "launch", fail)  # noqa: B010
    os.dup2(os.open(f"{folder}/stderr{rank}", os.O_WRONLY | os.O_CREAT), 2)
    main(config, rank, *given)


main = launch._worker_main


async def generate(config: EngineConfig) -> str:
    async with local_engine(config, print) as client:
        with pytest.raises(EngineFault) as fault:
            async for _ in client.generate(Request("a", tuple(prompts(1, 20)[0]), params(1, 0.0)[0])):
                pass
    return str(fault.value)


@pytest.mark.parametrize("failure", ["host", "device"])
def test_a_rank_that_fails_ends_by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failure: str) -> None:
    replicas: list[launch.LocalReplica] = []

    class Replica(launch.LocalReplica):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            replicas.append(self)

    monkeypatch.setenv("FAILING_RANK", f"{tmp_path}\n{failure}")
    monkeypatch.setattr(launch, "_worker_main", failing_main)
    monkeypatch.setattr(launch, "LocalReplica", Replica)
    monkeypatch.setattr(launch, "FAILED_TIMEOUT_S", CLOSING_LIMIT_S + 10)
    begin = time.monotonic()
    cause = asyncio.run(generate(CONFIG))
    print(f"ended after {time.monotonic() - begin:.1f} s: {cause}")
    assert ("the cause" in cause) if failure == "host" else ("CUDA error" in cause)
    said = [(tmp_path / f"stderr{rank}").read_text() for rank in range(2)]
    print(*said, sep="\n---\n")
    # Not -9: nobody killed it.
    assert replicas[0].workers[1].exitcode == 1
    assert "Timeout" not in said[1]
    assert "CUDA warning" not in said[1]
    assert ("live graphs" in said[1]) is (failure == "device")
