"""Runs step plans on one rank, in order: checks a plan, applies it to the slots, launches the step that fits it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kernels.ahead import Compiled
from kernels.page import NULL_PAGE, PAGE_TOKENS
from workers.cache.paged import PagedCache
from workers.graphs.capture import GraphRunner, Warmed, compile_steps, warm_up
from workers.graphs.stats import GraphStats
from workers.memory.scratch import Scratch
from workers.models.model import Model
from workers.parallel.group import TensorParallel
from workers.protocol.plan import BatchLayout, GraphKey, StepPlan, StepResult, TopLogprobs
from workers.step.decode import DecodeStep
from workers.step.logprobs import Taken
from workers.step.mixed import MixedStep
from workers.step.parts import StepOutput, StepParts
from workers.step.sampling import SamplingFault, SamplingState
from workers.step.slots import SlotState
from workers.step.stage import Stage


class PlanError(ValueError):
    """A plan that reads or writes outside what the replica owns: scheduler and worker disagree, which is a defect."""


@dataclass(frozen=True)
class Launched:
    """A step under way. On a GPU its result is still being computed; `Runner.collect` waits for it."""

    plan: StepPlan
    layout: BatchLayout
    begin: float
    decided_N: torch.Tensor
    """On the host, complete once `done` has happened."""
    logprobs: Taken | None
    done: torch.cuda.Event | None

    @property
    def finished(self) -> bool:
        """Whether `Runner.collect` would not wait."""
        return self.done is None or bool(self.done.query())  # type: ignore[no-untyped-call]


class Runner:
    """Executes plans in order. One per rank; all ranks of a replica get the same plans."""

    def __init__(
        self,
        model: Model,
        cache: PagedCache,
        slots: int,
        width: int,
        pages_per_row: int,
        token_budget: int,
        group: TensorParallel,
        sampling: SamplingState | None = None,
        *,
        adaptive: bool = False,
    ) -> None:
        """`cache` has one layer a model layer, and one more for the draft layer if `width` > 1. `token_budget`: the
        most tokens a step feeds. `sampling`: what rank 0 samples with, if it is there already. `adaptive`: steps
        may feed fewer tokens a row than `width`."""
        if width > 1 and model.drafter is None:
            raise ValueError(f"width {width} needs a drafter, and the model has none")
        device = cache.layers[0].device
        if sampling is None and group.rank == 0:
            sampling = SamplingState(slots, model.config.vocab_size, device)
        if sampling is not None and group.size > 1:
            sampling.dependent = False  # its first kernel stands behind a collective
        state = SlotState(slots, width - 1, pages_per_row, device)
        self.parts = StepParts(model, cache, state, sampling, group, width, adaptive)
        self.device = device
        self._token_budget = token_budget
        self._mixed = MixedStep(self.parts)
        self._decode: dict[GraphKey, DecodeStep] = {}
        self._scratch = Scratch(device)
        self.graphs: GraphRunner | None = None
        self.stats = GraphStats()
        self._steps = 0
        self._collected = 0.0

    def compile(self, threads: int, *, proof: bool = True) -> Compiled:
        """Compile what steps launch, and with `proof` what the self-test does, so many kernels at a time, instead of
        each when it is first launched. All ranks together; before the first step."""
        self._reserve()
        return compile_steps(self.parts, self.parts.state.slots, self._token_budget, threads, proof=proof)

    def warm_up(self) -> Warmed:
        """Launch what steps launch, on padding alone: what a capture will take. All ranks together; before the first
        step."""
        self._reserve()
        return warm_up(self.parts, self.parts.state.slots, self._token_budget)

    def capture(self, progress: Callable[[str], None] | None = None) -> GraphRunner:
        """Capture the whole ladders: from now on decode steps, and the segments of mixed steps, are replayed. CUDA
        only, and all ranks together."""
        self._reserve()
        slots = self.parts.state.slots
        self.graphs = GraphRunner(self.parts, slots, self._token_budget, self.stats, progress)
        return self.graphs

    def _reserve(self) -> None:
        if self.parts.sampling is not None:
            self.parts.sampling.reserve()

    def close(self) -> None:
        """Destroy the graphs, which must happen before the process group ends."""
        if self.graphs is not None:
            self.graphs.close()
            self.graphs = None

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step to its end: `launch`, then `collect`."""
        return self.collect(self.launch(plan))

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Start one step; on a GPU nothing here waits for it, so the next can be launched behind it.

        Raises PlanError before anything is launched if the plan is not executable.
        """
        begin = time.perf_counter()
        self._check(plan)
        self._steps = plan.step
        parts = self.parts
        parts.cache.scrub(plan.scrub)
        parts.state.admit(plan.admissions)
        parts.state.grant(plan.grants)
        if parts.sampling is not None:
            parts.sampling.admit(plan.admissions)
        if self.graphs is None:
            self.stats.eager["no graphs"] += 1
        output = self._run_mixed(plan) if plan.prefill else self._run_decode(plan)
        logprobs = None
        if plan.logprobs >= 0 and parts.sampling is not None and output.logits_NV is not None:
            token_N = output.decided_N[output.layout.target_slice]
            logprobs = parts.sampling.logprobs(output.logits_NV, token_N, output.layout, _sampled_slots(plan))
        decided_N = _to_host(output.decided_N)
        done = None
        if self.device.type == "cuda":
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return Launched(plan, output.layout, begin, decided_N, logprobs, done)

    def _run_mixed(self, plan: StepPlan) -> StepOutput:
        layout = plan.layout
        if self.graphs is None:
            stage = Stage(self.parts, layout.tokens, Scratch(self.device), Scratch(self.device))
            return self._mixed.run(plan, stage)
        return self._mixed.run(plan, self.graphs.stage(layout))

    def _run_decode(self, plan: StepPlan) -> StepOutput:
        captured = None if self.graphs is None else self.graphs.captured(plan)
        if captured is not None:
            return captured.replay()
        key = plan.layout.graph_key(len(plan.decode_slots), plan.drafts)
        step = self._decode.get(key)
        if step is None:
            step = self._decode[key] = DecodeStep(self.parts, key, self._scratch)
        step.slot_R.copy_(torch.tensor(plan.decode_slots, dtype=torch.int64))
        return step.run()

    def collect(self, launched: Launched) -> StepResult:
        """Wait for a launched step; steps are collected in the order of their launch.

        A row whose logits were no finite numbers gains nothing and is named. Raises SamplingFault when an id was no
        token.
        """
        if launched.done is not None:
            launched.done.synchronize()
        layout, (*decided, faults) = launched.layout, launched.decided_N.tolist()
        if faults:
            raise SamplingFault(faults, self.parts.model.config.vocab_size)
        # Rows past the plan's own are a bucket's padding.
        accepted = decided[layout.accepted_slice][: len(launched.plan.decode_slots)]
        tokens = [tuple(decided[layout.decode_slice(row)][: count + 1]) for row, count in enumerate(accepted)]
        tokens += [(token,) for token in decided[layout.final_slice]]
        bad = _bad_rows(layout, decided[layout.bad_slice], tokens)
        for row in bad:
            tokens[row] = ()
        logprobs: tuple[tuple[TopLogprobs, ...], ...] = ()
        if (taken := launched.logprobs) is not None:
            gained = [len(row) for row in tokens]
            logprobs = taken.entries([layout.logits_rows_of(row)[:count] for row, count in enumerate(gained)])
        # A step that was launched behind another begins when that one ends.
        begin, self._collected = max(launched.begin, self._collected), time.perf_counter()
        return StepResult(launched.plan.step, tuple(tokens), self._collected - begin, logprobs, bad)

    def _check(self, plan: StepPlan) -> None:
        """All that could index out of bounds, checked on the host before a launch (never in a captured graph)."""
        state, model, width = self.parts.state, self.parts.model, self.parts.width
        slots, pages, vocab = state.slots, self.parts.cache.pages, model.config.vocab_size
        # Behind a step's tokens the draft layer writes an entry a draft, and looks up where one more would lie.
        behind = width if width > 1 else 0
        capacity = min(state.pages_per_row * PAGE_TOKENS, model.max_positions) - behind
        if plan.step != self._steps + 1:
            raise PlanError(f"plan of step {plan.step} follows step {self._steps}")
        if not 1 <= plan.width <= width or not 0 <= plan.drafts < width:
            raise PlanError(f"width {plan.width} / {plan.drafts} drafts on a runner of width {width}")
        if plan.layout.tokens > self._token_budget:
            raise PlanError(f"{plan.layout.tokens} tokens on a runner of at most {self._token_budget} a step")
        used = [*plan.decode_slots, *(row.slot for row in plan.prefill)]
        if len(set(used)) != len(used):
            raise PlanError("a slot has two rows in one step")
        if not used:
            raise PlanError("a step without rows")
        for slot in (*used, *(a.slot for a in plan.admissions), *(g.slot for g in plan.grants)):
            if not 0 <= slot < slots:
                raise PlanError(f"slot {slot} of {slots}")
        for grant in plan.grants:
            if grant.first < 0 or grant.first + len(grant.pages) > state.pages_per_row:
                raise PlanError(f"page table entries {grant.first} + {len(grant.pages)} exceed a row")
            if any(not NULL_PAGE < page < pages for page in grant.pages):
                raise PlanError(f"granted pages {grant.pages} of {pages}")
        if any(not NULL_PAGE < page < pages for page in plan.scrub):
            raise PlanError(f"pages to scrub {plan.scrub} of {pages}")
        for row in plan.prefill:
            if row.start < 0 or row.start + len(row.tokens) > capacity:
                raise PlanError(f"prefill of {len(row.tokens)} tokens at {row.start} exceeds {capacity}")
            if row.final == (row.next_token >= 0):
                raise PlanError("a prefill row has a next token or ends its prompt, never both")
            if not 0 <= min(row.tokens) <= max(row.tokens) < vocab or row.next_token >= vocab:
                raise PlanError(f"token ids outside a vocabulary of {vocab}")


def _bad_rows(layout: BatchLayout, bad: Sequence[int], tokens: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Sampled rows of which a token that they gained is void. What is behind a row's accepted drafts does not count: it
    is of a token that the row never had."""
    if not any(bad):
        return ()
    return tuple(
        row for row, gained in enumerate(tokens) if any(bad[n] for n in layout.logits_rows_of(row)[: len(gained)])
    )


def _sampled_slots(plan: StepPlan) -> list[int]:
    return [*plan.decode_slots, *(row.slot for row in plan.prefill if row.final)]


def _to_host(x: torch.Tensor) -> torch.Tensor:
    """`x` itself on CPU; from a GPU a copy under way into pinned memory, complete when the stream gets there."""
    if x.device.type == "cpu":
        return x
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)
