"""Sparse attention in two token-wise segments with attention between them.

What went wrong elsewhere: sparse attention could be captured only after its projections were split from what stands
between them, and on the way a branch of the config, a scaling of the queries and a check of bounds were lost. Buffers
of indices were those of the capture; a tensor was stashed on the layer and overwritten before the next segment read it;
a segment cut its tensors at the number of tokens that the captured step happened to have.

Here segments hand on all that attention reads, what a token sees comes from lengths on the device, keys are written
before any is scored, and indices that lie outside of the cache end the step, or are counted. Each planted fault must
show in the answers, or end the replica.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import sparse as kernels_sparse
from tests.scenarios.served import Fault, Place, alone, greedy_jobs, named, poison_null_page, replica, serve
from tests.tiny_models import write_tiny
from tests.workers.faults import Memory, frozen, lengths_off, one_token
from workers.cache.paged import OutOfBoundsFault
from workers.families import load_model
from workers.memory.scratch import Scratch
from workers.models.attention import sparse, sparse_rows
from workers.models.attention.indexer import Indexer
from workers.models.attention.sparse import SparseAttention
from workers.models.attention.sparse_rows import SparseRows
from workers.models.batch import Batch, Selection
from workers.models.config import ConfigError
from workers.parallel.group import Group
from workers.proof.decode_steps import Candidate, SelfTest
from workers.protocol.plan import BatchLayout
from workers.scheduler import Unsound
from workers.step.decode import DecodeStep

PLACES: tuple[Place, ...] = (("cpu", False), ("cpu", True))
JOBS = (6, 60, 14)
"""Six requests, prompts of up to 60 tokens, up to 14 more of each: queries attend to 16."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with layers that attend to what another has selected."""
    return write_tiny(tmp_path_factory.mktemp("glm5"), "glm5", seed=1, indexer_types=["full", "shared"] * 2)


@pytest.mark.parametrize("place", PLACES, ids=named)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"width": 1}, marks=pytest.mark.long),
        {"width": 3, "max_rows": 3},
        pytest.param({"width": 4, "invariant": True}, marks=pytest.mark.long),
    ],
)
def test_every_request_is_served(folder: Path, settings: dict[str, Any], place: Place) -> None:
    run = replica(folder, place, **settings)
    poison_null_page(run)
    assert serve(run, greedy_jobs(*JOBS)) == alone(folder, "cpu", *JOBS)
    assert run.scheduler.stats().bad_rows == 0


def indices_of_the_capture() -> Fault:
    """Select in every run of a shape what was selected in the first."""
    memory, honest = Memory(), sparse_rows.select_positions

    def select(score_TN: Tensor, bound_T: Tensor, selected_TS: Tensor, *rest: Any, **options: Any) -> None:
        honest(score_TN, bound_T, selected_TS, *rest, **options)
        selected_TS.copy_(memory(selected_TS.shape, selected_TS.clone))

    return lambda patch, parts: patch.setattr(sparse_rows, "select_positions", select)


def bounds_of_the_capture() -> Fault:
    """Let tokens see what those of the first run of a shape saw."""
    memory, honest = Memory(), sparse.selection

    def stale(batch: Batch, *rest: Any) -> Selection:
        found = honest(batch, *rest)
        return replace(found, bound_T=memory((batch.layout, batch.first), found.bound_T.clone))

    return lambda patch, parts: patch.setattr(sparse, "selection", stale)


def stashed_queries() -> Fault:
    """A layer keeps its queries for itself, in memory that the next layer's segment takes for its own."""
    memory, honest = Memory(), SparseRows.select

    def select(rows: SparseRows, index_PKI: Tensor, **options: Any) -> None:
        stash_TJI = memory(rows.indexed.q_TJI.shape, rows.indexed.q_TJI.clone)
        stale = replace(rows, indexed=replace(rows.indexed, q_TJI=stash_TJI.clone()))
        stash_TJI.copy_(rows.indexed.q_TJI)
        honest(stale, index_PKI, **options)

    return lambda patch, parts: patch.setattr(SparseRows, "select", select)


