"""The self-test finds planted faults, and passes on what is right. Here a replay is a second run of the same step; on a
GPU it is a graph (tests/workers/test_gpu_engine.py)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import decode_state
from kernels.page import PAGE_TOKENS
from tests.tiny_models import write_tiny
from tests.workers.test_engine import engine
from workers.batch import DecodeBatch
from workers.decode_step import DecodeStep
from workers.graphs.ladder import Ladder
from workers.graphs.report import BucketReport
from workers.graphs.selftest import Candidate, SelfTest
from workers.plan import Admission, GraphKey
from workers.scratch import Scratch
from workers.step import StepOutput, StepParts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("v3"), "v3", seed=3)


def parts_of(folder: Path, width: int = 3, **settings: Any) -> StepParts:
    return engine(folder, width=width, max_rows=6, cache_pages=60, **settings).runner.parts


def step_of(parts: StepParts, key: GraphKey) -> DecodeStep:
    return DecodeStep(parts, key, Scratch(parts.device))


def report(parts: StepParts, key: GraphKey, replay: Callable[[DecodeStep], StepOutput], seed: int = 0) -> BucketReport:
    step = step_of(parts, key)
    [found] = SelfTest(parts, seed).run([Candidate(step, lambda: replay(step))])
    return found


@pytest.mark.parametrize("width", [1, 2, 4])
def test_every_bucket_passes(folder: Path, width: int) -> None:
    parts = parts_of(folder, width)
    steps = [step_of(parts, key) for key in Ladder(6, width)]
    reports = SelfTest(parts).run([Candidate(step, step.run) for step in steps])
    assert [r.problems for r in reports] == [()] * len(reports)
    assert [(r.bucket, r.drafts) for r in reports] == [(f"{s.key.rows} x {s.key.width}", s.key.drafts) for s in steps]
    assert max(r.logits_error for r in reports) < 1e-4
    if width > 1:
        assert sum(r.accepted for r in reports) > 5
    assert not any(layer.isnan().any() for layer in parts.cache.layers)
    assert not parts.state.tensors.page_SP.any()


def test_a_pool_of_two_pages_is_enough(folder: Path) -> None:
    parts = engine(folder, width=2, max_rows=4, cache_pages=3, max_context=32).runner.parts
    cut = [layer[:2] for layer in parts.cache.layers]
    parts.cache.layers[:] = cut
    steps = [step_of(parts, key) for key in Ladder(4, 2)]
    assert all(r.passed for r in SelfTest(parts).run([Candidate(step, step.run) for step in steps]))


class Frozen:
    """Calls a function, and the next time answers with what the first call wrote."""

    def __init__(self, function: Callable[..., None], *outputs: int) -> None:
        self._function, self._outputs = function, outputs
        self._first: list[torch.Tensor] | None = None

    def __call__(self, *args: Any) -> None:
        self._function(*args)
        if self._first is None:
            self._first = [args[index].clone() for index in self._outputs]
        for index, value in zip(self._outputs, self._first, strict=True):
            args[index].copy_(value)


def faulty(
    monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[..., None]
) -> Callable[[DecodeStep], StepOutput]:
    """A replay during which one of the bookkeeping kernels is replaced."""

    def replay(step: DecodeStep) -> StepOutput:
        with monkeypatch.context() as patch:
            patch.setattr(decode_state, name, function)
            return step.run()

    return replay


def frozen_at_capture(
    monkeypatch: pytest.MonkeyPatch, parts: StepParts, key: GraphKey, name: str, outputs: int
) -> Callable[[DecodeStep], StepOutput]:
    """What the kernel `name` writes to its argument `outputs` is frozen at a capture on padding."""
    frozen = Frozen(getattr(decode_state, name), outputs)
    replay = faulty(monkeypatch, name, frozen)
    replay(step_of(parts, key))
    return replay


KEY = GraphKey(4, 3, 2)


def test_lengths_frozen_at_capture_are_caught(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of(folder)
    replay = frozen_at_capture(monkeypatch, parts, KEY, "feed", 5)
    assert "logits differ" in report(parts, KEY, replay).problems


def test_page_tables_frozen_at_capture_are_caught(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of(folder)
    replay = frozen_at_capture(monkeypatch, parts, KEY, "feed", 6)
    assert "logits differ" in report(parts, KEY, replay).problems


@dataclass(frozen=True)
class Dealt:
    """Stands in for a plan of a GPU: what it dealt out, lengths [R], is all that attention works on."""

    length_R: torch.Tensor


def attention_by_plan(monkeypatch: pytest.MonkeyPatch, plan: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Decode rows attend to what `plan` makes of their lengths, within their own bounds."""
    from workers.models import attention

    honest = attention.mla_decode

    def deal(self: Any, rows: DecodeBatch, *rest: Any) -> DecodeBatch:
        return replace(rows, workspace=Dealt(plan(rows.length_R)))  # type: ignore[arg-type]

    def dealt(
        q: Any, cache: Any, page: Any, length: Any, out: Any, lse: Any, *, workspace: Any, **options: Any
    ) -> None:
        honest(q, cache, page, torch.minimum(length, workspace.length_R), out, lse, **options)

    monkeypatch.setattr(attention.LatentAttention, "_dealt", deal)
    monkeypatch.setattr(attention, "mla_decode", dealt)


