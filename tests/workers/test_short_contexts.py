"""Decode steps of sparse attention whose rows are all so short that they attend to everything: they do so densely, and
nobody can tell."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import index_entry
from kernels.latent_entry import decode
from tests.scenarios.served import StandInGraphs
from tests.tiny_models import VOCAB, write_tiny
from tests.workers.crowd import crowd, of_all_widths, serve
from tests.workers.test_sparse_engine import engine, expected, greedy, prompts
from workers.cache.spec import CacheSpec, Fp8LatentSpec, Int8IndexSpec
from workers.config import EngineConfig
from workers.memory.scratch import Scratch
from workers.models.attention.short_rows import ShortRows
from workers.models.attention.sparse import SparseAttention
from workers.models.batch import Batch
from workers.processes.client import EngineClient
from workers.processes.launch import local_engine
from workers.proof.decode_steps import SelfTest
from workers.proof.prove import prove
from workers.protocol.messages import Request
from workers.protocol.plan import MOST_DENSE_ROWS, Admission, BatchLayout, PageGrant
from workers.step.decode import DecodeStep
from workers.step.parts import StepOutput, StepParts

TOP_K = 128
"""Two pages: prompts and answers below cross it."""
DRAFTING = ("v32", "glm5", "hyv4")
"""Kinds of models with sparse attention and a layer that drafts; the last one has sinks, gates and streams."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        kind: write_tiny(tmp_path_factory.mktemp(kind), kind, seed=2, index_topk=TOP_K) for kind in (*DRAFTING, "axk2")
    }


class Passes:
    """Notes of every pass of decode steps whether it was dense, and how many entries the longest row had."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[bool, int]] = []
        honest, run, within = SparseAttention.plan, DecodeStep.run, [0]

        def plan(attention: SparseAttention, batch: Batch, scratch: Scratch) -> Batch:
            if within[0]:
                assert batch.decode is not None
                self.seen.append((batch.dense, int(batch.decode.length_R.max())))
            else:
                assert not batch.dense
            return honest(attention, batch, scratch)

        def step(self: DecodeStep, *masks: Any) -> StepOutput:
            within[0] += 1
            try:
                return run(self, *masks)
            finally:
                within[0] -= 1

        patch.setattr(SparseAttention, "plan", plan)
        patch.setattr(DecodeStep, "run", step)

    def longest(self, *, dense: bool) -> int:
        return max(length for kind, length in self.seen if kind is dense)


@pytest.mark.parametrize(
    ("width", "fp8_cache", "kind"),
    [
        (3, False, "v32"),
        (3, False, "glm5"),
        # With these each two values meet.
        pytest.param(1, False, "glm5", marks=pytest.mark.long),
        pytest.param(1, True, "v32", marks=pytest.mark.long),
        pytest.param(3, True, "glm5", marks=pytest.mark.long),
        pytest.param(3, False, "hyv4", marks=pytest.mark.long),
        pytest.param(1, True, "hyv4", marks=pytest.mark.long),
        pytest.param(1, False, "axk2", marks=pytest.mark.long),
        pytest.param(1, False, "hyv4", marks=pytest.mark.soak),
        pytest.param(3, True, "hyv4", marks=pytest.mark.soak),
        pytest.param(1, True, "axk2", marks=pytest.mark.soak),
        pytest.param(1, False, "v32", marks=pytest.mark.soak),
        pytest.param(1, True, "glm5", marks=pytest.mark.soak),
        pytest.param(3, True, "v32", marks=pytest.mark.soak),
    ],
)
def test_tokens_are_those_of_transformers_on_either_side(
    kind: str, width: int, fp8_cache: bool, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short rows alone, and beside one that is too long; all of them become too long. A dense pass never has a row that
    attends to more than is selected, and the keys that it has written are scored later. With FP8 caches the tokens are
    those of an engine that is never dense."""
    passes, asked = Passes(monkeypatch), prompts(20, 70, 101)
    how: dict[str, Any] = {"width": width, "kv_cache_dtype": "fp8" if fp8_cache else "auto"}
    run = engine(folders[kind], **how)
    if fp8_cache:
        with monkeypatch.context() as patch:
            patch.setattr(StepParts, "dense_pages", 0)
            want = engine(folders[kind], **how).generate(asked, greedy(70))
        assert not any(dense for dense, _ in passes.seen)
        passes.seen.clear()
    else:
        want = [expected(folders[kind], tuple(prompt), 70) for prompt in asked]
    assert run.generate(asked, greedy(70)) == want
    assert 110 < passes.longest(dense=True) <= TOP_K < passes.longest(dense=False)
    passes.seen.clear()
    run.generate(prompts(5, seed=1), greedy(20))
    assert {dense for dense, _ in passes.seen} == {True}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("fp8_cache", [False, True])
