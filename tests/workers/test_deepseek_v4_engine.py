"""A DeepSeek V4 behind the scheduler, in eager steps on a CPU, against transformers' generate."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.deepseek_v4_layout import QUANTIZATION, VOCAB, published_v4, quantized_v4, tiny_v4, write_v4
from tests.workers.called_graphs import call_graphs
from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.graphs import capture, segments
from workers.protocol.plan import SamplingParams
from workers.weights.formats.mxfp4 import Mxfp4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, model = tiny_v4(seed=1)
    return write_v4(tmp_path_factory.mktemp("v4"), config, published_v4(model))


def engine(folder: Path, **settings: Any) -> InlineEngine:
    defaults = {"max_rows": 4, "token_budget": 48, "cache_pages": 40, "max_context": 300, "device": "cpu"}
    return InlineEngine(EngineConfig(model=str(folder), **{**defaults, "selftest": False, **settings}))


@cache
def expected(prompt: tuple[int, ...], tokens: int) -> list[int]:
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        out = tiny_v4(seed=1)[1].generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, eos_token_id=None
        )
    return out[0, len(prompt) :].tolist()


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(tokens, temperature=0.0)


def test_greedy_tokens_are_transformers_tokens_in_mixed_batches(folder: Path) -> None:
    """Prompts on every side of the window, of entries and of pages, six for four rows."""
    run, asked = engine(folder), prompts(5, 17, 90, 140, 64, 33)
    for prompt, got in zip(asked, run.generate(asked, greedy(20)), strict=True):
        assert got == expected(tuple(prompt), 20)
    stats = run.scheduler.stats()
    assert stats.step_seconds["mixed"].count > 0
    assert stats.step_seconds["decode"].count > 0
    assert stats.bad_rows == 0


@pytest.mark.parametrize("width", [2, 4])
def test_rejected_drafts_change_no_token(width: int, folder: Path) -> None:
    asked = [prompt * 3 for prompt in prompts(30, 20, 7)]
    run = engine(folder, width=width, drafter="ngram")
    assert run.generate(asked, greedy(30)) == [expected(tuple(prompt), 30) for prompt in asked]
    stats = run.scheduler.stats()
    assert stats.drafts_offered > stats.drafts_accepted


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_captured_steps_pass_the_self_test_and_give_the_same_tokens(
    drafter: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode steps, segments and tails are each called again in the memory in which they were captured."""
    call_graphs(monkeypatch)
    asked = [prompt * 2 for prompt in prompts(30, 20, 7)]
    settings: dict[str, Any] = {"width": 3} if drafter == "ngram" else {}
    run = engine(folder, drafter=drafter, selftest=True, max_rows=3, **settings)
    assert {bucket.kind for bucket in run.reports[-1].buckets} == {"decode", "masked", "mixed", "tail"}
    assert run.reports[-1].passed, [bucket.problems for bucket in run.reports[-1].buckets]
    assert run.generate(asked, greedy(20)) == [expected(tuple(prompt), 20) for prompt in asked]
    assert run.runner.stats.replays > 0
    assert run.runner.stats.mixed_steps > 0


