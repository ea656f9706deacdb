"""Time of `Scheduler.plan` and `Scheduler.apply` with every slot decoding.

    python bench/scheduler.py --rows 256 --width 1 3 --host-pages 400000 --disk-pages 400000

Results are made up: all drafts accepted every other step. Rows cross page boundaries, grow pages and fill the prefix
cache as they would when serving, and their pages are saved to host memory and disk where there is some. Times are of
this process alone, in microseconds.
"""

from __future__ import annotations

import argparse
import gc
import random
import time

from workers.protocol.messages import Request
from workers.protocol.plan import SamplingParams, StepPlan, StepResult
from workers.protocol.tiers import DiskFound, DiskMoved, Moved, Moves
from workers.scheduler import Scheduler, SchedulerConfig


def results_of(plan: StepPlan, rng: random.Random) -> StepResult:
    layout = plan.layout
    rows = [
        tuple(rng.randrange(1000) for _ in range(plan.width if (row + plan.step) % 2 else 1))
        for row in range(layout.decode_rows)
    ]
    rows += [(rng.randrange(1000),) for _ in range(layout.sampled_rows - layout.decode_rows)]
    return StepResult(plan.step, tuple(rows), 0.0)


def measure(
    rows: int, width: int, steps: int, context: int, host_pages: int, disk_pages: int
) -> tuple[list[float], list[float]]:
    config = SchedulerConfig(
        slots=rows,
        pages=rows * (context // 64 + 4) + 1,
        max_context=context,
        token_budget=8192 + rows * width,
        width=width,
        queue_limit=rows,
        host_pages=host_pages,
        disk_pages=disk_pages,
    )
    scheduler, rng = Scheduler(config), random.Random(0)
    scheduler.disk_found(DiskFound(b"", last=True))
    for index in range(rows):
        prompt = tuple(rng.randrange(1000) for _ in range(rng.randrange(100, 400)))
        refusal = scheduler.add(Request(f"r{index}", prompt, SamplingParams(max_tokens=context, stop_ids=(1000,))))
        assert refusal is None, refusal
    flights: list[StepPlan] = []
    planning: list[float] = []
    applying: list[float] = []
    while len(planning) < steps:
        begin = time.perf_counter()
        plan = scheduler.plan()
        moves = scheduler.moves()
        end = time.perf_counter()
        scheduler.save_pages()
        for each in (*moves, *scheduler.moves()):
            if isinstance(each, Moves):
                scheduler.moved(Moved(0, each.ticket))
            else:
                scheduler.disk_moved(DiskMoved(0, each.ticket))
        if plan is not None:
            flights.append(plan)
            if len(plan.decode_slots) == rows:
                planning.append((end - begin) * 1e6)
            continue
        oldest = flights.pop(0)
        result = results_of(oldest, rng)
        begin = time.perf_counter()
        scheduler.apply(result)
        end = time.perf_counter()
        if len(oldest.decode_slots) == rows:
            applying.append((end - begin) * 1e6)
    return planning, applying


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--width", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--host-pages", type=int, default=0)
    parser.add_argument("--disk-pages", type=int, default=0)
    args = parser.parse_args()
    gc.freeze()
    for width in args.width:
        planning, applying = measure(args.rows, width, args.steps, args.context, args.host_pages, args.disk_pages)
        for name, values in (("plan", planning), ("apply", applying)):
            print(
                f"{args.rows} decode rows, width {width}: {name} median {quantile(values, 0.5):.0f} us, "
                f"p99 {quantile(values, 0.99):.0f} us"
            )


if __name__ == "__main__":
    main()