@pytest.mark.parametrize("kind", DRAFTING)
def test_a_dense_step_leaves_what_a_sparse_one_does(
    kind: str, fp8_cache: bool, rows: int, folders: dict[str, Path]
) -> None:
    """Tokens, logits, drafts, and the latents and index keys of all layers, the draft layer's among them."""
    run = engine(folders[kind], width=3, max_rows=3, kv_cache_dtype="fp8" if fp8_cache else "auto")
    parts = run.runner.parts
    for seed in range(3):
        with torch.inference_mode():
            fixture = SelfTest(parts, seed).fixture(BatchLayout(3, rows).graph_key(rows, 2, dense=True))
            left = []
            for dense in (True, False):
                step = DecodeStep(parts, BatchLayout(3, rows).graph_key(rows, 2, dense=dense), Scratch(parts.device))
                step.slot_R[: len(fixture.rows)] = fixture.slot_R
                outcome = fixture.outcome(step.run())
                drafted = parts.state.tensors.draft_SK[fixture.slot_R].clone()
                entries = [parts.cache.layers[layer].clone() for layer in range(len(parts.cache.layers))]
                left.append((outcome, drafted, entries))
                fixture.restore()
        (ours, our_drafts, our_layers), (theirs, their_drafts, their_layers) = left
        live = sum(row.logits_rows for row in fixture.rows)
        assert torch.equal(ours.decided_N, theirs.decided_N)
        torch.testing.assert_close(ours.logits_NV[:live], theirs.logits_NV[:live], atol=1e-4, rtol=1e-4)
        assert torch.equal(our_drafts, their_drafts)
        assert not ours.unwritten_L.any()
        for spec, our, their in zip(parts.cache.specs, our_layers, their_layers, strict=True):
            same_entries(spec, our, their)


def same_entries(spec: CacheSpec, ours: Tensor, theirs: Tensor) -> None:
    """Check that two contents of a layer's cache are read as the same numbers, but for rounding; NaN where nothing was
    written. Where a number lies between two codes, these may be either."""
    if isinstance(spec, Fp8LatentSpec):
        our, their = (decode(content, spec.latent, spec.rope, spec.dtype) for content in (ours, theirs))
        torch.testing.assert_close(our, their, atol=1e-4, rtol=1 / 8, equal_nan=True)
        our, their = our[..., spec.latent :], their[..., spec.latent :]  # not rounded to codes
        torch.testing.assert_close(our, their, atol=1e-4, rtol=1e-4, equal_nan=True)
    elif isinstance(spec, Int8IndexSpec):
        (code_PKD, scale_PK), (their_code_PKD, their_scale_PK) = index_entry.parts(ours), index_entry.parts(theirs)
        torch.testing.assert_close(scale_PK, their_scale_PK, atol=0, rtol=1e-4, equal_nan=True)
        assert int((code_PKD.int() - their_code_PKD.int()).abs().max()) <= 1
    else:
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4, equal_nan=True)


def test_the_graph_that_is_replayed_is_dense(folders: dict[str, Path]) -> None:
    run = engine(folders["v32"], width=2, max_rows=20, token_budget=60, cache_pages=80)
    asked, parts = prompts(*[3] * 18), run.runner.parts
    want = run.generate(asked, greedy(8))
    graphs = StandInGraphs(parts, 60, run.runner.stats)
    run.runner.graphs = graphs  # type: ignore[assignment]
    assert run.generate(asked, greedy(8)) == want
    # Of more rows there is no dense one.
    assert {key.dense for key in graphs.replayed if key.rows > MOST_DENSE_ROWS} == {False}
    graphs.replayed.clear()
    run.generate(asked[:3], greedy(8))
    assert {key.dense for key in graphs.replayed} == {True}
    graphs.replayed.clear()
    run.generate([*asked[:2], prompts(140)[0]], greedy(8))
    assert any(not key.dense for key in graphs.replayed)


