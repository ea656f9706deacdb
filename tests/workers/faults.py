"""Mistakes that other engines' captured graphs had, planted into buckets of this one for the tests of the self-test.

A fault is planted while its bucket is captured. On a GPU it then is in the graph, and nowhere else; on a CPU a replay
is another run of the step, which has the fault each time. What a capture would freeze is frozen by the run before it,
on padding, as a capture would see it. That run also makes all memory that a fault needs, because a capture must not.

Shape legend: R rows, W width, T = R * W tokens, P pages a row may hold, H heads, V value features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from kernels import decode_state, mla_decode
from kernels.page import PAGE_TOKENS
from workers.graphs.capture import CapturedStep
from workers.graphs.record import no_garbage_collection
from workers.memory.scratch import Scratch
from workers.models.attention import decode_rows, latent
from workers.models.batch import DecodeBatch
from workers.proof.decode_steps import Candidate, SelfTest
from workers.protocol.plan import GraphKey
from workers.step.decode import DecodeStep
from workers.step.mixed import DRAFT, Stage, Tail
from workers.step.parts import StepOutput, StepParts

Fault = Callable[[pytest.MonkeyPatch, StepParts], None]
"""Replaces what is at fault, for as long as the patch lasts."""


def no_fault(patch: pytest.MonkeyPatch, parts: StepParts) -> None:
    """Plant no fault, for a bucket that is right."""


@torch.inference_mode()
def bucket(monkeypatch: pytest.MonkeyPatch, parts: StepParts, key: GraphKey, fault: Fault = no_fault) -> Candidate:
    """A bucket whose replay has the fault; its eager step has not, unless it is planted there too."""
    measured = Scratch(parts.device)
    if parts.device.type == "cuda":
        DecodeStep(parts, key, measured).run()  # eager runs are right, and may need more memory
    with monkeypatch.context() as patch:
        fault(patch, parts)
        DecodeStep(parts, key, measured).run()  # freezes, and on a GPU compiles and measures
        if parts.device.type == "cuda":
            buffer = torch.empty(measured.peak, dtype=torch.uint8, device=parts.device)
            with no_garbage_collection():
                captured = CapturedStep(DecodeStep(parts, key, Scratch(parts.device, buffer)))

            def replay(_: Fault = fault) -> StepOutput:  # the graph reads the fault's memory
                return captured.replay()

            return Candidate(captured.step, replay)
    step = DecodeStep(parts, key, Scratch(parts.device))

    def run_again() -> StepOutput:
        with monkeypatch.context() as patch:
            fault(patch, parts)
            return step.run()

    return Candidate(step, run_again)


def _write(to: Tensor, value: Tensor) -> None:
    """Write by a kernel, as a step's own work does, where `copy_` would ask for a copy of memory."""
    torch.add(value, 0, out=to)


class Memory:
    """A fault's own tensors, each made when first asked for."""

    def __init__(self) -> None:
        self.tensors: dict[Any, Tensor] = {}

    def __call__(self, key: Any, make: Callable[[], Tensor]) -> Tensor:
        if key not in self.tensors:
            self.tensors[key] = make()
        return self.tensors[key]


def frozen(name: str, output: int) -> Fault:
    """Freeze, at the capture, what the kernel `name` of a step's bookkeeping writes to its argument `output`."""
    memory, honest = Memory(), getattr(decode_state, name)

    def stale(*args: Any) -> None:
        honest(*args)
        _write(args[output], memory(args[output].shape, lambda: args[output].clone()))

    return lambda patch, parts: patch.setattr(decode_state, name, stale)


def lengths_off(entries: Callable[[int], int]) -> Fault:
    """Every row of width W attends to `entries`(W) entries more than it should."""
    memory, honest = Memory(), decode_state.feed

    def feed(state: Any, slot_R: Tensor, token_RW: Tensor, *out: Any) -> None:
        honest(state, slot_R, token_RW, *out)
        length_R = out[2]
        extra_R = memory(slot_R.shape, lambda: torch.empty_like(slot_R))
        torch.clamp(slot_R, -1, 0, out=extra_R)
        length_R.add_(extra_R.add_(1).mul_(entries(token_RW.shape[1])))

    return lambda patch, parts: patch.setattr(decode_state, "feed", feed)


