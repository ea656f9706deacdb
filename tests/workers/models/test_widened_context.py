"""Attention over context that is widened from FP8 once per layer gives the bits of attention over the FP8 cache."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import ALONE, CPU, Paged
from tiny_models import SPARSE_KINDS, VOCAB, random_tokens, write_tiny
from torch import Tensor

from kernels.gather_context import gather_context
from kernels.page import PAGE_TOKENS, pages_for
from workers.families import load_model
from workers.models.attention import sparse_rows, widened
from workers.models.attention.sparse_rows import SparseRows
from workers.models.attention.widened import Stretch, WidenedContext, Widening
from workers.models.batch import PrefillBatch
from workers.models.model import Model

SEQUENCES = [random_tokens(200, seed, VOCAB) for seed in range(5)]
TOP_K = 24
Step = tuple[list[int], int, list[tuple[int, int]]]
"""Rows that decode, their width, and (row, tokens) of prefill chunks."""


@cache
def model_of(kind: str, fp8_cache: bool = True, invariant: bool = False) -> Model:
    how: dict[str, Any] = {"group": ALONE, "dtype": torch.float32, "device": CPU, "max_positions": 512}
    with tempfile.TemporaryDirectory() as name:
        folder = write_tiny(Path(name), kind, seed=1, index_topk=TOP_K)
        return load_model(folder, fp8_cache=fp8_cache, invariant=invariant, **how)


def bounds(
    patch: pytest.MonkeyPatch, entries: int = 1 << 17, heads: int = 0, tokens: int = 8, context: int = 8
) -> None:
    patch.setattr(widened, "WIDENED", entries)
    patch.setattr(widened, "FEW_HEADS", heads)
    patch.setattr(widened, "FEWEST_TOKENS", tokens)
    patch.setattr(widened, "CONTEXT_OF_A_TOKEN", context)


def passes(model: Model, steps: list[Step]) -> tuple[list[Tensor], list[int]]:
    """Logits of all steps and their drafts; and of every gather how many entries it was for."""
    entries: list[int] = []

    def gather(cache_PKC: Tensor, page_NP: Tensor, cu_B1: Tensor, out_SC: Tensor, **how: Any) -> None:
        assert len(out_SC) == int(cu_B1[-1])
        entries.append(len(out_SC))
        gather_context(cache_PKC, page_NP, cu_B1, out_SC.fill_(torch.nan), **how)

    paged, found = Paged(model, SEQUENCES), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(widened, "gather_context", gather)
        for decode, width, chunks in steps:
            step = paged.plan(decode, width, chunks)
            hidden = paged.forward(step)
            found += [model.logits(hidden[row]) for row in sorted(hidden)]
            if model.drafter is None:
                continue
            drafts = paged.draft(step, hidden)
            found += [model.drafter.logits(drafts[row]) for row in sorted(drafts)]
    return found, entries


def over_the_cache(rows: SparseRows, cache_PKC: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """The turns of the rows, all of which attend to the cache."""
    for turn, _, _ in TURNS(rows, cache_PKC):
        yield turn, cache_PKC, rows.page_RP


TURNS = SparseRows._turns


def check(model: Model, steps: list[Step]) -> list[int]:
    """Whether logits are the same if no token attends to what is widened. Tokens take the same turns there: a CPU
    rounds sums of few tokens otherwise than those of many. Returns the entries of every gather."""
    got, entries = passes(model, steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WidenedContext, "fill", lambda *args: None)
        patch.setattr(SparseRows, "_turns", over_the_cache)
        want, none = passes(model, steps)
    assert not none
    assert all(map(torch.equal, got, want))
    assert all(bool(logits.isfinite().all()) for logits in got)
    return entries


MIXED: list[Step] = [
    ([], 1, [(0, 70), (1, 5), (2, 30), (3, 20), (4, 9)]),
    ([0], 3, [(1, 40), (2, 4), (3, 50), (4, 90)]),
    ([1], 2, [(0, 30), (2, 60), (3, 9), (4, 2)]),
]
"""Rows that do not qualify stand between rows that do, at either end, and behind decode rows. In the last step row 3
has too few tokens for its context."""


@pytest.mark.parametrize("queries", [1 << 17, 28])
@pytest.mark.parametrize("kind", SPARSE_KINDS)
def test_logits_are_those_over_the_cache(kind: str, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits agree in every layer, the draft layer's included, whose first entry does not exist; whatever number
    attends at once."""
    bounds(monkeypatch)
    monkeypatch.setattr(sparse_rows, "QUERIES", queries)
    model = model_of(kind)
    pages = [(2 + 1 + 1 + 1), (1 + 2 + 2), (2 + 2)]
    layers = len(model.layers) + (model.drafter is not None)
    assert check(model, MIXED) == [count * PAGE_TOKENS for count in pages for _ in range(layers)]


