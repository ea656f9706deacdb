"""Decode steps of sparse attention whose rows are all so short that they attend to everything: they do so densely, and
nobody can tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import SPARSE_KINDS, VOCAB, write_tiny
from tests.workers.crowd import crowd, of_all_widths, serve
from tests.workers.test_sparse_engine import engine, expected, greedy, prompts
from workers.memory.scratch import Scratch
from workers.models.attention.short_rows import ShortRows
from workers.models.attention.sparse import SparseAttention
from workers.models.batch import Batch
from workers.proof.prove import prove
from workers.protocol.plan import BatchLayout
from workers.step.decode import DecodeStep
from workers.step.parts import StepParts

TOP_K = 128
"""Two pages: prompts and answers below cross it."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: write_tiny(tmp_path_factory.mktemp(kind), kind, seed=2, index_topk=TOP_K) for kind in SPARSE_KINDS}


class Passes:
    """Notes of every pass of decode rows whether it was dense, and how many entries the longest row had."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[bool, int]] = []
        honest = SparseAttention.plan

        def plan(attention: SparseAttention, batch: Batch, scratch: Scratch) -> Batch:
            if batch.decode is not None and batch.prefill is None and batch.layout.decode_rows:
                self.seen.append((batch.dense, int(batch.decode.length_R.max())))
            return honest(attention, batch, scratch)

        patch.setattr(SparseAttention, "plan", plan)

    def longest(self, *, dense: bool) -> int:
        return max(length for kind, length in self.seen if kind is dense)


@pytest.mark.parametrize("kind", SPARSE_KINDS)
@pytest.mark.parametrize("width", [1, pytest.param("auto", marks=pytest.mark.long)])
def test_tokens_are_those_of_transformers_on_either_side(
    kind: str, width: int | str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short rows alone, and beside one that is too long; all of them become too long. A dense pass never has a row that
    attends to more than is selected, and the keys that it has written are scored later."""
    passes, asked = Passes(monkeypatch), prompts(20, 70, 101)
    run = engine(folders[kind], width=width)
    for prompt, got in zip(asked, run.generate(asked, greedy(70)), strict=True):
        assert got == expected(folders[kind], tuple(prompt), 70)
    assert 110 < passes.longest(dense=True) <= TOP_K < passes.longest(dense=False)
    passes.seen.clear()
    [alone] = run.generate(prompts(5, seed=1), greedy(20))
    assert alone == expected(folders[kind], tuple(prompts(5, seed=1)[0]), 20)
    assert {dense for dense, _ in passes.seen} == {True}


@pytest.mark.long
@pytest.mark.parametrize("kind", SPARSE_KINDS)
def test_a_crowd_does_not_notice(kind: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of all lengths that come and go under every sampler, with drafts, in steps of all widths."""

    def tokens() -> list[list[int]]:
        run = engine(folders[kind], width=4, max_rows=6, token_budget=60, cache_pages=14, max_context=200)
        return serve(of_all_widths(run, 3), crowd(40, VOCAB, seed=4))

    passes = Passes(monkeypatch)
    got = tokens()
    assert passes.longest(dense=True) <= TOP_K < passes.longest(dense=False)
    assert len({dense for dense, _ in passes.seen}) == 2
    passes.seen.clear()
    monkeypatch.setattr(StepParts, "dense_pages", 0)
    assert tokens() == got
    assert not any(dense for dense, _ in passes.seen)


def test_keys_that_short_rows_do_not_write_are_missed(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the test above would not notice."""
    monkeypatch.setattr(ShortRows, "write", lambda *of: None)
    [asked], [got] = prompts(101), engine(folders["v32"], width=1).generate(prompts(101), greedy(70))
    want = expected(folders["v32"], tuple(asked), 70)
    assert got[:20] == want[:20]
    assert got != want


def test_preempted_and_cached_rows_are_as_short_as_their_pages(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages come from others then; those of a former request with the same slot count for nothing."""
    passes, asked = Passes(monkeypatch), prompts(100, 44, 43, 42, seed=1)
    crowded = engine(folders["v32"], max_context=200, cache_pages=7)
    answers = crowded.generate(asked, greedy(50))
    assert crowded.scheduler.stats().preemptions > 0
    assert answers == [expected(folders["v32"], tuple(prompt), 50) for prompt in asked]
    again = crowded.generate(asked[1:2], greedy(50))
    assert again == answers[1:2]
    assert passes.longest(dense=True) <= TOP_K < passes.longest(dense=False)


@pytest.mark.parametrize("kind", SPARSE_KINDS)
def test_every_dense_step_passes_the_self_test(kind: str, folders: dict[str, Path]) -> None:
    parts = engine(folders[kind], width=3, max_rows=2).runner.parts
    report = prove(parts, None, every_bucket=True)
    assert report.failed == ()
    assert [(bucket.kind, bucket.bucket) for bucket in report.buckets] == [
        (kind, f"{rows} x 3") for rows in (2, 1) for kind in ("decode", "dense")
    ]
    # What a step takes is said once, of rows that may be long.
    assert all(bucket.step_time is None for bucket in report.buckets if bucket.kind == "dense")


def test_drafts_that_share_a_selection_are_not_dense(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """They attend to what was selected for a token before them, not to all there is."""
    run = engine(folders["v32"], width=3)
    passes, step = (
        Passes(monkeypatch),
        DecodeStep(run.runner.parts, BatchLayout(3, 2).graph_key(2, 2, dense=True), Scratch(torch.device("cpu"))),
    )
    step.run()
    assert [dense for dense, _ in passes.seen] == [True] * 3
    monkeypatch.setattr(run.runner.parts.drafter, "keeps", TOP_K)
    passes.seen.clear()
    step.run()
    assert [dense for dense, _ in passes.seen] == [True, False, False]


@pytest.mark.parametrize("settings", [{"invariant": True}, {"folder": 16}], ids=["invariant", "less than a page"])
def test_who_has_no_dense_steps(settings: dict[str, Any], folders: dict[str, Path], tmp_path: Path) -> None:
    """Invariant mode, which has one way for all rows, and models that select less than a page has."""
    folder = folders["v32"]
    if "folder" in settings:
        folder, settings = write_tiny(tmp_path, "v32", index_topk=settings["folder"]), {}
    parts = engine(folder, **settings).runner.parts
    assert not any(key.dense for key in parts.ladder(4))