@pytest.mark.parametrize("frozen", [False, True])
def test_split_plans_frozen_at_capture_are_caught(frozen: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of(folder)
    made: list[torch.Tensor] = []
    stale: deque[torch.Tensor] = deque()

    def plan(length_R: torch.Tensor) -> torch.Tensor:
        made.append(length_R.clone())
        return stale.popleft() if stale else made[-1]

    attention_by_plan(monkeypatch, plan)
    step_of(parts, KEY).run()  # the capture, on padding
    captured = tuple(made)
    assert len(captured) == 3  # the target's pass, and the draft layer's two

    def replay(step: DecodeStep) -> StepOutput:
        stale.extend(captured if frozen else ())
        return step.run()

    problems = report(parts, KEY, replay).problems
    assert problems == () if not frozen else "logits differ" in problems


def test_a_graph_of_width_one_replayed_at_two_is_caught(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, feed = parts_of(folder), decode_state.feed

    def one_token(
        state: Any, slot_R: Any, token_RW: Any, position_RW: Any, cache_RW: Any, length_R: Any, page: Any
    ) -> None:
        feed(state, slot_R, token_RW, position_RW, cache_RW, length_R, page)
        length_R.sub_((slot_R >= 0) * (token_RW.shape[1] - 1))

    problems = report(parts, GraphKey(4, 2, 1), faulty(monkeypatch, "feed", one_token)).problems
    assert "logits differ" in problems


def test_bounds_grouped_per_request_are_caught_even_when_eager_has_them_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.models import attention

    parts, honest = parts_of(folder), attention.mla_decode

    def grouped(q: Any, cache: Any, page: Any, length: Any, out: Any, lse: Any, **options: Any) -> None:
        for token in range(q.shape[1]):  # every token sees what the last one may see
            part = slice(token, token + 1)
            honest(q[:, part], cache, page, length, out[:, part], lse[:, part], **options)

    monkeypatch.setattr(attention, "mla_decode", grouped)
    problems = report(parts, KEY, lambda step: step.run()).problems
    assert any("away from the prefill path" in problem for problem in problems)


def test_padding_that_writes_slot_zero_is_caught(folder: Path) -> None:
    parts = parts_of(folder)

    def replay(step: DecodeStep) -> StepOutput:
        step.slot_R.masked_fill_(step.slot_R < 0, 0)
        return step.run()

    # The bucket must have padding, and slot 0 no row: whichever seed gives that.
    found = [report(parts, GraphKey(3, 3, 2), replay, seed).problems for seed in range(6)]
    assert any("a slot without a row changed" in problems for problems in found)
    # Its former tenant's page belongs to somebody else by now.
    assert any("cache of layer 0 changed outside the rows' own entries" in problems for problems in found)


def test_a_tensor_stashed_across_segments_is_caught(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of(folder)
    model, stash = parts.model, []
    honest = model.draft

    def stale(token_T: Any, hidden_TE: Any, *rest: Any) -> Any:
        stash.append(hidden_TE.clone())
        first = next(old for old in stash if old.shape == hidden_TE.shape)
        return honest(token_T, first, *rest)

    def replay(step: DecodeStep) -> StepOutput:
        with monkeypatch.context() as patch:
            patch.setattr(model, "draft", stale)
            return step.run()

    replay(step_of(parts, KEY))
    assert any(what in p for p in report(parts, KEY, replay).problems for what in ("cache of layer", "drafts differ"))


def test_a_frozen_random_offset_is_caught(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of(folder)
    assert parts.sampling is not None
    sampling, kept = parts.sampling, []
    honest = sampling.target_tokens

    def frozen(logits: Any, layout: Any, slot: Any, fed: Any, position: Any, *rest: Any, **options: Any) -> Any:
        kept.append(position.clone())
        return honest(logits, layout, slot, fed, kept[0], *rest, **options)

    def replay(step: DecodeStep) -> StepOutput:
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "target_tokens", frozen)
            return step.run()

    replay(step_of(parts, KEY))
    assert "target tokens differ" in report(parts, KEY, replay).problems


def test_a_page_table_whose_tail_is_not_scrubbed_is_caught(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        length_R, page_RP = out[-2:]
        length_L, page_LP = length_R[slot_R >= 0], page_RP[slot_R >= 0]
        change(length_L, page_LP)
        length_R[slot_R >= 0], page_RP[slot_R >= 0] = length_L, page_LP

    return mistaken


@pytest.mark.parametrize(
    ("change", "caught"),
    [
        pytest.param(lambda length, page: length.add_(1), "away from the prefill path", id="past the length: NaN"),
        pytest.param(lambda length, page: page.zero_(), "away from the prefill path", id="the null page: NaN"),
        pytest.param(
            lambda length, page: length.add_(2 * PAGE_TOKENS), "indexed out of bounds", id="past the pages: a huge id"
        ),
    ],
)
def test_poison_that_is_read_is_caught_even_when_eager_reads_it_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, Any], None], caught: str
) -> None:
    parts = parts_of(folder)
    monkeypatch.setattr(decode_state, "feed", feed_with(change))
    found = report(parts, KEY, lambda step: step.run())
    assert not found.passed
    assert any(caught in problem for problem in found.problems)


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
    assert {"a slot without a row changed", "cache of layer 2 changed outside the rows' own entries"} <= set(problems)


@pytest.mark.parametrize("seed", range(12))
def test_any_seed_catches_a_frozen_random_offset(folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    parts = parts_of(folder)
    frozen = torch.zeros(KEY.rows * KEY.width, dtype=torch.int64)
    assert parts.sampling is not None
    honest = parts.sampling.target_tokens

    def replay(step: DecodeStep) -> StepOutput:
        with monkeypatch.context() as patch:
            patch.setattr(parts.sampling, "target_tokens", lambda *a, **o: honest(*a[:4], frozen, *a[5:], **o))
            return step.run()

    assert "target tokens differ" in report(parts, KEY, replay, seed).problems
