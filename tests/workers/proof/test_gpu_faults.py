"""The self-test finds mistakes in real graphs: each is captured into one (tests/workers/faults.py), and eager steps are
right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from kernels.runtime import repeat
from kernels.runtime.repeat import Repeat
from tests.workers.faults import (
    FAULTS,
    KEY,
    SEGMENT_FAULTS,
    TAIL_FAULTS,
    ForgottenPadding,
    GroupedBounds,
    PaddingInSlotZero,
    SplitPlans,
    bucket,
    captured_with,
)
from tests.workers.test_gpu_engine import engine
from workers.cache.paged import PagedCache
from workers.graphs.capture import Warmed
from workers.graphs.record import no_garbage_collection
from workers.graphs.segments import CapturedStage, CapturedTail
from workers.memory.scratch import Scratch
from workers.proof.decode_steps import SelfTest
from workers.proof.segments import SegmentProof
from workers.proof.tails import prove_tails
from workers.protocol.plan import Admission, GraphKey, TokenBuckets
from workers.protocol.report import BucketReport
from workers.step.mixed import Stage, Tail
from workers.step.parts import StepParts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BUDGET = 80


@dataclass(frozen=True)
class Rank:
    """Parts with which a rank's graphs are captured."""

    parts: StepParts
    warmed: Warmed


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def rank(request: pytest.FixtureRequest) -> Rank:
    settings = {"dtype": request.param, "max_rows": 6, "token_budget": BUDGET, "cache_pages": 60, "max_context": 200}
    runner = engine("cuda", width=3, graphs=True, **settings).runner
    return Rank(runner.parts, runner.warm_up())


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_caught(name: str, rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name].check(monkeypatch, rank.parts)


