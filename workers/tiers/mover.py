"""Copies pages of a rank's caches to host memory and back.

A record is a page of every cache, one after the other; so a page travels in one piece, however many layers there are.
Copies never wait for the device nor let a step wait for more than a copy within the device:

- What is saved is gathered into staging memory on the stream of the steps, in order with them and in one launch: a
  later step may overwrite the pages at once. From there it goes to the host on a stream of its own.
- What is loaded goes to staging memory, and from there into its pages, on two other streams; into its pages behind all
  steps that were launched before, which may still read what the pages held. No step has the pages before every rank has
  answered.

Copies to and from the host are many, and launching them takes the host's time: two threads do it, one a direction, and
not the one that launches the steps. On a CPU all is done at once.

Shape legend: P pages, B bytes of a page of one cache, N pages of one message, R bytes of a record.
"""

from __future__ import annotations

import logging
import math
import mmap
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from kernels.page import NULL_PAGE, pages_for
from kernels.page_records import PagedRecords, gather_pages, scatter_pages
from workers.cache.paged import PagedCache
from workers.cache.spec import CacheSpec
from workers.memory.scratch import on_device
from workers.protocol.messages import Fault
from workers.protocol.tiers import MOST_SAVES, Moved, Moves, Pinned
from workers.tiers.host_memory import HostMemory

logger = logging.getLogger("latentserve.tiers")

ALIGNMENT: Final = 256
"""Of a cache's part of a record, in bytes."""
STAGING_BYTES: Final = 64 * 1024 * 1024
"""Of pages on their way to the host, and from it, each, where a step's pages take no more."""
MOST_STAGING_BYTES: Final = 256 * 1024 * 1024
"""The same of pages on their way to the host, where those of a step take more."""
MOST_BATCH: Final = 64
"""Pages that are saved at once, however small, where a step has no more."""
UNEVEN: Final = 1.25
"""Of a step's pages a rank may get so many times its even share."""
PIECE_BYTES: Final = 256 * 1024 * 1024
"""Of host memory that is pinned at once: launches may have to wait for it."""
FINDERS: Final = 4
"""Threads that have the system find host memory."""


def runs(slots: Sequence[int], piece: int) -> Iterator[tuple[int, int]]:
    """(first index, length) of every longest run of slots that follow each other within a piece of so many slots."""
    first = 0
    for index in range(1, len(slots) + 1):
        if index == len(slots) or slots[index] != slots[index - 1] + 1 or slots[index] % piece == 0:
            yield first, index - first
            first = index


class MoveError(ValueError):
    """Copies of pages or slots that there are not: scheduler and rank disagree, which is a defect."""


