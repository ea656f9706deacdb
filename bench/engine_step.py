"""Compares a decode step in the engine with the same step as its graph alone, and with the one of decode_step.py.

    python bench/engine_step.py                       # a DeepSeek-V3 slice, 1, 16 and 64 rows
    python bench/engine_step.py --shape v2-lite --rows 16
    python bench/engine_step.py --shape v2-lite --rows 1 --invariant --timeline    # in invariant mode; kernels
    python bench/engine_step.py --shape v4-flash --layers 8 --timeline    # of DeepSeek V4 Flash; each kernel's share
    python bench/engine_step.py --shape v4-flash --layers 8 --prompts 8192,32768 --timeline    # prompts, not rows

A rank and a scheduler run in this process, and steps are launched ahead of the results of those before, as a replica
does it. All rows get prompts of random tokens, and once all decode, `--steps` steps are timed. Then the graph of these
rows is replayed, which goes on where the rows stand: what the engine takes more is the host's. At last `Case`, which
`decode_step.py` and `share.py` time, has rows of as many tokens whose contents are drawn: what its graph takes less
comes of the experts that its tokens choose, which each line says, and of where things lie in memory. `Case` has no rows
of DeepSeek V4; of its steps the line says the time in which the weights that they need can be read. A line in front of
each says how long the kernels of the engine took to compile, or to load where Triton's cache has them.

With `--prompts` one prompt of so many random tokens is read at a time, in the engine's chunks, the second of three is
timed, and with `--timeline` the third one's kernels are printed, by name, with the milliseconds that they ran.

The weights are generated as they are read (`bench/generated.py`). Times are medians, in milliseconds.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import tempfile
import time
from collections import deque
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from decode_step import chosen_experts, replayed, room
from generated import GENERATED, first_layers, installed, write_folder
from shapes import BANDWIDTH, Case, choices, weight_bytes
from timeline import by_name, timeline
from timing import milliseconds

from workers.config import EngineConfig
from workers.memory.scratch import Scratch
from workers.parallel.group import Group
from workers.processes.scheduler_process import scheduler_config
from workers.protocol.messages import Request
from workers.protocol.plan import SamplingParams, StepPlan
from workers.rank.rank import Rank
from workers.rank.runner import Launched
from workers.scheduler import Scheduler
from workers.step.decode import DecodeStep

INPUT = 1024
REPLAYS = 50


def _tell_kernels(line: str) -> None:
    """Print what a rank says of the time that it took to compile kernels, or to load those of Triton's cache."""
    if "compiled or loaded" in line:
        print(line, flush=True)


class Engine:
    """A rank and a scheduler, and rows that decode."""

    def __init__(self, config: EngineConfig, rows: int) -> None:
        with installed():
            self.rank = Rank(config, Group(), torch.device("cuda", torch.cuda.current_device()), progress=_tell_kernels)
        self.scheduler = Scheduler(scheduler_config(config, self.rank.ready))
        self.rows, self._under_way = rows, deque[Launched]()
        self._chance = random.Random(rows)

    def ask(self, tokens: int, most: int) -> None:
        """Add a request of so many random tokens, for `most` tokens."""
        vocab = self.rank.model.config.vocab_size
        prompt = tuple(self._chance.randrange(vocab) for _ in range(tokens))
        name = str(self._chance.getrandbits(64))
        if refusal := self.scheduler.add(Request(name, prompt, SamplingParams(max_tokens=most, temperature=0.0))):
            sys.exit(f"the engine refuses a request: {refusal}")

    def _step(self) -> StepPlan:
        """Launch what the scheduler plans, then wait for the oldest step; its plan."""
        while (plan := self.scheduler.plan()) is not None:
            self._under_way.append(self.rank.runner.launch(plan))
        launched = self._under_way.popleft()
        self.scheduler.apply(self.rank.runner.collect(launched))
        return launched.plan

    def timed(self, steps: int) -> float:
        """Milliseconds of a step where all rows decode."""
        while self._step().prefill:
            pass
        for _ in range(10):
            self._step()
        ends = [time.perf_counter()]
        for _ in range(steps):
            plan = self._step()
            assert len(plan.decode_slots) == self.rows
            assert not plan.prefill
            ends.append(time.perf_counter())
        return 1e3 * median(after - before for before, after in pairwise(ends))

    def read(self, tokens: int) -> float:
        """Read a prompt of so many tokens; the milliseconds from the request to its first token."""
        self.ask(tokens, 1)
        torch.cuda.synchronize()
        begin, read = time.perf_counter(), 0
        while read < tokens:
            read += sum(len(row.tokens) for row in self._step().prefill)
        return 1e3 * (time.perf_counter() - begin)

    def settle(self) -> StepPlan:
        """Wait for all that is under way; the last plan."""
        plan = None
        while self._under_way:
            launched = self._under_way.popleft()
            self.rank.runner.collect(launched)
            plan = launched.plan
        assert plan is not None
        return plan

    @torch.inference_mode()
    def graph(self, plan: StepPlan, kernels: bool) -> float:
        """Milliseconds of the plan's graph, replayed on the rows as they stand. `kernels`: print its kernels, too."""
        runner = self.rank.runner
        assert runner.graphs is not None
        captured = runner.graphs.captured(plan, dense=runner.parts.all_short(plan.decode_slots))
        assert captured is not None
        found = milliseconds(captured._graph, REPLAYS, warm=3)
        if kernels:
            timeline(captured._graph, lambda: None)
        return found

    @torch.inference_mode()
    def experts(self, plan: StepPlan) -> float:
        """Experts of a layer that the rows' next tokens choose, on average."""
        parts = self.rank.runner.parts
        key = plan.layout.graph_key(len(plan.decode_slots), plan.drafts, dense=parts.all_short(plan.decode_slots))
        step = DecodeStep(parts, key, Scratch(parts.device))
        step.slot_R.copy_(torch.tensor(plan.decode_slots))
        with choices() as noted:
            step.run()
        return sum(int(chosen_TX.any(0).sum()) for chosen_TX in noted) / max(1, len(noted))


