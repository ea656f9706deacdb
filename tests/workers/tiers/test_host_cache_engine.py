"""Sessions that return to host memory: the same bits, and so the same tokens, as from the device."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import VOCAB, write_tiny
from tests.workers.harness import InlineEngine
from workers.cache.spec import CacheSpec, IndexSpec, LatentSpec
from workers.config import EngineConfig
from workers.protocol.plan import SamplingParams, StepPlan
from workers.rank.runner import Runner
from workers.tiers.mover import PageMover


def engine(folder: Path, **settings: Any) -> InlineEngine:
    sizes: dict[str, Any] = {"max_rows": 4, "token_budget": 96, "device": "cpu", "max_context": 500, "selftest": False}
    return InlineEngine(EngineConfig(model=str(folder), **{**sizes, **settings}))


def sessions(replica: InlineEngine, turns: int = 3, count: int = 4) -> list[Any]:
    """Several sessions in turn, one request at a time, each of which goes on from its last answer. The tokens with
    their log-probabilities, and how much of each prompt was cached."""
    histories = [tokens(300, seed=number) for number in range(count)]
    told: list[Any] = []
    for turn in range(turns):
        for number, history in enumerate(histories):
            name = f"{number} {turn}"
            sampling = SamplingParams(6, temperature=1.0, seed=3, logprobs=2)
            replica.add(name, history, sampling)
            replica.run()
            finished = replica.finished[name]
            entries = [entry for output in finished.outputs for entry in output.logprobs]
            told.append(
                (finished.tokens, [(one.ids, one.logprobs) for one in entries], finished.outputs[0].cached_tokens)
            )
            history += [*finished.tokens, *tokens(20, seed=100 * turn + number)]
    return told


def tokens(count: int, seed: int) -> list[int]:
    return [random.Random(1000 * seed + place).randrange(VOCAB) for place in range(count)]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param("v3", {"width": 3}, id="drafts"),
        pytest.param("v3", {"width": 1, "invariant": True}, id="invariant", marks=pytest.mark.long),
        pytest.param("v3", {"width": 2, "kv_cache_dtype": "fp8"}, id="fp8"),
        pytest.param("glm5", {"width": 2}, id="sparse", marks=pytest.mark.long),
        pytest.param(
            "v32",
            {"width": 3, "kv_cache_dtype": "fp8", "invariant": True},
            id="sparse-fp8-invariant",
            marks=pytest.mark.long,
        ),
        pytest.param("v2", {"width": 3, "drafter": "ngram"}, id="ngram", marks=pytest.mark.long),
    ],
)
def test_pages_from_host_memory_are_as_good_as_those_of_the_device(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """A device with room for one session and host memory for all, beside a device with room for all."""
    folder = write_tiny(tmp_path, kind, seed=3)
    roomy = engine(folder, cache_pages=200, **settings)
    tiered = engine(folder, cache_pages=11, host_cache_bytes=64 << 20, **settings)
    assert sessions(tiered) == sessions(roomy)
    stats, other = tiered.scheduler.stats(), roomy.scheduler.stats()
    assert stats.host_loaded_pages >= 16
    assert stats.host_lost_pages == 0
    assert stats.drafts_accepted == other.drafts_accepted, "the drafter's cache comes back, too"
    assert stats.cached_tokens == other.cached_tokens


def test_a_page_that_comes_back_with_one_bit_changed_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: otherwise the test above would compare what was computed anew."""
    folder = write_tiny(tmp_path, "v3", seed=3)
    expected = sessions(engine(folder, cache_pages=200, width=1), turns=2)
    honest = PageMover.move

    def move(self: PageMover, moves: Any) -> None:
        for slot, _ in moves.loads:
            self.memory.slot_SB[slot, 0:4096:7] ^= 0x10
        honest(self, moves)

    monkeypatch.setattr(PageMover, "move", move)
    assert sessions(engine(folder, cache_pages=11, host_cache_bytes=64 << 20, width=1), turns=2) != expected


@pytest.mark.parametrize(
    ("kind", "late"),
    [
        pytest.param("v32", IndexSpec, id="index keys"),
        pytest.param("v3", LatentSpec, id="latents", marks=pytest.mark.long),
    ],
)
def test_a_layer_of_a_page_that_comes_a_step_after_the_page_counts_as_there_is_noticed(
    kind: str, late: type[CacheSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: a rank answers before the last target layer is copied that has a cache of this kind. One step
    reads what was in the page before; every later one finds all of it."""
    folder = write_tiny(tmp_path, kind, seed=3)
    expected = sessions(engine(folder, cache_pages=200, width=1), turns=2)
    tiered = engine(folder, cache_pages=11, host_cache_bytes=64 << 20, width=1)
    cache = tiered.runner.parts.cache
    layer = max(number for number, spec in enumerate(cache.specs) if isinstance(spec, late))
    coming: dict[int, torch.Tensor] = {}
    honest, execute = PageMover.move, Runner.execute

    def move(self: PageMover, moves: Any) -> None:
        before = {page: cache.layers[layer][page].clone() for _, page in moves.loads}
        honest(self, moves)
        for page, content in before.items():
            coming[page] = cache.layers[layer][page].clone()
            cache.layers[layer][page].copy_(content)

    def step(self: Runner, plan: StepPlan) -> Any:
        result = execute(self, plan)
        for page, content in coming.items():
            cache.layers[layer][page].copy_(content)
        coming.clear()
        return result

    monkeypatch.setattr(PageMover, "move", move)
    monkeypatch.setattr(Runner, "execute", step)
    assert sessions(tiered, turns=2) != expected
    assert tiered.scheduler.stats().host_loaded_pages >= 8


def test_what_a_replica_tells_of_its_host_memory(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "v3", seed=3)
    replica = engine(folder, cache_pages=11, host_cache_bytes=1 << 20)
    record = replica.replica.mover.memory.slot_SB.shape[1]  # type: ignore[union-attr]
    assert replica.replica.ready.host_pages == (1 << 20) // record > 4
    assert replica.scheduler.stats().host_pages_total == replica.replica.ready.host_pages


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="prefix_cache is off"):
        EngineConfig(model="demo", host_cache_bytes=1 << 30, prefix_cache=False)
    with pytest.raises(ValueError, match="leave out record_plans"):
        EngineConfig(model="demo", host_cache_bytes=1 << 30, record_plans="/tmp/plans")
