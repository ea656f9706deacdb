"""Gap of streams whose engine is killed: with a hot standby, and without.

    python bench/standby_gap.py --kills 5
    python bench/standby_gap.py --model ./DeepSeek-V2-Lite --device cuda --streams 16 --prompt 2000

One replica runs on this machine without Ray, as its front has it: an engine that serves, a weight keeper, and with a
hot standby a second engine. Streams run, the last rank is ended by SIGKILL, and for every stream its longest wait for a
token is taken from then on. That is repeated, each kill once another engine stands by, and more than a third of a
minute behind the last one, as three deaths within a minute end a replica. Without a standby an engine is started, with
the weights that stayed. In invariant mode, in which no token depends on where a stream was cut, tokens must be those of
an undisturbed run; with `--no-invariant` every stream must get as many. Exits with 1 otherwise.

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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

APART_S = 21.0
"""Seconds between two kills: three within a minute end a replica."""
TOKENS_BEFORE = 8
"""Tokens that every stream has when the rank is killed."""


async def measure(arguments: argparse.Namespace, hot: bool) -> tuple[list[float], int]:
    """Return the gaps of all streams of all kills, in seconds, and the number of streams with wrong tokens."""
    from tests.support.local_processes import LocalFront
    from workers.config import EngineConfig
    from workers.processes.failover import FailoverEngine
    from workers.processes.hot_standby import CALM_S
    from workers.protocol.messages import Request
    from workers.protocol.plan import SamplingParams

    settings = EngineConfig(
        model=arguments.model, device=arguments.device, tensor_parallel=arguments.tensor_parallel,
        max_rows=arguments.streams, token_budget=arguments.token_budget, invariant=arguments.invariant,
    )  # fmt: skip
    front = LocalFront(settings, hot=hot, calm_s=CALM_S)
    sampling = SamplingParams(arguments.tokens, temperature=0.7, seed=3)
    last: dict[int, list[float]] = {}

    async def read(engine: FailoverEngine, number: int, name: str, times: list[float]) -> list[int]:
        prompt = tuple(2 + (7 * place + 13 * number) % 1000 for place in range(arguments.prompt))
        tokens: list[int] = []
        async for output in engine.generate(Request(f"{name}.{number}", prompt, sampling)):
            if output.tokens:
                times.append(time.perf_counter())
                tokens += output.tokens
        return tokens

    async def all_of(engine: FailoverEngine, name: str) -> list[list[int]]:
        for number in range(arguments.streams):
            last[number] = []
        return await asyncio.gather(*(read(engine, n, name, last[n]) for n in range(arguments.streams)))

    gaps, wrong = [], 0
    served: list[float] = []
    try:
        engine = await front.start()
        engine.on_return.append(served.append)
        expected = await all_of(engine, "undisturbed")
        for kill in range(arguments.kills):
            if hot:
                await front.stands_by()
            await asyncio.sleep(APART_S if kill else 0.0)
            running = asyncio.create_task(all_of(engine, f"kill {kill}"))
            while not last or (any(len(times) < TOKENS_BEFORE for times in last.values()) and not running.done()):
                await asyncio.sleep(0.001)
            begin = time.perf_counter()
            os.kill(front.current.pid(f"rank {arguments.tensor_parallel - 1}"), signal.SIGKILL)
            found = await running
            for number, tokens in enumerate(found):
                later = [moment for moment in last[number] if moment > begin]
                # What was on its way when the rank died came at once: the longest pause is the gap.
                moments = [begin, *later]
                if later:
                    gaps.append(max(after - before for before, after in zip(moments, later, strict=False)))
                same = tokens == expected[number] if arguments.invariant else len(tokens) == len(expected[number])
                wrong += not same
        print(f"an engine served again after {', '.join(f'{seconds:.2f}' for seconds in served)} s")
        if hot and front.starts != 1:
            print(f"{front.starts - 1} engines were started while streams waited, as none stood by")
    finally:
        await front.end()
    return gaps, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=200, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=150, help="tokens that each stream asks for")
    parser.add_argument("--token-budget", type=int, default=512)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--invariant", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    medians, failed = {}, 0
    for hot in (False, True):
        gaps, wrong = asyncio.run(measure(arguments, hot))
        failed += wrong
        name = "hot standby" if hot else "started again"
        if not gaps:
            sys.exit(f"{name}: no stream was cut: give more --tokens")
        medians[hot] = statistics.median(gaps)
        print(
            f"{name}: gap of {len(gaps)} streams, median {medians[hot]:.2f} s, longest {max(gaps):.2f} s; "
            f"{wrong} with wrong tokens",
            flush=True,
        )
    print(f"ratio of the medians: {medians[False] / medians[True]:.1f}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
