"""Copies pages of a rank's caches to host memory and back.

A record is a page of every cache, one after the other; so a page travels in one piece, however many layers there are.
Copies never wait for the device nor let a step wait for more than a copy within the device:

- What is saved is gathered into staging memory on the stream of the steps, in order with them: a later step may
  overwrite the pages at once. From there it goes to the host on a stream of its own.
- What is loaded goes to staging memory, and from there into its pages, on a third stream, behind all steps that were
  launched before: these may still read what the pages held. No step has the pages before every rank has answered.

On a CPU both are done at once.

Shape legend: P pages, B bytes of a page of one cache, N pages of one message, R bytes of a record.
"""

from __future__ import annotations

import logging
import mmap
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from kernels.page import NULL_PAGE
from workers.cache.paged import PagedCache
from workers.cache.spec import CacheSpec
from workers.memory.pinned import on_device
from workers.protocol.tiers import MOST_SAVES, Moved, Moves
from workers.tiers.host_memory import HostMemory

logger = logging.getLogger("latentserve.tiers")

ALIGNMENT: Final = 256
"""Of a cache's part of a record, in bytes."""
STAGING_BYTES: Final = 64 * 1024 * 1024
"""Of pages on their way to the host, and from it, each."""
MOST_BATCH: Final = 64
"""Pages that are saved at once, however small."""
PIECE_BYTES: Final = 256 * 1024 * 1024
"""Of host memory that is pinned at once: launches may have to wait for it."""


class MoveError(ValueError):
    """Copies of pages or slots that there are not: scheduler and rank disagree, which is a defect."""


