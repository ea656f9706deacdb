"""Cost of structured output's masks in a step: the time of decode steps with a grammar in every row and in none.

    python bench/masked_steps.py --model demo --device cpu --rows 4 --seconds 2
    python bench/generated.py v2-lite DIR
    python bench/masked_steps.py --model DIR --grammar json --full-vocabulary          # on a GPU

Starts the engine as a replica starts it, scheduler and ranks included. First `--rows` streams decode freely, then as
many whose text a grammar holds to its form, and so on for `--rounds`. Both sample at the same temperature, and each
time their steps are counted for `--seconds`. A stream whose text ends makes room for another one at once, so all rows
stay busy.

The grammar is `regex`, lower-case letters and spaces without end, or `json`, an array of small objects that is as long
as it likes. A model with random weights drafts what neither allows, so few of its rows have more than one mask per
step. Folders of `bench/checkpoint.py` and `bench/generated.py` have the demo model's few tokens as text; with
`--full-vocabulary` they get a made-up tokenizer instead, of as many tokens as the model has ids.

A line each for free and constrained streams: the steps without prompts, the rows that they had on average, and their
time on rank 0; how many processors rank 0 was busy with, and for how long in a step, those with prompts included;
tokens a second; and how many streams ended meanwhile. The line below them is the difference. On a CPU the model's own
work is part of all of these. Exit status 1 where a step takes more than `--bound` times as long under masks, or where
rank 0 is busy with more than `--cpu-bound` processors: on a GPU it sleeps for most of a step of some milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import operator
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from masks import LISTS, write_vocabulary
from streams import PATIENCE_S, Streams, decoding_streams, tokens_left

from deploy.cli.latency import PromptSource
from deploy.cli.local import engine_config, engine_of, settled_stats
from deploy.mistakes import CommandFailure, UsageMistake
from workers.config import DEMO_MODEL, EngineConfig
from workers.processes.client import EngineClient
from workers.processes.launch import LocalReplica
from workers.protocol.grammar import Grammar
from workers.protocol.messages import Distribution, EngineStats, Request
from workers.protocol.plan import SamplingParams
from workers.vocabulary.folder import TOKENIZER_FILES

HOOKS = Path(__file__).resolve().parent / "replica_hooks"
GRAMMARS = {"regex": Grammar("regex", "[a-z ]*"), "json": Grammar("json_schema", json.dumps(LISTS))}
MOST_CONTEXT = 16384


@dataclass(frozen=True)
class Point:
    """Counts of streams of one kind."""

    seconds: float
    """Seconds of counting."""
    steps: int
    """Steps of decode rows alone. The next two fields are sums of their rows and of their times."""
    rows: float
    step_seconds: float
    all_steps: int
    """Steps of all kinds, those with prompts included."""
    cpu_seconds: float
    """Processor seconds of all threads of rank 0."""
    tokens: int
    ended: int
    """Streams that ended by themselves."""

    @staticmethod
    def of(before: EngineStats, after: EngineStats, seconds: float, cpu_seconds: float, ended: int) -> Point:
        """Compute the counts from two states of the engine's counters. RuntimeError where no step was without
        prompts."""
        nothing = Distribution()

        def gained(figure: str) -> tuple[int, float]:
            old, new = (getattr(stats, figure).get("decode", nothing) for stats in (before, after))
            return new.count - old.count, new.total - old.total

        steps, step_seconds = gained("step_seconds")
        if not steps:
            raise RuntimeError(f"no step of decode rows alone in {seconds:.1f} s: give more --seconds")
        return Point(
            seconds=seconds,
            steps=steps,
            rows=gained("step_decode_rows")[1],
            step_seconds=step_seconds,
            all_steps=after.steps - before.steps,
            cpu_seconds=cpu_seconds,
            tokens=after.generated_tokens - before.generated_tokens,
            ended=ended,
        )

    def __add__(self, other: Point) -> Point:
        """Add the counts of two intervals, one after the other."""
        return Point(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    @property
    def step_ms(self) -> float:
        """Milliseconds of a step of decode rows alone, on rank 0."""
        return 1e3 * self.step_seconds / self.steps

    @property
    def cpu_share(self) -> float:
        """Number of processors that rank 0 was busy with."""
        return self.cpu_seconds / self.seconds

    @property
    def cpu_ms(self) -> float:
        """Processor milliseconds of rank 0 per step of any kind."""
        return 1e3 * self.cpu_seconds / self.all_steps

    def report(self) -> dict[str, float]:
        """Return the figures for JSON."""
        means = {"step_ms": self.step_ms, "cpu_share": self.cpu_share, "cpu_ms": self.cpu_ms}
        return asdict(self) | means | {"mean_rows": self.rows / self.steps, "tokens_per_s": self.tokens / self.seconds}


async def requests_of(
    engine: EngineClient, grammar: Grammar | None, given: argparse.Namespace
) -> Callable[[int, int], Request]:
    """Make requests for streams of random prompts, free ones or such with a grammar. None ends while there is room for
    all, except where a grammar allows no more. UsageMistake where there is no room."""
    info, source = engine.info, PromptSource(engine.info.vocab_size, given.seed)
    most = await tokens_left(engine, given.rows, given.input)
    stops, least = ((), 0) if grammar is None else (info.eos_ids, most)

    def asked(place: int, number: int) -> Request:
        sampling = SamplingParams(
            most, given.temperature, seed=number, stop_ids=stops, min_tokens=least, grammar=grammar
        )
        return Request(f"bench-{number}", source.batch(1, given.input)[0], sampling)

    return asked


def cpu_seconds(rank: psutil.Process) -> float:
    """Return the processor seconds of all its threads since it began."""
    times = rank.cpu_times()
    return float(times.user + times.system)


async def point(engine: EngineClient, streams: Streams, rank: psutil.Process, given: argparse.Namespace) -> Point:
    """Let it settle, then count."""
    await asyncio.sleep(given.settle)
    loop = asyncio.get_running_loop()
    before = await settled_stats(engine)
    begin, cpu, ended = loop.time(), cpu_seconds(rank), streams.ended
    await asyncio.sleep(given.seconds)
    streams.check()
    after = await settled_stats(engine)
    return Point.of(before, after, loop.time() - begin, cpu_seconds(rank) - cpu, streams.ended - ended)


async def points(config: EngineConfig, given: argparse.Namespace) -> tuple[Point, Point]:
    """Measure free streams and constrained ones."""
    replica = LocalReplica(config)
    async with engine_of(config, given.quiet, replica=replica) as engine:
        rank = psutil.Process(replica.workers[0].pid)
        found: dict[bool, list[Point]] = {False: [], True: []}
        # By turns: what a machine does from second to second is not taken for masks.
        for _, masked in itertools.product(range(given.rounds), found):
            asked = await requests_of(engine, GRAMMARS[given.grammar] if masked else None, given)
            async with decoding_streams(engine, given.rows, asked) as streams:
                found[masked].append(await point(engine, streams, rank, given))
    free, constrained = (functools.reduce(operator.add, points) for points in found.values())
    return free, constrained


def verdict(free: Point, constrained: Point, given: argparse.Namespace) -> int:
    """Print the table; the exit status."""
    print(f"{given.rows} rows of width {given.width}, prompts of {given.input} tokens, grammar {given.grammar}")
    print(
        f"{'':12}{'steps':>8}{'rows':>8}{'ms a step':>12}{'CPU share':>12}{'CPU ms a step':>16}{'tok/s':>9}{'ended':>8}"
    )
    for name, one in (("free", free), ("constrained", constrained)):
        print(
            f"{name:12}{one.steps:8}{one.rows / one.steps:8.1f}{one.step_ms:12.3f}{one.cpu_share:12.2f}"
            f"{one.cpu_ms:16.3f}{one.tokens / one.seconds:9.0f}{one.ended:8}"
        )
    of_masks = [getattr(constrained, figure) - getattr(free, figure) for figure in ("step_ms", "cpu_share", "cpu_ms")]
    print("of masks".ljust(28) + "{:12.3f}{:12.2f}{:16.3f}".format(*of_masks))
    ratio = constrained.step_ms / free.step_ms
    print(f"a step takes {ratio:.3f} times as long under masks")
    if given.json:
        given.json.write_text(json.dumps({"free": free.report(), "constrained": constrained.report(), "ratio": ratio}))
    status = 0
    if given.bound is not None and ratio > given.bound:
        print(f"that is more than {given.bound:g}")
        status = 1
    busiest = max(free.cpu_share, constrained.cpu_share)
    if given.cpu_bound is not None and busiest > given.cpu_bound:
        print(f"rank 0 is busy with {busiest:.2f} processors, more than {given.cpu_bound:g}")
        status = 1
    return status


@contextmanager
def with_full_vocabulary(model: Path, vocab: int) -> Iterator[Path]:
    """A folder that is like the model's, but for a made-up tokenizer of `vocab` tokens."""
    with tempfile.TemporaryDirectory() as made:
        for file in model.resolve().iterdir():
            if file.name not in (*TOKENIZER_FILES, "tokenizer_config.json"):
                (Path(made) / file.name).symlink_to(file)
        write_vocabulary(Path(made), vocab)
        yield Path(made)