def test_a_split_plan_that_is_not_frozen_passes(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = SplitPlans(frozen=False)
    [found] = SelfTest(rank.parts).run([bucket(monkeypatch, rank.parts, KEY, plans)])
    assert found.problems == ()
    assert len(plans.memory.tensors) == 3  # of the target's pass, and of the draft layer's two


def test_bounds_grouped_per_request_are_caught_even_when_eager_has_them_too(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, fault = rank.parts, GroupedBounds()
    both = bucket(monkeypatch, parts, KEY, fault)
    fault(monkeypatch, parts)
    [found] = SelfTest(parts, seed=2).run([both])  # rows so short that a neighbour counts, in bfloat16, too
    assert [text for text in found.problems if "away from the prefill path" in text], found.problems
    assert "logits differ" not in found.problems


def test_a_page_table_whose_tail_is_not_zero_filled_is_caught(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(admissions: list[Admission]) -> None:
        pass

    candidate = bucket(monkeypatch, rank.parts, KEY)
    with monkeypatch.context() as patch:
        patch.setattr(rank.parts.state, "admit", forget)
        [forgotten] = SelfTest(rank.parts).run([candidate])
    assert forgotten.problems == ("a newcomer's page table keeps former pages",)
    [zero_filled] = SelfTest(rank.parts).run([candidate])
    assert zero_filled.problems == ()


@torch.inference_mode()
def reports(rank: Rank, fault: type[Stage] | None = None, seeds: range = range(1)) -> list[BucketReport]:
    """Return the reports of every token bucket, captured with the fault."""
    parts, device, stage = rank.parts, rank.parts.device, CapturedStage
    if fault is not None:
        stage = captured_with(CapturedStage, fault)
        eager = fault(parts, BUDGET, Scratch(device), Scratch(device))  # loads the fault's own kernels
        eager.clear()
        for which in range(len(eager.segments)):
            for index in eager.indices(which):
                eager.run_segment(which, index)
    stages, _ = captured(rank, stage, CapturedTail)
    return [report for seed in seeds for report in SegmentProof(parts, seed).run(stages)]


def captured(
    rank: Rank, stage: type[CapturedStage], tail: type[CapturedTail]
) -> tuple[list[CapturedStage], list[CapturedTail]]:
    """Stages of every token bucket, and the tails that they share."""
    parts, warmed, device, buckets = rank.parts, rank.warmed, rank.parts.device, TokenBuckets(BUDGET)
    outer, inner = (torch.empty(size, dtype=torch.uint8, device=device) for size in (warmed.scratch, warmed.inner))
    with no_garbage_collection():
        keys = buckets.tails(parts.most_tail_tokens(parts.state.slots))
        tails = {key: tail(parts, key.tokens, Scratch(device, inner)) for key in keys}
        stages = [stage(parts, key.tokens, Scratch(device, outer), Scratch(device, inner), tails) for key in buckets]
    return stages, list(tails.values())


@torch.inference_mode()
def tail_reports(rank: Rank, fault: type[Tail] | None = None) -> tuple[list[BucketReport], list[BucketReport]]:
    """Return the reports of every tail, captured with the fault, and of every token bucket."""
    parts, device, tail = rank.parts, rank.parts.device, CapturedTail
    if fault is not None:
        tail = captured_with(CapturedTail, fault)
        for key in TokenBuckets(BUDGET).tails(parts.most_tail_tokens(parts.state.slots)):
            eager = fault(parts, key.tokens, Scratch(device))  # loads the fault's own kernels
            for gathered in eager.buffers.finished:
                gathered.zero_()
            eager.run()
    stages, tails = captured(rank, CapturedStage, tail)
    return prove_tails(parts, tails), SegmentProof(parts).run(stages)


@pytest.mark.parametrize("fault", TAIL_FAULTS)
def test_faults_in_tails_are_caught_in_every_tail_and_bucket(fault: type[Tail], rank: Rank) -> None:
    for found in tail_reports(rank):
        assert [one.problems for one in found] == [()] * len(found)
    tails, buckets = tail_reports(rank, fault)
    assert [(one.bucket, one.problems) for one in tails] == [("16 tokens", ("hidden states differ",))]
    assert [one.bucket for one in buckets] == [f"{tokens} tokens" for tokens in (80, 64, 48, 32, 16)]
    for one in buckets:
        assert any("cache of layer" in text for text in one.problems), one  # where it was drafted


@pytest.mark.parametrize("fault", SEGMENT_FAULTS)
def test_faults_in_segments_are_caught_in_every_bucket(fault: type[Stage], rank: Rank) -> None:
    assert [found.problems for found in reports(rank)] == [()] * 5
    found = reports(rank, fault)
    assert [found.bucket for found in found] == [f"{tokens} tokens" for tokens in (80, 64, 48, 32, 16)]
    for one in found:
        assert any(SEGMENT_FAULTS[fault] in text for text in one.problems), one


def test_layers_launched_with_anothers_tensors_are_caught(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are those in graphs of decode steps, and between the segments of mixed ones."""
    plain, key = Repeat.__call__, GraphKey(6, 3, 2)

    def wrong(self: Repeat, index: int, call: Callable[[], None]) -> None:
        """Every layer but the first attends with what is the own of the one before."""
        layers = self._layers
        if index and self._noted:
            for again in self._noted:
                again(layers.own[index - 1], layers.addresses[index - 1], repeat._stream(rank.parts.device))
        else:
            plain(self, index, call)

    def plant(patch: pytest.MonkeyPatch, parts: StepParts) -> None:
        patch.setattr(Repeat, "__call__", wrong)

    buckets = [bucket(monkeypatch, rank.parts, key), bucket(monkeypatch, rank.parts, key, plant)]
    right, found = SelfTest(rank.parts).run(buckets)
    assert right.problems == ()
    assert "logits differ" in found.problems
    with monkeypatch.context() as patch:
        plant(patch, rank.parts)
        mixed = reports(rank)
    assert all("logits differ" in one.problems for one in mixed), mixed


def test_padding_of_segments_that_is_written_to_a_row_is_caught(rank: Rank) -> None:
    """The last page of a pool so small that rows have it."""
    few = PagedCache([layer[:8] for layer in rank.parts.cache.layers], rank.parts.cache.specs)
    rank, seeds = replace(rank, parts=replace(rank.parts, cache=few)), range(4)
    assert [found.problems for found in reports(rank, seeds=seeds)] == [()] * 20
    found = reports(rank, ForgottenPadding, seeds)
    assert any("changed outside" in text or "differs" in text for one in found for text in one.problems)


def test_padding_of_segments_that_is_written_to_a_former_tenants_page_is_caught(rank: Rank) -> None:
    """Or to the first entry of the row that has slot 0, which is cached already."""
    found = reports(rank, PaddingInSlotZero, range(4))
    assert any("cache of layer 0 changed outside the rows' own entries" in one.problems for one in found), found