def test_eager_steps_are_dense_where_graphs_would_be(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes(monkeypatch)
    run = engine(folders["v32"], width=1, max_rows=20, token_budget=60, cache_pages=80)
    run.generate(prompts(*[3] * 18), greedy(8))
    assert {dense for dense, _ in passes.seen} == {False}
    passes.seen.clear()
    run.generate(prompts(*[3] * MOST_DENSE_ROWS), greedy(8))
    assert {dense for dense, _ in passes.seen} == {True}


@pytest.mark.parametrize(
    "kind", [pytest.param("glm5", marks=pytest.mark.long), pytest.param("v32", marks=pytest.mark.soak)]
)
def test_two_ranks_agree_on_what_is_dense(kind: str, folders: dict[str, Path]) -> None:
    """Rows on either side, together and alone, in processes of their own, whose sums are of both."""
    asked = prompts(20, 70, 101)
    sizes = {"width": 3, "max_rows": 4, "token_budget": 48, "cache_pages": 40, "max_context": 300}
    how = {"device": "cpu", "dtype": "float32", "tensor_parallel": 2, "selftest": True, "selftest_buckets": "all"}
    config = EngineConfig.model_validate({"model": str(folders[kind]), **sizes, **how})

    async def tokens() -> list[list[int]]:
        async def one(client: EngineClient, name: str, prompt: list[int]) -> list[int]:
            outputs = client.generate(Request(name, tuple(prompt), greedy(70)))
            return [token async for output in outputs for token in output.tokens]

        async with local_engine(config, print) as client:
            names = zip("abc", asked, strict=True)
            found = await asyncio.gather(*(one(client, name, prompt) for name, prompt in names))
            return [*found, await one(client, "alone", asked[0])]

    want = [expected(folders[kind], tuple(prompt), 70) for prompt in asked]
    assert asyncio.run(tokens()) == [*want, want[0]]


@pytest.mark.parametrize(
    "kind", [pytest.param("v32", marks=pytest.mark.long), pytest.param("glm5", marks=pytest.mark.soak)]
)
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
    """Comparing tokens would otherwise show nothing."""
    monkeypatch.setattr(ShortRows, "write", lambda *of: None)
    [asked], [got] = prompts(101), engine(folders["v32"], width=1).generate(prompts(101), greedy(70))
    want = expected(folders["v32"], tuple(asked), 70)
    assert got[:20] == want[:20]
    assert got != want


@pytest.mark.long
def test_preempted_and_cached_rows_are_as_short_as_their_pages(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages come from others then; those of a former request in the same slot count for nothing."""
    passes, asked = Passes(monkeypatch), prompts(100, 44, 43, 42, seed=1)
    crowded = engine(folders["v32"], max_context=200, cache_pages=7)
    answers = crowded.generate(asked, greedy(50))
    assert crowded.scheduler.stats().preemptions > 0
    assert answers == [expected(folders["v32"], tuple(prompt), 50) for prompt in asked]
    assert passes.longest(dense=True) <= TOP_K < passes.longest(dense=False)
    for prompt in asked[1], asked[0][:80]:
        for _ in range(crowded.runner.parts.state.slots + 1):  # every slot, and pages of the same prompt
            passes.seen.clear()
            [got] = crowded.generate([prompt], greedy(20))
            assert got == expected(folders["v32"], tuple(prompt), 20)
            assert {dense for dense, _ in passes.seen} == {True}
    assert crowded.scheduler.stats().cached_tokens >= 64


@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize("kind", DRAFTING)
def test_every_dense_step_passes_the_self_test(
    kind: str, cache: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = Passes(monkeypatch)
    parts = engine(folders[kind], width=3, max_rows=2, kv_cache_dtype=cache).runner.parts
    report = prove(parts, None, every_bucket=True)
    assert report.failed == ()
    assert passes.longest(dense=True) > TOP_K - 10  # the last page is read, too
    assert [(bucket.kind, bucket.bucket) for bucket in report.buckets] == [
        (kind, f"{rows} x 3") for rows in (2, 1) for kind in ("decode", "dense")
    ]
    # What a step takes is said once, of rows that may be long.
    assert all(bucket.step_time is None for bucket in report.buckets if bucket.kind == "dense")


def test_keys_that_are_not_written_fail_the_self_test(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = engine(folders["v32"], width=3, max_rows=2).runner.parts
    monkeypatch.setattr(ShortRows, "write", lambda *of: None)
    failed = prove(parts, None, every_bucket=True).failed
    assert {bucket.kind for bucket in failed} == {"dense"}
    assert len(failed) == 2
    assert all("cache of layer 1 lacks entries of the step" in bucket.problems for bucket in failed)


def test_drafts_that_share_a_selection_are_not_dense(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Such drafts attend to what was selected for a token before them, not to all there is."""
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
    parts.state.admit([Admission(0, greedy(1))])
    parts.state.grant([PageGrant(0, 0, (1,))])
    assert not any(key.dense for key in parts.buckets(4))
    assert not parts.all_short([0])
    with pytest.raises(ValueError, match="never attends densely"):
        DecodeStep(parts, BatchLayout(1, 1).graph_key(1, 0, dense=True), Scratch(parts.device))