def run(given: argparse.Namespace) -> int:
    """Measure, and print what was found; the exit status."""
    folder = DEMO_MODEL if given.model == "demo" else Path(given.model)
    try:
        fields = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UsageMistake(f"--model: {error}") from None
    made = with_full_vocabulary(folder, fields["vocab_size"]) if given.full_vocabulary else nullcontext(folder)
    with made as model:
        config = engine_config(
            model=str(model),
            width=given.width,
            tensor_parallel=given.tensor_parallel,
            device=given.device,
            max_rows=given.rows,
            token_budget=max(2048, given.rows * given.width + 1),
            max_context=given.context or min(MOST_CONTEXT, fields.get("max_position_embeddings", MOST_CONTEXT)),
            queue_limit=given.rows,
            prefix_cache=False,
            selftest=False,
            start_timeout_s=300.0,
            grammar_compile_timeout_s=PATIENCE_S,
        )
        return verdict(*asyncio.run(points(config, given)), given)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder, or demo")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--width", type=int, default=3)
    parser.add_argument("--grammar", choices=GRAMMARS, default="regex")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--input", type=int, default=256, help="prompt tokens of a stream")
    parser.add_argument("--context", type=int, help="of a stream; default: 16384, or the model's")
    parser.add_argument("--settle", type=float, default=1.0, help="seconds before steps are counted")
    parser.add_argument("--seconds", type=float, default=4.0, help="while they are, in a round")
    parser.add_argument("--rounds", type=int, default=2, help="in which both kinds of streams are counted")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--full-vocabulary", action="store_true", help="a token for each of the model's ids")
    parser.add_argument("--bound", type=float, help="most that a step may take under masks, in steps without")
    parser.add_argument("--cpu-bound", type=float, help="most processors that rank 0 may be busy with")
    parser.add_argument("--quiet", action="store_true", help="no progress of the engine on stderr")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser


def main() -> int:
    given = options().parse_args()
    # Ranks may have to make their weights.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HOOKS), os.environ.get("PYTHONPATH"))))
    try:
        return run(given)
    except (CommandFailure, UsageMistake, RuntimeError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    sys.exit(main())