def compare(folder: Path, rows: int, steps: int, kernels: bool, invariant: bool) -> None:
    """Print the line of one number of rows."""
    most = INPUT + 4 * steps + 4 * REPLAYS
    config = EngineConfig(
        model=str(folder),
        device="cuda",
        max_rows=rows,
        width=1,
        token_budget=8192,
        max_context=most,
        cache_pages=rows * (most // 64 + 2) + 2,
        prefix_cache=False,
        selftest=False,
        invariant=invariant,
    )
    engine = Engine(config, rows)
    for _ in range(rows):
        engine.ask(INPUT, 2 * steps + REPLAYS)
    in_engine = engine.timed(steps)
    plan = engine.settle()
    experts, alone = engine.experts(plan), engine.graph(plan, kernels)
    model = engine.rank.model
    engine.rank.runner.close()
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    if invariant:
        beside = "in invariant mode"
    elif model.config.compression is None:
        with torch.inference_mode():
            case = Case(model, rows, 1, INPUT + steps, room(1))
            drawn_experts = chosen_experts(case)
            case.rewind()
            beside = f"drawn rows {min(replayed(case)):.3f} ({drawn_experts:.1f})"
    else:
        floor = weight_bytes(model, experts) / BANDWIDTH
        beside = f"its weights' bytes {floor:.3f}, {alone / floor:.2f} times that"
    print(
        f"rows {rows:3}: in the engine {in_engine:.3f}, its graph alone {alone:.3f} ({experts:.1f} experts a layer), "
        f"{beside}; the engine takes {in_engine / alone:.3f} times its graph",
        flush=True,
    )
    gc.collect()
    torch.cuda.empty_cache()


def read_prompts(folder: Path, lengths: list[int], kernels: bool, invariant: bool) -> None:
    """Print the line of each length of a prompt."""
    longest = max(lengths) + 64
    config = EngineConfig(
        model=str(folder),
        device="cuda",
        max_rows=1,
        width=1,
        token_budget=8192,
        max_context=longest,
        cache_pages=2 * (longest // 64 + 2),
        prefix_cache=False,
        selftest=False,
        invariant=invariant,
    )
    engine = Engine(config, 1)
    for tokens in lengths:
        engine.read(tokens)
        taken = engine.read(tokens)
        print(f"prompt of {tokens:6}: {taken:.2f} ms, {1e3 * tokens / taken:,.0f} tokens/s", flush=True)
        if kernels:
            by_name(partial(engine.read, tokens))
    engine.rank.runner.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["v3-slice", "v2-lite", "glm-flash", "v4-flash"], default="v3-slice")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--rows", default="1,16,64")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", help="numbers of tokens: time reading of prompts instead")
    parser.add_argument("--invariant", action="store_true", help="in invariant mode")
    parser.add_argument("--timeline", action="store_true", help="print what each kernel of a graph takes")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this measures a GPU, and there is none")
    values, form = GENERATED[given.shape]
    values = values if given.layers is None else first_layers(values, given.layers)
    with tempfile.TemporaryDirectory() as made:
        write_folder(values, form, Path(made))
        if given.prompts:
            lengths = [int(tokens) for tokens in given.prompts.split(",")]
            read_prompts(Path(made), lengths, given.timeline, given.invariant)
            return
        for rows in given.rows.split(","):
            compare(Path(made), int(rows), given.steps, given.timeline, given.invariant)


if __name__ == "__main__":
    main()
