"""An engine that serves before all of its graphs are captured: tokens stay what they are, and no step takes a graph
before that is proven."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.deepseek_v4_layout import published_v4, tiny_v4, write_v4
from tests.rank_processes import run_ranks
from tests.tiny_models import VOCAB, write_tiny
from tests.workers.called_graphs import CalledGraph, call_graphs
from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.graphs import graph_runner
from workers.graphs.capture import Warmed, warm_up_portion
from workers.graphs.graph_runner import NOT_YET, GraphRunner, UncapturedStep
from workers.graphs.portions import Portion
from workers.graphs.segments import CapturedStage
from workers.memory.bits import differ
from workers.memory.keeper import WeightKeeper
from workers.parallel.group import Group
from workers.proof.prove import GraphProof
from workers.proof.step_fixture import slot_tensors
from workers.protocol.captures import CapturePortion, PortionCaptured
from workers.protocol.plan import BatchLayout, SamplingParams, StepPlan
from workers.rank import inherited_proof
from workers.rank import rank as rank_module
from workers.rank.captures import Captures, SelfTestFailedError, bytes_of_copies
from workers.rank.inherited_proof import InheritedWarmUp, Measured
from workers.scheduler import captures
from workers.step.mixed import Stage
from workers.step.parts import StepParts
from workers.weights.kept import KeptWeights

SETTINGS: dict[str, Any] = {"max_rows": 6, "token_budget": 40, "cache_pages": 120, "max_context": 200, "device": "cpu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("v3"), "v3", seed=3, num_hidden_layers=2)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[CalledGraph]:
    monkeypatch.setattr(captures, "PAUSE", 0.0)
    monkeypatch.setattr(captures, "QUIET_S", 0.0)
    return call_graphs(monkeypatch)


def engine(folder: Path, waiting: int | None = None, keeper: Path | None = None, **settings: Any) -> InlineEngine:
    given = {"model": str(folder), "width": 3, **SETTINGS, **settings}
    return InlineEngine(EngineConfig(**given), torch.device("cpu"), waiting=waiting, keeper=keeper)


def graphs_of(run: InlineEngine) -> GraphRunner:
    assert run.runner.graphs is not None
    return run.runner.graphs


def ask(run: InlineEngine, first: int = 0, count: int = 7) -> None:
    """Requests of all kinds."""
    for number in range(first, first + count):
        chance = random.Random(number)
        prompt = [chance.randrange(VOCAB) for _ in range(chance.choice([1, 7, 70]))]
        sampling = SamplingParams(
            chance.randrange(10, 30),
            temperature=chance.choice([0.0, 1.0]),
            seed=number,
            presence_penalty=chance.choice([0.0, 0.5]),
        )
        run.add(f"r{number}", prompt, sampling)


def tokens(run: InlineEngine) -> dict[str, list[int]]:
    return {name: found.tokens for name, found in run.run().items()}


def names(run: InlineEngine) -> list[str]:
    return [str(bucket) for bucket in run.reports[-1].buckets]


@pytest.mark.parametrize("width", [3, pytest.param("auto", marks=pytest.mark.long)])
def test_streams_go_on_unchanged_while_graphs_are_captured_and_proven(
    folder: Path, made: list[CalledGraph], width: int | str
) -> None:
    whole = engine(folder, width=width)
    assert whole.replica.captures is None
    for first in (0, 10):
        ask(whole, first, 6)
        want = tokens(whole)
    run = engine(folder, waiting=2, width=width)
    portions = len(run.replica.ready.portions)
    assert portions == len(graphs_of(run).left) > 4
    ask(run, 0, 6)
    run.run()
    assert run.runner.stats.eager[NOT_YET] > 0
    assert not graphs_of(run).left
    assert graphs_of(run).count == graphs_of(whole).count
    eager = run.runner.stats.eager[NOT_YET]
    ask(run, 10, 6)
    assert tokens(run) == want
    assert run.runner.stats.eager[NOT_YET] == eager
    assert run.runner.stats.mixed_steps > 0
    assert run.runner.stats.replays > 0
    # What is proven in the end is what a start proves, in its order.
    assert names(run) == names(whole)
    assert run.reports[0].left_out == len(names(run)) - len(run.reports[0].buckets)
    assert run.reports[-1].passed
    assert run.reports[-1].left_out == 0
    assert run.scheduler.stats().pages_free == whole.scheduler.stats().pages_free


@pytest.mark.parametrize("inherits", [False, True])
def test_rings_of_rows_stay_what_they_are_while_graphs_are_captured_and_proven(
    tmp_path: Path, made: list[CalledGraph], compiled: list[int | None], inherits: bool
) -> None:
    """DeepSeek V4 keeps the newest tokens of each row in rings: a proof overwrites them as it does tables of slots."""
    config, model = tiny_v4(seed=1)
    folder = write_v4(tmp_path, config, published_v4(model))
    keeper = WeightKeeper()
    try:
        whole = engine(folder, keeper=keeper.path(), width=1)
        ask(whole, 0, 5)
        want = tokens(whole)
        run = engine(folder, waiting=2, keeper=keeper.path() if inherits else None, width=1)
        assert compiled == [None, 2 if inherits else None]
        rings = run.runner.parts.cache.rings
        slots = run.runner.parts.state.kept_bytes
        assert bytes_of_copies(run.runner) - slots > sum(ring.nbytes for ring in rings) > 0
        ask(run, 0, 5)
        assert tokens(run) == want
        assert not graphs_of(run).left
        assert run.reports[-1].passed
    finally:
        keeper.close()


def test_the_buckets_of_the_waiting_rows_come_first_and_larger_ones_serve_for_smaller(
    folder: Path, made: list[CalledGraph]
) -> None:
    graphs = graphs_of(engine(folder, waiting=3))
    assert {captured.step.key.rows for captured in graphs.all()} == {1, 3, 6}
    assert [portion.rows for portion in graphs.left if portion.steps] == [2, 4]
    assert [portion.tokens for portion in graphs.left if portion.stages] == [16, 32, 40]
    assert [portion.rows for portion in graphs.left if portion.split_steps] == [1, 2, 4, 6]
    assert not graphs.stages()


def test_no_step_takes_a_graph_that_is_not_proven(
    folder: Path, made: list[CalledGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    proven = set[Any]()
    prove, captured, stage = GraphProof.prove, GraphRunner.captured, GraphRunner.stage

    def noted(self: GraphProof, portion: Portion, *rest: Any) -> bool:
        passed = prove(self, portion, *rest)
        proven.update(portion.steps, portion.stages)
        return passed

    def checked(self: GraphRunner, plan: StepPlan, *, dense: bool) -> Any:
        found = captured(self, plan, dense=dense)
        assert found is not None
        assert isinstance(found, UncapturedStep) or found.step.key in proven
        return found

    def checked_stage(self: GraphRunner, layout: BatchLayout) -> Stage:
        found = stage(self, layout)
        assert not isinstance(found, CapturedStage) or self.token_buckets.key(layout) in proven
        return found

    monkeypatch.setattr(GraphProof, "prove", noted)
    monkeypatch.setattr(GraphRunner, "captured", checked)
    monkeypatch.setattr(GraphRunner, "stage", checked_stage)
    run = engine(folder, waiting=6)
    for first in (0, 10):
        ask(run, first, 4)
        run.run()
    assert run.runner.stats.replays > 0
    assert run.runner.stats.mixed_steps > 0


@pytest.mark.parametrize("at", [0, 2, -1])
def test_a_graph_that_computes_something_else_ends_the_engine_before_it_is_used(
    folder: Path, made: list[CalledGraph], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    run = engine(folder, waiting=6)
    graphs = graphs_of(run)
    wrong = list(graphs.left)[at]
    capture = GraphRunner.capture

    def captured(self: GraphRunner) -> Any:
        before = len(made)
        portion = capture(self)
        if portion is wrong:
            for graph in made[before:]:
                graph._call = lambda: None  # as of a graph that writes nothing
        return portion

    monkeypatch.setattr(GraphRunner, "capture", captured)
    ask(run)
    with pytest.raises(SelfTestFailedError, match="self-test failed for"):
        run.run()
    assert wrong not in graphs.left
    assert not run.reports[-1].passed


def test_an_idle_engine_captures_them_all_and_without_a_self_test_proves_none(
    folder: Path, made: list[CalledGraph]
) -> None:
    run = engine(folder, waiting=0, selftest=False)
    assert set(run.replica.ready.portions) == {(0, 0)}
    run.run()
    assert not graphs_of(run).left
    assert not run.reports


def test_few_pages_are_no_hindrance(folder: Path, made: list[CalledGraph]) -> None:
    """Where rows have nearly all pages, graphs wait until they are idle; then a proof takes what there is."""
    want = engine(folder, cache_pages=9, selftest=False)
    ask(want)
    run = engine(folder, waiting=0, cache_pages=9)
    ask(run)
    assert tokens(run) == tokens(want)
    run.run()
    assert not graphs_of(run).left
    assert run.reports[-1].passed


def test_an_engine_that_inherits_a_proof_proves_the_ends_of_each_kind(folder: Path, made: list[CalledGraph]) -> None:
    """The first engine notes its report once all is proven, not before."""
    keeper = WeightKeeper()
    try:
        first, second = (engine(folder, waiting=1, keeper=keeper.path()) for _ in range(2))
        assert second.reports[0].inherited == 0
        first.run()
        third = engine(folder, waiting=1, keeper=keeper.path())
        assert third.reports[0].inherited > 0
        assert third.reports[0].left_out == 0
        third.run()
        assert names(third) == names(first)
        # The largest and the smallest of three kinds, and the only tail.
        assert len(names(third)) - third.reports[-1].inherited == 7
        assert graphs_of(third).count == graphs_of(first).count
    finally:
        keeper.close()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Let ranks on a CPU have kernels in Triton's cache. The list fills with what each engine asks to be compiled: rows
    whose steps come first, or None where it is all."""
    asked: list[int | None] = []

    def compile(*args: Any, proof: bool, first: int | None) -> frozenset[str]:
        asked.append(first)
        return frozenset({"KERNEL"})

    monkeypatch.setattr(rank_module, "_compile", compile)
    monkeypatch.setattr(inherited_proof, "still_compiled", lambda folders: folders == ("KERNEL",))
    return asked