def one_token() -> Fault:
    """Attention was captured for rows of one token."""
    return lengths_off(lambda width: 1 - width)


def one_too_many() -> Fault:
    """The last token of a row sees an entry that nobody wrote, NaN; those before it see one another's future."""
    return lengths_off(lambda width: 1)


@dataclass(frozen=True)
class Dealt:
    """Stands in for a plan of a GPU: what it dealt out, lengths [R], is all that attention works on."""

    length_R: Tensor


class SplitPlans:
    """Decode rows attend to what a plan deals out of them. A frozen plan is of the capture's lengths, not of now."""

    def __init__(self, *, frozen: bool = True) -> None:
        self.frozen, self.memory = frozen, Memory()

    def __call__(self, patch: pytest.MonkeyPatch, parts: StepParts) -> None:
        if parts.device.type == "cuda":
            self._plant(patch)
        else:
            self._plant_reference(patch)

    def _plant(self, patch: pytest.MonkeyPatch) -> None:
        honest = decode_rows.schedule_decode

        def plan(shape: Any, length_R: Tensor, *rest: Any, first: int, **options: Any) -> Any:
            workspace = honest(shape, length_R, *rest, first=first, **options)
            assert workspace is not None
            made = self.memory((shape, first), lambda: workspace.metadata.clone())
            if self.frozen:
                _write(workspace.metadata, made)
            return workspace

        patch.setattr(decode_rows, "schedule_decode", plan)

    def _plant_reference(self, patch: pytest.MonkeyPatch) -> None:
        """The reference plans nothing, so something that could be stale is put beside it."""
        honest = decode_rows.mla_decode

        def deal(heads: Any, rows: DecodeBatch, width: int, first: int, *rest: Any, **_: Any) -> DecodeBatch:
            made = self.memory((rows.length_R.shape, width, first), rows.length_R.clone)
            length_R = made if self.frozen else rows.length_R.clone()
            return replace(rows, workspace=Dealt(length_R))  # type: ignore[arg-type]

        def attend(
            q: Any, cache: Any, page: Any, length: Any, out: Any, lse: Any, workspace: Any, *, scale: Any, first: int,
            **_: Any,
        ) -> None:  # fmt: skip
            honest(q, cache, page, torch.minimum(length, workspace.length_R), out, lse, scale=scale, first=first)

        patch.setattr(latent, "plan_rows", deal)
        patch.setattr(decode_rows, "launch", SimpleNamespace(attend=attend, merge=lambda *_, **__: None))


class GroupedBounds:
    """Every token of a row sees what the row's last one may see."""

    def __init__(self) -> None:
        self._memory = Memory()

    def __call__(self, patch: pytest.MonkeyPatch, parts: StepParts) -> None:
        if parts.device.type == "cuda":
            self._plant(patch)
        else:
            self._plant_reference(patch)

    def _plant(self, patch: pytest.MonkeyPatch) -> None:
        """The kernels count bounds from a row's last token, so every token becomes a row, of the row's length."""
        launch, honest_plan = mla_decode.launch, decode_rows.schedule_decode
        honest_attend, honest_merge = launch.attend, launch.merge
        grouped: dict[int, tuple[Any, Tensor, Tensor]] = {}

        def plan(shape: Any, length_R: Tensor, page_RP: Tensor, *rest: Any, first: int, **options: Any) -> Any:
            rows, width, pages = shape.rows, shape.width, shape.pages
            length_RW = self._memory((shape, first, "length"), lambda: length_R.new_empty(rows, width))
            page_RWP = self._memory((shape, first, "page"), lambda: page_RP.new_empty(rows, width, pages))
            length_RW.copy_(length_R.unsqueeze(1).expand(rows, width))
            page_RWP.copy_(page_RP.unsqueeze(1).expand(rows, width, pages))
            where = length_RW.flatten(), page_RWP.flatten(0, 1)
            workspace = honest_plan(replace(shape, rows=rows * width, width=1), *where, *rest, first=first, **options)
            grouped[id(workspace)] = workspace, *where
            return workspace

        def attend(
            q: Any, cache: Any, page: Any, length: Any, out: Any, lse: Any, workspace: Any, **options: Any
        ) -> None:
            _, length_T, page_TP = grouped[id(workspace)]
            honest_attend(
                q.view(-1, 1, *q.shape[2:]), cache, page_TP, length_T, *_alone(out, lse), workspace, **options
            )

        def merge(out: Any, lse: Any, workspace: Any, **options: Any) -> None:
            honest_merge(*_alone(out, lse), workspace, **options)

        patch.setattr(decode_rows, "schedule_decode", plan)
        patch.setattr(launch, "attend", attend)
        patch.setattr(launch, "merge", merge)

    def _plant_reference(self, patch: pytest.MonkeyPatch) -> None:
        honest = decode_rows.mla_decode

        def grouped(q: Any, cache: Any, page: Any, length: Any, out: Any, lse: Any, **options: Any) -> None:
            for token in range(q.shape[1]):
                part = slice(token, token + 1)
                honest(q[:, part], cache, page, length, out[:, part], lse[:, part], **options)

        patch.setattr(decode_rows, "mla_decode", grouped)


