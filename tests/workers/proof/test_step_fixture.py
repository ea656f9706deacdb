"""The fixture that the proofs of decode steps and of mixed steps share: what it holds, and which entries of the cache
it lets a step write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.page import NULL_PAGE, PAGE_TOKENS
from tests.support.fp8_entries import numbers
from tests.tiny_models import write_tiny
from tests.workers.test_engine import engine
from workers.memory.scratch import Scratch
from workers.proof.decode_steps import Candidate, SelfTest
from workers.proof.rows import Entries, Row, draft_entries, target_entries
from workers.proof.segments import SegmentProof
from workers.proof.step_fixture import HUGE_PAGE, Outcome, StepFixture
from workers.protocol.plan import GraphKey
from workers.protocol.report import BucketReport
from workers.step.decode import DecodeStep
from workers.step.mixed import Stage
from workers.step.parts import StepOutput, StepParts

SLOTS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("v3"), "v3", seed=3)


def parts_of(folder: Path, width: int, kv_cache_dtype: str = "auto") -> StepParts:
    settings = {"max_rows": SLOTS, "token_budget": 160, "cache_pages": 60, "max_context": 200, "selftest": False}
    return engine(folder, width=width, kv_cache_dtype=kv_cache_dtype, **settings).runner.parts


def decode(parts: StepParts, seed: int) -> list[BucketReport]:
    """Eager steps are their own replays, here and below."""
    widths = {1, parts.width}
    keys = [GraphKey(4, width, drafts) for width in widths for drafts in {0, parts.width - 1}]
    steps = [DecodeStep(parts, key, Scratch(parts.device)) for key in keys]
    return SelfTest(parts, seed).run([Candidate(step, step.run) for step in steps])


def mixed(parts: StepParts, seed: int) -> list[BucketReport]:
    stages = [Stage(parts, tokens, Scratch(parts.device), Scratch(parts.device)) for tokens in (80, 48, 16)]
    return SegmentProof(parts, seed).run(stages)


def test_the_entries_of_rows_in_the_targets_layers_and_in_the_draft_layer() -> None:
    chunk = Row(slot=0, start=64, cached=65, end=70, logits_rows=1, drafts=3, pages=(5, 3))
    middle = Row(slot=1, start=0, cached=0, end=12, logits_rows=0, drafts=0, pages=(2,))
    decoding = Row(slot=2, start=62, cached=62, end=65, logits_rows=3, drafts=2, pages=(4, 6))
    pages, none, full = [NULL_PAGE, 7, 5, 3, 2, 4, 6], [], list(range(PAGE_TOKENS))

    def found(entries: Entries) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """Return for every page the entries that are cached, and those that the step may write."""
        cached, own = ({page: [] for page in pages} for _ in range(2))
        for page, poison_K, kept_K in zip(pages, entries.poison_PK, entries.kept_PK, strict=True):
            cached[page] = (~poison_K).nonzero().flatten().tolist()
            own[page] = (~kept_K).nonzero().flatten().tolist()
        assert own.pop(NULL_PAGE) == full  # everybody's
        assert entries.own_E.tolist() == [PAGE_TOKENS * page + offset for page in own for offset in own[page]]
        return cached, own

    cached, own = found(target_entries([chunk, middle, decoding], [NULL_PAGE, 7]))
    assert cached == {NULL_PAGE: none, 7: none, 5: full, 3: [0], 2: none, 4: [*range(62)], 6: none}
    assert own == {7: none, 5: none, 3: [1, 2, 3, 4, 5], 2: [*range(12)], 4: [62, 63], 6: [0]}
    cached, own = found(draft_entries([chunk, middle, decoding], [NULL_PAGE, 7]))
    assert cached == {NULL_PAGE: none, 7: none, 5: full[1:], 3: [0], 2: none, 4: [*range(1, 63)], 6: none}
    assert own == {7: none, 5: none, 3: [*range(1, 9)], 2: [*range(1, 13)], 4: [63], 6: [0, 1, 2]}


def before_every_outcome(patch: pytest.MonkeyPatch, look: Callable[[StepFixture], None]) -> None:
    honest = StepFixture.outcome

    def outcome(fixture: StepFixture, output: StepOutput) -> Outcome:
        look(fixture)
        return honest(fixture, output)

    patch.setattr(StepFixture, "outcome", outcome)


def broken(layer: Tensor) -> Tensor:
    """bool [entries]: what is read of them has NaN."""
    flat = layer.flatten(0, 1)
    return (numbers(flat, 32, 8, torch.float32) if flat.dtype == torch.uint8 else flat).isnan().any(-1)


@pytest.mark.parametrize(
    ("proof", "width", "kv_cache_dtype"),
    [
        (decode, 1, "auto"),
        pytest.param(decode, 3, "auto", marks=pytest.mark.long),
        (decode, 3, "fp8"),
        (mixed, 1, "auto"),
        (mixed, 3, "auto"),
        pytest.param(mixed, 3, "fp8", marks=pytest.mark.long),
    ],
)
def test_a_step_writes_all_entries_that_it_may(
    folder: Path,
    proof: Callable[..., list[BucketReport]],
    width: int,
    kv_cache_dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that a fixture lets a step write was poison and is finite: nothing is let through unseen. Drafts of a row
    whose own drafts fell lie further ahead, so they are looked at where there are none."""
    parts, seen = parts_of(folder, width, kv_cache_dtype), 0

    def look(fixture: StepFixture) -> None:
        nonlocal seen
        alone = [row for row in fixture.rows if row.logits_rows <= 1]
        for index, layer in enumerate(parts.cache.layers):
            draft = width > 1 and index == len(parts.cache.layers) - 1
            entries = draft_entries(alone, [NULL_PAGE]) if draft else target_entries(fixture.rows, [NULL_PAGE])
            assert not broken(layer)[entries.own_E].any(), index
            if draft or width == 1:
                seen += len(entries.own_E)

    before_every_outcome(monkeypatch, look)
    for seed in range(3):
        assert [report.problems for report in proof(parts, seed) if not report.passed] == []
    assert seen > 50


