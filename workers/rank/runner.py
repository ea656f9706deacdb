"""Runs step plans on one rank, in order: checks a plan, applies it to the slots, launches the step that fits it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch

from kernels.page import NULL_PAGE, PAGE_TOKENS
from kernels.runtime.ahead import Compiled
from kernels.sampling import TokenMasks
from workers.cache.paged import OutOfBoundsFault, PagedCache
from workers.grammar.rows import ConstrainedRows
from workers.graphs.capture import Warmed, compile_first, compile_steps, warm_up
from workers.graphs.graph_runner import GraphRunner, all_keys
from workers.graphs.stats import GraphStats
from workers.memory.scratch import Scratch
from workers.models.model import Model
from workers.parallel.group import Group
from workers.protocol.plan import BatchLayout, GraphKey, StepPlan, StepResult, TopLogprobs
from workers.protocol.request import TOKEN_BYTES
from workers.protocol.scores import Scores
from workers.rank.step_reads import step_reads
from workers.rank.waiting import StepEnd, Waiting, kind_of
from workers.step.decode import DecodeStep
from workers.step.logprobs import Taken
from workers.step.masks import StepMasks
from workers.step.mixed import MixedStep, Stage
from workers.step.parts import SlotState, StepOutput, StepParts, unpacked
from workers.step.sampling import SamplingFault, SamplingState


class PlanError(ValueError):
    """A plan that reads or writes outside what the replica owns: scheduler and worker disagree, which is a defect."""


@dataclass(frozen=True)
class Launched:
    """A step under way. On a GPU its result is still being computed; `Runner.collect` waits for it."""

    plan: StepPlan
    layout: BatchLayout
    begin: float
    decided_N: torch.Tensor
    """Decision on the host, complete once `done` has happened."""
    logprobs: Taken | None
    draft_SK: torch.Tensor | None
    """Drafts of all slots after a step with constrained rows; on the host, as `decided_N`."""
    out_of_bounds_count_1: torch.Tensor | None
    """Out-of-bounds count of `PagedCache`, where attention is sparse; on the host, as `decided_N`."""
    dead_ends: dict[int, int]
    """Positions at which the grammars of sampled rows allowed nothing."""
    scored: Taken | None
    """Prompt scores, as in `StepOutput`."""
    done: StepEnd | None
    """End of the step; None where steps are computed while they are launched."""
    timed: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
    """Events before and after the step; None where there is no device that works by itself."""
    settled: list[Settled] = field(default_factory=list)
    """Decision of the step, once it is known."""

    @property
    def finished(self) -> bool:
        """Whether `Runner.collect` would not wait."""
        return self.done is None or self.done.passed


@dataclass(frozen=True)
class Settled:
    """Decision of a step, on the host."""

    tokens: list[tuple[int, ...]]
    """Tokens that each sampled row gained: none for non-finite rows, and at a grammar's dead end those before it."""
    nonfinite: tuple[int, ...]
    dead_ends: tuple[int, ...]
    faults: int


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
        group: Group,
        sampling: SamplingState | None = None,
        *,
        adaptive: bool = False,
        masks: StepMasks | None = None,
        constrained: ConstrainedRows | None = None,
    ) -> None:
        """`cache` has one layer per model layer, and behind them those of the drafter; of their pages it has this
        rank's. `token_budget`: the most tokens a step feeds. `sampling`, `masks`: what rank 0 samples with, if it is
        there already. `adaptive`: steps may feed fewer tokens per row than `width`. `constrained`: the grammars of
        rows, on rank 0; without them no request may have one."""
        if width > 1 and model.drafter is None:
            raise ValueError(f"width {width} needs a drafter, and the model has none")
        device = cache.layers[0].device
        if sampling is None and group.mesh.heads.first:
            sampling = SamplingState(slots, model.config.vocab_size, device)
        if sampling is not None and group.mesh.heads.size > 1:
            sampling.dependent = False  # its first kernel stands behind a collective
        self._reads_tokens = width > 1 and model.drafter is not None and model.drafter.reads_tokens
        shards = group.mesh.shards
        state = SlotState(slots, width - 1, pages_per_row, device, tokens=self._reads_tokens, shards=shards)
        self.parts = StepParts(model, cache, state, sampling, group, width, adaptive)
        if masks is None and group.mesh.heads.first:
            masks = StepMasks(slots * width, model.config.vocab_size, device)
        self.masks, self._constrained = masks, constrained
        self._under_way: deque[Launched] = deque()
        self._waiting = Waiting()
        self.device = device
        self._token_budget = token_budget
        self._pages = shards.pages(cache.pages)
        """Pages of the cache, of all ranks that share it out."""
        # Behind a step's tokens the draft layer writes an entry per draft, and looks up where one more would lie.
        behind = width if width > 1 else 0
        self._capacity = min(pages_per_row * PAGE_TOKENS, model.max_positions) - behind
        """Tokens of a row at the most."""
        self._mixed = MixedStep(self.parts)
        self._decode: dict[GraphKey, DecodeStep] = {}
        self._scratch = Scratch(device)
        self.graphs: GraphRunner | None = None
        self.stats = GraphStats(step_reads=step_reads(model, device))
        self._steps = 0
        self._collected = 0.0

    def compile(self, threads: int, *, proof: bool = True) -> Compiled:
        """Compile what steps launch, and with `proof` what the self-test does, so many kernels at a time, instead of
        each when it is first launched. All ranks together; before the first step."""
        self._reserve()
        return compile_steps(
            self.parts, self.parts.state.slots, self._token_budget, threads, proof=proof, masks=self._token_masks
        )

    def warm_up(self) -> Warmed:
        """Launch what steps launch, on padding alone: what a capture will take. All ranks together; before the first
        step."""
        self._reserve()
        return warm_up(self.parts, self.parts.state.slots, self._token_budget, self._token_masks)

    def compile_first(self, threads: int, waiting: int) -> Compiled:
        """Compile what the steps launch that are captured first for an engine that so many rows wait for, and what
        prompts launch, in place of `compile`."""
        self._reserve()
        first = all_keys(self.parts, self.parts.state.slots, self._token_budget).in_order(waiting)[0]
        return compile_first(self.parts, first, self._token_budget, threads)

    def capture(
        self,
        progress: Callable[[str], None] | None = None,
        *,
        waiting: int | None = None,
        warmed: Warmed | None = None,
    ) -> GraphRunner:
        """Capture the graphs of all buckets: from now on decode steps, and the segments of mixed steps, are replayed.
        CUDA only, and all ranks together. `waiting` and `warmed`: see `GraphRunner`."""
        self._reserve()
        sizes = self.parts.state.slots, self._token_budget
        masks = self._token_masks
        self.graphs = GraphRunner(self.parts, *sizes, self.stats, progress, masks=masks, waiting=waiting, warmed=warmed)
        return self.graphs

    @property
    def _token_masks(self) -> TokenMasks | None:
        return None if self.masks is None else self.masks.masks

    def _reserve(self) -> None:
        if self.parts.sampling is not None:
            self.parts.sampling.reserve()

    def close(self) -> None:
        """Destroy the graphs, which must happen before the process group ends."""
        if self.graphs is not None:
            self.graphs.close()
            self.graphs = None

    def begin_anew(self) -> None:
        """Forget all rows: the next plan is the first of another scheduler. No step may be under way."""
        if self._under_way:
            raise PlanError(f"{len(self._under_way)} steps are under way")
        self.parts.state.clear()
        self.parts.cache.clear_slots()
        self._steps = 0

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
        before = self._mark()
        if plan.zero_fill:
            parts.cache.zero_fill(plan.zero_fill)
        if plan.admissions:
            parts.state.admit(plan.admissions)
            if parts.sampling is not None:
                parts.sampling.admit(plan.admissions)
            if self._constrained is not None:
                self._constrained.admit(plan.admissions)
        if plan.grants:
            parts.state.grant(plan.grants)
        if self.graphs is None:
            self.stats.eager["no graphs"] += 1
        dead_ends: dict[int, int] = {}
        masks = partial(self._fill_masks, plan, dead_ends) if plan.constrained else None
        rings, snapshots = parts.cache.rings, parts.cache.snapshots
        step = self._mixed_step if plan.prefill else self._decode_step
        if snapshots is not None:
            for row in plan.prefill:
                if row.restore >= 0:
                    snapshots.restore(rings, row.slot, row.restore, row.start)
        output = step(plan, masks)()
        if snapshots is not None:
            for row in plan.prefill:
                if row.save >= 0:
                    snapshots.save(rings, row.slot, row.save, row.start + len(row.tokens))
        logprobs = None
        if plan.logprobs >= 0 and parts.sampling is not None and output.logits_NV is not None:
            token_N = output.decided_N[output.layout.target_slice]
            logprobs = parts.sampling.logprobs(output.logits_NV, token_N, output.layout, _sampled_slots(plan))
        decided_N = _to_host(output.decided_N)
        of_grammars = plan.constrained and self._constrained is not None
        draft_SK = _to_host(parts.state.tensors.draft_SK) if of_grammars else None
        sparse = parts.model.config.indexing is not None
        out_of_bounds_count_1 = _to_host(parts.cache.out_of_bounds_count_1) if sparse else None
        done = timed = None
        if before is not None and (behind := self._mark()) is not None:
            done, timed = self._waiting.launched(kind_of(plan), behind, begin), (before, behind)
        where = decided_N, logprobs, draft_SK, out_of_bounds_count_1
        launched = Launched(plan, output.layout, begin, *where, dead_ends, output.scored, done, timed)
        self._under_way.append(launched)
        return launched

    def _mark(self) -> torch.cuda.Event | None:
        """Record an event after all work that was launched so far, with its time; None on a CPU."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _fill_masks(self, plan: StepPlan, dead_ends: dict[int, int]) -> TokenMasks | None:
        """The masks of a step, on their way to the device; None on ranks that do not sample. The forward pass of the
        step runs meanwhile. Waits for the decision of the step before, from which they follow."""
        if self._constrained is None or self.masks is None:
            return None
        for launched in self._under_way:
            if launched.plan.constrained:
                self._settle(launched)
        self.masks.clear()
        dead_ends |= self._constrained.fill(plan.layout, _sampled_slots(plan), plan.constrained, self.masks)
        return self.masks.upload()

    def _mixed_step(self, plan: StepPlan, masks: Callable[[], TokenMasks | None] | None) -> Callable[[], StepOutput]:
        """Return the function that runs a step with prefill rows."""
        layout = plan.layout
        if self.graphs is None:
            stage = Stage(self.parts, layout.tokens, Scratch(self.device), Scratch(self.device))
            return partial(self._mixed.run, plan, stage, masks)
        return partial(self._mixed.run, plan, self.graphs.stage(layout), masks)

    def _decode_step(self, plan: StepPlan, masks: Callable[[], TokenMasks | None] | None) -> Callable[[], StepOutput]:
        """Return the function that runs a step of decode rows alone: a graph where there is one for it."""
        dense = masks is None and self.parts.all_short(plan.decode_slots)
        if self.graphs is not None:
            if masks is not None and (split := self.graphs.split_step(plan)) is not None:
                return partial(split.replay, masks)
            if masks is None and (captured := self.graphs.captured(plan, dense=dense)) is not None:
                return captured.replay
        key = plan.layout.graph_key(len(plan.decode_slots), plan.drafts, dense=dense)
        step = self._decode.get(key)
        if step is None:
            step = self._decode[key] = DecodeStep(self.parts, key, self._scratch)
        step.slot_R.copy_(torch.tensor(plan.decode_slots, dtype=torch.int64))
        return partial(step.run, masks)

    def collect(self, launched: Launched) -> StepResult:
        """Wait for a launched step; steps are collected in the order of their launch.

        A row whose logits were no finite numbers gains nothing and is named, and so is one whose grammar allowed no
        token, which gains those before. Raises SamplingFault when an id was no token, OutOfBoundsFault when indices of
        attention lay outside of the cache.
        """
        settled, layout = self._settle(launched), launched.layout
        while self._under_way and self._under_way.popleft() is not launched:
            pass
        if launched.out_of_bounds_count_1 is not None and (out_of_bounds := int(launched.out_of_bounds_count_1)):
            raise OutOfBoundsFault(out_of_bounds)
        if settled.faults:
            raise SamplingFault(settled.faults, self.parts.model.config.vocab_size)
        tokens = settled.tokens
        logprobs: tuple[tuple[TopLogprobs, ...], ...] = ()
        if (taken := launched.logprobs) is not None:
            gained = [len(row) for row in tokens]
            logprobs = taken.entries([layout.logits_rows_of(row)[:count] for row, count in enumerate(gained)])
        duration, scores = self._duration(launched), _scores(launched)
        return StepResult(
            launched.plan.step, tuple(tokens), duration, logprobs, settled.nonfinite, settled.dead_ends, scores
        )

    def _duration(self, launched: Launched) -> float:
        """Seconds that a step took whose end was waited for. A step that was launched behind another begins when that
        one ends."""
        begin, self._collected = max(launched.begin, self._collected), time.perf_counter()
        if launched.timed is None:
            return self._collected - begin
        # The host may have been launching the next step when this one ended, or the one before, and found out late.
        before, behind = launched.timed
        return 1e-3 * float(before.elapsed_time(behind))

    def _settle(self, launched: Launched) -> Settled:
        """Wait for a step's decision, and let the grammars of its rows know it; once."""
        if launched.settled:
            return launched.settled[0]
        if launched.done is not None:
            launched.done.wait()
        plan, layout = launched.plan, launched.layout
        *decided, faults = launched.decided_N.tolist()
        # Rows past the plan's own are a bucket's padding.
        accepted = decided[layout.accepted_slice][: len(plan.decode_slots)]
        tokens = [tuple(decided[layout.decode_slice(row)][: count + 1]) for row, count in enumerate(accepted)]
        tokens += [(token,) for token in decided[layout.final_slice]]
        nonfinite = _nonfinite_rows(layout, decided[layout.nonfinite_slice], tokens)
        for row in nonfinite:
            tokens[row] = ()
        # What comes before such a position was allowed, and may be the end of the request, whoever finds it.
        dead_ends = {row: position for row, position in launched.dead_ends.items() if position < len(tokens[row])}
        for row, position in dead_ends.items():
            tokens[row] = tokens[row][:position]
        if launched.draft_SK is not None and self._constrained is not None:
            slots = _sampled_slots(plan)
            lost = self._constrained.gained(slots, tokens, plan.constrained)
            for slot in plan.constrained:
                self._constrained.drafted(slot, launched.draft_SK[slot, : plan.drafts].tolist())
            for row, kept in lost.items():
                tokens[row] = tokens[row][:kept]
            dead_ends |= lost
        launched.settled.append(Settled(tokens, nonfinite, tuple(sorted(dead_ends)), faults))
        return launched.settled[0]

    def _check(self, plan: StepPlan) -> None:
        """All that could index out of bounds, checked on the host before a launch (never in a captured graph)."""
        state, model, width = self.parts.state, self.parts.model, self.parts.width
        slots, vocab, pages, capacity = state.slots, model.config.vocab_size, self._pages, self._capacity
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
        for admission in plan.admissions if self._reads_tokens else ():
            if not 0 < len(admission.tokens) <= capacity * TOKEN_BYTES:
                raise PlanError(f"{len(admission.tokens)} bytes of a newcomer's tokens, {capacity} tokens at most")
            token_X = unpacked(admission.tokens)
            if not 0 <= int(token_X.min()) <= int(token_X.max()) < vocab:
                raise PlanError(f"token ids of a newcomer outside a vocabulary of {vocab}")
        for grant in plan.grants:
            if grant.first < 0 or grant.first + len(grant.pages) > state.pages_per_row:
                raise PlanError(f"page table entries {grant.first} + {len(grant.pages)} exceed a row")
            if any(not NULL_PAGE < page < pages for page in grant.pages):
                raise PlanError(f"granted pages {grant.pages} of {pages}")
        if not set(plan.constrained) <= {*plan.decode_slots, *(row.slot for row in plan.prefill if row.final)}:
            raise PlanError("a row with a grammar is not sampled")
        if any(not NULL_PAGE < page < pages for page in plan.zero_fill):
            raise PlanError(f"pages to zero-fill {plan.zero_fill} of {pages}")
        for row in plan.prefill:
            if row.start < 0 or row.start + len(row.tokens) > capacity:
                raise PlanError(f"prefill of {len(row.tokens)} tokens at {row.start} exceeds {capacity}")
            held = self.parts.cache.snapshots
            if max(row.restore, row.save) >= (0 if held is None else held.count):
                raise PlanError(f"snapshots {row.restore} and {row.save} of {0 if held is None else held.count}")
            if row.final == (row.next_token >= 0):
                raise PlanError("a prefill row has a next token or ends its prompt, never both")
            if (
                not 0 <= row.score_from <= row.score_to <= len(row.tokens) - row.final
                or not 0 <= row.score_top <= vocab
            ):
                raise PlanError(f"scores of tokens {row.score_from} to {row.score_to} of {len(row.tokens)}")
            if not 0 <= min(row.tokens) <= max(row.tokens) < vocab or row.next_token >= vocab:
                raise PlanError(f"token ids outside a vocabulary of {vocab}")


