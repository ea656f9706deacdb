"""A rank that stands by takes the place of one that served: what of both is left, and what is not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from kernels import page
from kernels.mla_decode import invariant
from tests.deepseek_v4_layout import published_v4, tiny_v4, write_v4
from tests.rank_processes import run_ranks
from tests.tiny_models import write_tiny
from tests.workers.harness import InlineEngine
from tests.workers.test_deepseek_v4_engine import expected as expected_v4
from tests.workers.test_deepseek_v4_engine import prompts as prompts_v4
from tests.workers.test_engine import engine, random_prompts
from workers.cache.paged import PagedCache
from workers.cache.snapshots import RingSnapshots
from workers.config import EngineConfig
from workers.memory.keeper import KeeperClient, WeightKeeper
from workers.models.attention import sparse_rows
from workers.parallel.group import Group
from workers.processes.scheduler_process import scheduler_config
from workers.protocol.plan import SamplingParams
from workers.rank import rank
from workers.rank.runner import PlanError
from workers.scheduler import Scheduler, pages
from workers.step.parts import SlotState

DRAWN = SamplingParams(40, temperature=1.0, seed=5, logprobs=1)
PAGES = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("v3"), "v3", seed=3)


@pytest.fixture(scope="module")
def folder_v4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, model = tiny_v4(seed=1)
    return write_v4(tmp_path_factory.mktemp("v4"), config, published_v4(model))


@pytest.fixture
def keeper() -> Iterator[Path]:
    made = WeightKeeper()
    yield made.path()
    made.close()


def settings(folder: Path, **more: object) -> EngineConfig:
    few = {"max_rows": 12, "token_budget": 160, "cache_pages": PAGES, "selftest": False, "width": 2, "device": "cpu"}
    return EngineConfig.model_validate({"model": str(folder), **few, **more})


def long_prompt() -> list[int]:
    """One that has two whole pages."""
    [prompt] = random_prompts(1, 150, seed=4)
    return (prompt * 150)[:150]


def run(made: InlineEngine, name: str, prompt: list[int]) -> list[int]:
    made.add(name, prompt, DRAWN)
    made.run()
    return made.finished[name].tokens


def logprobs(made: InlineEngine, name: str) -> list[float]:
    """Those of the tokens of a request that has ended."""
    return [entry.chosen for output in made.finished[name].outputs for entry in output.logprobs]


def untouched(made: InlineEngine) -> bool:
    """Whether no page, ring of a slot or snapshot has anything, and no slot a page."""
    cache, tables = made.runner.parts.cache, made.runner.parts.state.tensors.page_SP
    kept = [] if cache.snapshots is None else cache.snapshots._kept
    return not any(bool(tensor.any()) for tensor in (*cache.layers, *cache.rings, *kept, tables))


def mapped_files() -> list[str]:
    """The files of weights that this process has mapped, one for each range of addresses."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[4] for line in lines if "latentserve weights" in line]


def test_it_has_all_pages_and_nothing_in_them(folder: Path, keeper: Path) -> None:
    others = mapped_files()  # of earlier tests
    prompts = [long_prompt(), *random_prompts(1, 150, seed=5)]
    expected = engine(folder, width=1).generate(prompts, [DRAWN] * 2)
    serving = InlineEngine(settings(folder, selftest=True), keeper=keeper, role="primary")
    assert [run(serving, str(number), prompt) for number, prompt in enumerate(prompts)] == expected
    standby = InlineEngine(settings(folder, selftest=True), keeper=keeper, role="standby")
    assert standby.replica.ready.pages < serving.replica.ready.pages == PAGES
    mapped = [file for file in mapped_files() if file not in others]
    assert len(mapped) >= 2
    assert len(set(mapped)) == 1  # mapped twice, and there once
    places = [layer.data_ptr() for layer in standby.runner.parts.cache.layers]
    assert [run(standby, f"a{number}", prompt) for number, prompt in enumerate(prompts)] == expected  # a rehearsal
    assert not untouched(standby)
    ready = standby.replica.take_over()
    assert replace(ready, start_s={}) == replace(serving.replica.ready, start_s={})
    assert untouched(standby)
    assert [layer.data_ptr() for layer in standby.runner.parts.cache.layers] == places
    standby.scheduler = Scheduler(scheduler_config(settings(folder), ready))
    assert [run(standby, f"b{number}", prompt) for number, prompt in enumerate(prompts)] == expected


