"""Says where the time of a step goes: prefill, mixed steps, and decode steps of many rows, of the DeepSeek-V2-Lite
shape on this machine's GPU.

    python bench/step_parts.py                                # 1x1024, 8x1024 and 1x8192 prompts; 64 and 256 rows
    python bench/step_parts.py --prefill 1x1024 --kernels     # one prompt, with a table of kernels
    python bench/step_parts.py --mixed 16+512,64+512          # decode rows beside 512 tokens of a prompt
    python bench/step_parts.py --decode 64,256 --width 2      # rows that verify and draft one token

Prompts are prefilled in one step, whatever their length (a replica cuts them at its token budget, 2048 unless told).
Of every step the first lines say, medians of 20 steps that a replica's runner launches and collects:

    wall     from the begin of the launch until its tokens are on the host, the device idle before
    host     how much of that the launch takes
    device   what the device needs from the first to the last of the step when the host is ahead of it all the time: a
             kernel holds the device until everything is launched
    gap      wall without device: the device waits for the host, or the host for the last copy
    floor    the larger of two: weights and cached context read at 4.2 TB/s, products and attention at 790 TFLOP/s; of
             the target's pass, padding and drafts excluded, choices of experts taken as evenly spread

Then the parts, on the device alone: the same step with nothing replayed, launched while the device is held, medians of
5. Events between parts cost about a microsecond each, which the sum shows beside the replayed step. An indented part is
contained in the one above it. `--kernels` adds the kernels of the replayed step, as torch's profiler sees them.

Steps of at most 16 tokens take another path: `python bench/decode_step.py`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, supported_activities

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import parts
from shapes import BANDWIDTH, OPERATIONS, V2_LITE, Case, Tokens, Work, model_of, target_work, woken

from kernels.linear import MOST_STREAMED
from workers.graphs.capture import CapturedStep
from workers.graphs.record import no_garbage_collection
from workers.graphs.segments import CapturedStage, CapturedTail
from workers.memory.scratch import Scratch
from workers.models.model import Model
from workers.protocol.plan import Admission, BatchLayout, PageGrant, PrefillRow, SamplingParams, StepPlan, TokenBuckets
from workers.step.mixed import MixedStep, Stage

REPEATS, TABLES = 20, 5
"""Steps that are timed whole, and by parts."""
BUDGETS = (2048, 8192, 16384)
"""Token budgets: the smallest that holds the step is taken, and its buckets."""
MOST_KERNELS = 30


class Only:
    """Substitute for the captured graphs of a replica's runner: one stage, or one decode step."""

    def __init__(self, stage: Stage | None = None, step: CapturedStep | None = None) -> None:
        self._stage, self._step = stage, step

    def stage(self, layout: BatchLayout) -> Stage | None:
        """Return the stage in which a mixed step runs."""
        return self._stage

    def captured(self, plan: StepPlan, *, dense: bool) -> CapturedStep | None:
        """The decode step, its slots filled in."""
        if self._step is not None:
            slot_R = torch.tensor(plan.decode_slots, dtype=torch.int64)
            if self._step.step.slot_R.is_cuda:
                slot_R = slot_R.pin_memory()
            self._step.step.slot_R.copy_(slot_R, non_blocking=True)
        return self._step


@dataclass
class Measured:
    """A step to measure."""

    title: str
    case: Case
    tokens: Tokens
    plan: Callable[[int], StepPlan]
    """Step number -> the same step again."""
    graphs: Only
    plain: Callable[[], object]
    """Launches the step with nothing replayed."""

    def __post_init__(self) -> None:
        self.case.runner.graphs = self.graphs
        self.numbers = count(1)

    def next_plan(self) -> StepPlan:
        """Return the plan that the runner is to run next; the rows have their context again."""
        self.case.rewind()
        return self.plan(next(self.numbers))

    def held_back(self, host_ms: float) -> tuple[float, bool]:
        """Let the device wait, as `parts.held_back` does."""
        plan, launched = self.next_plan(), []
        found = parts.held_back(lambda: launched.append(self.case.runner.launch(plan)), host_ms)
        self.case.runner.collect(*launched)
        return found


def budget_of(tokens: int) -> int:
    """The budget of a step of so many."""
    return next(budget for budget in BUDGETS if tokens <= budget)


