"""An engine serves with few graphs where this very engine was proven before, and proves all of them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rank_processes import run_ranks
from tests.tiny_models import write_tiny
from tests.workers.called_graphs import CalledGraph, call_graphs
from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.graphs.graph_runner import GraphRunner
from workers.memory.keeper import WeightKeeper
from workers.parallel.group import Group
from workers.protocol.captures import Waiting
from workers.protocol.plan import SamplingParams
from workers.protocol.report import BucketReport, SelfTestReport
from workers.rank import inherited_proof, proven_before
from workers.rank.captures import CaptureFailedError, SelfTestFailedError
from workers.rank.proven_before import FOLDER, ProvenBefore
from workers.rank.role import Role
from workers.scheduler import captures

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("v3"), "v3", seed=3, num_hidden_layers=2)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Triton's cache, empty."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, cache: Path) -> list[CalledGraph]:
    monkeypatch.setattr(captures, "PAUSE", 0.0)
    monkeypatch.setattr(captures, "QUIET_S", 0.0)
    graphs = call_graphs(monkeypatch)
    monkeypatch.setattr(proven_before, "cache_folder", lambda: cache)
    return graphs


def engine(folder: Path, waiting: Waiting = "auto", **settings: Any) -> InlineEngine:
    given: dict[str, Any] = {"max_rows": 4, "token_budget": 24, "cache_pages": 60, "max_context": 200, "width": 2}
    config = EngineConfig(**{"model": str(folder), "device": "cpu", **given, **settings})
    return InlineEngine(config, CPU, waiting=waiting)


def notes(cache: Path) -> list[Path]:
    return list((cache / FOLDER).glob("*"))


def tokens(run: InlineEngine) -> dict[str, list[int]]:
    for number in range(5):
        run.add(f"r{number}", list(range(1 + number, 9 + 7 * number)), SamplingParams(12, temperature=0.5, seed=number))
    return {name: found.tokens for name, found in run.run().items()}


def begins_with_few(run: InlineEngine) -> bool:
    return run.replica.captures is not None


def test_the_second_start_serves_with_few_graphs_and_proves_them_all_again(
    folder: Path, made: list[CalledGraph], cache: Path
) -> None:
    first = engine(folder)
    assert not begins_with_few(first)
    assert first.reports[0].left_out == 0
    [note] = notes(cache)
    second = engine(folder)
    assert begins_with_few(second)
    assert second.runner.stats.figures()["graph_portions_left"][""] == len(second.replica.ready.portions) > 0
    assert second.reports[0].left_out > 0
    assert not notes(cache)  # an engine that dies now is followed by one that proves all before it serves
    assert tokens(second) == tokens(first)
    second.run()
    assert second.runner.stats.figures()["graph_portions_left"][""] == 0
    assert second.reports[-1].inherited == second.reports[-1].left_out == 0
    assert [str(one) for one in second.reports[-1].buckets] == [str(one) for one in first.reports[-1].buckets]
    assert notes(cache) == [note]
    assert begins_with_few(engine(folder, graphs_at_start="few"))  # how it is begun with makes no difference


def test_who_waits_for_all_graphs_gets_them(folder: Path, made: list[CalledGraph], cache: Path) -> None:
    engine(folder, None)
    assert not begins_with_few(engine(folder, None))
    assert begins_with_few(engine(folder))
    assert not begins_with_few(engine(folder))  # the one before did not come to its end
    assert begins_with_few(engine(folder, 0))


@pytest.mark.parametrize("captured", [True, False])
def test_behind_a_late_failure_all_are_proven_before_an_engine_serves(
    folder: Path, made: list[CalledGraph], cache: Path, monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    engine(folder)
    run = engine(folder)
    capture = GraphRunner.capture

    def fails(self: GraphRunner) -> Any:
        before = len(made)
        if not captured:
            raise torch.OutOfMemoryError
        portion = capture(self)
        for graph in made[before:]:
            graph._call = lambda: None  # as of a graph that writes nothing
        return portion

    with monkeypatch.context() as patch:
        patch.setattr(GraphRunner, "capture", fails)
        with pytest.raises(SelfTestFailedError if captured else CaptureFailedError):
            tokens(run)
        assert not notes(cache)
        if captured:  # nor does the next one serve
            with pytest.raises(SelfTestFailedError):
                engine(folder)
    assert not notes(cache)
    assert not begins_with_few(engine(folder))
    assert begins_with_few(engine(folder))


def started(folder: Path, keeper: WeightKeeper, role: Role) -> InlineEngine:
    """One of two engines of a replica."""
    config = EngineConfig(
        model=str(folder), device="cpu", max_rows=12, token_budget=160, cache_pages=60, max_context=200, width=2
    )
    return InlineEngine(config, CPU, keeper=keeper.path(), role=role)


def test_an_engine_that_stands_by_leaves_the_note_to_the_one_that_serves(
    folder: Path, made: list[CalledGraph], cache: Path
) -> None:
    """What it proves says nothing of how a start with few graphs beside it comes to its end."""
    keeper = WeightKeeper()
    try:
        started(folder, keeper, "primary")
        [note] = notes(cache)
        started(folder, keeper, "standby")
        assert notes(cache) == [note]
        note.unlink()  # as while one with few graphs serves
        started(folder, keeper, "standby")
        assert not notes(cache)
    finally:
        keeper.close()


def test_nothing_is_noted_where_nothing_is_proven(folder: Path, made: list[CalledGraph], cache: Path) -> None:
    for _ in range(2):
        assert not begins_with_few(engine(folder, selftest=False))
    assert not notes(cache)


def note_of(folder: Path, root: bytes = b"root", context: int = 100, **settings: Any) -> ProvenBefore:
    config = EngineConfig(model=str(folder), **settings)
    return ProvenBefore(config, Group(), CPU, root, context)


def report(*problems: str) -> SelfTestReport:
    buckets = (BucketReport("decode", "1 x 1", 0.1, problems),)
    return SelfTestReport("cpu", 1, "", 1, 0, 0.0, 0.0, 1.0, buckets)


@pytest.mark.parametrize(
    "other",
    [
        {"root": b"toor"},
        {"context": 101},
        {"max_rows": 7},
        {"invariant": True},
        "device_identity",
        "driver_version",
        "_triton",
    ],
)
def test_a_note_is_of_one_engine_alone(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any] | str
) -> None:
    note_of(folder).note(report())
    with monkeypatch.context() as patch:
        if isinstance(other, str):
            patch.setattr(inherited_proof, other, lambda *_: "1.2.3")
        assert not note_of(folder, **({} if isinstance(other, str) else other)).take()
    assert note_of(folder).take()
    assert not note_of(folder).take()


def test_a_note_is_of_one_source_code_alone(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = cache / "package"
    package.mkdir()
    (package / "code.py").write_text("x = 1\n")
    monkeypatch.setattr(proven_before.workers, "__path__", [str(package)])
    note_of(folder).note(report())
    (package / "code.py").write_text("x = 2\n")
    assert not note_of(folder).take()
    (package / "code.py").write_text("x = 1\n")
    assert note_of(folder).take()


def test_source_code_that_cannot_be_read_is_told_and_no_note_is_had(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a link by which an editor marks a file that somebody edits: it leads nowhere."""
    package = cache / "package"
    package.mkdir()
    (package / ".#code.py").symlink_to("somebody@somewhere")
    monkeypatch.setattr(proven_before.workers, "__path__", [str(package)])
    told: list[str] = []
    note = ProvenBefore(EngineConfig(model=str(folder)), Group(), CPU, b"root", 100, told.append)
    note.note(report())
    assert not note.take()
    assert not notes(cache)
    assert [line.split(":")[0] for line in told] == ["all graphs are captured before this replica serves"]