def test_preemptions_change_no_token(folder: Path) -> None:
    """Rows lose their slots and pages, and are computed again in others."""
    asked = prompts(58, 57, 56, seed=1)
    crowded = engine(folder, max_context=100, cache_pages=4, max_rows=3)
    assert crowded.generate(asked, greedy(20)) == [expected(tuple(prompt), 20) for prompt in asked]
    assert crowded.scheduler.stats().preemptions > 0


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Entries of 128 tokens: then pages can be shared at multiples of 128 tokens alone."""
    config, model = tiny_v4(seed=1, compress_rate_hca=128)
    return write_v4(tmp_path_factory.mktemp("v4"), config, published_v4(model))


def cached(run: InlineEngine) -> int:
    return run.scheduler.stats().cached_tokens


@pytest.mark.parametrize("settings", [{}, {"width": 4, "drafter": "ngram"}])
def test_prompts_begin_behind_pages_that_have_a_snapshot(settings: dict[str, Any], folder: Path) -> None:
    """The last boundary of a prompt has one, and from the second prompt on the place where others leave it. Tokens are
    those without hits, of a prompt that ends at a boundary, too."""
    run, (head, *tails) = engine(folder, **settings), prompts(140, 9, 70, 30, 9, seed=2)
    asked = [head, head, head + tails[0], head[:70] + tails[1], head[:70] + tails[2], head[:128]]
    hits = []
    for prompt in asked:
        before = cached(run)
        assert run.generate([prompt], greedy(12)) == [expected(tuple(prompt), 12)]
        hits.append(cached(run) - before)
    assert hits == [0, 128, 128, 0, 64, 64]
    assert run.generate([asked[3]], greedy(12)) == [expected(tuple(asked[3]), 12)]
    assert cached(run) == sum(hits) + 128


def test_boundaries_are_those_of_the_longest_entry(published: Path) -> None:
    run, (head, tail) = engine(published), prompts(140, 60, seed=5)
    first = run.generate([head], greedy(8))
    assert run.generate([head], greedy(8)) == first
    assert cached(run) == 128
    run.generate([head[:127] + tail], greedy(8))
    assert cached(run) == 128
    fresh = engine(published, prefix_cache=False)
    asked = head[:130] + tail
    assert run.generate([asked], greedy(8)) == fresh.generate([asked], greedy(8))
    assert cached(run) == 256


def test_prompts_of_one_plan_wait_for_the_snapshot(folder: Path) -> None:
    """Equal prompts that come together are computed once, but for what is behind the last boundary."""
    run, (prompt,) = engine(folder), prompts(150, seed=6)
    assert run.generate([prompt] * 3, greedy(8)) == [expected(tuple(prompt), 8)] * 3
    assert cached(run) == 2 * 128


def test_the_least_recently_used_snapshot_makes_room(folder: Path) -> None:
    run, asked = engine(folder, prefix_snapshots=2), prompts(70, 71, 72, seed=7)
    for prompt in asked:
        run.generate([prompt], greedy(2))
    assert run.scheduler._rows.snapshots is not None
    assert run.scheduler._rows.snapshots.held == 2
    hits = []
    for index in (0, 2, 0, 1):
        before = cached(run)
        assert run.generate([asked[index]], greedy(5)) == [expected(tuple(asked[index]), 5)]
        hits.append(cached(run) - before)
    assert hits == [0, 64, 64, 0]


def test_evicted_pages_take_their_snapshots_with_them(folder: Path) -> None:
    run, asked = engine(folder, cache_pages=7, max_context=200), prompts(130, 131, 132, 133, seed=8)
    for prompt in (*asked, *asked[-1:]):
        assert run.generate([prompt], greedy(5)) == [expected(tuple(prompt), 5)]
    snapshots = run.scheduler._rows.snapshots
    assert snapshots is not None
    assert 0 < snapshots.held <= 3
    assert cached(run) == 128


def test_without_snapshots_prompts_share_nothing(folder: Path) -> None:
    for settings in ({"prefix_snapshots": 0}, {"prefix_cache": False}):
        run, (prompt,) = engine(folder, **settings), prompts(140, seed=2)
        for _ in range(2):
            assert run.generate([prompt], greedy(12)) == [expected(tuple(prompt), 12)]
        assert cached(run) == 0
        assert run.runner.parts.cache.snapshots is None


def test_a_slot_has_nothing_of_its_former_row(folder: Path) -> None:
    run = engine(folder, max_rows=1)
    run.generate(prompts(100, seed=3), greedy(5))
    cache = run.runner.parts.cache
    assert cache.snapshots is not None
    for tensor in [*cache.rings, *cache.layers, *cache.snapshots._kept]:
        tensor.fill_(torch.nan)
    asked = prompts(3, 70, seed=4)
    assert run.generate(asked, greedy(20)) == [expected(tuple(prompt), 20) for prompt in asked]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"invariant": True}, "invariant mode"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8"),
        ({"host_cache_bytes": 1 << 20}, "host_cache_bytes"),
        ({"tensor_parallel": 2, "cache_shards": 2}, "cache_shards"),
    ],
)
def test_settings_that_are_not_supported_are_named(settings: dict[str, Any], words: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=words):
        engine(folder, **settings)


def test_no_experts_are_looked_at_in_a_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU whether MXFP4 is FP8 is asked of all numbers, which waits for it. Layers of the same kind as others are
    run for the first time where graphs are captured."""
    call_graphs(monkeypatch)
    matrix, record, captures, looked = Mxfp4.matrix, capture.record, list[bool](), list[bool]()

    def noting(device: torch.device, call: Callable[[], Any]) -> Any:
        captures.append(True)
        try:
            return record(device, call)
        finally:
            captures[-1] = False

    def looking(self: Mxfp4, *given: Any) -> Any:
        looked.append(any(captures))
        return matrix(self, *given)

    monkeypatch.setattr(capture, "record", noting)
    monkeypatch.setattr(segments, "record", noting)
    monkeypatch.setattr(Mxfp4, "matrix", looking)
    config, model = tiny_v4(seed=1, expert_dtype="fp4", quantization_config=QUANTIZATION)
    folder = write_v4(tmp_path, config, quantized_v4(published_v4(model))[0])
    assert len(engine(folder, drafter="none", max_rows=2).generate(prompts(30), greedy(5))[0]) == 5
    assert captures
    assert looked == [False] * 2 * config["num_hidden_layers"]