@pytest.mark.long
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_logits_of_drawn_steps(data: st.DataObject) -> None:
    def drawn(what: str, *values: int) -> int:
        return data.draw(st.sampled_from(values), label=what)

    steps: list[Step] = []
    written = [0] * len(SEQUENCES)
    for _ in range(drawn("steps", 1, 2, 3)):
        rows = data.draw(st.permutations(range(len(SEQUENCES))), label="rows")
        chunks = [(row, data.draw(st.integers(1, 60), label="tokens")) for row in rows[: drawn("chunks", 1, 3, 5)]]
        fed = {row for row, _ in chunks}
        decode = [row for row in rows if row not in fed and written[row] and data.draw(st.booleans(), label="decode")]
        steps.append((decode, 2, chunks))
        for row, count in [*chunks, *((row, 2) for row in decode)]:
            written[row] += count
    with pytest.MonkeyPatch.context() as patch:
        limits = {"tokens": drawn("fewest", 1, 8, 20), "context": drawn("context", 1, 3, 500)}
        bounds(patch, PAGE_TOKENS * drawn("pages", 1, 2, 4, 100), **limits)
        patch.setattr(sparse_rows, "QUERIES", drawn("queries", 1, 30, 1 << 17))
        check(model_of("v32"), steps)


def test_logits_are_those_without_any_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for how a CPU rounds sums of fewer tokens."""
    bounds(monkeypatch)
    got, entries = passes(model_of("v32"), MIXED)
    bounds(monkeypatch, heads=1000)
    want, none = passes(model_of("v32"), MIXED)
    assert entries
    assert not none
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_what_is_widened_is_what_is_attended_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison would otherwise compare nothing. A chunk too short for it attends to the cache."""
    bounds(monkeypatch)
    steps: list[Step] = [([], 1, [(0, 70), (1, 5)])]
    want, _ = passes(model_of("v32"), steps)
    monkeypatch.setattr(WidenedContext, "fill", lambda own, *args: (own.cache_WKC.zero_(), own.page_NP.zero_()))
    got, _ = passes(model_of("v32"), steps)
    # A CPU rounds the products of a token otherwise beside others, whose experts are others.
    same = [torch.allclose(ours, theirs, atol=1e-4, rtol=0) for ours, theirs in zip(got, want, strict=True)]
    assert same == [False, True, False, True]  # logits, then drafts, of both rows


def test_what_is_not_in_fp8_or_must_be_invariant_is_not_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds(monkeypatch)
    for how in ({"fp8_cache": False}, {"invariant": True}):
        _, entries = passes(model_of("v32", **how), MIXED)
        assert not entries


def widening(rows: list[tuple[int, int]], columns: int = 4000) -> Widening | None:
    """Make the widening of rows with so many cached entries before their chunks of so many tokens."""
    start, count = zip(*rows, strict=True)
    return Widening.of(PrefillBatch(start, count, torch.zeros(len(rows), columns, dtype=torch.int32)))


def test_rows_with_few_tokens_for_their_context_are_not_widened() -> None:
    assert widening([(0, 63)]) is None
    assert widening([(512 * 64 - 63, 64)]) is None
    for row in ((0, 64), (512 * 64 - 64, 64), ((1 << 17) - 256, 256)):
        found = widening([row])
        assert found is not None
        assert found.pages == pages_for(sum(row))
    assert widening([((1 << 17) - 255, 256)]) is None


def test_most_tokens_come_first_where_there_is_not_room_for_all() -> None:
    """Rows lie in their own order. The shortest chunk of them still fits behind one that does not."""
    half = 1 << 16
    found = widening([(half, 300), (10, 2), (half - 400, 400), (1000, 500), (5000, 200), (64, 70)])
    assert found is not None
    pages = [0, 0, half // 64, 24, 82, 3]
    assert found.cu_B1.tolist() == [64 * sum(pages[:row]) for row in range(7)]
    assert found.pages == sum(pages)
    for row, own in enumerate(pages):
        assert found.page_NP[row, :own].tolist() == list(range(sum(pages[:row]), sum(pages[: row + 1])))
    assert found.page_NP.dtype == found.cu_B1.dtype == torch.int32
    assert found.stretches == (Stretch(302, False), Stretch(1170, True))


def test_neighbours_of_one_kind_are_one_stretch() -> None:
    found = widening([(0, 3), (0, 4), (0, 64), (9, 80), (0, 1), (0, 100)])
    assert found is not None
    assert found.stretches == (Stretch(7, False), Stretch(144, True), Stretch(1, False), Stretch(100, True))


def test_a_page_outside_of_the_cache_is_refused_and_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is counted as over the cache itself, and whoever gathers sees none of it."""
    bounds(monkeypatch)
    model = model_of("v32")
    for out_of_bounds in (-1, 1 << 20):
        tables: list[Tensor] = []

        def gather(cache_PKC: Tensor, page_NP: Tensor, *rest: Any, tables: list[Tensor] = tables, **how: Any) -> None:
            tables.append(page_NP.clone())
            gather_context(cache_PKC, page_NP, *rest, **how)

        monkeypatch.setattr(widened, "gather_context", gather)
        paged = Paged(model, SEQUENCES[:2])
        paged.forward(paged.plan([], 1, [(0, 70), (1, 70)]))
        # Scores are let pass, so that attention is the first to see it.
        monkeypatch.setattr(sparse_rows, "index_scores", lambda *args, **options: args[6].fill_(1.0))
        batch = paged.batch(paged.plan([], 1, [(0, 20), (1, 20)]), 0)
        assert batch.prefill is not None
        batch.prefill.page_NP[1, 0] = out_of_bounds
        tables.clear()
        with pytest.raises(IndexError, match="outside the cache"):
            model.forward(torch.zeros(40, dtype=torch.int64), batch, paged.cache)
        assert all(bool(((table >= 0) & (table < len(paged.cache.layers[0]))).all()) for table in tables)
        assert tables
        monkeypatch.undo()
        bounds(monkeypatch)