def record_layout(specs: Sequence[CacheSpec]) -> tuple[int, ...]:
    """Where the page of each cache begins in a record, in bytes, and at last the bytes of a record."""
    sizes = [-(-spec.page_bytes // ALIGNMENT) * ALIGNMENT for spec in specs]
    *begins, end = accumulate(sizes, initial=0)
    # Pieces of whole records are pinned one by one, and no page of the system's may belong to two of them.
    return (*begins, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE)


def batch_of(record_bytes: int) -> int:
    """Pages that are saved at once."""
    return max(1, min(MOST_BATCH, STAGING_BYTES // record_bytes))


@dataclass
class Staging:
    """Memory of a GPU for pages on their way, and the streams they take. None of it on a CPU."""

    save_NR: tuple[Tensor, ...]
    load_NR: Tensor
    saves: torch.cuda.Stream
    loads: torch.cuda.Stream
    saved: int = 0
    """Messages that saved anything so far."""

    @staticmethod
    def allocate(record_bytes: int, device: torch.device) -> Staging:
        """To be called before the cache takes what is left of the GPU."""

        def records() -> Tensor:
            return torch.empty(batch_of(record_bytes), record_bytes, dtype=torch.uint8, device=device)

        # As many saves as the scheduler lets be under way: none overwrites what another has not sent yet.
        saves, loads = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        return Staging(tuple(records() for _ in range(MOST_SAVES)), records(), saves, loads)


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
    ) -> None:
        """`rank`: of the replica. `tell` is called from another thread where there is `staging`, which a GPU needs."""
        self.memory, self._rank, self._tell, self._staging = memory, rank, tell, staging
        self._pages = cache.pages
        self._device = cache.layers[0].device
        self._layers = [layer.view(cache.pages, -1).view(torch.uint8) for layer in cache.layers]
        self._begins = record_layout(cache.specs)
        if self._begins[-1] != memory.slot_SB.shape[1]:
            raise ValueError(f"slots of {memory.slot_SB.shape[1]} bytes for records of {self._begins[-1]}")
        self._pinned = _Pinned(memory.slots)
        self._under_way: queue.SimpleQueue[tuple[int, torch.cuda.Event, torch.cuda.Event] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        if staging is not None:
            self._pinned.slots = 0
            for work in (self._pin, self._follow):
                thread = threading.Thread(target=work, name=f"pages {work.__name__}", daemon=True)
                thread.start()
                self._threads.append(thread)

    def move(self, moves: Moves) -> None:
        """Begin these copies, behind all steps that were launched so far and before all later ones. MoveError."""
        self._check(moves)
        saves = [(page, slot) for page, slot in moves.saves if self.memory.writes(slot)]
        if not saves and not moves.loads:
            self._tell(Moved(self._rank, moves.ticket))
        elif max(slot for _, slot in [*saves, *((page, slot) for slot, page in moves.loads)]) >= self._pinned.slots:
            self._tell(Moved(self._rank, moves.ticket, lost=True))  # not yet
        elif self._staging is None:
            begin = time.perf_counter()
            self._move_at_once(saves, moves.loads)
            self._tell(Moved(self._rank, moves.ticket, seconds=time.perf_counter() - begin))
        elif saves:
            self._launch_saves(self._staging, moves.ticket, saves)
        else:
            self._launch_loads(self._staging, moves.ticket, moves.loads)

    def close(self) -> None:
        """Wait for what is under way, and give the memory back."""
        self._pinned.ended.set()
        self._under_way.put(None)
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
        step = max(1, PIECE_BYTES // memory.shape[1])
        for first in range(0, len(memory), step):
            yield memory[first : first + step]

    def _check(self, moves: Moves) -> None:
        slots = [slot for _, slot in moves.saves] + [slot for slot, _ in moves.loads]
        pages = [page for page, _ in moves.saves] + [page for _, page in moves.loads]
        if moves.saves and moves.loads:
            raise MoveError(f"ticket {moves.ticket} saves pages and loads others")
        if any(not 0 <= slot < self.memory.slots for slot in slots) or any(
            not NULL_PAGE < page < self._pages for page in pages
        ):
            raise MoveError(f"ticket {moves.ticket} names a page or a slot that there is not: {moves}")

    def _parts(self, records_NR: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each cache [P, B], and its part of some records [N, B]."""
        for layer, begin in zip(self._layers, self._begins, strict=False):
            yield layer, records_NR[:, begin : begin + layer.shape[1]]

    @torch.inference_mode()
    def _move_at_once(self, saves: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int]]) -> None:
        memory = self.memory.slot_SB
        if saves:
            page_N, slot_N = torch.tensor(saves, dtype=torch.int64).unbind(1)
            for layer, part in self._parts(memory):
                part[slot_N] = layer[page_N]
        if loads:
            slot_N, page_N = torch.tensor(loads, dtype=torch.int64).unbind(1)
            for layer, part in self._parts(memory):
                layer[page_N] = part[slot_N]

    @torch.inference_mode()
    def _launch_saves(self, staging: Staging, ticket: int, saves: Sequence[tuple[int, int]]) -> None:
        records_NR = staging.save_NR[staging.saved % len(staging.save_NR)][: len(saves)]
        staging.saved += 1
        page_N = on_device([page for page, _ in saves], torch.int64, self._device)
        for layer, part in self._parts(records_NR):
            part.copy_(layer.index_select(0, page_N))
        with self._timed(staging.saves, ticket):
            for record_R, (_, slot) in zip(records_NR, saves, strict=True):
                self.memory.slot_SB[slot].copy_(record_R, non_blocking=True)

    @torch.inference_mode()
    def _launch_loads(self, staging: Staging, ticket: int, loads: Sequence[tuple[int, int]]) -> None:
        with self._timed(staging.loads, ticket):
            for first in range(0, len(loads), len(staging.load_NR)):
                chunk = loads[first : first + len(staging.load_NR)]
                for record_R, (slot, _) in zip(staging.load_NR, chunk, strict=False):
                    record_R.copy_(self.memory.slot_SB[slot], non_blocking=True)
                page_N = on_device([page for _, page in chunk], torch.int64, self._device)
                for layer, part in self._parts(staging.load_NR[: len(chunk)]):
                    layer.index_copy_(0, page_N, part)

    @contextmanager
    def _timed(self, stream: torch.cuda.Stream, ticket: int) -> Iterator[None]:
        """Launch on `stream`, behind all that the steps' stream has by now; the ticket is answered when that ends."""
        stream.wait_stream(torch.cuda.current_stream(self._device))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            begin.record()
            yield
            end.record()
        self._under_way.put((ticket, begin, end))

    def _follow(self) -> None:
        """Tell of each copy when it has ended; in a thread of its own."""
        torch.cuda.set_device(self._device)
        while (item := self._under_way.get()) is not None:
            ticket, begin, end = item
            end.synchronize()
            self._tell(Moved(self._rank, ticket, seconds=1e-3 * float(begin.elapsed_time(end))))

    def _pin(self) -> None:
        """Pin host memory piece by piece, from the first slot on; in a thread of its own, as a terabyte takes minutes.
        Copies of slots that are not pinned yet count as lost."""
        torch.cuda.set_device(self._device)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        for piece in self._pieces():
            if self._pinned.ended.is_set():
                return
            piece.view(-1)[:: mmap.PAGESIZE].sum()  # the system finds the memory before the driver is kept by it
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