def _scores(launched: Launched) -> tuple[Scores, ...]:
    """Return the scores that each scoring prefill row asked for."""
    if launched.scored is None:
        return ()
    rows = [row for row in launched.plan.prefill if row.scored]
    ends = accumulate(row.scored for row in rows)
    return tuple(
        launched.scored.scores(end - row.scored, end, row.score_top) for row, end in zip(rows, ends, strict=True)
    )


def _nonfinite_rows(
    layout: BatchLayout, nonfinite: Sequence[int], tokens: Sequence[tuple[int, ...]]
) -> tuple[int, ...]:
    """Sampled rows of which a token that they gained is void. What is behind a row's accepted drafts does not count: it
    is of a token that the row never had."""
    if not any(nonfinite):
        return ()
    return tuple(
        row for row, gained in enumerate(tokens) if any(nonfinite[n] for n in layout.logits_rows_of(row)[: len(gained)])
    )


def _sampled_slots(plan: StepPlan) -> list[int]:
    return [*plan.decode_slots, *(row.slot for row in plan.prefill if row.final)]


def _to_host(x: torch.Tensor) -> torch.Tensor:
    """A copy, which no later step changes; from a GPU one under way into pinned memory, complete when the stream gets
    there."""
    if x.device.type == "cpu":
        return x.clone()
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)