def _alone(*tensors_RW: Tensor) -> list[Tensor]:
    """[T, 1, ...] of [R, W, ...]: every token as a row."""
    return [x_RW.view(-1, 1, *x_RW.shape[2:]) for x_RW in tensors_RW]


def padding_in_slot_zero() -> Fault:
    """A padded row is a row of slot 0."""
    memory, honest = Memory(), DecodeStep.run

    def run(step: DecodeStep) -> StepOutput:
        slot_R = step.slot_R
        step.slot_R = memory(slot_R.shape, lambda: torch.empty_like(slot_R))
        torch.clamp(slot_R, min=0, out=step.slot_R)
        try:
            return honest(step)
        finally:
            step.slot_R = slot_R

    return lambda patch, parts: patch.setattr(DecodeStep, "run", run)


def stashed_hidden_states() -> Fault:
    """The draft layer reads hidden states where the run before the capture had them."""
    memory = Memory()

    def plant(patch: pytest.MonkeyPatch, parts: StepParts) -> None:
        honest = parts.drafter.catch_up

        def stale(token_T: Any, hidden_TE: Any, *rest: Any) -> Any:
            return honest(token_T, memory(hidden_TE.shape, lambda: hidden_TE), *rest)

        patch.setattr(parts.drafter, "catch_up", stale)

    return plant


def frozen_random_offset() -> Fault:
    """Tokens are sampled with the noise of the capture's positions."""
    memory = Memory()

    def plant(patch: pytest.MonkeyPatch, parts: StepParts) -> None:
        assert parts.sampling is not None
        honest = parts.sampling.target_tokens

        def stale(logits: Any, layout: Any, slot: Any, fed: Any, position: Any, **options: Any) -> Any:
            return honest(logits, layout, slot, fed, memory(position.shape, position.clone), **options)

        patch.setattr(parts.sampling, "target_tokens", stale)

    return plant


def of_width_one(monkeypatch: pytest.MonkeyPatch, parts: StepParts, key: GraphKey) -> Candidate:
    """A bucket that is served by the graph of one token a row; what the others' results should be is not written."""
    step, narrow = (bucket(monkeypatch, parts, which) for which in (key, GraphKey(key.rows, 1, key.drafts)))
    layout, vocab = step.step.layout, parts.model.config.vocab_size
    decided_N = torch.zeros_like(step.step.decided_N)
    logits_NV = torch.zeros(layout.logits_rows, vocab, device=parts.device)

    def replay() -> StepOutput:
        narrow.step.slot_R.copy_(step.step.slot_R)
        output = narrow.replay()
        decided_N[: layout.logits_rows : key.width] = output.decided_N[: key.rows]
        decided_N[layout.accepted_slice] = output.decided_N[narrow.step.layout.accepted_slice]
        logits_NV[:: key.width] = output.logits_NV
        return StepOutput(layout, decided_N, logits_NV)

    return Candidate(step.step, replay)


