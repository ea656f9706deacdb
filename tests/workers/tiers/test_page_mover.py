"""Pages of every cache of a rank, to host memory and back, bit by bit."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.page import PAGE_TOKENS, LocalPage, Shards
from kernels.page_records import PagedRecords
from workers.cache.paged import PagedCache
from workers.cache.spec import CacheSpec, IndexSpec, Int8IndexSpec, LatentSpec, latent_spec
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh
from workers.protocol.messages import Fault
from workers.protocol.tiers import Moved, Moves, Pinned
from workers.tiers import host_memory
from workers.tiers import mover as mover_module
from workers.tiers.host_memory import HostMemory, available_bytes, node_name
from workers.tiers.mover import (
    ALIGNMENT,
    MoveError,
    PageMover,
    Staging,
    batch_of,
    record_layout,
    runs,
    staging_bytes,
    thread_of,
)

CPU = torch.device("cpu")
SPECS: list[CacheSpec] = [
    LatentSpec(40, torch.float32),
    latent_spec(128, 16, torch.bfloat16, fp8=True),
    Int8IndexSpec(32, torch.bfloat16),
    IndexSpec(24, torch.bfloat16),
    LatentSpec(33, torch.bfloat16),
]
PAGES, SLOTS = 12, 7


def caches(seed: int) -> PagedCache:
    generator = torch.Generator().manual_seed(seed)
    return PagedCache([spec.random(PAGES, CPU, generator) for spec in SPECS], SPECS)


def contents(cache: PagedCache, page: int) -> list[list[int]]:
    entry_E = torch.arange(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
    return [cache.entry_bits(layer, entry_E).flatten().tolist() for layer in range(len(SPECS))]


def memory(ranks: int = 1, shards: int = 1) -> list[HostMemory]:
    shared = torch.zeros(SLOTS, record_layout(SPECS)[-1], dtype=torch.uint8)
    return [HostMemory(shared, rank, tuple(each % shards for each in range(ranks))) for rank in range(ranks)]


def comes_back_with_all_its_bits() -> None:
    cache, told = caches(1), list[Moved]()
    mover = PageMover(cache, memory()[0], 3, told.append)
    pages = {page: contents(cache, page) for page in range(PAGES)}
    mover.move(Moves(1, saves=((2, 6), (5, 0), (11, 3))))
    for layer, other in zip(cache.layers, caches(2).layers, strict=True):
        layer.copy_(other)
    others = {page: contents(cache, page) for page in range(PAGES)}
    mover.move(Moves(2, loads=((0, 1), (6, 7), (3, 4))))
    assert [(moved.rank, moved.ticket, moved.lost) for moved in told] == [(3, 1, False), (3, 2, False)]
    came_from = {1: 5, 7: 2, 4: 11}
    for page in range(PAGES):
        expected = pages[came_from[page]] if page in came_from else others[page]
        assert contents(cache, page) == expected, page


def test_a_page_comes_back_with_all_its_bits() -> None:
    comes_back_with_all_its_bits()


@pytest.mark.parametrize("layer", range(len(SPECS)), ids=lambda layer: f"{layer} {type(SPECS[layer]).__name__}")
@pytest.mark.parametrize("way", ["gather_pages", "scatter_pages"])
def test_a_cache_that_a_copy_leaves_out_is_noticed(layer: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: latents, with their scales where they are FP8, or index keys, of one layer stay behind."""
    honest = getattr(mover_module, way)

    def without(records: PagedRecords, *rest: torch.Tensor) -> None:
        layers, begins = ((*of[:layer], *of[layer + 1 :]) for of in (records.layers, records.begins))
        honest(replace(records, layers=layers, begins=begins), *rest)

    monkeypatch.setattr(mover_module, way, without)
    with pytest.raises(AssertionError):
        comes_back_with_all_its_bits()


def test_ranks_write_a_part_each_and_read_all() -> None:
    shared = memory(ranks=2)
    told: list[Moved] = []
    movers = [PageMover(caches(1), part, rank, told.append) for rank, part in enumerate(shared)]
    saves = Moves(1, saves=tuple((page, page - 1) for page in range(1, 8)))
    movers[0].move(saves)
    assert [bool(slot.any()) for slot in shared[0].slot_SB] == [True, False] * 3 + [True]
    movers[1].move(saves)
    assert all(bool(slot.any()) for slot in shared[0].slot_SB)
    assert len(told) == 2, "every rank answers, whatever its part was"
    target = caches(3)
    PageMover(target, shared[1], 1, told.append).move(Moves(2, loads=((0, 9), (1, 10))))
    source = caches(1)
    assert contents(target, 9) == contents(source, 1)
    assert contents(target, 10) == contents(source, 2)


