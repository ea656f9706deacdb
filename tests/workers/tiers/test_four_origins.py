"""The same bits wherever a page was: computed, on the device, in host memory, on disk. In every format, with every
drafter, sparse and dense, on one rank and on two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from typing_extensions import override

from kernels.page import PAGE_TOKENS
from tests.rank_processes import run_ranks
from tests.tiny_draft_models import write_draft
from tests.tiny_models import VOCAB, write_tiny
from tests.workers.harness import InlineEngine
from tests.workers.tiers.test_disk_cache_engine import worth_a_load
from tests.workers.tiers.test_host_cache_engine import tokens
from workers.config import EngineConfig
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh
from workers.protocol.plan import SamplingParams, StepPlan, StepResult
from workers.protocol.tiers import DiskMoved, DiskMoves, Moved, Moves
from workers.tiers.disk_files import HEADER_BYTES
from workers.tiers.mover import PageMover, record_layout

CPU = torch.device("cpu")
PAGES = 9
"""Full ones of the prompt that is asked for again and again: more than a piece of a cache that ranks share out in
invariant mode, so that each of them has some."""


Told = tuple[str, list[int], list[Any], int]
"""Where the pages of a prompt were, what it got, with log-probabilities, and how many of its pages were cached."""


class Case(NamedTuple):
    """What is served."""

    kind: str = "v3"
    settings: dict[str, Any] = {}  # noqa: RUF012
    draft: str = ""
    """Layout of its draft model, if it has one."""


CASES = {
    "layer": Case(settings={"width": 3}),
    "bf16": Case(settings={"width": 2, "dtype": "bfloat16"}),
    "fp8": Case(settings={"width": 2, "kv_cache_dtype": "fp8"}),
    "sparse": Case("glm5", {"width": 2}),
    "sparse-fp8": Case("v32", {"width": 3, "kv_cache_dtype": "fp8"}),
    "ngram": Case("v2", {"width": 3, "drafter": "ngram"}),
    "none": Case(settings={"width": 1}),
    "gqa": Case("v2", {"width": 3}, "gqa"),
    "mla": Case("v2", {"width": 3}, "mla"),
}
SHARED = {"whole caches": 1, "shards": 2}


class RankEngine(InlineEngine):
    """Of one of several ranks. What the others say of copies is heard at once, so that all make the same plans. The
    results are those of rank 0, which alone has log-probabilities."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        honest = self.runner.execute

        def execute(plan: StepPlan) -> StepResult:
            results = [honest(plan)]
            dist.broadcast_object_list(results, src=0)
            return results[0]

        self.runner.execute = execute  # type: ignore[method-assign]

    @override
    def step(self) -> bool:
        while self.plan() is not None:
            pass
        if not self._queue or not isinstance(moves := self._queue[0], Moves | DiskMoves):
            return super().step()
        self._queue.popleft()
        mover = self.replica.mover if isinstance(moves, Moves) else self.replica.disk
        assert mover is not None
        mover.move(moves)  # type: ignore[arg-type]
        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, self._moved.get(timeout=60))
        for answer in answers:
            if isinstance(answer, Moved):
                self.scheduler.moved(answer)
            else:
                assert isinstance(answer, DiskMoved)
                self.scheduler.disk_moved(answer)
        return True


def written(folder: Path, case: Case) -> dict[str, Any]:
    """The settings of the case, whose model is written."""
    model = write_tiny(folder / "model", case.kind, seed=3, max_position_embeddings=1024)
    if not case.draft:
        return {"model": str(model), **case.settings}
    hidden = json.loads((model / "config.json").read_text())["hidden_size"]
    sizes: dict[str, Any] = {"hidden_size": hidden, "vocab_size": VOCAB, "max_position_embeddings": 1024}
    draft = write_draft(folder / "draft", case.draft, **sizes)
    return {"model": str(model), "draft_model": str(draft), **case.settings}


def served(settings: dict[str, Any], disk: Path, group: Group | None = None, shards: int = 1) -> InlineEngine:
    """An engine with a device for two prompts at the most, host memory for three, and a disk for all."""
    common: dict[str, Any] = {
        "device": "cpu", "max_rows": 2, "token_budget": 96, "max_context": 620, "selftest": False, "invariant": True,
        "cache_shards": shards, "tensor_parallel": 1 if group is None else group.mesh.world.size, **settings,
    }  # fmt: skip
    made = InlineEngine if group is None else RankEngine
    record = record_layout(made(EngineConfig(**common, cache_pages=10), group=group).replica.model.caches)[-1]
    sizes: dict[str, Any] = {"host_cache_bytes": 30 * record, "disk_cache_bytes": 200 * (record + HEADER_BYTES)}
    pages = {1: 12, 2: 10}[shards]  # of each rank, its null page included
    return made(EngineConfig(**common, cache_pages=pages, disk_cache_dir=str(disk), **sizes), group=group)