KEY = GraphKey(4, 3, 2)


@dataclass(frozen=True)
class Case:
    """A fault of a decode step, and what the self-test must say of it."""

    planted: Callable[[pytest.MonkeyPatch, StepParts, GraphKey], Candidate]
    caught: tuple[str, ...]
    """Each is part of a problem, in one of the states."""
    key: GraphKey = KEY
    seeds: range = range(1)
    """Random states, where it takes some that not every one is: padding, and a slot without a row."""

    def check(self, monkeypatch: pytest.MonkeyPatch, parts: StepParts) -> None:
        """Check that of three like buckets the one with the fault fails, as it should, and the others pass."""
        right, wrong = bucket(monkeypatch, parts, self.key), self.planted(monkeypatch, parts, self.key)
        problems: list[str] = []
        for seed in self.seeds:
            before, found, after = SelfTest(parts, seed).run([right, wrong, right])
            assert (before.problems, after.problems) == ((), ())
            problems += found.problems
        assert all(any(text in problem for problem in problems) for text in self.caught), problems


def case(make: Callable[[], Fault], *caught: str, key: GraphKey = KEY, seeds: range = range(1)) -> Case:
    """Make the case of a fault that is planted for a capture."""
    return Case(lambda monkeypatch, parts, key: bucket(monkeypatch, parts, key, make()), caught, key, seeds)


FAULTS = {
    "a graph of width 1 replayed at 2": Case(
        of_width_one, ("logits differ", "target tokens differ", "cache of layer 0 differs"), GraphKey(4, 2, 1)
    ),
    "attention of width 1 replayed at 2": case(one_token, "logits differ", key=GraphKey(4, 2, 1)),
    "lengths frozen at capture": case(lambda: frozen("feed", 5), "logits differ"),
    "page tables frozen at capture": case(lambda: frozen("feed", 6), "logits differ"),
    "split plans frozen at capture": case(SplitPlans, "logits differ"),
    "bounds grouped per request": case(GroupedBounds, "logits differ"),
    "bounds one entry too far": case(one_too_many, "logits differ"),
    "padding that writes slot 0": case(
        padding_in_slot_zero,
        "a slot without a sampled row changed",
        # Its former tenant's page belongs to somebody else by now.
        "cache of layer 0 changed outside the rows' own entries",
        seeds=range(6),
    ),
    "a tensor stashed across segments": case(stashed_hidden_states, "cache of layer"),
    "a frozen random offset": case(frozen_random_offset, "target tokens differ"),
}
"""Faults of decode steps."""


class StaleAttention(Stage):
    """A segment reads what attention gave the one before."""

    def __init__(self, parts: StepParts, tokens: int, scratch: Scratch, inner: Scratch) -> None:
        super().__init__(parts, tokens, scratch, inner)
        attended_THV = self.tensors[0].buffers.attended_THV
        self._before_THV, self._now_THV = torch.zeros_like(attended_THV), torch.zeros_like(attended_THV)

    def run_segment(self, which: int, index: int) -> None:
        attended_THV = self.tensors[which].buffers.attended_THV
        _write(self._now_THV, attended_THV)
        if index > 1:
            _write(attended_THV, self._before_THV)
        super().run_segment(which, index)
        _write(self._before_THV, self._now_THV)


class StashedHidden(Stage):
    """The draft layer reads the target's hidden states where they were once."""

    def __init__(self, parts: StepParts, tokens: int, scratch: Scratch, inner: Scratch) -> None:
        super().__init__(parts, tokens, scratch, inner)
        assert self.hidden_TE is not None
        self.tensors[DRAFT] = replace(self.tensors[DRAFT], source_TE=torch.zeros_like(self.hidden_TE))


class FrozenPositions(Stage):
    """The positions of the capture, for ever."""

    def run_segment(self, which: int, index: int) -> None:
        self.position_T.fill_(0)
        super().run_segment(which, index)


class ForgottenResidual(Stage):
    """The residual of a former step is not cleared."""

    def run_segment(self, which: int, index: int) -> None:
        super().run_segment(which, index)
        if not index:
            self.tensors[which].buffers.residual_TE.add_(1e-3)