def prefill(model: Model, rows: int, length: int, width: int) -> Measured:
    """Whole prompts in one step, whose segments are replayed."""
    case = Case(model, rows, width, length, 2 * width, budget_of(rows * length))
    tokens = Tokens.prefill(rows, length, woken(model, rows * length))
    return beside(f"prefill {rows}x{length}, width {width}", case, tokens, (), range(rows), length, 0)


def mixed(model: Model, rows: int, length: int, width: int, context: int, start: int) -> Measured:
    """Decode rows, and the last `length` tokens of one prompt, `start` of which are cached."""
    longest = max(context, start + length)
    case = Case(model, rows + 1, width, longest, 8 * width, budget_of(rows * width + length))
    case.context = context  # that the rows are given again; the prompt's row says its own
    tokens = Tokens.mixed(rows, width, context, length, start, woken(model, rows * width + length))
    title = f"{rows} decode rows, context {context}, + {length} tokens behind {start} cached, width {width}"
    return beside(title, case, tokens, tuple(range(rows)), range(rows, rows + 1), length, start)


def prompts_behind(
    case: Case, decode: tuple[int, ...], prompts: range, length: int, start: int
) -> Callable[[int], StepPlan]:
    """Step number -> the plan of a step that prefills `length` tokens of each of the slots `prompts` from `start` on,
    beside decode rows."""
    model, width = case.model, case.width
    tokens = torch.randint(0, model.config.vocab_size, (len(prompts), length)).tolist()
    pages = case.state.tensors.page_SP.tolist()
    greedy = SamplingParams(max_tokens=2, temperature=0.0)
    rows = tuple(PrefillRow(slot, start, tuple(fed), start, True) for slot, fed in zip(prompts, tokens, strict=True))

    def plan(step: int) -> StepPlan:
        return StepPlan(
            step,
            width,
            width - 1,
            decode,
            prefill=rows,
            admissions=tuple(Admission(slot, greedy) for slot in prompts),
            grants=tuple(PageGrant(slot, 0, tuple(pages[slot])) for slot in prompts),
        )

    return plan


def beside(
    title: str, case: Case, work: Tokens, decode: tuple[int, ...], prompts: range, length: int, start: int
) -> Measured:
    """A step that prefills `length` tokens of each of the slots `prompts` from `start` on, beside decode rows."""
    plan = prompts_behind(case, decode, prompts, length, start)
    layout = plan(1).layout
    key = TokenBuckets(budget_of(layout.tokens)).key(layout)
    kinds = [Scratch(case.device) for _ in range(2)]
    step, example = MixedStep(case.parts), plan(1)
    step.run(example, Stage(case.parts, key.tokens, *kinds))
    buffers = [torch.empty(kind.peak, dtype=torch.uint8, device=case.device) for kind in kinds]

    def scratch() -> list[Scratch]:
        return [Scratch(case.device, buffer) for buffer in buffers]

    with no_garbage_collection():
        # The step's own alone: of the others nothing has run, and a capture would have to compile them.
        tail = TokenBuckets(key.tokens).key(BatchLayout(1, layout.sampled_rows))
        tails = {tail: CapturedTail(case.parts, tail.tokens, scratch()[1])}
        stage = CapturedStage(case.parts, key.tokens, *scratch(), tails)
    plain = Stage(case.parts, key.tokens, *scratch())
    return Measured(
        f"{title}: {layout.tokens} tokens in a bucket of {key.tokens}",
        case,
        work,
        plan,
        Only(stage=stage),
        lambda: step.run(example, plain),
    )


def decode(model: Model, rows: int, width: int, context: int) -> Measured:
    """A step of decode rows alone, which is one graph."""
    case = Case(model, rows, width, context, 8 * width)  # the profiler sees a few steps in a row
    measured = Scratch(case.device)
    case.step(measured).run()
    buffer = torch.empty(measured.peak, dtype=torch.uint8, device=case.device)
    with no_garbage_collection():
        captured = CapturedStep(case.step(Scratch(case.device, buffer)))
    plain = case.step(Scratch(case.device, buffer))
    slots = tuple(range(rows))
    return Measured(
        f"decode {rows} rows, width {width}, context {context}",
        case,
        Tokens.decode(rows, width, context, woken(model, rows * width)),
        lambda step: StepPlan(step, width, width - 1, slots),
        Only(step=captured),
        plain.run,
    )