@pytest.fixture
def warmed(monkeypatch: pytest.MonkeyPatch) -> list[Portion | None]:
    """The list that fills with the portions that are warmed up, and with None for all of an engine."""
    done: list[Portion | None] = []
    whole, portion = graph_runner.warm_up, graph_runner.warm_up_portion

    def warm_up(*args: Any) -> Any:
        done.append(None)
        return whole(*args)

    def warm_up_portion(parts: StepParts, wanted: Portion, *rest: Any) -> None:
        done.append(wanted)
        portion(parts, wanted, *rest)

    monkeypatch.setattr(graph_runner, "warm_up", warm_up)
    monkeypatch.setattr(graph_runner, "warm_up_portion", warm_up_portion)
    return done


@pytest.mark.parametrize("settings", [{}, pytest.param({"width": "auto"}, marks=pytest.mark.long)])
def test_an_engine_that_takes_a_place_warms_up_each_graph_right_before_its_capture(
    folder: Path,
    made: list[CalledGraph],
    compiled: list[int | None],
    warmed: list[Portion | None],
    settings: dict[str, Any],
) -> None:
    keeper = WeightKeeper()
    try:
        first = engine(folder, keeper=keeper.path(), **settings)
        ask(first, 0, 6)
        want = tokens(first)
        assert compiled == [None]
        assert warmed == [None]
        second = engine(folder, waiting=2, keeper=keeper.path(), **settings)
        graphs = graphs_of(second)
        order = [graphs.there, *graphs.left]
        assert compiled == [None, 2]
        assert [set(portion.steps) for portion in warmed[1:] if portion is not None] == [set(order[0].steps)]
        ask(second, 0, 6)
        assert tokens(second) == want
        second.run()
        assert warmed[2:] == order[1:]
        assert graphs.warmed == graphs_of(first).warmed
        assert second.replica.ready.pages == first.replica.ready.pages
        assert second.reports[-1].passed
        assert graphs.count == graphs_of(first).count
    finally:
        keeper.close()