def record_layout(specs: Sequence[CacheSpec]) -> tuple[int, ...]:
    """Where the page of each cache begins in a record, in bytes, and at last the bytes of a record."""
    sizes = [-(-spec.page_bytes // ALIGNMENT) * ALIGNMENT for spec in specs]
    *begins, end = accumulate(sizes, initial=0)
    # Pieces of whole records are pinned one by one, and no page of the system's may belong to two of them.
    return (*begins, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE)


def batch_of(record_bytes: int, tokens: int = 0, ranks: int = 1) -> int:
    """Pages that a rank saves at once: all that a step of `tokens` prompt tokens completes, shared out over `ranks`.

    A message goes with each step. With fewer pages in it than a step completes, prompts would fill the cache faster
    than it is saved, and pages would leave it unsaved.
    """
    share = math.ceil(UNEVEN * pages_for(tokens) / ranks)
    usual = min(MOST_BATCH, STAGING_BYTES // record_bytes)
    return max(1, min(max(usual, share), MOST_STAGING_BYTES // record_bytes))


def staging_bytes(record_bytes: int, batch: int | None = None) -> int:
    """Bytes of a GPU for pages on their way to host memory and from it, as `Staging.allocate` takes them."""
    usual = batch_of(record_bytes)
    return (MOST_SAVES * (usual if batch is None else batch) + 2 * max(1, usual // 2)) * record_bytes


@dataclass
class Staging:
    """Memory of a GPU for pages on their way, and the streams they take. None of it on a CPU."""

    save_NR: tuple[Tensor, ...]
    load_NR: tuple[Tensor, ...]
    """While one half is copied into pages, the other is filled."""
    saves: torch.cuda.Stream
    loads: torch.cuda.Stream
    pages: torch.cuda.Stream
    """On which records that have been loaded are copied into their pages."""
    saved: int = 0
    """Messages that saved anything so far."""

    @staticmethod
    def allocate(record_bytes: int, device: torch.device, batch: int | None = None) -> Staging:
        """To be called before the cache takes what is left of the GPU. `batch`: pages that are saved at once; None: as
        many as `batch_of` says of no steps in particular."""
        usual = batch_of(record_bytes)

        def records(count: int) -> Tensor:
            return torch.empty(count, record_bytes, dtype=torch.uint8, device=device)

        # As many saves as the scheduler lets be under way: none overwrites what another has not sent yet.
        saves = tuple(records(usual if batch is None else batch) for _ in range(MOST_SAVES))
        half = max(1, usual // 2)
        to_host, from_host, pages = (torch.cuda.Stream(device) for _ in range(3))  # type: ignore[no-untyped-call]
        return Staging(saves, (records(half), records(half)), to_host, from_host, pages)


@dataclass(frozen=True)
class _Copies:
    """A message's copies in one direction."""

    ticket: int
    pairs: Sequence[tuple[int, int]]
    """As `Moves` has them: (page, slot) of saves, (slot, page) of loads; of this rank's pages, by their local ids."""
    behind: torch.cuda.Event
    """What must have been done before: steps, and where pages are saved their gathering."""
    record_NR: Tensor | None = None
    """Staging memory that holds what is saved."""


@dataclass
class _Pinned:
    slots: int = 0
    """The first so many slots can be copied from and to without the host's help."""
    ended: threading.Event = field(default_factory=threading.Event)


class PageMover:
    """Does what `Moves` say, and tells when it is done. One per rank."""

    def __init__(
        self,
        cache: PagedCache,
        memory: HostMemory,
        rank: int,
        tell: Callable[[Moved], None],
        staging: Staging | None = None,
        news: Callable[[Pinned | Fault], None] = lambda message: None,
    ) -> None:
        """`rank`: of the replica. `tell` is called from other threads where there is `staging`, which a GPU needs; and
        then `news` hears how many slots are pinned, and of a thread that has failed."""
        self.memory, self._rank, self._tell, self._staging, self._news = memory, rank, tell, staging, news
        self._shards, self._pages = cache.shards, cache.shards.pages(cache.pages)
        self._device = cache.layers[0].device
        begins = record_layout(cache.specs)
        if begins[-1] != memory.slot_SB.shape[1]:
            raise ValueError(f"slots of {memory.slot_SB.shape[1]} bytes for records of {begins[-1]}")
        self._records = PagedRecords.of(cache.layers, begins[:-1])
        self._pinned = _Pinned(memory.slots)
        self._piece = max(1, PIECE_BYTES // begins[-1])
        """Slots that are pinned at once; no copy may touch two such pieces."""
        self._saves: queue.SimpleQueue[_Copies | None] = queue.SimpleQueue()
        self._loads: queue.SimpleQueue[_Copies | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        if staging is not None:
            self._pinned.slots = 0
            self._compile(staging)
            saving = partial(self._follow, self._saves, self._save, staging)
            loading = partial(self._follow, self._loads, self._load, staging)
            for name, work in (("pin", self._pin), ("save", saving), ("load", loading)):
                self._threads.append(thread_of(work, f"{name} pages", self._failed))

    def move(self, moves: Moves) -> None:
        """Begin these copies, behind all steps that were launched so far and before all later ones. MoveError."""
        self._check(moves)
        # From here on pages have this rank's local ids.
        owns, local = self._shards.owns, self._shards.local
        saves = [(local(page), slot) for page, slot in moves.saves if owns(page) and self.memory.writes(slot)]
        loads = [(slot, local(page)) for slot, page in moves.loads if owns(page)]
        if not saves and not loads:
            self._tell(Moved(self._rank, moves.ticket))
        elif max(slot for _, slot in [*saves, *((page, slot) for slot, page in loads)]) >= self._pinned.slots:
            self._tell(Moved(self._rank, moves.ticket, lost=True))  # the scheduler names none that is not pinned
        elif self._staging is None:
            begin = time.perf_counter()
            self._move_at_once(saves, loads)
            self._tell(Moved(self._rank, moves.ticket, seconds=time.perf_counter() - begin))
        elif saves:
            self._gather(self._staging, moves.ticket, saves)
        else:
            self._loads.put(_Copies(moves.ticket, loads, self._now()))

    def _failed(self, error: BaseException) -> None:
        cause = f"rank {self._rank}: pages cannot be copied: {type(error).__name__}: {error}"
        self._news(Fault(cause, self._rank, in_step=True))  # errors of a device come up wherever it is asked next

    @property
    def all_pinned(self) -> bool:
        """Whether every slot can be copied from and to."""
        return self._pinned.slots == self.memory.slots

    def close(self) -> None:
        """Wait for what is under way, and give the memory back."""
        self._pinned.ended.set()
        self._saves.put(None)
        self._loads.put(None)
        for thread in self._threads:
            thread.join()
        if self._staging is not None:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            for piece in self._pieces():
                if self._pinned.slots > 0:
                    runtime.cudaHostUnregister(piece.data_ptr())
                    self._pinned.slots -= len(piece)

    def _pieces(self) -> Iterator[Tensor]:
        """Host memory as it is pinned, from the first slot on."""
        memory = self.memory.slot_SB
        for first in range(0, len(memory), self._piece):
            yield memory[first : first + self._piece]

    def _check(self, moves: Moves) -> None:
        slots = [slot for _, slot in moves.saves] + [slot for slot, _ in moves.loads]
        pages = [page for page, _ in moves.saves] + [page for _, page in moves.loads]
        if moves.saves and moves.loads:
            raise MoveError(f"ticket {moves.ticket} saves pages and loads others")
        if any(not 0 <= slot < self.memory.slots for slot in slots) or any(
            not NULL_PAGE < page < self._pages for page in pages
        ):
            raise MoveError(f"ticket {moves.ticket} names a page or a slot that there is not: {moves}")

    @torch.inference_mode()
    def _move_at_once(self, saves: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int]]) -> None:
        memory = self.memory.slot_SB
        if saves:
            page_N, slot_N = torch.tensor(saves, dtype=torch.int64).unbind(1)
            record_NR = memory.new_empty(len(saves), memory.shape[1])
            gather_pages(self._records, page_N, record_NR)
            memory[slot_N] = record_NR
        if loads:
            slot_N, page_N = torch.tensor(loads, dtype=torch.int64).unbind(1)
            scatter_pages(self._records, page_N, memory[slot_N])

    def _compile(self, staging: Staging) -> None:
        """Launch both kernels once, on the null page."""
        null_1 = on_device([NULL_PAGE], torch.int64, self._device)
        gather_pages(self._records, null_1, staging.load_NR[0][:1])
        scatter_pages(self._records, null_1, staging.load_NR[0][:1])
        torch.cuda.current_stream(self._device).synchronize()

    def _now(self) -> torch.cuda.Event:
        """An event behind all that the steps' stream has by now."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    @torch.inference_mode()
    def _gather(self, staging: Staging, ticket: int, saves: Sequence[tuple[int, int]]) -> None:
        """Copy pages into staging memory, in order with the steps."""
        batch_NR = staging.save_NR[staging.saved % len(staging.save_NR)]
        if len(saves) > len(batch_NR):
            raise MoveError(f"ticket {ticket} saves {len(saves)} pages of this rank, which takes {len(batch_NR)}")
        record_NR = batch_NR[: len(saves)]
        staging.saved += 1
        gather_pages(self._records, on_device([page for page, _ in saves], torch.int64, self._device), record_NR)
        self._saves.put(_Copies(ticket, saves, self._now(), record_NR))

    @torch.inference_mode()
    def _follow(
        self,
        asked: queue.SimpleQueue[_Copies | None],
        copy: Callable[[Staging, _Copies], torch.cuda.Event],
        staging: Staging,
    ) -> None:
        """Begin the copies of one direction, and tell of each message when it has ended; in a thread of its own."""
        torch.cuda.set_device(self._device)
        while (item := asked.get()) is not None:
            begin = time.perf_counter()
            copy(staging, item).synchronize()
            self._tell(Moved(self._rank, item.ticket, seconds=time.perf_counter() - begin))

    def _save(self, staging: Staging, item: _Copies) -> torch.cuda.Event:
        """Copy records from staging memory to their slots; the event is behind all."""
        assert item.record_NR is not None
        with torch.cuda.stream(staging.saves):
            staging.saves.wait_event(item.behind)
            for first, count in runs([slot for _, slot in item.pairs], self._piece):
                slot = item.pairs[first][1]
                self.memory.slot_SB[slot : slot + count].copy_(item.record_NR[first : first + count], non_blocking=True)
        return _end(staging.saves)

    def _load(self, staging: Staging, item: _Copies) -> torch.cuda.Event:
        """Copy slots to staging memory, and from there into pages; the event is behind all."""
        half = len(staging.load_NR[0])
        staging.pages.wait_event(item.behind)
        emptied = [torch.cuda.Event() for _ in staging.load_NR]  # type: ignore[no-untyped-call]
        for number, at in enumerate(range(0, len(item.pairs), half)):
            chunk = item.pairs[at : at + half]
            record_NR, free = staging.load_NR[number % 2][: len(chunk)], emptied[number % 2]
            with torch.cuda.stream(staging.loads):
                staging.loads.wait_event(free)
                for first, count in runs([slot for slot, _ in chunk], self._piece):
                    slot = chunk[first][0]
                    record_NR[first : first + count].copy_(self.memory.slot_SB[slot : slot + count], non_blocking=True)
            staging.pages.wait_stream(staging.loads)
            with torch.cuda.stream(staging.pages):
                page_N = on_device([page for _, page in chunk], torch.int64, self._device)
                scatter_pages(self._records, page_N, record_NR)
                free.record()
        return _end(staging.pages)

    def _pin(self) -> None:
        """Pin host memory piece by piece, from the first slot on; in a thread of its own, as a terabyte takes minutes.
        The scheduler hears of each, and uses no others."""
        torch.cuda.set_device(self._device)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with ThreadPoolExecutor(FINDERS) as finders:
            for piece in self._pieces():
                if self._pinned.ended.is_set():
                    return
                # The system finds the memory, and clears it, before the driver is kept by it.
                list(finders.map(_find, piece.view(-1).chunk(FINDERS)))
                try:
                    torch.cuda.check_error(runtime.cudaHostRegister(piece.data_ptr(), piece.numel(), 0))
                except RuntimeError as error:
                    logger.warning(
                        "of %d pages of host memory only the first %d are used, the others cannot be pinned: %s",
                        self.memory.slots,
                        self._pinned.slots,
                        error,
                    )
                    return
                self._pinned.slots += len(piece)
                self._news(Pinned(self._rank, self._pinned.slots))


def thread_of(work: Callable[[], object], name: str, failed: Callable[[BaseException], None]) -> threading.Thread:
    """A thread of this name, which is running. What `work` raises `failed` is told, and the log."""

    def watched() -> None:
        try:
            work()
        except BaseException as error:
            logger.exception("the thread that is to %s has failed", name)
            failed(error)

    thread = threading.Thread(target=watched, name=name, daemon=True)
    thread.start()
    return thread


def _find(memory: Tensor) -> None:
    """Touch every page of the system's."""
    memory[:: mmap.PAGESIZE].sum()


def _end(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event behind all that the stream has by now; who waits for it sleeps."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