def report(step: Measured) -> None:
    """Measure, and print everything but the kernels."""
    walls, hosts, devices, ahead = [], [], [], True
    for repeat in range(REPEATS + 3):
        plan = step.next_plan()
        parts.wait()
        begin = time.perf_counter()
        launched = step.case.runner.launch(plan)
        between = time.perf_counter()
        step.case.runner.collect(launched)
        if repeat >= 3:
            walls.append((time.perf_counter() - begin) * 1e3)
            hosts.append((between - begin) * 1e3)
    wall, host = median(walls), median(hosts)
    for _ in range(TABLES):
        ms, first = step.held_back(host)
        devices.append(ms)
        ahead = ahead and first
    device = median(devices)
    work = target_work(step.case.model, step.tokens)
    total = sum(work.values(), Work())
    print(step.title)
    print(
        f"  wall {wall:.3f} ms ({min(walls):.3f} to {max(walls):.3f}), host {host:.3f} ms, device {device:.3f} ms, gap "
        f"{wall - device:.3f} ms ({(wall - device) / wall:.0%} of the wall)"
    )
    if not ahead:
        print("  the device began before the host had launched everything: device is too large, gap too small")
    print(
        f"  floor {total.ms:.3f} ms ({total.ms / wall:.0%} of the wall): {total.bytes / 1e9:.2f} GB in "
        f"{total.bytes / BANDWIDTH:.3f} ms, {total.operations / 1e12:.2f} TFLOP in {total.operations / OPERATIONS:.3f} "
        f"ms, {step.tokens.experts:.1f} experts per layer"
    )
    parts.wait()
    begin = time.perf_counter()
    step.plain()
    plain_host = (time.perf_counter() - begin) * 1e3
    step.case.rewind()
    table(*parts.measured(step.plain, TABLES, plain_host), work)
    sys.stdout.flush()


def table(rows: list[parts.Row], whole: float, ahead: bool, work: dict[str, Work]) -> None:
    """The parts of a step that took `whole` ms."""
    print(f"  {'part, with nothing replayed':44}{'calls':>6}{'ms':>9}{'share':>7}{'us each':>9}{'floor ms':>10}")
    rest = whole
    for row in rows:
        *above, name = row.path
        floor = ""
        if not above:
            rest -= row.total
            floor = f"{work[name].ms:10.3f}" if name in work else ""
        label = "  " * len(above) + name
        print(f"  {label:44}{row.calls:6}{row.total:9.3f}{row.total / whole:7.1%}{row.each * 1e3:9.1f}{floor}")
    print(f"  {'rest: state, upload, embedding, first norm':44}{'':6}{rest:9.3f}{rest / whole:7.1%}")
    note = "" if ahead else "   (the device began before the host had launched everything: gaps may be included)"
    print(f"  {'sum':44}{'':6}{whole:9.3f}{note}")


def kernel_times(step: Measured, steps: int) -> list[tuple[str, float]]:
    """(Name, microseconds) of everything the device did in so many steps; nothing where the profiler sees no device."""
    if ProfilerActivity.CUDA not in supported_activities():
        return []
    plans = [step.next_plan() for _ in range(steps)]
    parts.wait()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for plan in plans:
            step.case.runner.execute(plan)
        parts.wait()
    events = [event for event in seen.events() or () if event.device_type == DeviceType.CUDA]
    return [(event.name, event.time_range.elapsed_us()) for event in events]


def kernel_table(step: Measured, steps: int = 3) -> None:
    """The kernels of one step by name, those that take longest first."""
    print(f"kernels of {step.title}")
    times = kernel_times(step, steps)
    if not times:
        print("  torch's profiler saw nothing of the device: is CUPTI installed, and may it be used?")
        return
    by_name = defaultdict(list)
    for name, us in times:
        by_name[name].append(us)
    total = sum(us for _, us in times)
    print(f"  {'kernel':70}{'launches':>9}{'us':>10}{'share':>7}{'us each':>9}")
    order = sorted(by_name, key=lambda name: -sum(by_name[name]))
    for name in order[:MOST_KERNELS]:
        own = by_name[name]
        print(
            f"  {name[:69]:70}{len(own) / steps:9g}{sum(own) / steps:10.1f}{sum(own) / total:7.1%}"
            f"{sum(own) / len(own):9.1f}"
        )
    rest = [us for name in order[MOST_KERNELS:] for us in by_name[name]]
    if rest:
        print(f"  {'others':70}{len(rest) / steps:9g}{sum(rest) / steps:10.1f}{sum(rest) / total:7.1%}")
    print(f"  {'all, one after the other':70}{len(times) / steps:9g}{total / steps:10.1f}")