def prompts_of_shards() -> list[list[int]]:
    """Two that begin with the same two pages, and one more."""
    return [long_prompt(), [*long_prompt(), 5, 6], *random_prompts(1, 100, seed=5)]


GREEDY = SamplingParams(10, temperature=0.0)


def rank_main(number: int, folder: Path, keeper: Path) -> None:
    """Be one of two ranks that share out a cache in invariant mode, and whose schedulers make the same plans. Leave
    what the engine that serves gives, and what the promoted one does."""
    torch.set_num_threads(1)
    for module in (page, pages, invariant):
        module.PIECE_PAGES = 1  # type: ignore[attr-defined]  # rows have several on each rank
    shared = {"tensor_parallel": 2, "cache_shards": 2, "invariant": True, "max_context": 450}
    made = settings(folder / "model", **shared)
    greedy = replace(GREEDY, logprobs=1 if number == 0 else -1)
    group = Group.connect(made.mesh(number), f"file://{folder}/rendezvous", torch.device("cpu"), timeout_s=120)

    def given(run: InlineEngine) -> tuple[list[list[int]], list[float], int]:
        run.finished.clear()
        tokens = run.generate(prompts_of_shards(), greedy)
        return (
            tokens,
            [each for name in run.finished for each in logprobs(run, name)],
            run.scheduler.stats().cached_tokens,
        )

    try:
        served = given(InlineEngine(made, group=group, keeper=keeper, role="primary"))
        run = InlineEngine(made, group=group, keeper=keeper, role="standby")
        run.generate([[7, 8]], greedy)  # a rehearsal
        few = run.replica.ready.pages
        run.scheduler = Scheduler(scheduler_config(made, run.replica.take_over()))
        assert few < run.scheduler.config.pages == 2 * (PAGES - 1) + 1
        torch.save((served, given(run)), folder / f"{number}.pt")
    finally:
        group.close()


@pytest.mark.long
def test_ranks_that_share_out_a_cache_take_over_in_invariant_mode(tmp_path: Path, keeper: Path) -> None:
    """A promoted scheduler deals pieces of rows out as another one does, and no bit is another."""
    expected = engine(write_tiny(tmp_path / "model", "v3", seed=3), width=1).generate(prompts_of_shards(), GREEDY)
    run_ranks(rank_main, 2, tmp_path, keeper)
    for number in range(2):
        served, promoted = torch.load(tmp_path / f"{number}.pt", weights_only=False)
        assert promoted == served
        assert served[0] == expected
        assert len(served[1]) == (30 if number == 0 else 0)
        assert served[2] > 0  # pages that two prompts share


@pytest.mark.parametrize("fault", [None, "rings", "snapshots"])
def test_rings_of_slots_and_snapshots_are_empty_too(
    folder_v4: Path, keeper: Path, monkeypatch: pytest.MonkeyPatch, fault: str | None
) -> None:
    """DeepSeek V4 keeps something beside its pages, which no memory of the other engine has. Planted: it stays."""
    few = {"cache_pages": 40, "max_rows": 4, "token_budget": 256, "max_context": 300, "width": 1}
    (prompt,) = prompts_v4(150, seed=6)
    greedy = SamplingParams(8, temperature=0.0)
    wanted = expected_v4(tuple(prompt), 8)

    def run_twice(made: InlineEngine) -> int:
        """The second time from a snapshot on. The number of its cached tokens."""
        before = made.scheduler.stats().cached_tokens
        assert made.generate([prompt], greedy) == made.generate([prompt], greedy) == [wanted]
        return made.scheduler.stats().cached_tokens - before

    serving = InlineEngine(settings(folder_v4, **few, selftest=True), keeper=keeper, role="primary")
    assert run_twice(serving) == 128
    standby = InlineEngine(settings(folder_v4, **few, selftest=True), keeper=keeper, role="standby")
    assert standby.replica.ready.pages < serving.replica.ready.pages
    assert run_twice(standby) == 128  # rehearsals
    assert standby.runner.parts.cache.snapshots is not None
    if fault == "snapshots":
        monkeypatch.setattr(RingSnapshots, "clear", lambda self: None)
    elif fault == "rings":
        monkeypatch.setattr(PagedCache, "clear_slots", lambda self: self.snapshots.clear())
    ready = standby.replica.take_over()
    assert replace(ready, start_s={}) == replace(serving.replica.ready, start_s={})
    assert untouched(standby) is (fault is None)
    if fault is None:
        standby.scheduler = Scheduler(scheduler_config(settings(folder_v4, **few), ready))
        assert run_twice(standby) == 128


