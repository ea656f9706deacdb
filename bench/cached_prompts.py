"""Speed of streams that decode after long prompts, all of whose context an endpoint has cached.

    latentserve serve --model DIR --token-budget 8192
    python bench/cached_prompts.py --rows 1,16 --input 64960
    python bench/cached_prompts.py --rows 1,4 --input 500 --output 40 --vocab 4000    # the demo model

Prompts are random token ids, tokens are chosen greedily. Every number of rows has prompts of its own. They are sent
together three times: first for one token, which takes in the prompts, and then twice for `--output` tokens, when the
prefix cache has all of them but the last page. Printed are the seconds that the first took, and of the others the gaps
between two events of a stream while all streams decode.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mixed_load import Answer, Failed, Load

from deploy.loadtest.load_report import Distribution
from deploy.loadtest.served_model import served_model
from deploy.loadtest.sse_client import SseClient, Target
from deploy.mistakes import CommandFailure, UsageMistake

REPEATS = 2


@dataclass(frozen=True)
class Figures:
    """Figures of a number of rows."""

    rows: int
    prefill_s: float
    """Seconds until all had their first token."""
    gaps: tuple[Distribution, ...]
    """Milliseconds, of each repetition."""
    mean_ms: tuple[float, ...]

    def show(self, length: int) -> None:
        """Print them."""
        print(f"{self.rows} prompts of {length:,} ids: taken in within {self.prefill_s:.2f} s")
        for mean, gaps in zip(self.mean_ms, self.gaps, strict=True):
            p50, p90, p99 = gaps.percentiles
            print(f"  gap, ms: mean {mean:.3f}, p50 {p50:.3f}, p90 {p90:.3f}, p99 {p99:.3f}, max {gaps.most:.3f}")


def gaps_of(answers: list[Answer]) -> list[float]:
    """Seconds between the events of each while all decode. Failed where that was never so."""
    begin = max(answer.arrivals[0][0] for answer in answers)
    end = min(answer.arrivals[-1][0] for answer in answers)
    found = [gap for answer in answers for gap in answer.gaps(begin, end)]
    if not found:
        raise Failed("at no time did all streams decode: give more --output")
    return found


async def asked(load: Load, bodies: list[bytes]) -> tuple[float, list[Answer]]:
    """Send these together. The seconds until all are answered, and the answers."""
    answers = [Answer(f"stream {number}") for number in range(len(bodies))]
    begin = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for answer, body in zip(answers, bodies, strict=True):
                group.create_task(load.ask(answer, body))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return time.perf_counter() - begin, answers


async def measured(given: argparse.Namespace) -> list[Figures]:
    """Measure all that was asked for, one number of rows after the other."""
    model = given.model or await served_model(given.url, None, given.limit)
    client, found = SseClient(Target(given.url)), []
    try:
        async with asyncio.timeout(given.limit):
            load = Load(client, model, given)
            await asked(load, [load.body(min(128, given.input), 8) for _ in range(2)])  # nothing is done first later
            for rows in given.rows:
                prompts = [load.prompt(given.input) for _ in range(rows)]
                prefill, _ = await asked(load, [load.request(prompt, 1) for prompt in prompts])
                bodies = [load.request(prompt, given.output) for prompt in prompts]
                gaps = [gaps_of((await asked(load, bodies))[1]) for _ in range(REPEATS)]
                spread = tuple(filter(None, map(Distribution.of, gaps)))
                found.append(Figures(rows, prefill, spread, tuple(1e3 * sum(own) / len(own) for own in gaps)))
    except TimeoutError:
        raise Failed(f"it did not end within {given.limit:g} s") from None
    finally:
        client.close()
    return found


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the one that is served")
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=[1, 16])
    parser.add_argument("--input", type=int, default=64960, help="prompt ids of a row")
    parser.add_argument("--output", type=int, default=73, help="tokens of a row")
    parser.add_argument("--vocab", type=int, default=100_000, help="token ids are drawn below this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that the run may take in all")
    return parser


def main() -> None:
    parser = options()
    given = parser.parse_args()
    try:
        Target(given.url)
    except ValueError as error:
        parser.error(f"--url: {error}")
    # A pause of the collector here would be taken for one of the endpoint.
    gc.disable()
    try:
        for figures in uvloop.run(measured(given)):
            figures.show(given.input)
    except (Failed, CommandFailure, UsageMistake) as error:
        sys.exit(str(error))
    finally:
        gc.enable()


if __name__ == "__main__":
    main()
