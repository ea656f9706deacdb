"""Gap of streams whose engine dies of its GPU: of an access to nowhere, or of a kernel that never ends.

    python bench/device_deaths.py --model DIR --device cuda --streams 16 --prompt 2000 --token-budget 8192
    python bench/device_deaths.py --step-timeout 20     # the demo model on a CPU: an error, and a step without end

One replica runs on this machine without Ray, with a hot standby, as in `bench/standby_gap.py`. While streams run, the
next step of the last rank launches what `--faults` says, one after the other, each once another engine stands by. For
every stream its longest wait for a token is taken from then on, and every stream must get the tokens of an undisturbed
run, in invariant mode, or as many with `--no-invariant`. Exits with 1 otherwise.

A kernel that never ends is noticed as `engine.step_timeout_s` says: on a GPU by what the self-test measured.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

FAULTS = ("stray", "endless")
"""An access to nowhere, and a kernel that never ends."""
MOST_FAULTS = 2
"""Of which a replica is not given up within a minute."""
NOWHERE = 256 << 20
"""Bytes that are written to and are not there."""
WHERE = "LATENTSERVE_BENCH_FAULT"
"""Names the file that says what fault the next step is to have; ranks inherit it."""
TOKENS_BEFORE = 8
"""Tokens that every stream has when the fault comes."""


def launch(fault: str, device: Any) -> None:
    """Do in a rank what the fault is."""
    import torch

    if device.type != "cuda":
        if fault == "stray":
            raise RuntimeError("a planted error")
        while True:
            time.sleep(1)
    if fault == "endless":
        torch.cuda._sleep(2**60)  # cycles: centuries
        return
    memory = torch.empty(NOWHERE, dtype=torch.uint8, device=device)
    window = torch.as_tensor(Window(memory.data_ptr()), device=device)
    del memory
    torch.cuda.empty_cache()  # from here on nothing is there
    window.fill_(1)


class Window:
    """Memory of a GPU by its address alone, for `torch.as_tensor`."""

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (NOWHERE,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def plant() -> None:
    """Have steps of this rank look whether they are to have a fault."""
    from workers.rank.runner import Runner

    honest, file = Runner.launch, Path(os.environ[WHERE])

    def launched(self: Any, plan: Any) -> Any:
        try:
            fault = file.read_text()
            file.unlink()
        except FileNotFoundError:
            return honest(self, plan)
        launch(fault, self.parts.cache.layers[0].device)
        return honest(self, plan)

    Runner.launch = launched  # type: ignore[method-assign]


async def measure(arguments: argparse.Namespace, file: Path) -> int:
    """Print the gaps of each fault; return the number of streams with wrong tokens."""
    from tests.support.local_processes import LocalFront
    from workers.config import EngineConfig
    from workers.processes.failover import FailoverEngine
    from workers.processes.hot_standby import CALM_S
    from workers.protocol.messages import Request
    from workers.protocol.plan import SamplingParams

    limit = {} if arguments.step_timeout is None else {"step_timeout_s": arguments.step_timeout}
    settings = EngineConfig(
        model=arguments.model, device=arguments.device, tensor_parallel=arguments.tensor_parallel,
        max_rows=arguments.streams, token_budget=arguments.token_budget, invariant=arguments.invariant, **limit,
    )  # fmt: skip
    front = LocalFront(settings, hot=True, calm_s=CALM_S)
    sampling = SamplingParams(arguments.tokens, temperature=0.7, seed=3)
    arrivals: dict[int, list[float]] = {}

    async def read(engine: FailoverEngine, number: int, name: str) -> list[int]:
        prompt = tuple(2 + (7 * place + 13 * number) % 1000 for place in range(arguments.prompt))
        tokens: list[int] = []
        async for output in engine.generate(Request(f"{name} {number}", prompt, sampling)):
            if output.tokens:
                arrivals[number].append(time.perf_counter())
                tokens += output.tokens
        return tokens

    async def all_of(engine: FailoverEngine, name: str) -> list[list[int]]:
        arrivals.update({number: [] for number in range(arguments.streams)})
        return await asyncio.gather(*(read(engine, number, name) for number in range(arguments.streams)))

    wrong = 0
    try:
        engine = await front.start()
        expected = await all_of(engine, "undisturbed")
        causes: list[str] = []
        engine.on_loss.append(causes.append)
        for number, fault in enumerate(arguments.faults):
            await front.stands_by()
            running = asyncio.create_task(all_of(engine, fault))
            await asyncio.sleep(0)
            while any(len(times) < TOKENS_BEFORE for times in arrivals.values()) and not running.done():
                await asyncio.sleep(0.001)
            begin = time.perf_counter()
            file.write_text(fault)
            found = await running
            if len(causes) <= number:
                sys.exit(f"{fault}: no engine died before all streams had ended: give more --tokens")
            gaps = []
            for times in arrivals.values():
                moments = [begin, *(moment for moment in times if moment > begin)]
                gaps += [max(after - before for before, after in pairwise(moments))] if len(moments) > 1 else []
            wrong_ones = sum(
                tokens != other if arguments.invariant else len(tokens) != len(other)
                for tokens, other in zip(found, expected, strict=True)
            )
            wrong += wrong_ones
            print(
                f"{fault}: {causes[number]}\n  gap of {len(gaps)} streams, median {statistics.median(gaps):.2f} s, "
                f"longest {max(gaps):.2f} s; {wrong_ones} with wrong tokens",
                flush=True,
            )
        if front.starts != 1:
            print(f"{front.starts - 1} engines were started while streams waited, as none stood by")
    finally:
        await front.end()
    return wrong


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=200, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=150, help="tokens that each stream asks for")
    parser.add_argument("--token-budget", type=int, default=512)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--step-timeout", type=float, help="engine.step_timeout_s; by default what it is by default")
    parser.add_argument("--invariant", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    if len(arguments.faults) > MOST_FAULTS:
        parser.error("a replica is given up at the third death within a minute: give two --faults at the most")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fault"
        os.environ[WHERE] = str(file)
        return 1 if asyncio.run(measure(arguments, file)) else 0


if __name__ == "__main__":
    raise SystemExit(main())
elif WHERE in os.environ and multiprocessing.current_process().name.startswith("rank"):
    plant()  # processes that are started import the program of their parent
