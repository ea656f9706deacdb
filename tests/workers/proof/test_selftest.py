"""The self-test finds planted faults, and passes on what is right. Here a replay is a second run of the same step; on a
GPU it is a graph (tests/workers/proof/test_gpu_faults.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import decode_state
from kernels.latent_entry import fp8_entry
from kernels.page import PAGE_TOKENS
from tests.tiny_models import write_tiny
from tests.workers.faults import FAULTS, KEY, GroupedBounds, SplitPlans, bucket
from tests.workers.test_engine import engine
from workers.memory.scratch import Scratch
from workers.models import general
from workers.proof.decode_steps import Candidate, SelfTest
from workers.protocol.plan import Admission, DecodeBuckets, GraphKey
from workers.protocol.report import BucketReport
from workers.step.decode import DecodeStep
from workers.step.parts import StepOutput, StepParts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("v3"), "v3", seed=3)


def parts_of(folder: Path, width: int = 3, **settings: Any) -> StepParts:
    return engine(folder, width=width, max_rows=6, cache_pages=60, **settings).runner.parts


def step_of(parts: StepParts, key: GraphKey) -> DecodeStep:
    return DecodeStep(parts, key, Scratch(parts.device))


def report(
    parts: StepParts,
    key: GraphKey,
    replay: Callable[[DecodeStep], StepOutput],
    seed: int = 0,
    plain: bool | None = None,
) -> BucketReport:
    step = step_of(parts, key)
    [found] = SelfTest(parts, seed, plain=plain).run([Candidate(step, lambda: replay(step))])
    return found


REFERENCES = {"the plain forward pass": True, "the prefill path": False}
"""References of logits on a CPU and on a GPU; whether each is plain."""


@pytest.mark.parametrize("width", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_every_bucket_passes(folder: Path, width: int) -> None:
    parts = parts_of(folder, width)
    steps = [step_of(parts, key) for key in DecodeBuckets(6, width)]
    reports = SelfTest(parts).run([Candidate(step, step.run) for step in steps])
    assert [r.problems for r in reports] == [()] * len(reports)
    assert [(r.bucket, r.drafts) for r in reports] == [(f"{s.key.rows} x {s.key.width}", s.key.drafts) for s in steps]
    assert max(r.logits_error for r in reports) < 1e-4
    if width > 1:
        assert sum(r.accepted for r in reports) > 5
    assert not any(layer.isnan().any() for layer in parts.cache.layers)
    assert not parts.state.tensors.page_SP.any()


def test_every_bucket_passes_on_an_fp8_cache(folder: Path) -> None:
    parts = parts_of(folder, kv_cache_dtype="fp8")
    assert parts.cache.layers[0].dtype == torch.uint8
    steps = [step_of(parts, key) for key in DecodeBuckets(6, 3)]
    reports = SelfTest(parts).run([Candidate(step, step.run) for step in steps])
    assert [r.problems for r in reports] == [()] * len(reports)
    assert sum(r.accepted for r in reports) > 5
    assert not any(layer.any() for layer in parts.cache.layers)


def test_a_scale_of_another_entry_is_caught(folder: Path) -> None:
    """One bit of an entry that a row owns, and one of what no row may write."""
    parts = parts_of(folder, kv_cache_dtype="fp8")
    scales = fp8_entry(32, 8, torch.float32).scales

    def replay(step: DecodeStep, own: bool) -> StepOutput:
        output, state = step.run(), parts.state.tensors
        slot = int(step.slot_R[0])
        entry = int(state.length_S[slot]) - 1 if own else 0
        page = int(state.page_SP[slot, entry // PAGE_TOKENS])
        parts.cache.layers[1][page, entry % PAGE_TOKENS, scales] ^= 1
        return output

    assert "cache of layer 1 differs" in report(parts, KEY, lambda step: replay(step, own=True)).problems
    changed = "cache of layer 1 changed outside the rows' own entries"
    assert changed in report(parts, KEY, lambda step: replay(step, own=False)).problems


def test_a_pool_of_two_pages_is_enough(folder: Path) -> None:
    parts = engine(folder, width=2, max_rows=4, cache_pages=3, max_context=32).runner.parts
    cut = [layer[:2] for layer in parts.cache.layers]
    parts.cache.layers[:] = cut
    steps = [step_of(parts, key) for key in DecodeBuckets(4, 2)]
    assert all(r.passed for r in SelfTest(parts).run([Candidate(step, step.run) for step in steps]))


SLOW = (
    "padding that writes slot 0",
    "split plans frozen at capture",
    "page tables frozen at capture",
    "a graph of width 1 replayed at 2",
    "bounds one entry too far",
)
"""Others are of the same kinds."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long if n in SLOW else ()) for n in FAULTS])
def test_planted_faults_are_caught(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name].check(monkeypatch, parts_of(folder))


def test_a_split_plan_that_is_not_frozen_passes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, plans = parts_of(folder), SplitPlans(frozen=False)
    [found] = SelfTest(parts).run([bucket(monkeypatch, parts, KEY, plans)])
    assert found.problems == ()
    assert len(plans.memory.tensors) == 3  # of the target's pass, and of the draft layer's two


