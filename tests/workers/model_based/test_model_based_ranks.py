"""Engines of several ranks, which share out one latent cache, under random schedules; and that this finds what is
planted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from kernels import decode_state
from kernels.own_entries import OwnEntries, own_entries
from kernels.page import Shards
from tests.rank_processes import run_ranks
from tests.workers.model_based.drive import Bench, Outcome
from tests.workers.model_based.followers import CPU, TIMEOUT_S, Ranks, follow
from tests.workers.model_based.soak import drawn, soak
from workers.cache.paged import PagedCache
from workers.models.attention import decode_rows
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh


def frozen_bounds() -> None:
    """Every pass of as many rows and tokens has the bounds of the first one."""
    kept: dict[tuple[int, ...], OwnEntries] = {}

    def frozen(page_RP: Any, length_R: Any, out: OwnEntries, shards: Shards, *, first: int = 0) -> None:
        own_entries(page_RP, length_R, out, shards, first=first)
        old = kept.setdefault((*out.seen_RX.shape, first), OwnEntries(out.page_RP, out.length_R, out.seen_RX.clone()))
        out.seen_RX.copy_(old.seen_RX)

    assert decode_rows.own_entries is own_entries, "what is replaced must be what is called"
    decode_rows.own_entries = frozen


def owner_of_the_page_before() -> None:
    """A rank writes the pages behind its own."""
    honest = decode_state.own_pages
    decode_state.own_pages = lambda page_T, shards: honest((page_T - 1).clamp(min=0), shards)  # type: ignore[assignment]


def every_rank_writes() -> None:
    """A rank writes what another owns, too, where its own page of that number lies."""
    decode_state.own_pages = lambda page_T, shards: (page_T + shards.count - 1) // shards.count  # type: ignore[assignment]


def others_pages_zeroed() -> None:
    """Pages are zeroed on every rank, and on all but their owners it is others of the same number."""

    def zero_fill(self: PagedCache, pages: Any) -> None:
        for layer in self.layers:
            for page in pages:
                layer[self.shards.local(page)] = 0.0

    PagedCache.zero_fill = zero_fill  # type: ignore[method-assign]


PLANTED: dict[str, Callable[[], None]] = {
    "frozen bounds": frozen_bounds,
    "the owner of page p - 1 for that of p": owner_of_the_page_before,
    "writes without an owner": every_rank_writes,
    "zeroes on another rank": others_pages_zeroed,
}
KINDS: dict[str, dict[str, Any]] = {"v3": {}, "glm5": {"indexer_types": ["full", "shared"]}}
"""Models with dense attention, and with sparse attention in which one layer attends to what another one selects."""
HERE = ("frozen bounds", "zeroes on another rank")
"""Faults that no quicker test finds."""

FIRST = 300_019
"""A schedule with NaN in seven rows and drafts from the prompt; then one in invariant mode, with the model's own drafts
and preemptions; then one with an EAGLE draft model, and pages from host memory and disk. All have two shards."""


def rank_main(rank: int, ranks: int, folder: Path, steps: int, seed: int, name: str, kind: str) -> None:
    torch.set_num_threads(1)
    if name:
        PLANTED[name]()
    group = Group.connect(Mesh.of(rank, ranks), f"file://{folder}/rendezvous", CPU, TIMEOUT_S)
    try:
        if rank:
            follow(group)
            return
        all_ranks = Ranks(group)
        outcome = soak(Bench(folder, kind, ranks=all_ranks, **KINDS[kind]), steps, seed, behind=None)
        all_ranks.tell("end")
        torch.save((outcome.problem, outcome.steps, outcome.seen), folder / "outcome.pt")
    finally:
        group.close()


def on_ranks(folder: Path, ranks: int, steps: int, seed: int, name: str = "", kind: str = "v3") -> Outcome:
    run_ranks(rank_main, ranks, ranks, folder, steps, seed, name, kind)
    return Outcome(*torch.load(folder / "outcome.pt", weights_only=False))


@pytest.mark.parametrize(
    ("ranks", "steps", "seed"),
    [
        pytest.param(2, 350, FIRST, marks=pytest.mark.long),
        pytest.param(4, 3000, 310_000, marks=pytest.mark.soak),
    ],
)
def test_schedules_on_ranks_that_share_out_a_cache(tmp_path: Path, ranks: int, steps: int, seed: int) -> None:
    outcome = on_ranks(tmp_path, ranks, steps, seed)
    again = f"python -m tests.workers.model_based.soak --ranks {ranks} --seed {seed} --steps {steps}"
    assert outcome.problem == "", again
    seen = outcome.seen
    assert outcome.steps >= steps
    for shards in (2, 4)[: ranks // 2]:
        assert seen[f"steps of {shards} shards"] > steps / 8
    assert min(seen["cached tokens"], seen["drafts accepted"], seen["steps of pieces that go round"]) > 0
    assert seen["near ties"] <= seen["tokens"] / 250


@pytest.mark.soak
def test_sparse_schedules_on_ranks_that_share_out_a_cache(tmp_path: Path) -> None:
    """Host memory and a disk lie behind every third schedule, as behind the dense ones."""
    outcome = on_ranks(tmp_path, 2, 800, 320_000, kind="glm5")
    seen = outcome.seen
    assert outcome.problem == ""
    assert seen["steps of 2 shards"] > 100
    assert min(seen["bad rows"], seen["cached tokens"], seen["drafts accepted"]) > 0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in HERE else pytest.mark.soak) for name in PLANTED]
)
def test_a_fault_planted_on_all_ranks_is_found(tmp_path: Path, name: str) -> None:
    """In a schedule in which nothing differs without it: the first one of the test above."""
    assert on_ranks(tmp_path, 2, 1, FIRST, name).problem


def test_shards_are_drawn_beside_everything_else() -> None:
    """A schedule is on several ranks what it is on one, but for the settings of its engine."""
    found, in_pieces = set(), 0
    for seed in range(20):
        alone, shared = drawn(seed), drawn(seed, ranks=4)
        found.add(shared.engine["shards"])
        assert replace(shared, engine=alone.engine) == alone
        assert {**shared.engine, "invariant": None} == {
            **alone.engine,
            "invariant": None,
            "shards": shared.engine["shards"],
        }
        in_pieces += shared.engine["invariant"] and shared.engine["shards"] > 1
    assert found == {1, 2, 4}
    assert in_pieces > 0