def test_what_stands_by_for_a_sparse_model_proves_steps_that_select(
    tmp_path: Path, keeper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though rows of so many tokens take more pages than it would have for rehearsals."""
    top_k = 260
    folder = write_tiny(tmp_path, "glm5", seed=3, index_topk=top_k, num_hidden_layers=3)
    few = {"cache_pages": 60, "max_rows": 3, "token_budget": 64, "max_context": 480, "selftest": True}
    serving = InlineEngine(settings(folder, **few), keeper=keeper, role="primary")
    longest: list[int] = []
    honest = sparse_rows.select_positions

    def noting(score_TN: Tensor, bound_T: Tensor, *rest: Any, **options: Any) -> None:
        longest.append(int(bound_T.max()))
        honest(score_TN, bound_T, *rest, **options)

    monkeypatch.setattr(sparse_rows, "select_positions", noting)
    standby = InlineEngine(settings(folder, **few), keeper=keeper, role="standby")
    assert standby.replica.ready.pages < serving.replica.ready.pages
    assert sum(length > top_k for length in longest) >= len(longest) / 3


@pytest.mark.parametrize("fault", ["contents", "tables"])
def test_what_is_left_of_either_would_be_found(
    folder: Path, keeper: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Planted: memory that is not emptied, and tables that are not cleared."""
    prompt = long_prompt()
    serving = InlineEngine(settings(folder), keeper=keeper, role="primary")
    run(serving, "a", prompt)
    standby = InlineEngine(settings(folder), keeper=keeper, role="standby")
    run(standby, "a", prompt)
    if fault == "contents":
        monkeypatch.setattr(os, "ftruncate", lambda descriptor, size: None)
    else:
        monkeypatch.setattr(SlotState, "clear", lambda self: None)
    standby.replica.take_over()
    assert not untouched(standby)


@pytest.mark.parametrize("refused", [True, False])
def test_a_scheduler_that_goes_on_from_a_rehearsal_is_refused_and_would_be_wrong(
    folder: Path, keeper: Path, refused: bool
) -> None:
    """Planted: it believes that pages of the prompt are still cached."""
    prompt = long_prompt()
    [expected] = engine(folder, width=1).generate([prompt], [DRAWN])
    serving = InlineEngine(settings(folder), keeper=keeper, role="primary")
    standby = InlineEngine(settings(folder), keeper=keeper, role="standby")
    assert run(standby, "a", prompt) == expected
    steps = standby.runner._steps
    standby.replica.take_over()
    if refused:
        with pytest.raises(PlanError, match=f"plan of step {steps + 1} follows step 0"):
            run(standby, "b", prompt)
    else:
        standby.runner._steps = steps
        run(standby, "b", prompt)
        assert logprobs(standby, "b") != pytest.approx(logprobs(standby, "a"), abs=1e-3)
    assert serving.replica.ready.pages == PAGES


def test_without_a_weight_keeper_it_loads_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*_: object, **__: object) -> None:
        pytest.fail("weights are loaded, which are there already")

    monkeypatch.setattr(rank, "load_model", loaded)
    with pytest.raises(RuntimeError, match="shares what a weight keeper has, and there is none"):
        InlineEngine(settings(folder), role="standby")


def test_it_stands_by_for_its_like_alone(folder: Path, keeper: Path) -> None:
    with pytest.raises(RuntimeError, match="the weights that serve cannot be used: they are not kept on every rank"):
        InlineEngine(settings(folder), keeper=keeper, role="standby")
    serving = InlineEngine(settings(folder), keeper=keeper, role="primary")
    with pytest.raises(RuntimeError, match="no cache of an engine that serves: it is not kept"):
        InlineEngine(settings(folder, max_rows=11), keeper=keeper, role="standby")
    with pytest.raises(RuntimeError, match="the weights that serve cannot be used"):
        InlineEngine(settings(folder, dtype="bfloat16"), keeper=keeper, role="standby")
    standby = InlineEngine(settings(folder), keeper=keeper, role="standby")  # nothing was let go
    KeeperClient(keeper).forget("rank 0, cache")
    with pytest.raises(RuntimeError, match="cannot be taken: the memory of its cache is not kept any more"):
        standby.replica.take_over()
    assert serving.replica.ready.pages == PAGES