def sliced_by_a_count() -> Fault:
    """The segment projects as many tokens as the step of the capture had."""
    honest = Indexer.project

    def project(own: Indexer, way: Any, x: Any, latent: Any, rotation_TO: Tensor, out: Any, scratch: Any) -> None:
        count = max(1, len(rotation_TO) // 2)
        honest(own, way, x[:count], latent[:count], rotation_TO[:count], out.of(slice(0, count)), scratch)

    return lambda patch, parts: patch.setattr(Indexer, "project", project)


def weights_dropped() -> Fault:
    """All heads of the indexer count alike."""
    honest = Indexer.project

    def project(own: Indexer, way: Any, x: Any, latent: Any, rotation_TO: Tensor, out: Any, scratch: Any) -> None:
        honest(own, way, x, latent, rotation_TO, out, scratch)
        out.weight_TJ.fill_(own.scale)

    return lambda patch, parts: patch.setattr(Indexer, "project", project)


def scaling_dropped() -> Fault:
    """Attention scores are not divided by the root of their features."""

    def plant(patch: pytest.MonkeyPatch, parts: Any) -> None:
        for layer in parts.model.layers:
            patch.setattr(layer.attention, "heads", replace(layer.attention.heads, scale=1.0))

    return plant


def selection_before_the_write() -> Fault:
    """Tokens are scored while the step's own keys are not in the cache."""

    def attend(own: SparseAttention, backends: Any, *caches: Tensor) -> None:
        for rows in backends:
            rows.enter(own.heads, caches[0])
        if own.indexer is not None:
            for rows in backends:
                rows.select(caches[1], invariant=False)
            for rows in backends:
                rows.write(caches[1])
        for rows in backends:
            rows.attend(own.heads, caches[0])

    return lambda patch, parts: patch.setattr(SparseAttention, "attend", attend)


def later_drafts_are_seen() -> Fault:
    """Every token of a decode row may select what the row's last one may."""
    honest = sparse.selection

    def grouped(batch: Batch, *rest: Any) -> Selection:
        found, split = honest(batch, *rest), batch.layout.decode_tokens
        seen_RW = found.bound_T[:split].view(-1, batch.layout.width)
        seen_RW.copy_(seen_RW[:, -1:].clone().expand_as(seen_RW))
        return found

    return lambda patch, parts: patch.setattr(sparse, "selection", grouped)


def shared_layers_select_nothing() -> Fault:
    """A layer without an indexer attends to what the layer before it left in a buffer that was cleared since."""
    honest = SparseAttention.attend

    def attend(own: SparseAttention, backends: Any, *caches: Tensor) -> None:
        if own.indexer is None:
            for rows in backends:
                rows.selection.selected_TS[:, 1:].fill_(-1)
        honest(own, backends, *caches)

    return lambda patch, parts: patch.setattr(SparseAttention, "attend", attend)


WRONG: dict[str, Callable[[], Fault]] = {
    "indices of the capture": indices_of_the_capture,
    "bounds of the capture": bounds_of_the_capture,
    "lengths of the capture": lambda: frozen("feed", 5),
    "captured for one token a row": one_token,
    "an entry past the row": lambda: lengths_off(lambda width: 1),
    "queries stashed across segments": stashed_queries,
    "sliced by a count inside a segment": sliced_by_a_count,
    "weights of heads dropped": weights_dropped,
    "scaling dropped": scaling_dropped,
    "selection before the cache write": selection_before_the_write,
    "later drafts are seen": later_drafts_are_seen,
    "shared layers select nothing": shared_layers_select_nothing,
}


QUICK = (
    "indices of the capture",
    "bounds of the capture",
    "an entry past the row",
    "queries stashed across segments",
    "selection before the cache write",
    "shared layers select nothing",
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.long) for n in WRONG])
def test_a_wrong_split_does_not_serve(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    expected = alone(folder, "cpu", *JOBS)
    run = replica(folder, ("cpu", True), WRONG[name](), monkeypatch, width=3)
    poison_null_page(run)
    try:
        tokens = serve(run, greedy_jobs(*JOBS))
    except (Unsound, IndexError):
        return  # the replica ended
    assert tokens != expected


def tables_out_of_bounds(patch: pytest.MonkeyPatch, *, clamped: bool) -> None:
    """Page tables name a page that does not exist, by the time that attention reads them; and whoever reads them may
    clamp what they say."""

    def plant(name: str, place: int) -> None:
        honest = getattr(kernels_sparse, name)

        def out_of_bounds(*args: Any, **options: Any) -> None:
            cache_PKE, page_RP = args[place - 1], args[place].clone()
            page_RP[:, 0] = len(cache_PKE) + 3
            page_RP = page_RP.clamp(0, len(cache_PKE) - 1) if clamped else page_RP
            honest(*args[:place], page_RP, *args[place + 1 :], **options)

        patch.setattr(sparse_rows, name, out_of_bounds)

    plant("index_scores", 3)
    plant("sparse_decode", 2)


def test_indices_outside_of_the_cache_end_a_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Indices are counted on a GPU. Where they were clamped, wrong answers would be served."""
    expected, jobs = alone(folder, "cpu", *JOBS), greedy_jobs(*JOBS)
    with monkeypatch.context() as patch:
        tables_out_of_bounds(patch, clamped=False)
        run = replica(folder, ("cpu", False))
        with pytest.raises(IndexError, match="outside the cache"):
            serve(run, jobs)
    tables_out_of_bounds(monkeypatch, clamped=True)
    assert serve(replica(folder, ("cpu", False)), jobs) != expected


def test_what_a_gpu_counts_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There nothing raises where it happens. The counter outlives a step, and whoever collects one, or proves one,
    reads it: never within a capture."""
    monkeypatch.setattr(sparse_rows, "refuse_out_of_bounds", lambda fault_1: None)
    sound = replica(folder, ("cpu", False))
    serve(sound, greedy_jobs(*JOBS))
    assert not int(sound.runner.parts.cache.out_of_bounds_count_1)
    tables_out_of_bounds(monkeypatch, clamped=False)
    parts = replica(folder, ("cpu", False)).runner.parts
    step = DecodeStep(parts, BatchLayout(parts.width, 1).graph_key(1, 0), Scratch(parts.device))
    [found] = SelfTest(parts).run([Candidate(step, step.run)])
    assert "attention met rows, positions or pages outside of the cache" in found.problems
    with pytest.raises(OutOfBoundsFault, match="outside the cache"):
        serve(replica(folder, ("cpu", False)), greedy_jobs(*JOBS))


def test_a_model_without_a_query_latent_is_refused_by_name(tmp_path: Path) -> None:
    """The branch is not lost silently: no indexer can read a latent that is not there."""
    folder = write_tiny(tmp_path, "v32")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"q_lora_rank": 24', '"q_lora_rank": null'))
    with pytest.raises(ConfigError, match=r"q_lora_rank = None is not supported for model_type 'deepseek_v32'"):
        load_model(folder, group=Group(), dtype=torch.float32, device=torch.device("cpu"), max_positions=64)