class ForgottenPadding(Stage):
    """Stage that leaves what the memory held before where a padded token's cache index belongs: here the pool's last
    page."""

    def __init__(self, parts: StepParts, tokens: int, scratch: Scratch, inner: Scratch) -> None:
        super().__init__(parts, tokens, scratch, inner)
        self._padding_T = torch.zeros(tokens, dtype=torch.bool, device=parts.device)

    def run_segment(self, which: int, index: int) -> None:
        torch.le(self.live_T, 0, out=self._padding_T)
        self.cache_slot_T.masked_fill_(self._padding_T, PAGE_TOKENS * (self.parts.cache.pages - 1))
        super().run_segment(which, index)


class PaddingInSlotZero(Stage):
    """A padded token is written to where slot 0 begins: to a former tenant's page where no row has that slot."""

    def __init__(self, parts: StepParts, tokens: int, scratch: Scratch, inner: Scratch) -> None:
        super().__init__(parts, tokens, scratch, inner)
        self._padding_T = torch.zeros(tokens, dtype=torch.bool, device=parts.device)
        self._begin_1 = torch.zeros(1, dtype=torch.int64, device=parts.device)

    def run_segment(self, which: int, index: int) -> None:
        torch.le(self.live_T, 0, out=self._padding_T)
        _write(self._begin_1, self.parts.state.tensors.page_SP[0, :1])
        self._begin_1.mul_(PAGE_TOKENS)
        torch.where(self._padding_T, self._begin_1, self.cache_slot_T, out=self.cache_slot_T)
        super().run_segment(which, index)


SEGMENT_FAULTS: dict[type[Stage], str] = {
    StaleAttention: "logits differ",
    FrozenPositions: "logits differ",
    ForgottenResidual: "logits differ",
    StashedHidden: "cache of layer",
}
"""Faults of mixed steps, and what the proof must say of every bucket."""


class StaleTail(Tail):
    """The last layer ends with what attention gave the tokens of the run before."""

    def __init__(self, parts: StepParts, tokens: int, inner: Scratch) -> None:
        super().__init__(parts, tokens, inner)
        attended_NHV = self.buffers.attended_THV
        self._before_NHV, self._now_NHV = torch.zeros_like(attended_NHV), torch.zeros_like(attended_NHV)

    def run(self) -> None:
        attended_NHV = self.buffers.attended_THV
        _write(self._now_NHV, attended_NHV)
        _write(attended_NHV, self._before_NHV)
        super().run()
        _write(self._before_NHV, self._now_NHV)


class GatheredOnce(Tail):
    """The gathers are in the graph, of buffers that lie where the capture's did."""

    def __init__(self, parts: StepParts, tokens: int, inner: Scratch) -> None:
        super().__init__(parts, tokens, inner)
        buffers = self.buffers
        self._residual_NE, self._attended_NHV = (
            torch.zeros_like(buffers.residual_TE),
            torch.ones_like(buffers.attended_THV),
        )

    def run(self) -> None:
        _write(self.buffers.residual_TE, self._residual_NE)
        _write(self.buffers.attended_THV, self._attended_NHV)
        super().run()


class KeptResidual(Tail):
    """Something of the residual of the run before is still there."""

    def __init__(self, parts: StepParts, tokens: int, inner: Scratch) -> None:
        super().__init__(parts, tokens, inner)
        self._before_NE = torch.full_like(self.buffers.residual_TE, 0.25)

    def run(self) -> None:
        self.buffers.residual_TE.add_(self._before_NE)
        super().run()
        _write(self._before_NE, self.buffers.residual_TE)


TAIL_FAULTS: tuple[type[Tail], ...] = (StaleTail, GatheredOnce, KeptResidual)
"""Faults of mixed steps' last pass."""

T = TypeVar("T")


def captured_with(base: type[T], fault: type[Any]) -> type[T]:
    """A stage that captures, or records, its segments as `base` does, with the fault in them; or a logits-only tail."""
    return type(f"{base.__name__}With{fault.__name__}", (base, fault), {})
