"""The model-based test as a program, for long runs and for replaying what failed.

    python -m tests.workers.model_based.soak --steps 300000
    python -m tests.workers.model_based.soak --schedule failing-schedule.json
    python -m tests.workers.model_based.soak --steps 300000 --ranks 2

Random schedules (`schedules`) drive the engine, and every answer is held against the reference (`reference_engine`).
A schedule that fails is made small and written to a file, which `--schedule` runs again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from tests.rank_processes import run_ranks
from tests.workers.model_based.drive import Bench, Outcome
from tests.workers.model_based.followers import CPU, TIMEOUT_S, Ranks, follow
from tests.workers.model_based.schedules import Schedule, random_schedule
from tests.workers.model_based.shrink import shrink
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh

Report = Callable[[str], None]


def drawn(seed: int, behind: bool | None = False, ranks: int = 1) -> Schedule:
    """The schedule of a seed. `behind`, `ranks`: see `random_schedule`; None: of every third seed."""
    return random_schedule(seed, behind=seed % 3 == 0 if behind is None else behind, ranks=ranks)


def soak(
    bench: Bench,
    steps: int,
    first_seed: int = 0,
    report: Report = lambda line: None,
    behind: bool | None = False,
) -> Outcome:
    """Schedules until so many steps were run, or one fails: then the problem names the seed. `behind`: see `drawn`."""
    total, begin, schedules = Outcome(), time.monotonic(), 0
    while total.steps < steps:
        seed = first_seed + schedules
        outcome = bench.run(drawn(seed, behind, bench.size))
        schedules += 1
        total.steps += outcome.steps
        total.seen += outcome.seen
        if outcome.problem:
            total.problem = f"schedule {seed}: {outcome.problem}"
            break
        if schedules % 100 == 0:
            report(f"{total.steps} steps of {schedules} schedules, {time.monotonic() - begin:.0f} s")
    total.seen["schedules"] = schedules
    total.seen.update(bench.reference.seen)
    return total


def keep(bench: Bench, seed: int, folder: Path, behind: bool | None = False) -> Path:
    """Make the schedule of this seed, which fails, small, and write it to a file."""
    small = shrink(drawn(seed, behind, bench.size), lambda schedule: bool(bench.run(schedule).problem))
    file = folder / f"failing-schedule-{seed}.json"
    file.write_bytes(small.to_json())
    return file


def main(arguments: list[str] | None = None) -> int:
    """0 when nothing differs."""
    parser = argparse.ArgumentParser(description="Drive the engine by random schedules and compare with the reference.")
    parser.add_argument("--steps", type=int, default=3000, help="stop after so many steps of the engine")
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule; the next one has the next seed")
    parser.add_argument("--schedule", type=Path, help="run this file instead")
    parser.add_argument("--ranks", type=int, default=1, help="of an engine, which share out its cache")
    parser.add_argument("--keep", type=Path, default=Path(), help="folder for a schedule that fails")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if options.ranks > 1:
            run_ranks(_of_ranks, options.ranks, Path(folder), options)
            return int((Path(folder) / "problem").exists())
        return _judged(Bench(Path(folder)), options)


def _of_ranks(rank: int, folder: Path, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    group = Group.connect(Mesh.of(rank, options.ranks), f"file://{folder}/rendezvous", CPU, TIMEOUT_S)
    try:
        if rank:
            follow(group)
            return
        ranks = Ranks(group)
        if _judged(Bench(folder, ranks=ranks), options):
            (folder / "problem").touch()
        ranks.tell("end")
    finally:
        group.close()


def _judged(bench: Bench, options: argparse.Namespace) -> int:
    """Run what is asked for and say what was found: 0 when nothing differs."""
    if options.schedule is not None:
        outcome = bench.run(Schedule.from_json(options.schedule.read_bytes()))
    else:

        def report(line: str) -> None:
            print(line, file=sys.stderr, flush=True)

        outcome = soak(bench, options.steps, options.seed, report, behind=None)
    print(summary(outcome))
    if outcome.problem and options.schedule is None:
        seed = options.seed + outcome.seen["schedules"] - 1
        file = keep(bench, seed, options.keep, behind=None)
        ranks = f" --ranks {bench.size}" if bench.size > 1 else ""
        print(f"made small: python -m tests.workers.model_based.soak{ranks} --schedule {file}")
    return bool(outcome.problem)


def summary(outcome: Outcome) -> str:
    """Return what was run and found."""
    seen: Counter[str] = outcome.seen
    lines = [f"{outcome.steps} steps", *(f"{seen[name]} {name}" for name in sorted(seen))]
    return "\n".join([*lines, outcome.problem or "nothing differs from the reference"])


if __name__ == "__main__":
    sys.exit(main())