def prompts(text: str) -> list[tuple[int, int]]:
    """ "8x1024" -> 8 prompts of 1024 tokens, separated by commas."""
    pairs = [tuple(map(int, part.split("x"))) for part in text.split(",") if part]
    for pair in pairs:
        if len(pair) != 2 or min(pair) < 1 or pair[0] * pair[1] > BUDGETS[-1]:
            raise argparse.ArgumentTypeError(f"prompts are ROWSxTOKENS, at most {BUDGETS[-1]} tokens per step: {text}")
    return [(rows, length) for rows, length in pairs]


def mixtures(text: str) -> list[tuple[int, int]]:
    """ "64+512" -> 64 decode rows beside 512 tokens of a prompt, separated by commas."""
    pairs = [tuple(map(int, part.split("+"))) for part in text.split(",") if part]
    for pair in pairs:
        if len(pair) != 2 or min(pair) < 1:
            raise argparse.ArgumentTypeError(f"mixed steps are ROWS+TOKENS: {text}")
    return [(rows, length) for rows, length in pairs]


def many(text: str) -> list[int]:
    """Numbers, separated by commas."""
    return [int(part) for part in text.split(",") if part]


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line; everything is measured when nothing is named."""
    parser = argparse.ArgumentParser(description="Where the time of a step goes.")
    parser.add_argument("--prefill", type=prompts, help="prompts of a step: 1x1024,8x1024")
    parser.add_argument("--mixed", type=mixtures, help="decode rows and tokens of a prompt: 16+512,64+512")
    parser.add_argument("--start", type=int, default=0, help="cached tokens of that prompt")
    parser.add_argument("--decode", type=many, help="rows of a step: 64,256")
    parser.add_argument("--width", type=int, default=1, help="tokens that a decode row verifies; above 1 with drafts")
    parser.add_argument("--context", type=int, default=1024, help="cached tokens of a decode row")
    parser.add_argument("--kernels", action="store_true", help="a table of kernels, from torch's profiler")
    found = parser.parse_args(given)
    if found.prefill is None and found.mixed is None and found.decode is None:
        found.prefill, found.decode = [(1, 1024), (8, 1024), (1, 8192)], [64, 256]
    if found.start < 0:
        parser.error("--start is a number of tokens")
    if found.width < 1 or found.context <= found.width:
        parser.error("--width must be positive, and smaller than --context")
    for rows, length in found.mixed or ():
        if rows * found.width + length > BUDGETS[-1]:
            parser.error(f"at most {BUDGETS[-1]} tokens per step: {rows} rows of {found.width} and {length} are more")
    for rows in found.decode or ():
        if rows * found.width <= MOST_STREAMED:
            parser.error(
                f"steps of at most {MOST_STREAMED} tokens take another path: python bench/decode_step.py times it"
            )
    return found


def steps(model: Model, given: argparse.Namespace) -> Iterator[Measured]:
    """Yield the steps that were asked for, one after the other."""
    for rows, length in given.prefill or ():
        yield prefill(model, rows, length, given.width)
    for rows, length in given.mixed or ():
        yield mixed(model, rows, length, given.width, given.context, given.start)
    for rows in given.decode or ():
        yield decode(model, rows, given.width, given.context)


def main() -> None:
    given = arguments()
    if not torch.cuda.is_available():
        sys.exit("this measures a GPU, and there is none")
    kept = []
    with torch.inference_mode():
        for step in steps(model_of(V2_LITE, given.width, torch.bfloat16, torch.device("cuda")), given):
            report(step)
            if given.kernels:
                kept.append(step)
        for step in kept:  # last: a profiler that was once on may slow down what follows
            kernel_table(step)


if __name__ == "__main__":
    main()
