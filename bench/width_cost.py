"""Says what it costs to verify several tokens of one row, over the same tokens in rows of their own, in the
DeepSeek-V2-Lite shape on this machine's GPU.

    python bench/width_cost.py                               # widths 2 and 4, 1024 tokens of context
    python bench/width_cost.py --widths 8 --context 8192

One row feeds `width` tokens; beside it, as many rows of one token name the same pages and are a token longer each. A
layer caches all tokens before it attends, so token i of the row and row i are the same computation and read the same
weights: only attention has other rows to deal with. Timed is the target's pass up to its decision: state, embedding,
layers, head, sampling, verification. Nothing is drafted, and no state moves on. Both steps are graphs, replayed in
turns, 100 times each in a measurement; printed are medians of the middle one of three, and the ratios of all.

What is timed is compared. First in a few layers, one of each kind: tokens are drawn until both steps choose the same
experts for every token, and then their logits must agree. In the whole model rounding tips choices between experts that
are nearly equal, and other choices follow; tokens are drawn until both steps wake equally many experts, and so read as
many bytes. If anything is not as it must be, a line says so, and the exit status is 1. Weights are normal(0, 0.02),
norms 1, so that routing is that of random tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import parts
from shapes import V2_LITE, choices, model_of
from verdict import error

from kernels.linear import MOST_STREAMED
from kernels.page import PAGE_TOKENS
from workers.cache.paged import PagedCache
from workers.graphs.capture import CapturedStep
from workers.graphs.record import no_garbage_collection
from workers.memory.scratch import Scratch
from workers.models.model import Model
from workers.parallel.group import Group
from workers.protocol.plan import BatchLayout
from workers.step.decode import DecodeStep
from workers.step.parts import SlotState, StepOutput, StepParts
from workers.step.sampling import SamplingState

REPEATS, MEASUREMENTS = 100, 3
MOST_DRAWS = 200
FEW_LAYERS, WHOLE = 2**-6, 2**-3
"""Largest differences, as shares of the logits' norm. Three layers round some dozens of times, by about 2**-9 each.
Over all layers that adds up, and tipped choices come on top; of logits that have nothing to do with each other the
difference is 1.4 norms."""


class TargetStep(DecodeStep):
    """A decode step as far as its decision: nothing is drafted, and the slots' state stays what it is."""

    def run(self) -> StepOutput:
        """Run the step from the slots' state to the decision."""
        with self.memory():
            passed = self.target()
            self._verify(passed.logits_NV, passed.fed, None)
        return StepOutput(self.layout, self.decided_N, passed.logits_NV)


@dataclass(frozen=True)
class Computed:
    """Result of a step."""

    logits_TV: Tensor
    chosen_LTX: Tensor
    """Whether a token chose an expert, for every layer that has experts."""

    @property
    def woken(self) -> int:
        """Experts that some token chose, each layer's counted for themselves."""
        return int(self.chosen_LTX.any(1).sum())


@dataclass(frozen=True)
class Both:
    """Results of one row, and of rows of their own."""

    one: Computed
    many: Computed

    @property
    def apart(self) -> float:
        """The logits, in norms."""
        return error(self.one.logits_TV, self.many.logits_TV)

    @property
    def tipped(self) -> int:
        """Tokens, in each layer, that chose other experts."""
        return int((self.one.chosen_LTX != self.many.chosen_LTX).any(2).sum())

    @property
    def choices(self) -> int:
        """Tokens, in each layer, that chose experts."""
        return self.one.chosen_LTX[..., 0].numel()

    @property
    def more(self) -> int:
        """Experts that one of both wakes more than the other."""
        return abs(self.one.woken - self.many.woken)