def told(replica: InlineEngine) -> list[Told]:
    """What the prompt gets as it was computed, from the device, from host memory and from the disk: where it was by the
    counters, tokens, log-probabilities, and how many of its pages were cached."""
    found = []

    def ask(name: str, prompt: list[int]) -> None:
        before = replica.scheduler.stats()
        replica.add(name, prompt, SamplingParams(8, temperature=1.0, seed=5, logprobs=2))
        replica.run()
        after, finished = replica.scheduler.stats(), replica.finished[name]
        entries = [(one.ids, one.logprobs) for output in finished.outputs for one in output.logprobs]
        cached = finished.outputs[0].cached_tokens // PAGE_TOKENS
        disk = after.disk_loaded_pages - before.disk_loaded_pages
        host = after.host_loaded_pages - before.host_loaded_pages
        where = "disk" if disk else "host" if host else "device" if cached else "computed"
        found.append((where, finished.tokens, entries, cached))

    prompt = tokens(PAGES * PAGE_TOKENS + 2, seed=1)
    ask("first", prompt)
    ask("second", prompt)
    ask("between", tokens(600, seed=2))
    ask("more", tokens(600, seed=3))
    ask("third", prompt)
    for seed in range(4, 8):
        ask(f"other {seed}", tokens(600, seed=seed))
    ask("fourth", prompt)
    stats = replica.scheduler.stats()
    assert stats.host_lost_pages == stats.disk_lost_pages == stats.disk_late_loads == 0
    assert replica.replica.disk is not None
    replica.replica.disk.close()
    return [found[place] for place in (0, 1, 4, -1)]


def judge(found: list[Told]) -> None:
    assert [where for where, *_ in found] == ["computed", "device", "host", "disk"]
    assert [cached for *_, cached in found] == [0, PAGES, PAGES, PAGES]
    _, *first = found[0]
    for _, ids, entries, _ in found[1:]:
        assert (ids, entries) == tuple(first[:2])


ELSEWHERE = {"layer": (), "sparse": pytest.mark.soak}
"""Marks of cases on one rank that are not of the longer lane. Entries of a sparse model in FP8 take every path that
those of `sparse` take."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=ELSEWHERE.get(name, pytest.mark.long)) for name in CASES])
def test_on_one_rank(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worth_a_load(monkeypatch)
    judge(told(served(written(tmp_path, CASES[name]), tmp_path / "disk")))


def rank_main(rank: int, folder: Path, settings: dict[str, Any], shards: int, fault: bool) -> None:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        worth_a_load(patch)
        if fault and rank == 1:
            plant(patch)
        group = Group.connect(Mesh.of(rank, 2), f"file://{folder}/rendezvous", CPU, 120.0)
        try:
            shared = group.sharing_out(shards, CPU, 120.0) if shards > 1 else group
            found = told(served(settings, folder / "disk", shared, shards))
            if rank == 0:
                torch.save(found, folder / "found.pt")
        finally:
            group.close()


def plant(patch: pytest.MonkeyPatch) -> None:
    """Have a rank take what it loads from the slot before."""
    honest = PageMover.move

    def move(self: PageMover, moves: Moves) -> None:
        honest(self, Moves(moves.ticket, moves.saves, tuple((max(slot - 1, 0), page) for slot, page in moves.loads)))

    patch.setattr(PageMover, "move", move)


def on_two_ranks(folder: Path, case: Case, shards: int, fault: bool = False) -> list[Told]:
    run_ranks(rank_main, 2, folder, written(folder, case), shards, fault)
    found: list[Told] = torch.load(folder / "found.pt", weights_only=False)
    return found


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name == "layer" else pytest.mark.soak)
        for name in CASES
        if name != "gqa"  # a start is refused
    ],
)
def test_on_two_ranks(name: str, shared: str, tmp_path: Path) -> None:
    judge(on_two_ranks(tmp_path, CASES[name], SHARED[shared]))


@pytest.mark.parametrize(
    "shards", [pytest.param(1, marks=pytest.mark.soak), pytest.param(2, marks=pytest.mark.long)], ids=SHARED
)
def test_a_rank_that_loads_other_pages_than_it_should_is_noticed(tmp_path: Path, shards: int) -> None:
    """A planted fault, on one of two ranks."""
    with pytest.raises(AssertionError):
        judge(on_two_ranks(tmp_path, CASES["none"], shards, True))
