"""Gap of streams whose engine is killed: with a hot standby, with processes that have imported, and without any.

    python bench/standby_gap.py --kills 5
    python bench/standby_gap.py --model ./DeepSeek-V2-Lite --device cuda --streams 16 --prompt 2000
    python bench/standby_gap.py --standby none imported --kills 1

One replica runs on this machine without Ray, as its front has it: an engine that serves, a weight keeper, and what
stands by. Streams run, the last rank is ended by SIGKILL, and for every stream its longest wait for a token is taken
from then on. That is repeated, each kill once what is to stand by does, and never three within a minute, which end a
replica. Without a hot standby an engine is started, with the weights that stayed; the seconds of its parts are printed:
until its processes run (`processes`) and its rank has imported everything (`libraries`), what the rank says of itself,
and a first step. In invariant mode, in which no token depends on where a stream was cut, tokens must be those of an
undisturbed run; with `--no-invariant` every stream must get as many. Exits with 1 otherwise.

On machines that do other work, take ratios alone.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.processes.failover import FailoverEngine

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from workers.processes.failover import LOSSES_S  # noqa: E402 - needs the path above

APART_S = LOSSES_S + 1.0
"""Seconds between a kill and the one after the next: three within a minute end a replica."""
STANDBYS = ("none", "imported", "hot")
TOKENS_BEFORE = 8
"""Tokens that every stream has when the rank is killed."""


@dataclass
class Found:
    """What was found with one thing that stands by."""

    gaps: list[float] = field(default_factory=list)
    """Of all streams of all kills, in seconds."""
    wrong: int = 0
    """Streams with wrong tokens."""
    served: list[float] = field(default_factory=list)
    """Seconds until an engine served again, of each kill."""


class Measurement:
    """One replica whose engine is killed again and again."""

    def __init__(self, arguments: argparse.Namespace, hot: bool) -> None:
        from tests.support.local_processes import LocalFront
        from workers.config import EngineConfig
        from workers.processes.hot_standby import CALM_S

        settings = EngineConfig(
            model=arguments.model, device=arguments.device, tensor_parallel=arguments.tensor_parallel,
            max_rows=arguments.streams, token_budget=arguments.token_budget, invariant=arguments.invariant,
        )  # fmt: skip
        self._arguments = arguments
        self.front = LocalFront(settings, hot=hot, calm_s=CALM_S)
        self._times: dict[int, list[float]] = {}
        self._kills: list[float] = []
        self._expected: list[list[int]] = []

    async def _read(self, engine: FailoverEngine, number: int, name: str) -> list[int]:
        from workers.protocol.messages import Request
        from workers.protocol.plan import SamplingParams

        sampling = SamplingParams(self._arguments.tokens, temperature=0.7, seed=3)
        prompt = tuple(2 + (7 * place + 13 * number) % 1000 for place in range(self._arguments.prompt))
        tokens: list[int] = []
        async for output in engine.generate(Request(f"{name}.{number}", prompt, sampling)):
            if output.tokens:
                self._times[number].append(time.perf_counter())
                tokens += output.tokens
        return tokens

    async def _all(self, engine: FailoverEngine, name: str) -> list[list[int]]:
        streams = range(self._arguments.streams)
        self._times = {number: [] for number in streams}
        return await asyncio.gather(*(self._read(engine, number, name) for number in streams))

    async def run(self, standbys: Sequence[str]) -> dict[str, Found]:
        """Kill the engine `--kills` times with each of these."""
        found = {standby: Found() for standby in standbys}
        front = self.front
        try:
            engine = await front.start()
            print(f"first start: {words(front.parts[-1])}", flush=True)
            self._expected = await self._all(engine, "undisturbed")
            for standby in standbys:
                engine.on_return[1:] = [found[standby].served.append]  # behind what the front does itself
                front.imports = standby == "imported"
                front.stand_by()
                for _ in range(self._arguments.kills):
                    await self._kill(engine, standby, found[standby])
        finally:
            await front.end()
        return found

    async def _kill(self, engine: FailoverEngine, standby: str, found: Found) -> None:
        front, starts = self.front, self.front.starts
        if standby != "none":
            await front.stands_by()
        if len(self._kills) > 1:
            await asyncio.sleep(max(0.0, self._kills[-2] + APART_S - time.perf_counter()))
        self._times = {}
        running = asyncio.create_task(self._all(engine, f"{standby} {len(self._kills)}"))
        while not self._times or (
            any(len(times) < TOKENS_BEFORE for times in self._times.values()) and not running.done()
        ):
            await asyncio.sleep(0.001)
        begin = time.perf_counter()
        self._kills.append(begin)
        os.kill(front.current.pid(f"rank {self._arguments.tensor_parallel - 1}"), signal.SIGKILL)
        tokens_of = await running
        for number, tokens in enumerate(tokens_of):
            later = [moment for moment in self._times[number] if moment > begin]
            # What was on its way when the rank died came at once: the longest pause is the gap.
            moments = [begin, *later]
            if later:
                found.gaps.append(max(after - before for before, after in zip(moments, later, strict=False)))
            same = tokens == self._expected[number] if self._arguments.invariant else None
            found.wrong += not (len(tokens) == len(self._expected[number]) if same is None else same)
        if front.starts > starts:
            print(f"started again, {standby} stood by: {words(front.parts[-1])}", flush=True)
            for line in front.current.told if self._arguments.told else ():
                print(f"    {line}", flush=True)


def words(parts: dict[str, float]) -> str:
    """Return the seconds of a start by its parts."""
    return f"{sum(parts.values()):.2f} s: " + ", ".join(f"{part} {seconds:.2f}" for part, seconds in parts.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=200, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=150, help="tokens that each stream asks for")
    parser.add_argument("--token-budget", type=int, default=512)
    parser.add_argument("--kills", type=int, default=3, help="kills with each thing that stands by")
    parser.add_argument("--standby", nargs="+", default=["none", "hot"], choices=STANDBYS, help="what stands by")
    parser.add_argument("--invariant", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--told", action="store_true", help="print what ranks say while they start again")
    arguments = parser.parse_args()
    found: dict[str, Found] = {}
    for hot in (False, True):
        if standbys := [name for name in STANDBYS if name in arguments.standby and (name == "hot") == hot]:
            found |= asyncio.run(Measurement(arguments, hot).run(standbys))
    medians = {}
    for name, of in found.items():
        if not of.gaps:
            sys.exit(f"standby {name}: no stream was cut: give more --tokens")
        medians[name] = statistics.median(of.gaps)
        served = ", ".join(f"{seconds:.2f}" for seconds in of.served)
        print(
            f"standby {name}: an engine served again after {served} s; gap of {len(of.gaps)} streams, median "
            f"{medians[name]:.2f} s, longest {max(of.gaps):.2f} s; {of.wrong} with wrong tokens"
        )
    for name in list(medians)[1:]:
        first = next(iter(medians))
        print(f"ratio of the medians, {first} to {name}: {medians[first] / medians[name]:.1f}")
    sys.exit(1 if any(of.wrong for of in found.values()) else 0)


if __name__ == "__main__":
    main()