class Pair:
    """The same tokens behind the same cache twice: slot 0 is one row of `width`, the slots behind it rows of one."""

    def __init__(self, model: Model, width: int, context: int) -> None:
        """`context`: what the last token attends to, itself included; whole pages, see `arguments`."""
        self.width, self.device = width, model.norm_E.device
        torch.manual_seed(width)
        pages, slots = context // PAGE_TOKENS, 1 + width
        self.cache = PagedCache.allocate(model.caches, pages + 1, self.device)
        for layer in self.cache.layers:
            layer.normal_()
        self.state = SlotState(slots, width - 1, pages, self.device)
        sampling = SamplingState(slots, model.config.vocab_size, self.device)
        sampling.reserve()
        self.parts = StepParts(model, self.cache, self.state, sampling, Group(), width)
        tensors = self.state.tensors
        tensors.page_SP[:slots] = torch.randperm(pages, device=self.device).int() + 1
        self.position_W = torch.arange(context - width, context, device=self.device)
        tensors.length_S[0] = context - width
        tensors.length_S[1:slots] = self.position_W

    def draw(self, seed: int) -> None:
        """Draw other tokens."""
        torch.manual_seed(seed)
        tensors = self.state.tensors
        token_W = torch.randint(0, self.parts.model.config.vocab_size, (self.width,), device=self.device)
        tensors.last_S[0], tensors.draft_SK[0] = token_W[0], token_W[1:]
        tensors.last_S[1 : 1 + self.width] = token_W

    def step(self, width: int, scratch: Scratch) -> TargetStep:
        """The step of the one row, or that of the rows of width 1."""
        layout = BatchLayout(width, self.width // width)
        return TargetStep(self.parts, layout.graph_key(layout.decode_rows, 0), scratch)

    def fill(self, step: TargetStep) -> None:
        """Let the step run its slots."""
        first = 0 if step.key.width > 1 else 1
        step.slot_R.copy_(torch.arange(first, first + step.key.rows))

    def compute(self, width: int) -> Computed:
        """Run the step of that width, the tokens not cached before."""
        slot_W = self.state.cache_slots(torch.zeros_like(self.position_W), self.position_W)
        for layer in self.cache.layers:
            layer.flatten(0, 1)[slot_W] = torch.nan
        step = self.step(width, Scratch(self.device))
        self.fill(step)
        with choices() as chosen:
            logits_TV = step.run().logits_NV
        assert logits_TV is not None
        return Computed(logits_TV, torch.stack(chosen))

    def settle(self, wrong: Callable[[Both], int]) -> Both:
        """Draw tokens until nothing is wrong; if that does not happen, those of which the least is."""
        least: list[tuple[int, int]] = []
        for seed in range(MOST_DRAWS):
            both = self.drawn(seed)
            least.append((wrong(both), seed))
            if not least[-1][0]:
                return both
        return self.drawn(min(least)[1])

    def drawn(self, seed: int) -> Both:
        """Compute both steps with these tokens."""
        self.draw(seed)
        return Both(self.compute(self.width), self.compute(1))


def replayed(pair: Pair) -> tuple[list[tuple[float, float]], float]:
    """Medians in ms of one row and of many, each measurement's, and the `error` of the last replays' logits."""
    peaks = []
    for width in (pair.width, 1):
        measured = Scratch(pair.device)
        step = pair.step(width, measured)
        pair.fill(step)
        step.run()
        peaks.append(measured.peak)
    # Buffers of their own: the logits of both outlive the other's replay.
    buffers = [torch.empty(peak, dtype=torch.uint8, device=pair.device) for peak in peaks]
    with no_garbage_collection():
        steps = [
            CapturedStep(pair.step(width, Scratch(pair.device, buffer)))
            for width, buffer in zip((pair.width, 1), buffers, strict=True)
        ]
    for captured in steps:
        pair.fill(captured.step)
    medians = []
    for _ in range(MEASUREMENTS):
        for captured in steps * 3:
            captured.replay()
        events = [parts.event() for _ in range(2 * REPEATS + 1)]
        events[0].record()
        for place, event in enumerate(events[1:]):
            steps[place % 2].replay()
            event.record()
        parts.wait()
        times = [begin.elapsed_time(end) for begin, end in pairwise(events)]
        medians.append((median(times[::2]), median(times[1::2])))
    one, many = (captured.output.logits_NV for captured in steps)
    assert one is not None
    assert many is not None
    return medians, error(one, many)


def compare(model: Model, width: int, context: int) -> bool:
    """Print what `width` tokens of a row cost; False if that is not the cost of the same computation."""
    few = Pair(model.shallow(), width, context).settle(lambda both: both.tipped)
    pair = Pair(model, width, context)
    whole = pair.settle(lambda both: both.more)
    medians, replays_apart = replayed(pair)
    ratios = [one / many for one, many in medians]
    middle = ratios.index(median(ratios))
    layers, deep = len(few.one.chosen_LTX), len(whole.one.chosen_LTX)
    times = f"one row {medians[middle][0]:.3f} ms, {width} rows {medians[middle][1]:.3f} ms"
    print(
        f"width {width} context {context}: {times}, ratio {ratios[middle]:.3f} "
        f"({', '.join(f'{ratio:.3f}' for ratio in ratios)})\n"
        f"  experts woken {whole.one.woken} and {whole.many.woken}, {whole.one.woken / deep:.1f} a layer; "
        f"choices tipped {whole.tipped} of {whole.choices}\n"
        f"  logits apart {few.apart:.1e} with {layers} layers of experts, {whole.apart:.1e} with {deep}, "
        f"replayed {replays_apart:.1e}"
    )
    wrong = []
    if few.tipped:
        wrong.append(f"{few.tipped} of {few.choices} choices of experts in few layers, at best")
    if not few.apart <= FEW_LAYERS:
        wrong.append(f"logits of few layers, more than {FEW_LAYERS:.1e} apart")
    if whole.more:
        wrong.append("numbers of experts woken, at best")
    if not (whole.apart <= WHOLE and replays_apart <= WHOLE):
        wrong.append(f"logits, more than {WHOLE:.1e} apart")
    for what in wrong:
        print(f"  NOT THE SAME: {what}")
    sys.stdout.flush()
    return not wrong


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What verifying several tokens costs over the same tokens in rows.")
    parser.add_argument("--widths", default="2,4", help="tokens of the one row, 2 to 16 each")
    parser.add_argument("--context", type=int, default=1024, help="what the last token attends to, a multiple of 64")
    found = parser.parse_args(given)
    found.widths = [int(width) for width in found.widths.split(",")]
    if not all(1 < width <= MOST_STREAMED for width in found.widths):
        parser.error(f"widths are 2 to {MOST_STREAMED}")
    # Attention may ask for tiles before the kernel before it has finished if it takes them for older than the step
    # (`early` in `kernels.mla_decode.launch`). To a row of one token those that rows before it cache are older. At the
    # end of a page they share its last tile with the last token of all, for which attention of every row waits.
    if found.context <= 0 or found.context % PAGE_TOKENS:
        parser.error(f"--context must be a multiple of {PAGE_TOKENS}")
    return found


def main() -> None:
    given = arguments()
    if not torch.cuda.is_available():
        sys.exit("this measures a GPU, and there is none")
    with torch.inference_mode():
        model = model_of(V2_LITE, 1, torch.bfloat16, torch.device("cuda"))
        same = [compare(model, width, given.context) for width in given.widths]
    sys.exit(0 if all(same) else 1)


if __name__ == "__main__":
    main()
