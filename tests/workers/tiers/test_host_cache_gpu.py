"""Sessions that return to host memory on a GPU: pages are copied beside the steps that others decode in."""

from __future__ import annotations

import gc
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.page import PAGE_TOKENS
from tests.tiny_models import write_tiny
from tests.workers.harness import InlineEngine
from tests.workers.tiers.test_disk_cache_engine import worth_a_load
from tests.workers.tiers.test_host_cache_engine import sessions
from tests.workers.tiers.test_page_mover import PAGES, SPECS
from workers.cache.paged import PagedCache
from workers.config import EngineConfig
from workers.parallel.group import Group
from workers.protocol.tiers import Moved, Moves
from workers.tiers.disk_files import HEADER_BYTES
from workers.tiers.host_memory import HostMemory
from workers.tiers.mover import PageMover, Staging, record_layout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def engine(folder: Path, **settings: Any) -> InlineEngine:
    sizes: dict[str, Any] = {"max_rows": 4, "token_budget": 96, "device": "cuda", "max_context": 500, "selftest": False}
    return InlineEngine(EngineConfig(model=str(folder), **{**sizes, **settings}), torch.device("cuda"))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("v3", {"width": 3, "dtype": "float32"}),
        ("v3", {"width": 2, "kv_cache_dtype": "fp8", "invariant": True}),
        ("glm5", {"width": 2, "invariant": True}),
    ],
)
def test_pages_from_host_memory_are_as_good_as_those_of_the_device(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_tiny(tmp_path, kind, seed=3)
    expected = sessions(engine(folder, cache_pages=200, **settings))
    tiered = engine(folder, cache_pages=11, host_cache_bytes=64 << 20, **settings)
    wait_until_pinned(tiered)
    assert sessions(tiered) == expected
    stats = tiered.scheduler.stats()
    assert stats.host_loaded_pages >= 16
    assert stats.host_lost_pages == 0
    assert tiered.replica.mover is not None
    tiered.replica.mover.close()


def test_pages_from_disk_are_as_good_as_those_of_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory for little more than one session, which is pinned and which the disk writes to."""
    worth_a_load(monkeypatch)
    folder = write_tiny(tmp_path, "v3", seed=3)
    roomy = engine(folder, cache_pages=200, width=2, dtype="float32")
    expected = sessions(roomy)
    record = record_layout(roomy.replica.model.caches)[-1]
    sizes = {"host_cache_bytes": 8 * record, "disk_cache_bytes": 200 * (record + HEADER_BYTES)}
    tiered = engine(folder, cache_pages=11, width=2, dtype="float32", disk_cache_dir=str(tmp_path / "disk"), **sizes)
    wait_until_pinned(tiered)
    assert sessions(tiered) == expected
    stats = tiered.scheduler.stats()
    assert stats.disk_loaded_pages >= 16
    assert stats.disk_lost_pages == stats.host_lost_pages == 0
    assert tiered.replica.mover is not None
    assert tiered.replica.disk is not None
    tiered.replica.disk.close()
    tiered.replica.mover.close()


def wait_until_pinned(replica: InlineEngine) -> None:
    mover = replica.replica.mover
    assert mover is not None
    deadline = time.monotonic() + 60
    while not mover.all_pinned:
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Copies:
    """A mover by itself, and pages whose contents are drawn."""

    def __init__(self, slots: int = 40) -> None:
        device = torch.device("cuda")
        generator = torch.Generator(device).manual_seed(1)
        self.cache = PagedCache([spec.random(PAGES, device, generator) for spec in SPECS], SPECS)
        record = record_layout(SPECS)[-1]
        memory = HostMemory.shared(slots * record, record, Group(), device)
        self.told: list[Moved] = []
        self.mover = PageMover(self.cache, memory, 0, self.told.append, Staging.allocate(record, device))
        while not self.mover.all_pinned:
            time.sleep(0.01)

    def move(self, moves: Moves) -> None:
        self.mover.move(moves)

    def wait(self, tickets: int) -> None:
        deadline = time.monotonic() + 60
        while len(self.told) < tickets:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert not any(moved.lost for moved in self.told)

    def contents(self) -> list[list[list[int]]]:
        pages = [torch.arange(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS, device="cuda") for page in range(PAGES)]
        return [
            [self.cache.entry_bits(layer, entry_E).flatten().tolist() for layer in range(len(SPECS))]
            for entry_E in pages
        ]


def test_a_later_step_may_overwrite_what_is_being_saved_and_an_earlier_one_reads_what_is_loaded_over() -> None:
    """The steps' stream is kept busy, so that copies which did not wait for it would come too soon."""
    copies = Copies()
    before = copies.contents()
    chance = random.Random(0)
    for number in range(10):
        page, target = chance.sample(range(1, PAGES), 2)
        slot = number
        source = [layer[page].clone() for layer in copies.cache.layers]
        torch.cuda._sleep(20_000_000)
        copies.move(Moves(3 * number + 1, saves=((page, slot),)))
        for layer in copies.cache.layers:
            layer[page].zero_()  # as a later step might
        copies.wait(2 * number + 1)
        torch.cuda._sleep(20_000_000)
        read = [layer[target].clone() for layer in copies.cache.layers]  # as an earlier step might
        was = before[target]
        copies.move(Moves(3 * number + 2, loads=((slot, target),)))
        copies.wait(2 * number + 2)
        for layer, (spec, expected) in enumerate(zip(SPECS, source, strict=True)):
            assert torch.equal(copies.cache.layers[layer][target], expected), spec
        for layer, found in enumerate(read):
            entry_E = torch.arange(PAGE_TOKENS, device="cuda")
            one = PagedCache([found.unsqueeze(0)], [SPECS[layer]])
            assert one.entry_bits(0, entry_E).flatten().tolist() == was[layer]
        for layer, expected in enumerate(source):
            copies.cache.layers[layer][page].copy_(expected)
        before = copies.contents()
    copies.mover.close()


def test_more_pages_than_staging_holds_are_loaded_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.tiers.mover.MOST_BATCH", 3)
    copies = Copies()
    pages = list(range(1, PAGES))
    expected = copies.contents()
    for number in range(0, len(pages), 3):
        batch = pages[number : number + 3]
        copies.move(Moves(number, saves=tuple((page, page) for page in batch)))
        copies.wait(number // 3 + 1)
    for layer in copies.cache.layers:
        layer.zero_()
    done = len(copies.told)
    copies.move(Moves(99, loads=tuple((page, page) for page in pages)))
    copies.wait(done + 1)
    assert copies.contents()[1:] == expected[1:]
    copies.mover.close()


def test_memory_is_given_back() -> None:
    copies = Copies()
    copies.mover.close()
    held = torch.cuda.memory_allocated()
    del copies
    gc.collect()
    assert torch.cuda.memory_allocated() < held
