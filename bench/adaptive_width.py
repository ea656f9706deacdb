"""Says what `--width auto` loses against the best fixed width, for drafts that are accepted as often as is said here.

    python bench/generated.py v3-slice DIR
    python bench/adaptive_width.py --model DIR                        # on a GPU: batch 1, 8, 32, 64
    python bench/adaptive_width.py --model demo --batch 1,4 --seconds 4 --settle 2

Starts the engine once for every fixed width and once with `auto`, as a replica starts it, scheduler and ranks included.
In each, so many streams decode past 1,024 tokens of prompt; one that reaches the end of its context, or of its share of
the cache, begins anew. Drafts are made to stand with one probability after the other, each where those before it do
(`bench/synthetic_acceptance.py`). For every point streams begin anew, so that contexts are as long for all widths;
after `--settle` seconds the tokens that come in `--seconds` are counted. With `auto` other streams decode for
`--settle-auto` seconds before them: it tries once in a few seconds whether drafts pay, and here they change from one
moment to the next for all streams.

Tokens are sampled at temperature 1, and drafts are random. Of text that repeats itself a step of a mixture of experts
would wake fewer experts, and texts of different widths repeat themselves differently.

A line per batch and probability: tokens a second of every width and of auto, what auto reaches of the best, and the
widths that it took meanwhile. Then what speculation gives a single stream whose drafts are accepted four times out of
five, so that a step yields 1.8 tokens: its time per token, over 1.8ths of a step that feeds two rows and drafts
nothing.

Exit status 1 where auto reaches less than `--bound` of the best, or of width 1, or where drafts were accepted more or
less often than they were made to.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import synthetic_acceptance
from streams import LOOK_S, Streams, decoding_streams, tokens_left

from deploy.cli.latency import PromptSource
from deploy.cli.local import engine_config, engine_of, settled_stats
from deploy.mistakes import CommandFailure, UsageMistake
from workers.config import AUTO_WIDTH
from workers.processes.client import EngineClient
from workers.protocol.messages import Request
from workers.protocol.plan import SamplingParams

HOOKS = Path(__file__).resolve().parent / "replica_hooks"
VARIABLE = "LATENTSERVE_BENCH_ACCEPTANCE"
ASIDE = 5.0
"""Standard deviations that the share of drafts that are accepted may be from what it was made to be."""
YIELD = 0.8
"""The probability at which a step of width 2 yields 1.8 tokens."""


@dataclass(frozen=True)
class Point:
    """Figures of one measurement."""

    speed: float
    """Tokens a second of all streams."""
    offered: int
    """Drafts that were verified."""
    accepted: int
    widths: Counter[int]
    """Number of times that each width was seen."""


@contextmanager
def acceptance_file() -> Iterator[Path]:
    """Engines that start within this context take their acceptance from this file."""
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", VARIABLE)}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "acceptance"
        synthetic_acceptance.write(file, synthetic_acceptance.OFF)
        os.environ[VARIABLE] = str(file)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HOOKS), before["PYTHONPATH"])))
        try:
            yield file
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


async def requests_of(engine: EngineClient, batch: int, given: argparse.Namespace) -> Callable[[int, int], Request]:
    """Make requests for streams that decode as long as there is room for all. Each place has its own prompt and
    seed."""
    prompts = PromptSource(engine.info.vocab_size, batch).batch(batch, given.input)
    most = await tokens_left(engine, batch, given.input)
    sampling = [SamplingParams(max_tokens=most, temperature=1.0, seed=place) for place in range(batch)]
    return lambda place, number: Request(f"bench-{number}", prompts[place], sampling[place])


async def point(
    engine: EngineClient,
    batch: int,
    asked: Callable[[int, int], Request],
    given: argparse.Namespace,
    before: float = 0.0,
) -> Point:
    """Measure streams that have just begun. Others decode for `before` seconds ahead of them."""
    if before:
        async with decoding_streams(engine, batch, asked):
            await asyncio.sleep(before)
    async with decoding_streams(engine, batch, asked) as streams:
        return await counted(engine, streams, given)


async def counted(engine: EngineClient, streams: Streams, given: argparse.Namespace) -> Point:
    """Let them settle, then count."""
    await asyncio.sleep(given.settle)
    before, loop = await settled_stats(engine), asyncio.get_running_loop()
    begin, tokens, widths = loop.time(), sum(streams.given), Counter[int]()
    while loop.time() < begin + given.seconds:
        await asyncio.sleep(LOOK_S)
        widths[engine.stats.width] += 1
    seconds, made = loop.time() - begin, sum(streams.given) - tokens
    streams.check()
    after = await settled_stats(engine)
    offered = after.drafts_offered - before.drafts_offered
    accepted = after.drafts_accepted - before.drafts_accepted
    return Point(made / seconds, offered, accepted, widths)


async def engine_points(
    width: int | str, file: Path, given: argparse.Namespace
) -> dict[tuple[int, float | None], Point]:
    """Measure one engine, by batch and probability, which is None for width 1."""
    config = engine_config(
        model=given.model,
        width=width,
        device=given.device,
        drafter=given.drafter,
        max_rows=max(2, *given.batch),
        token_budget=max(2048, max(given.batch) * AUTO_WIDTH + 1),
        max_context=given.context,
        queue_limit=max(2, *given.batch),
        prefix_cache=False,
        selftest=width == "auto",  # it is what measures the times of steps
        start_timeout_s=300.0,
    )
    points: dict[tuple[int, float | None], Point] = {}
    synthetic_acceptance.write(file, synthetic_acceptance.OFF)
    async with engine_of(config, given.quiet) as engine:
        for batch in given.batch:
            asked = await requests_of(engine, batch, given)
            for probability in given.acceptance if width != 1 else (None,):
                synthetic_acceptance.write(file, synthetic_acceptance.OFF if probability is None else probability)
                ahead = given.settle_auto if width == "auto" else 0.0
                points[batch, probability] = await point(engine, batch, asked, given, ahead)
                told(width, batch, probability, points[batch, probability])
        synthetic_acceptance.write(file, YIELD)
        for batch, wanted in ((1, 2), (2, 1)):
            if width == wanted:
                points[batch, YIELD] = await point(engine, batch, await requests_of(engine, batch, given), given)
                told(width, batch, YIELD, points[batch, YIELD])
    return points


def told(width: int | str, batch: int, probability: float | None, found: Point) -> None:
    """A line of progress."""
    accepted = f"{found.accepted} of {found.offered}"
    print(
        f"width {width}, batch {batch}, {probability}: {found.speed:.1f} tok/s, stood {accepted}",
        file=sys.stderr,
        flush=True,
    )


def expected(width: int, probability: float) -> float:
    """The share of drafts that are accepted, of those that a step of this width verifies."""
    return sum(probability**place for place in range(1, width)) / (width - 1)


def verdict(found: dict[int | str, dict[tuple[int, float | None], Point]], given: argparse.Namespace) -> int:
    """Print the table; the exit status."""
    fixed = [width for width in found if isinstance(width, int)]
    wrong = []
    print(
        f"{'batch':>5} {'stands':>6}"
        + "".join(f"{f'width {w}':>10}" for w in fixed)
        + f"{'auto':>10}  of best  widths of auto"
    )
    for batch in given.batch:
        for probability in given.acceptance:
            speeds = {w: found[w][batch, None if w == 1 else probability].speed for w in fixed}
            auto = found["auto"][batch, probability]
            ratio, alone = auto.speed / max(speeds.values()), auto.speed / speeds[1]
            widths = ", ".join(f"{w}: {n / auto.widths.total():.0%}" for w, n in sorted(auto.widths.items()))
            print(
                f"{batch:5} {probability:6.2f}"
                + "".join(f"{speeds[w]:10.1f}" for w in fixed)
                + f"{auto.speed:10.1f} {ratio:8.3f}  {widths}"
            )
            if min(ratio, alone) < given.bound:
                wrong.append(
                    f"batch {batch}, drafts that are accepted with {probability}: auto reaches {ratio:.3f} of the best"
                )
            for w in fixed[1:]:
                one, wanted = found[w][batch, probability], expected(w, probability)
                # A row's drafts stand or fall together at worst: no more than one independent trial per step.
                spread = 0.5 * ((w - 1) / max(1, one.offered)) ** 0.5
                if abs(one.accepted - wanted * one.offered) > ASIDE * spread * one.offered:
                    wrong.append(
                        f"batch {batch}, width {w}: {one.accepted} of {one.offered} drafts accepted, not {wanted:.3f}"
                    )
    two, step = found[2][1, YIELD].speed, 2 / found[1][2, YIELD].speed
    print(
        f"one stream at 1.8 tokens a step: {1e3 / two:.3f} ms a token; two rows without drafts: {step * 1e3:.3f} ms "
        f"a step; {1.8 / two / step:.2f} of its 1.8th"
    )
    for line in wrong:
        print(line)
    if given.json:
        given.json.write_text(
            json.dumps({str(w): {str(at): p.speed for at, p in points.items()} for w, points in found.items()})
        )
    return bool(wrong)


def numbers(text: str) -> list[float]:
    """Parse numbers with commas between them."""
    return [float(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--drafter", default="auto", help="such as ngram, whose drafts cost nothing")
    parser.add_argument("--batch", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32, 64])
    parser.add_argument("--acceptance", type=numbers, default=[0.0, 0.3, 0.6, 0.9])
    parser.add_argument("--input", type=int, default=1024)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--settle", type=float, default=0.8, help="seconds before tokens are counted")
    parser.add_argument("--settle-auto", type=float, default=5.0, help="of other streams before, with width auto")
    parser.add_argument("--seconds", type=float, default=1.2, help="while they are")
    parser.add_argument("--bound", type=float, default=0.97)
    parser.add_argument("--quiet", action="store_true", help="no progress of the engine on stderr")
    parser.add_argument("--json", type=Path, help="write the speeds to this file")
    given = parser.parse_args()
    with acceptance_file() as file:
        found: dict[int | str, dict[tuple[int, float | None], Point]] = {}
        try:
            for width in (*range(1, AUTO_WIDTH + 1), "auto"):
                found[width] = asyncio.run(engine_points(width, file, given))
        except (CommandFailure, UsageMistake) as error:
            sys.exit(str(error))
    return verdict(found, given)


if __name__ == "__main__":
    sys.exit(main())