@pytest.mark.parametrize("reference", REFERENCES)
def test_bounds_grouped_per_request_are_caught_even_when_eager_has_them_too(
    reference: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = parts_of(folder)
    GroupedBounds()(monkeypatch, parts)
    problems = report(parts, KEY, lambda step: step.run(), plain=REFERENCES[reference]).problems
    assert any(f"away from {reference}" in problem for problem in problems)


def test_a_mistake_that_all_ways_share_is_caught(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefill path, which computes it as well, cannot tell; the plain forward pass does."""
    parts, honest = parts_of(folder), general.silu_mul

    def halved(gate_up_TF: Tensor, act_TI: Tensor, **options: Any) -> None:
        honest(gate_up_TF, act_TI, **options)
        act_TI.mul_(0.5)

    monkeypatch.setattr(general, "silu_mul", halved)
    assert report(parts, KEY, lambda step: step.run(), plain=False).problems == ()
    problems = report(parts, KEY, lambda step: step.run()).problems
    assert any("away from the plain forward pass" in problem for problem in problems)


def test_a_page_table_whose_tail_is_not_zero_filled_is_caught(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of(folder)

    def forget(admissions: list[Admission]) -> None:
        pass

    monkeypatch.setattr(parts.state, "admit", forget)
    assert "a newcomer's page table keeps former pages" in report(parts, KEY, lambda step: step.run()).problems


def test_a_write_outside_the_rows_is_caught(folder: Path) -> None:
    parts = parts_of(folder)

    def replay(step: DecodeStep) -> StepOutput:
        output = step.run()
        page = int(parts.state.tensors.page_SP[int(step.slot_R[0]), 0])
        parts.cache.layers[1][page, 0, 3] += 1
        return output

    problems = report(parts, KEY, replay).problems
    assert "cache of layer 1 changed outside the rows' own entries" in problems


def feed_with(change: Callable[[Any, Any], None]) -> Callable[..., None]:
    """`decode_state.feed`, then a mistake in the lengths [R] and page tables [R, P] of live rows."""
    feed = decode_state.feed

    def mistaken(state: Any, slot_R: Any, *out: Any) -> None:
        feed(state, slot_R, *out)
        length_R, page_RP, _ = out[-3:]
        length_L, page_LP = length_R[slot_R >= 0], page_RP[slot_R >= 0]
        change(length_L, page_LP)
        length_R[slot_R >= 0], page_RP[slot_R >= 0] = length_L, page_LP

    return mistaken


@pytest.mark.parametrize(
    ("change", "caught"),
    [
        pytest.param(lambda length, page: length.add_(1), "away from {}", id="past the length: NaN"),
        pytest.param(lambda length, page: page.zero_(), "away from {}", id="the null page: NaN"),
        pytest.param(
            lambda length, page: length.add_(2 * PAGE_TOKENS), "indexed out of bounds", id="past the pages: a huge id"
        ),
    ],
)
@pytest.mark.parametrize("reference", REFERENCES)
def test_poison_that_is_read_is_caught_even_when_eager_reads_it_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, Any], None], caught: str, reference: str
) -> None:
    parts = parts_of(folder)
    monkeypatch.setattr(decode_state, "feed", feed_with(change))
    found = report(parts, KEY, lambda step: step.run(), plain=REFERENCES[reference])
    assert not found.passed
    assert any(caught.format(reference) in problem for problem in found.problems)


def test_what_both_runs_change_wrongly_is_caught(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, honest = parts_of(folder), DecodeStep.run

    def run(step: DecodeStep) -> StepOutput:
        output = honest(step)
        free = sorted(set(range(6)) - set(step.slot_R.tolist()))[0]
        assert parts.sampling is not None
        parts.sampling.tables.whole_SI[free, -1] += 1
        parts.cache.layers[2][int(parts.state.tensors.page_SP[int(step.slot_R[0]), 0]), 0] = 1.0
        return output

    monkeypatch.setattr(DecodeStep, "run", run)
    problems = report(parts, KEY, lambda step: step.run()).problems
    assert "a slot without a sampled row changed" in problems
    assert "cache of layer 2 changed outside the rows' own entries" in problems


def former_page(parts: StepParts, step: DecodeStep, start: int) -> int:
    free = sorted(set(range(6)) - set(step.slot_R.tolist()))[0]
    parts.cache.layers[1][int(parts.state.tensors.page_SP[free, 0]), 5] = 1.0
    return 1


def draft_entry_before_the_first(parts: StepParts, step: DecodeStep, start: int) -> int:
    draft_entry(parts, step, start).fill_(1.0)
    return 3


def draft_entry_of_the_last_draft(parts: StepParts, step: DecodeStep, start: int) -> int:
    draft_entry(parts, step, start + step.key.width + max(step.key.drafts, 1)).fill_(1.0)
    return 3


def draft_entry(parts: StepParts, step: DecodeStep, position: int) -> Tensor:
    """Return the entry of the first row, in the draft layer's cache."""
    page = int(parts.state.tensors.page_SP[int(step.slot_R[0]), position // PAGE_TOKENS])
    return parts.cache.layers[-1][page, position % PAGE_TOKENS]


@pytest.mark.parametrize("key", [KEY, GraphKey(4, 3, 0), GraphKey(4, 1, 2)], ids=str)
@pytest.mark.parametrize("change", [former_page, draft_entry_before_the_first, draft_entry_of_the_last_draft])
def test_entries_that_both_runs_write_wrongly_are_caught(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[StepParts, DecodeStep, int], int],
    key: GraphKey,
) -> None:
    parts, honest = parts_of(folder), DecodeStep.run

    def run(step: DecodeStep) -> StepOutput:
        start = int(parts.state.tensors.length_S[int(step.slot_R[0])])
        output = honest(step)
        layers.add(change(parts, step, start))
        return output

    layers: set[int] = set()
    monkeypatch.setattr(DecodeStep, "run", run)
    problems = report(parts, key, lambda step: step.run()).problems
    assert problems == tuple(f"cache of layer {layer} changed outside the rows' own entries" for layer in layers)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 12))])
def test_any_seed_catches_a_frozen_random_offset(folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    replace(FAULTS["a frozen random offset"], seeds=range(seed, seed + 1)).check(monkeypatch, parts_of(folder))