def test_a_report_that_did_not_pass_takes_the_note_away(folder: Path, cache: Path) -> None:
    note = note_of(folder)
    note.note(report())
    note.note(report("logits differ"))
    assert not note.take()


def test_where_no_note_can_be_had_all_graphs_are_captured_and_that_is_told(folder: Path, cache: Path) -> None:
    (cache / FOLDER).write_text("a file in place of the folder")
    told: list[str] = []
    note = ProvenBefore(EngineConfig(model=str(folder)), Group(), CPU, b"root", 100, told.append)
    assert not note.take()
    note.note(report())
    assert [line.split(":")[0] for line in told] == [
        "all graphs are captured before this replica serves",
        "the next start captures all graphs before it serves",
    ]


def rank_main(rank: int, place: Path) -> None:
    """Be a rank, of which the second has no note at first, and leave whether all had theirs."""
    config = EngineConfig(model="demo", tensor_parallel=2)
    group = Group.connect(config.mesh(rank), f"file://{place}/rendezvous", CPU, timeout_s=120)
    note, found = ProvenBefore(config, group, CPU, b"root", 100), []
    for ranks in ((0,), (0, 1)):
        if rank in ranks:
            note.note(report())
        found.append(note.take())
    torch.save(found, place / f"rank{rank}.pt")
    Group.close()


def test_all_ranks_or_none_begin_with_few_graphs(cache: Path) -> None:
    run_ranks(rank_main, 2, cache)
    assert [torch.load(cache / f"rank{rank}.pt") for rank in range(2)] == [[False, True]] * 2
