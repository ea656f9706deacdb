"""Copies pages between host memory and disk, for one rank.

Threads of their own do it, a page at a time each: disks answer many requests at once faster than one after the other,
and nobody waits for them. Reads have threads of their own, as prompts wait for them and for writes nobody does.

A disk that cannot be written to is given up, and so is one that gives back much that is not what this process has
written: nothing is copied any more, one line of each rank in the log says so, and the scheduler is told with every
answer. Pages that an earlier process has left half written, as in a power cut, say nothing of the disk: they cost no
more than themselves.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from workers.protocol.tiers import FOUND, DiskFound, DiskMoved, DiskMoves, DiskPage
from workers.tiers.disk_files import DiskFiles
from workers.tiers.host_memory import HostMemory

logger = logging.getLogger("latentserve.tiers")

READERS: Final = 8
"""Threads of a rank that read. All ranks of a node share a disk."""
WRITERS: Final = 2
MOST_BAD_READS: Final = 64
"""Of `RECENT_READS`, reads that fail, or of pages that this process wrote and which are not as they were written, after
which a disk is given up."""
RECENT_READS: Final = 1000
FOUND_PAGES: Final = 16384
"""Of one message at the start."""
CLOSING_S: Final = 1.0
"""For the threads to end. One that a disk keeps for longer is left to the end of the process."""


@dataclass(eq=False)
class _Job:
    """A message that is under way."""

    ticket: int
    left: int
    """Pages."""
    begun: float
    bad: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Page:
    job: _Job
    kind: Literal["save", "load", "erase"]
    slot: int
    page: DiskPage | None = None


class DiskMover:
    """Begins every `DiskMoves` of the scheduler's, and tells when it has ended."""

    def __init__(self, files: DiskFiles, memory: HostMemory, rank: int, tell: Callable[[DiskMoved], None]) -> None:
        """`rank`: of the replica. `tell` is called from other threads."""
        self.files, self._memory, self._rank, self._tell = files, memory, rank, tell
        self._records = memory.slot_SB.numpy()
        self._lock = threading.Lock()
        self.failed = False
        self._bad_reads: deque[bool] = deque(maxlen=RECENT_READS)
        """Of the last reads, whether they speak against the disk."""
        self._warned = False
        self._own_S = np.zeros(files.slots, dtype=bool)
        """Whether this process has written a slot."""
        self._reads: queue.SimpleQueue[_Page | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[_Page | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        for name, asked, count in (("read", self._reads, READERS), ("write", self._writes, WRITERS)):
            for _ in range(count):
                # No thread that a disk keeps waiting may keep the process from its end.
                thread = threading.Thread(target=self._follow, args=(asked,), name=f"{name} pages", daemon=True)
                thread.start()
                self._threads.append(thread)

    def found(self) -> Sequence[DiskFound]:
        """What rank 0 tells of the pages that were there at the start."""
        packed, size = self.files.found, FOUND.size * FOUND_PAGES
        parts = [packed[at : at + size] for at in range(0, len(packed), size)] or [b""]
        return [DiskFound(part, last=number == len(parts)) for number, part in enumerate(parts, 1)]

    def move(self, moves: DiskMoves) -> None:
        """Begin these copies."""
        owns = self.files.owns
        job = _Job(moves.ticket, 0, time.perf_counter())
        pages = [_Page(job, "save", page.slot, page) for page in moves.saves if owns(page.slot)]
        pages += [_Page(job, "load", page.slot, page) for page in moves.loads if owns(page.slot)]
        pages += [_Page(job, "erase", slot) for slot in moves.erased if owns(slot)]
        job.left = len(pages)
        if not pages:
            self._tell(DiskMoved(self._rank, moves.ticket, off=self.failed))
        asked = self._reads if moves.loads else self._writes
        for page in pages:
            asked.put(page)

    def close(self) -> None:
        """End the threads, and let others have the files."""
        for asked, count in ((self._reads, READERS), (self._writes, WRITERS)):
            for _ in range(count):
                asked.put(None)
        deadline = time.monotonic() + CLOSING_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        if not any(thread.is_alive() for thread in self._threads):
            self.files.close()

    def _follow(self, asked: queue.SimpleQueue[_Page | None]) -> None:
        while (page := asked.get()) is not None:
            good = self._copied(page)
            with self._lock:
                if not good:
                    page.job.bad.append(page.slot)
                page.job.left -= 1
                ended = page.job.left == 0
            if ended:
                job = page.job
                seconds = time.perf_counter() - job.begun
                self._tell(DiskMoved(self._rank, job.ticket, tuple(job.bad), seconds, self.failed))

    def _copied(self, one: _Page) -> bool:
        """Copy one page; whether it is where it should be."""
        try:
            if one.page is None:
                self.files.erase(one.slot)
                return True
            if self.failed:
                return False
            record_B = self._records[one.page.host]
            if one.kind == "save":
                self.files.write(one.page, record_B)
                self._own_S[one.slot] = True
                return True
            good = self.files.read(one.page, record_B)
            fails = not good and bool(self._own_S[one.slot])
        except OSError as error:
            if one.kind != "load":
                self._give_up(f"cannot be written to ({error.strerror})")
                return False
            good, fails = False, True
        except Exception as error:  # a defect of ours: without this thread prompts would wait for nothing
            logger.exception("page %d of %s cannot be copied", one.slot, self.files.folder)
            self._give_up(f"cannot be used ({type(error).__name__}: {error})")
            return False
        self._count_read(one.slot, good, fails)
        return good

    def _count_read(self, slot: int, good: bool, fails: bool) -> None:
        """`fails`: whether a read speaks against the disk."""
        with self._lock:
            self._bad_reads.append(fails)
            count = sum(self._bad_reads) if fails else 0
            first, self._warned = not good and not self._warned, self._warned or not good
        if first:
            logger.warning(
                "page %d of %s is not as it was written: it is computed again; more of them are only counted",
                slot,
                self.files.folder,
            )
        if count >= MOST_BAD_READS:
            self._give_up(f"did not give back {count} of the last {RECENT_READS} pages as they were written")

    def _give_up(self, why: str) -> None:
        with self._lock:
            first, self.failed = not self.failed, True
        if first:
            logger.warning(
                "the disk of cached pages, %s, %s: it is not used any more, and prompts are computed",
                self.files.folder,
                why,
            )