def test_an_engine_warms_up_as_a_whole_where_kernels_or_its_context_are_others(
    folder: Path,
    made: list[CalledGraph],
    compiled: list[int | None],
    warmed: list[Portion | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keeper = WeightKeeper()
    try:
        engine(folder, keeper=keeper.path(), max_context=None, cache_pages=20)
        with monkeypatch.context() as patch:
            patch.setattr(inherited_proof, "still_compiled", lambda folders: False)
            engine(folder, waiting=1, keeper=keeper.path(), max_context=None, cache_pages=20)
        assert compiled == [None, None]
        assert warmed == [None, None]
        with monkeypatch.context() as patch:
            patch.setattr(rank_module, "own_pages", lambda *args: 3)
            engine(folder, waiting=1, keeper=keeper.path(), max_context=None, cache_pages=20)
        assert compiled == [None, None, 1]  # it learns of its context later
        assert warmed == [None, None, None]
        engine(folder, keeper=keeper.path(), max_context=None, cache_pages=20)  # for which nobody waits
        assert compiled[-1] is None
        assert warmed[3:] == [None]
    finally:
        keeper.close()


def test_warming_up_beside_rows_changes_nothing_of_theirs(folder: Path, made: list[CalledGraph]) -> None:
    run = engine(folder)
    ask(run)
    for _ in range(6):
        run.step()
    parts, graphs = run.runner.parts, graphs_of(run)
    slots = [tensor.clone() for tensor in slot_tensors(parts)]
    pages = [layer.clone() for layer in parts.cache.layers]
    assert any(bool(slot.any()) for slot in slots)
    warm_up_portion(parts, graphs.keys.everything(), graphs._scratch(), graphs._inner(), graphs._masks)
    for before, after in zip(slots, slot_tensors(parts), strict=True):
        whole = len(before) - 1 if len(before) == parts.state.slots + 1 else len(before)  # the last slot is nobody's
        assert torch.equal(before[:whole], after[:whole])
    for before, after in zip(pages, parts.cache.layers, strict=True):
        assert not bool(differ(before[1:], after[1:]))  # page 0 is the null page


def test_every_page_that_a_proof_is_granted_is_zero_afterwards(
    folder: Path, made: list[CalledGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a former tenant has left in it was to be zeroed before anybody else has it. Of a portion the tail alone may
    be proven, where the proof is inherited: then no page is granted."""
    capture, granted = Captures.capture, dict[int, int]()

    def checked(self: Captures, message: CapturePortion) -> PortionCaptured:
        portion, pages = self._graphs.left[0], list(message.pages)
        for layer in self._runner.parts.cache.layers:
            layer[pages] = torch.nan
        captured = capture(self, message)
        assert not any(layer[pages].any() for layer in self._runner.parts.cache.layers)
        if portion.tails:
            granted[portion.tokens] = len(pages)
        return captured

    settings = {"width": 1, "max_rows": 17}
    keeper = WeightKeeper()
    try:
        engine(folder, keeper=keeper.path(), **settings)
        run = engine(folder, waiting=1, keeper=keeper.path(), **settings)
        assert run.reports[0].inherited > 0
        monkeypatch.setattr(Captures, "capture", checked)
        run.run()
    finally:
        keeper.close()
    assert not graphs_of(run).left
    assert run.reports[-1].passed
    assert granted[16] > 0 == granted[32]  # of 32 tokens the tail is the largest, and the stage is not


def test_copies_of_the_slots_are_counted_before_the_cache_gets_the_rest(
    folder: Path, made: list[CalledGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    pages, clone = rank_module.own_pages, torch.Tensor.clone

    def asked(*given: Any) -> int:
        taken.append(given[-1])
        return pages(*given)

    monkeypatch.setattr(rank_module, "own_pages", asked)
    settings = {"width": 1, "max_rows": 2, "token_budget": 16}
    engine(folder, **settings)
    engine(folder, waiting=1, selftest=False, **settings)
    run = engine(folder, waiting=1, **settings)
    copied = 0

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal copied
        copied += tensor.nbytes
        return clone(tensor)

    assert run.runner.parts.sampling is not None
    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(torch.Tensor, "clone", counted)
        with run.runner.parts.state.kept(), run.runner.parts.sampling.kept():
            pass
    assert copied > VOCAB
    assert taken == [taken[1] + copied, taken[1], taken[1] + copied]


def rank_main(rank: int, folder: Path, place: Path, settings: dict[str, Any]) -> None:
    """Be a rank whose scheduler makes the same plans as all others'; leave its tokens and what was proven."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captures, "PAUSE", 0.0)  # else the schedulers' clocks decide
        patch.setattr(captures, "QUIET_S", 0.0)
        call_graphs(patch)
        config = EngineConfig(model=str(folder), width=3, tensor_parallel=2, **{**SETTINGS, **settings})
        group = Group.connect(config.mesh(rank), f"file://{place}/rendezvous", torch.device("cpu"), timeout_s=120)
        run = InlineEngine(config, group=group, waiting=2)
        ask(run, 0, 4)
        found = tokens(run)
        assert not graphs_of(run).left
        assert graphs_of(run).stats.eager[NOT_YET] > 0
        report = run.replica.captures.report() if run.replica.captures is not None else None
        assert report is not None
        assert report.passed
        torch.save((found, [str(bucket) for bucket in report.buckets]), place / f"rank{rank}.pt")
        Group.close()


@pytest.mark.long
@pytest.mark.parametrize("settings", [{}, pytest.param({"cache_shards": 2}, marks=pytest.mark.soak)])
def test_all_ranks_capture_at_the_same_place(
    folder: Path, made: list[CalledGraph], tmp_path: Path, settings: dict[str, Any]
) -> None:
    whole = engine(folder)
    ask(whole, 0, 4)
    run_ranks(rank_main, 2, folder, tmp_path, settings)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    assert ranks[0] == ranks[1]
    assert ranks[0] == (tokens(whole), names(whole))


def recalling_main(rank: int, place: Path) -> None:
    """Be a rank that remembers several engines before it, and leave which of them it inherits from."""
    config = EngineConfig(model="demo", tensor_parallel=2)
    cpu, keeper = torch.device("cpu"), WeightKeeper()
    group = Group.connect(config.mesh(rank), f"file://{place}/rendezvous", cpu, timeout_s=120)
    inherited, found = [], InheritedWarmUp(KeptWeights(keeper.path(), group, cpu), config)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(inherited_proof, "still_compiled", lambda folders: True)
            for pages, context in ((9, 200), (9 + rank, 200), (9, 200 - rank)):
                found.note(Measured(Warmed(100 + rank, 10, 5), pages, context, ("KERNEL",)))
                inherited.append(found.recall() is not None)
    finally:
        keeper.close()
        Group.close()
    torch.save(inherited, place / f"rank{rank}.pt")


def test_ranks_that_remember_different_engines_inherit_nothing(tmp_path: Path) -> None:
    """An engine may end when one rank has noted what it measured, and another has not. How much memory graphs need may
    differ between ranks; pages and the longest request decide what all of them do next."""
    run_ranks(recalling_main, 2, tmp_path)
    assert [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)] == [[True, False, False]] * 2
