"""Mixed steps in token buckets: padding is inert, segments can be recorded and replayed, and memory is enough. On a CPU
a graph is emulated (`recorded`); tests/workers/test_gpu_engine.py has the real ones."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_draft_models import LAYOUTS, write_draft
from tests.tiny_models import VOCAB, write_tiny
from tests.workers.recorded import Recording, no_host_values
from tests.workers.test_engine import engine, greedy, random_prompts
from workers.graphs.mixed_warm_up import warm_up_mixed_steps, warm_up_plans
from workers.memory.scratch import Scratch
from workers.models.attention.sparse import SparseAttention
from workers.models.attention.sparse_rows import selection
from workers.models.general import GeneralOps
from workers.protocol.plan import (
    Admission,
    BatchLayout,
    PageGrant,
    PrefillRow,
    SamplingParams,
    StepPlan,
    TokenBuckets,
    TokenKey,
)
from workers.scheduler import Unsound
from workers.step.mixed import MixedStep, Stage, Tail
from workers.step.parts import StepOutput, StepParts

POISON = 0xFF
"""Filled with it, a float is NaN and an id -1; with 0x7F, a float is nearly infinite and an id 2**63 and more."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("v3"), "v3", seed=3)


class RecordedTail(Tail):
    """Recorded variant of `CapturedTail`."""

    def __init__(self, parts: StepParts, tokens: int, inner: Scratch) -> None:
        super().__init__(parts, tokens, inner)
        for gathered in self.buffers.finished:
            gathered.zero_()  # a recording runs
        self._recording = Recording(super().run)
        self.replays = 0

    def run(self) -> None:
        self._recording.replay()
        self.replays += 1


class RecordedStage(Stage):
    """Recorded variant of `CapturedStage`: segments are recorded on padding alone."""

    def __init__(
        self, parts: StepParts, tokens: int, scratch: Scratch, inner: Scratch, tails: Mapping[TokenKey, Tail]
    ) -> None:
        super().__init__(parts, tokens, scratch, inner)
        self._tails = tails
        self.uploaded_X.zero_()
        self.cache_slot_T.zero_()
        run = super().run_segment
        self._recordings = [
            [Recording(lambda which=which, index=index: run(which, index)) for index in self.indices(which)]  # type: ignore[misc]
            for which in range(len(self.segments))
        ]

    def run_segment(self, which: int, index: int) -> None:
        self._recordings[which][index].replay()

    def tail(self, key: TokenKey) -> Tail:
        return self._tails[key]


class Buckets:
    """Stand-in for `GraphRunner`, for mixed steps alone: stages that share memory, which is poison before each step,
    and tails, those of `RecordedStage`."""

    def __init__(self, parts: StepParts, budget: int, stage: type[Stage], tail: type[Tail] = RecordedTail) -> None:
        self.buckets = TokenBuckets(budget)
        self.used: set[TokenKey] = set()
        measured = [Scratch(parts.device) for _ in range(2)]
        warm_up_mixed_steps(Stage(parts, budget, *measured))
        self.buffers = [torch.empty(scratch.peak, dtype=torch.uint8) for scratch in measured]
        keys = self.buckets.tails(parts.most_tail_tokens(parts.state.slots)) if issubclass(stage, RecordedStage) else ()
        self.tails = {key: tail(parts, key.tokens, Scratch(parts.device, self.buffers[1])) for key in keys}
        self.stages = {}
        for key in self.buckets:
            scratch, inner = (Scratch(parts.device, buffer) for buffer in self.buffers)
            shared = (self.tails,) if issubclass(stage, RecordedStage) else ()
            self.stages[key] = stage(parts, key.tokens, scratch, inner, *shared)

    def stage(self, layout: BatchLayout) -> Stage:
        key = self.buckets.key(layout)
        self.used.add(key)
        for buffer in self.buffers:
            buffer.fill_(POISON)
        return self.stages[key]

    def captured(self, plan: StepPlan, *, dense: bool) -> None:
        assert not plan.prefill