@pytest.mark.parametrize(("ranks", "shards"), [(2, 2), (4, 2), (4, 4)])
def test_the_owners_of_a_page_write_and_read_it(ranks: int, shards: int) -> None:
    """Planted faults: whoever writes a slot by its number, and does not have the page; a page is looked for by its
    global id, or loaded on every rank."""
    told: list[Moved] = []
    # Ranks of one shard hold the same, as they compute the same.
    held = [replace(caches(rank % shards), shards=Shards(shards, rank % shards)) for rank in range(ranks)]
    movers = [PageMover(held[r], part, r, told.append) for r, part in enumerate(memory(ranks, shards))]
    slot_of = dict(zip(range(1, 8), (3, 0, 6, 1, 5, 2, 4), strict=True))
    for mover in movers:
        mover.move(Moves(1, saves=tuple(slot_of.items())))
    before = {slot: contents(held[(page - 1) % shards], -(-page // shards)) for page, slot in slot_of.items()}
    records = movers[0].memory.slot_SB
    assert all(bool(slot.any()) for slot in records)
    last = shards * (PAGES - 1)
    came = {last - index: index for index in range(7)}  # page, and the slot it comes from
    others = [[contents(cache, place) for place in range(PAGES)] for cache in held]
    for mover in movers:
        mover.move(Moves(2, loads=tuple((slot, page) for page, slot in came.items())))
    assert [(one.rank, one.ticket, one.lost) for one in told] == [
        (rank, ticket, False) for ticket in (1, 2) for rank in range(ranks)
    ]
    for rank, cache in enumerate(held):
        for place in range(PAGES):
            slot = came.get(cache.shards.page(LocalPage(place)))
            expected = others[rank][place] if slot is None else before[slot]
            assert contents(cache, place) == expected, (rank, place)


@pytest.mark.parametrize(
    "moves",
    [
        Moves(1, saves=((0, 1),)),
        Moves(1, saves=((PAGES, 1),)),
        Moves(1, loads=((SLOTS, 1),)),
        Moves(1, loads=((0, 0),)),
        Moves(1, saves=((1, 1),), loads=((0, 2),)),
    ],
)
def test_pages_and_slots_that_there_are_not_are_refused(moves: Moves) -> None:
    told: list[Moved] = []
    with pytest.raises(MoveError, match="ticket 1"):
        PageMover(caches(1), memory()[0], 0, told.append).move(moves)
    assert not told


def test_a_thread_that_fails_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    told: list[BaseException] = []
    thread_of(fails, "save pages", told.append).join()
    assert [str(error) for error in told] == ["CUDA error: an illegal memory access was encountered"]
    assert "the thread that is to save pages has failed" in caplog.text
    news: list[Pinned | Fault] = []
    mover = PageMover(caches(1), memory()[0], 3, lambda moved: None, news=news.append)
    mover._failed(told[0])
    (fault,) = news
    assert isinstance(fault, Fault)
    assert (fault.rank, fault.secondary) == (3, False)
    assert fault.cause.startswith("rank 3: pages cannot be copied: RuntimeError: CUDA error")


def test_records_are_aligned_and_a_batch_is_never_empty() -> None:
    layout = record_layout(SPECS)
    assert all(begin % ALIGNMENT == 0 for begin in layout)
    assert layout[-1] % mmap.PAGESIZE == 0
    assert all(after - begin >= spec.page_bytes for begin, after, spec in zip(layout, layout[1:], SPECS, strict=False))
    assert batch_of(10**12) == 1
    assert batch_of(1) > 1


@pytest.mark.parametrize("batch", [None, 1, 40])
@pytest.mark.parametrize("record", [4096, 2_605_056, 10**8])
def test_memory_for_pages_on_their_way_is_counted_as_it_is_taken(
    record: int, batch: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    staging = Staging.allocate(record, torch.device("meta"), batch)
    assert sum(part_NR.nbytes for part_NR in (*staging.save_NR, *staging.load_NR)) == staging_bytes(record, batch)


def test_a_rank_has_room_for_its_share_of_what_a_step_completes() -> None:
    record = 4 << 20
    assert batch_of(record) == batch_of(record, tokens=8 * PAGE_TOKENS) == 16
    assert batch_of(record, tokens=128 * PAGE_TOKENS, ranks=8) == 20
    assert batch_of(record, tokens=1000 * PAGE_TOKENS) == 64, "more would take too much of the device's memory"
    assert batch_of(1, tokens=128 * PAGE_TOKENS) == 160


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ([], []),
        ([3], [[3]]),
        ([0, 1, 2, 3, 4, 5, 6], [[0, 1, 2], [3, 4, 5], [6]]),
        ([7, 4, 5, 1, 0, 8, 10, 11, 11], [[7], [4, 5], [1], [0], [8], [10, 11], [11]]),
    ],
)
def test_slots_side_by_side_are_copied_at_once_within_what_is_pinned_at_once(
    slots: list[int], expected: list[list[int]]
) -> None:
    assert [slots[first : first + count] for first, count in runs(slots, 3)] == expected


class Driver:
    """Pins memory, like CUDA's, when it is let; no more at once, or in all, than it can."""

    def __init__(self, at_once: int, in_all: int, patience_s: float) -> None:
        """Bytes, and seconds that it takes at the most."""
        self.may, self.pinned, self.unpinned = threading.Event(), list[tuple[int, int]](), list[int]()
        self._at_once, self._in_all, self._patience_s = at_once, in_all, patience_s

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.may.wait(self._patience_s)
        if size > self._at_once or sum(size for _, size in self.pinned) + size > self._in_all:
            return 1
        self.pinned.append((address, size))
        return 0

    def cudaHostUnregister(self, address: int) -> None:
        self.unpinned.append(address)


def pins_in_pieces(patch: pytest.MonkeyPatch, *, room: int = SLOTS, patience_s: float = 60.0) -> list[int]:
    """A mover starts before anything is pinned, and no piece is larger than two slots. How many slots it says to be
    pinned in the end, where there is `room` for so many."""
    record = record_layout(SPECS)[-1]
    driver, told, news = Driver(2 * record, room * record, patience_s), list[Moved](), list[Any]()

    def check_error(code: int) -> None:
        if code:
            raise RuntimeError("out of memory")

    for name, as_on_a_gpu in (("cudart", lambda: driver), ("set_device", lambda device: None)):
        patch.setattr(torch.cuda, name, as_on_a_gpu)
    patch.setattr(torch.cuda, "check_error", check_error)
    patch.setattr(PageMover, "_compile", lambda *arguments: None)
    nothing: Any = None
    shared = memory()[0]
    mover = PageMover(caches(1), shared, 3, told.append, Staging((), (), nothing, nothing, nothing), news.append)
    assert not news, "a start waits for memory to be pinned"
    mover.move(Moves(1, saves=((2, 0),)))
    assert [(moved.ticket, moved.lost) for moved in told] == [(1, True)], "a slot is used that is not pinned"
    driver.may.set()
    mover._threads[0].join(60)
    slots = [pinned.slots for pinned in news]
    assert slots, "nothing is pinned"
    assert [size // record for _, size in driver.pinned] == [b - a for a, b in zip([0, *slots], slots, strict=False)]
    places = [(address - shared.slot_SB.data_ptr()) // record for address, _ in driver.pinned]
    assert places == [0, *slots[:-1]]
    assert mover.all_pinned == (slots[-1] == SLOTS)
    mover.close()
    assert driver.unpinned == [address for address, _ in driver.pinned]
    return slots


def test_host_memory_is_pinned_in_pieces_while_a_replica_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert mover_module.PIECE_BYTES <= 4 << 30, "drivers have refused pieces of 512 GiB"
    monkeypatch.setattr(mover_module, "PIECE_BYTES", 2 * record_layout(SPECS)[-1])
    assert pins_in_pieces(monkeypatch) == [2, 4, 6, 7]
    assert not caplog.records
    assert pins_in_pieces(monkeypatch, room=5) == [2, 4]
    assert "of 7 pages of host memory only the first 4 are used, the others cannot be pinned" in caplog.text


def all_at_once(patch: pytest.MonkeyPatch) -> None:
    """Plant a fault: all of it is pinned in one call."""
    patch.setattr(mover_module, "PIECE_BYTES", 1 << 50)


def before_the_start_ends(patch: pytest.MonkeyPatch) -> None:
    """Plant a fault: a start pins by itself."""
    honest = mover_module.thread_of

    def thread_of(work: Any, name: str, failed: Any) -> threading.Thread:
        thread = honest(work, name, failed)
        if name == "pin pages":
            thread.join()
        return thread

    patch.setattr(mover_module, "thread_of", thread_of)


@pytest.mark.parametrize(
    ("plant", "shows"), [(all_at_once, "nothing is pinned"), (before_the_start_ends, "a start waits")]
)
def test_memory_that_is_pinned_at_once_or_first_is_noticed(
    plant: Callable[[pytest.MonkeyPatch], None], shows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover_module, "PIECE_BYTES", 2 * record_layout(SPECS)[-1])
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=shows):
        pins_in_pieces(monkeypatch, patience_s=0.05 if plant is before_the_start_ends else 60.0)


def test_host_memory_says_what_is_too_much_and_what_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"host_cache_bytes = 999 is less than one page .* takes 1000"):
        HostMemory.shared(999, 1000, Group(), CPU)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 4999)
    with pytest.raises(RuntimeError, match=r"only 4999 bytes of memory are free"):
        HostMemory.shared(5000, 1000, Group(), CPU)
    fits = HostMemory.shared(4999, 1000, Group(), CPU)
    assert fits.slots == 4
    assert not fits.slot_SB.any()


@pytest.mark.parametrize(
    ("nodes", "shards", "expected"),
    [
        ("ab", 2, r"a node of rank 0 has no rank with shard 1 of the cache"),
        ("aaab", 2, r"a node of rank 3 has no rank with shard 0 of the cache"),
        ("aabb", 4, r"a node of rank 0 has no rank with shard 2 of the cache"),
        ("aabb", 2, 1),
        ("ab", 1, 1),
        ("aabb", 1, 2),
        ("aaaabbbb", 2, 2),
        ("aaaaaabb", 1, 2),
        ("aaaaabbb", 1, 1),
    ],
)
def test_a_node_has_all_shards_or_no_host_memory(
    monkeypatch: pytest.MonkeyPatch, nodes: str, shards: int, expected: str | int
) -> None:
    """Pages of a shard that no rank of a node has would be loaded, and nobody would have written them. All ranks find
    it, though on some nodes there are all shards: none waits for the others. `expected`: what is lacking, or the number
    of ranks among which pages are evenly shared out on every node."""

    def gather_bytes(group: Group, payload: bytes, device: torch.device) -> list[bytes]:
        return [node.encode() for node in nodes] if payload == node_name().encode() else [payload] * len(nodes)

    monkeypatch.setattr(Group, "gather_bytes", gather_bytes)
    for rank in range(len(nodes)):
        group = Group(Mesh.of(rank, len(nodes), cache=shards))
        if isinstance(expected, str):
            with pytest.raises(RuntimeError, match=expected):
                HostMemory.shared(4096, 1024, group, CPU)
        elif nodes.index(nodes[rank]) == rank:  # the others open the file of this one
            memory = HostMemory.shared(4096, 1024, group, CPU)
            assert (memory.slots, memory.savers) == (4, expected)


def test_the_limit_of_a_container_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    unlimited = available_bytes()
    (tmp_path / "memory.max").write_text("1000000000\n")
    (tmp_path / "memory.current").write_text("400000000\n")
    assert available_bytes() == 550_000_000 < unlimited
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes() > 550_000_000


def test_memory_is_gone_with_its_processes() -> None:
    """Whoever is killed leaves nothing behind: the file has no name."""
    program = (
        "import os, re, signal, torch\n"
        "from workers.tiers.host_memory import HostMemory\n"
        "from workers.parallel.group import Group\n"
        "memory = HostMemory.shared(1 << 20, 1 << 10, Group(), torch.device('cpu'))\n"
        "memory.slot_SB.fill_(1)\n"
        "for line in open('/proc/self/maps'):\n"
        "    begin, end = (int(number, 16) for number in line.split()[0].split('-'))\n"
        "    if begin <= memory.slot_SB.data_ptr() < end: print(line, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ})
    assert ended.returncode == -9, ended.stderr
    (line,) = ended.stdout.strip().splitlines()
    assert "/memfd:" in line, "a file that has a name stays"
    assert line.endswith("(deleted)")