@pytest.mark.parametrize(
    ("proof", "width"), [(decode, 1), (decode, 3), pytest.param(mixed, 1, marks=pytest.mark.long), (mixed, 3)]
)
def test_slots_pages_and_tables_before_a_step(
    folder: Path, proof: Callable[..., list[BucketReport]], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a step of either kind, rows have their pages and huge ids behind them, other slots a former tenant's page,
    which is poison and nobody else's."""
    parts, honest, vacant = parts_of(folder, width), StepFixture.restore, 0

    def restore(fixture: StepFixture) -> None:
        nonlocal vacant
        honest(fixture)
        table_SP, length_S = parts.state.tensors.page_SP.tolist(), parts.state.tensors.length_S.tolist()
        owned = [page for row in fixture.rows for page in row.pages]
        assert len({NULL_PAGE, *owned}) == 1 + len(owned)
        for row in fixture.rows:
            assert length_S[row.slot] == row.cached
            assert table_SP[row.slot][: len(row.pages)] == list(row.pages)
            assert set(table_SP[row.slot][len(row.pages) :]) <= {HUGE_PAGE}
        assert not any(table_SP[SLOTS])
        others = {table_SP[slot][0] for slot in {*range(SLOTS)} - {row.slot for row in fixture.rows}}
        assert len(others) <= 1
        assert not others & {NULL_PAGE, *owned}
        for layer in parts.cache.layers:
            assert all(bool(layer[page].isnan().all()) for page in (NULL_PAGE, *others))
        vacant += len(others)

    monkeypatch.setattr(StepFixture, "restore", restore)
    for seed in range(3):
        proof(parts, seed)
    assert vacant > 5