@pytest.mark.parametrize(
    ("kind", "width", "drafter"),
    [
        ("v3", 3, "mtp"),
        pytest.param("v3", 1, "none", marks=pytest.mark.long),
        pytest.param("v2", 3, "ngram", marks=pytest.mark.long),
        pytest.param("v2-no-q-lora", 3, "gqa", marks=pytest.mark.long),
        pytest.param("v2", 2, "mla", marks=pytest.mark.long),
        pytest.param("glm5", 3, "mtp", marks=pytest.mark.long),
        pytest.param("axk2", 3, "ngram", marks=pytest.mark.long),
        pytest.param("hyv4", 3, "mtp", marks=pytest.mark.long),
    ],
)
def test_replayed_segments_give_the_tokens_of_eager_steps(
    kind: str, width: int, drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are compared as well, which no token would show."""
    no_host_values(monkeypatch)
    folder = write_tiny(tmp_path, kind, seed=3, num_hidden_layers=4)
    prompts = random_prompts(14, 150, seed=4)
    # Where the model's pass is a step's last, more tokens are verified than the smallest tail has.
    model_ends = drafter not in ("mtp", "none")
    rows = 9 if model_ends else 6
    settings: dict[str, Any] = {"width": width, "max_rows": rows, "token_budget": 80, "cache_pages": 80}
    if drafter in LAYOUTS:
        draft = write_draft(tmp_path / "draft", drafter, hidden_size=48, vocab_size=VOCAB, draft_vocab=60)
        settings["draft_model"] = str(draft)
    else:
        settings["drafter"] = drafter
    params = [SamplingParams(12 + i % 9, temperature=0.7 * (i % 2), seed=i) for i in range(len(prompts))]
    eager, run = engine(folder, **settings), engine(folder, **settings)
    expected = eager.generate(prompts, params)
    with torch.inference_mode():
        buckets = Buckets(run.runner.parts, 80, RecordedStage)
    run.runner.graphs = buckets  # type: ignore[assignment]
    assert run.generate(prompts, params) == expected
    assert run.scheduler.stats().drafts_accepted == eager.scheduler.stats().drafts_accepted
    assert torch.equal(run.runner.parts.state.tensors.draft_SK, eager.runner.parts.state.tensors.draft_SK)
    assert len(buckets.used) >= 4
    assert [key.tokens for key in buckets.tails] == ([32, 16] if model_ends else [16])


def test_a_selection_in_memory_of_segments_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The selection of one layer is gone when the next, which has no indexer, attends to it."""
    folder = write_tiny(tmp_path, "glm5", seed=3)
    prompts, honest = random_prompts(6, 80, seed=4), SparseAttention.backends
    settings: dict[str, Any] = {"width": 1, "max_rows": 4, "token_budget": 48, "cache_pages": 60, "drafter": "none"}
    expected = engine(folder, **settings).generate(prompts, greedy(8))

    def misplaced(own: SparseAttention, projected: Any, out: Any, batch: Any, geometry: Any, *rest: Any) -> Any:
        moved = replace(batch, selection=selection(batch, own.indexing.top_k, rest[-1]))
        return honest(own, projected, out, moved, geometry, *rest)

    monkeypatch.setattr(SparseAttention, "backends", misplaced)
    run = engine(folder, **settings, selftest=False)
    with torch.inference_mode():
        run.runner.graphs = Buckets(run.runner.parts, 48, Stage)  # type: ignore[assignment]
    with suppress(IndexError, Unsound):  # then it was seen at once
        assert run.generate(prompts, greedy(8)) != expected


@pytest.mark.parametrize(
    ("width", "invariant"),
    [
        pytest.param(2, False, marks=pytest.mark.long),
        pytest.param(1, True, marks=pytest.mark.long),
        pytest.param(1, False, marks=pytest.mark.soak),
        pytest.param(2, True, marks=pytest.mark.soak),
    ],
)
def test_stages_of_all_buckets_share_their_tails(
    folder: Path, width: int, invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 40 rows, each of which wants one token's hidden states."""
    no_host_values(monkeypatch)
    prompts = random_prompts(70, 30, seed=6)
    settings = {"width": width, "max_rows": 40, "token_budget": 112, "cache_pages": 90, "invariant": invariant}
    params = [SamplingParams(14 + i % 9, temperature=0.7 * (i % 2), seed=i) for i in range(len(prompts))]
    expected = engine(folder, **settings).generate(prompts, params)
    run = engine(folder, **settings)
    with torch.inference_mode():
        buckets = Buckets(run.runner.parts, 112, RecordedStage)
    run.runner.graphs = buckets  # type: ignore[assignment]
    assert run.generate(prompts, params) == expected
    replays = {key.tokens: tail.replays for key, tail in buckets.tails.items()}  # type: ignore[attr-defined]
    assert list(replays) == [48, 32, 16]
    assert all(replays.values())
    assert len(buckets.used) >= 2


@pytest.mark.parametrize("kind", ["v3", pytest.param("glm5", marks=pytest.mark.long)])
def test_the_memory_of_the_warm_up_is_enough_for_any_step(kind: str, tmp_path: Path) -> None:
    """Long contexts in many rows: more cached entries at once than a step has tokens."""
    folder = write_tiny(tmp_path, kind, seed=3)
    prompts = random_prompts(24 if kind == "v3" else 8, 400, seed=5)
    settings = {"width": 2, "max_rows": 8, "token_budget": 120, "cache_pages": 200, "max_context": 480}
    expected = engine(folder, **settings).generate(prompts, greedy(8))
    run = engine(folder, **settings)
    with torch.inference_mode():
        run.runner.graphs = Buckets(run.runner.parts, 120, Stage)  # type: ignore[assignment]
    assert run.generate(prompts, greedy(8)) == expected


@pytest.mark.parametrize("width", [1, 3])
def test_the_last_layer_ends_for_the_tokens_that_are_wanted(
    folder: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 100 tokens in chunks of 40: nothing is sampled of the first two, one token of the last."""
    run = engine(folder, width=width, token_budget=40, max_rows=4)
    model = run.runner.parts.model
    last = model.layers[-1] if width == 1 else model.drafter.layer
    finish, seen = type(last).finish, []

    def noted(layer: Any, buffers: Any, *rest: Any) -> None:
        if layer is last:
            seen.append(buffers.residual_TE.shape[0])
        finish(layer, buffers, *rest)

    monkeypatch.setattr(type(last), "finish", noted)
    run.generate([list(range(1, 101))], greedy(1))
    # The smallest bucket; then what is drafted from it.
    assert seen == [16, *[1] * (width > 1)]


@torch.inference_mode()
def test_a_small_bucket_may_need_more_memory_than_the_largest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts' workspace on a GPU does: it holds results in fp32 while there are few."""
    no_host_values(monkeypatch)
    experts = GeneralOps.experts

    def wasteful(self: GeneralOps, x_TE: torch.Tensor, *rest: Any) -> None:
        [scratch] = [given for given in rest if isinstance(given, Scratch)]
        scratch.empty(1 << 22 if x_TE.shape[0] == 48 else 0, dtype=torch.uint8)
        experts(self, x_TE, *rest)

    monkeypatch.setattr(GeneralOps, "experts", wasteful)
    Buckets(engine(folder).runner.parts, 80, RecordedStage)


@torch.inference_mode()
def test_a_warm_up_plan_has_no_more_rows_than_slots(folder: Path) -> None:
    """A step here may feed many times what all slots hold."""
    parts = engine(folder, max_rows=2, max_context=40, token_budget=1000).runner.parts
    plans = list(warm_up_plans(parts, 1000))
    assert max(plan.layout.rows for plan in plans) == 2
    warm_up_mixed_steps(Stage(parts, 1000, Scratch(parts.device), Scratch(parts.device)))


def test_a_warm_up_plan_has_context_in_several_pieces(folder: Path) -> None:
    """A merge of several pieces compiles a kernel of its own. With 40 rows a piece holds 64 entries of each."""
    parts = engine(folder, max_rows=40, max_context=400, token_budget=160).runner.parts
    begins = [row.start for plan in warm_up_plans(parts, 160) if len(plan.prefill) == 40 for row in plan.prefill]
    assert any(begin > 64 for begin in begins)


def test_tensors_of_a_stage_are_aligned_whatever_its_tokens(folder: Path) -> None:
    parts = engine(folder).runner.parts
    for tokens in (1, 16, 17):
        stage = Stage(parts, tokens, Scratch(parts.device), Scratch(parts.device))
        views = [stage.token_T, stage.position_T, stage.live_T, stage.write_slot_T, stage.cache_slot_T, stage.rows_X]
        assert all(view.data_ptr() % 16 == 0 for view in views)
        assert {len(view) for view in views[:5]} == {tokens}


@torch.inference_mode()
def test_a_warm_up_leaves_nothing_behind(folder: Path) -> None:
    parts = engine(folder, width=3, max_rows=5).runner.parts
    for layer in parts.cache.layers:
        layer[1:].fill_(torch.nan)
    assert parts.sampling is not None
    state = [getattr(parts.state.tensors, field.name) for field in fields(parts.state.tensors)]
    state += [getattr(parts.sampling.tables, field.name) for field in fields(parts.sampling.tables)]
    before = [tensor.clone() for tensor in state]
    warm_up_mixed_steps(Stage(parts, 64, Scratch(parts.device), Scratch(parts.device)))
    assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))
    assert all(bool(layer[1:].isnan().all()) for layer in parts.cache.layers)
    assert not parts.sampling.fault_1.item()


def mixed_plan(parts: StepParts) -> StepPlan:
    """Two decode rows, a chunk that ends its prompt, one that does not and begins with suppressed writes behind cached
    context; slots, pages and cache hold what the rows need."""
    lengths = {0: 70, 1: 3, 3: 66, 4: 0}
    admissions = [Admission(slot, SamplingParams(9, temperature=0.7, seed=slot)) for slot in lengths]
    parts.state.admit(admissions)
    assert parts.sampling is not None
    parts.sampling.admit(admissions)
    parts.state.grant([PageGrant(slot, 0, (3 * i + 1, 3 * i + 2, 3 * i + 3)) for i, slot in enumerate(lengths)])
    state = parts.state.tensors
    for slot, length in lengths.items():
        state.length_S[slot] = length
    generator = torch.Generator().manual_seed(2)
    for tensor in (state.last_S, state.draft_SK):
        tensor.copy_(torch.randint(0, 131, tensor.shape, generator=generator))
    for layer in parts.cache.layers:
        layer.copy_(torch.randn(layer.shape, generator=generator))
    prefill = (
        PrefillRow(3, 66, tuple(range(5, 16)), write_from=68, final=False, next_token=17),
        PrefillRow(4, 0, tuple(range(40, 60)), write_from=0, final=True),
    )
    return StepPlan(1, 3, 2, (0, 1), prefill)


@torch.inference_mode()
def outcome(folder: Path, tokens: int, fill: int | None) -> tuple[StepOutput, list[torch.Tensor], list[torch.Tensor]]:
    """A mixed step in a stage of so many tokens, whose memory and whose null page were filled with this byte: output,
    slots' state, and the cache without the null page."""
    parts = engine(folder, width=3, max_rows=6, cache_pages=20).runner.parts
    plan = mixed_plan(parts)
    scratch = [Scratch(parts.device) for _ in range(2)]
    if fill is not None:
        scratch = [Scratch(parts.device, torch.full((1 << 22,), fill, dtype=torch.uint8)) for _ in range(2)]
        for layer in parts.cache.layers:
            layer[0].view(torch.uint8).fill_(fill)
    output = MixedStep(parts).run(plan, Stage(parts, tokens, *scratch))
    state = [getattr(parts.state.tensors, field.name) for field in fields(parts.state.tensors)]
    return output, state, [layer[1:] for layer in parts.cache.layers]


@pytest.mark.parametrize("kind", ["v3", "glm5"])
def test_what_padding_holds_changes_no_bit(kind: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, kind, seed=3)
    plain, state, cache = outcome(folder, 48, 0)
    assert plain.logits_NV is not None
    assert plain.layout.tokens == 37
    for fill in (POISON, 0x7F):
        other, other_state, other_cache = outcome(folder, 48, fill)
        assert other.logits_NV is not None
        assert torch.equal(plain.decided_N, other.decided_N)
        assert torch.equal(plain.logits_NV, other.logits_NV)
        for mine, theirs in zip([*state, *cache], [*other_state, *other_cache], strict=True):
            assert torch.equal(mine, theirs)


def test_padding_changes_nothing_but_rounding(folder: Path) -> None:
    padded, state, cache = outcome(folder, 64, POISON)
    exact, exact_state, exact_cache = outcome(folder, 37, None)
    assert padded.logits_NV is not None
    assert exact.logits_NV is not None
    assert torch.equal(padded.decided_N, exact.decided_N)
    torch.testing.assert_close(padded.logits_NV, exact.logits_NV, atol=1e-4, rtol=1e-4)
    for mine, theirs in zip(state, exact_state, strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(cache, exact_cache, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
