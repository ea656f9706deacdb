"""Times the copies between a GPU's caches, host memory and a disk: pages that are saved, and pages that come back.

    python bench/tiers.py                         # records of 4 KiB to 8 MiB, then the pages of three models
    python bench/tiers.py --gigabytes 8           # more host memory, which takes longer to pin
    python bench/tiers.py --disk /mnt/nvme        # a disk, too; where there is no GPU, that alone

The first table has plain copies of pinned memory, as many of one size as give `--gigabytes`, in both directions: what
the link between host and GPU bears by the size of a record. The second has what a rank does, by `PageMover` itself: a
record is a page of all caches of a model. Saves are told as the scheduler tells them, at most `MOST_SAVES` messages
under way; a load brings all pages that were saved back in one message. "a step waits" is the time on the stream of the
steps for one message of saves: gathering its pages into staging memory. "the host launches" is the time that the
thread which launches the steps spends on the message.

The table of a disk has what one rank does, by `DiskMover` itself, by the size of a record: saves of 16 pages a message,
4 messages under way, then one message that loads all. Checksums are computed in both directions. Several ranks of a
node share its disk, and reach more together. Where the file system has no `O_DIRECT`, memory is measured and not the
disk; the table says so.
"""

from __future__ import annotations

import argparse
import queue
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kernels.page import PAGE_TOKENS
from workers.cache.paged import PagedCache
from workers.cache.spec import CacheSpec, Int8IndexSpec, LatentSpec, latent_spec
from workers.parallel.group import Group
from workers.protocol.tiers import MOST_SAVES, DiskMoved, DiskMoves, DiskPage, Moved, Moves
from workers.scheduler.disk_saves import MOST_WRITES, WRITE_BATCH
from workers.tiers.disk_files import HEADER_BYTES, DiskFiles
from workers.tiers.disk_mover import DiskMover
from workers.tiers.host_memory import HostMemory
from workers.tiers.mover import PageMover, Staging, batch_of, record_layout

KIB, GB = 1024, 1e9
SIZES = (*(4 * KIB * 4**power for power in range(6)), 8 * KIB * KIB)
"""Bytes of a record: 4 KiB to 4 MiB, and 8 MiB."""
DISK_SIZES = (64 * KIB, 256 * KIB, 1024 * KIB, 2560 * KIB, 8192 * KIB)
"""Bytes of a record: a page of DeepSeek V3 in FP8 takes 2,542 KiB."""
LIMIT_S = 120.0
"""For any one message, and for pinning."""


def models() -> dict[str, list[CacheSpec]]:
    """The caches of a rank."""
    v3 = [latent_spec(512, 64, torch.bfloat16, fp8=True)]
    return {
        "V2-Lite, bf16": [LatentSpec(576, torch.bfloat16)] * 27,
        "V3 with its draft layer, FP8": v3 * 62,
        "V3.2 with its draft layer, FP8": [*v3 * 62, *[Int8IndexSpec(128, torch.bfloat16)] * 62],
    }


def copies(host: Tensor, device: Tensor) -> float:
    """GB/s of copies from one to the other, uint8 [records, bytes] both, one copy a record."""
    stream = torch.cuda.current_stream()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    best = 0.0
    for _ in range(3):
        begin.record()
        for source, target in zip(host, device, strict=True):
            target.copy_(source, non_blocking=True)
        end.record()
        stream.synchronize()
        best = max(best, host.numel() / (1e-3 * begin.elapsed_time(end)) / GB)
    return best


def by_size(total: int) -> None:
    """Print the first table."""
    print("record    host to GPU    GPU to host   GB/s")
    for size in SIZES:
        records = min(total // size, 8192)
        host = torch.empty(records, size, dtype=torch.uint8, pin_memory=True)
        device = torch.empty_like(host, device="cuda")
        print(f"{size // KIB:5d} KiB  {copies(host, device):8.1f}  {copies(device, host):12.1f}", flush=True)


class Mover:
    """A rank's mover with caches and host memory, both full."""

    def __init__(self, specs: Sequence[CacheSpec], total: int) -> None:
        device = torch.device("cuda")
        self.record = record_layout(specs)[-1]
        self.pages = total // self.record
        cache = PagedCache([spec.allocate(self.pages + 1, device) for spec in specs], specs)
        memory = HostMemory.shared(self.pages * self.record, self.record, Group(), device)
        self.told: queue.SimpleQueue[Moved] = queue.SimpleQueue()
        begin = time.perf_counter()
        self.mover = PageMover(cache, memory, 0, self.told.put, Staging.allocate(self.record, device))
        while not self.mover.all_pinned:
            if time.perf_counter() - begin > LIMIT_S:
                raise SystemExit(f"host memory was not pinned within {LIMIT_S:g} s")
            time.sleep(0.001)
        self.pinned_s = time.perf_counter() - begin

    def done(self) -> Moved:
        """What is told next."""
        moved = self.told.get(timeout=LIMIT_S)
        if moved.lost:
            raise SystemExit("pages were lost")
        return moved

    def save(self) -> tuple[float, float, float]:
        """(GB/s, microseconds of a message on the steps' stream, and on the host) where all pages are saved."""
        batch, under_way, host_s, device_ms = batch_of(self.record), 0, 0.0, 0.0
        pairs = [(page, page - 1) for page in range(1, self.pages + 1)]
        messages = [tuple(pairs[first : first + batch]) for first in range(0, len(pairs), batch)]
        begin = time.perf_counter()
        for ticket, saves in enumerate(messages):
            if under_way == MOST_SAVES:
                self.done()
                under_way -= 1
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            before.record()
            launch = time.perf_counter()
            self.mover.move(Moves(ticket, saves=saves))
            host_s += time.perf_counter() - launch
            after.record()
            under_way += 1
            if ticket == len(messages) // 2:
                after.synchronize()
                device_ms = before.elapsed_time(after)
        for _ in range(under_way):
            self.done()
        seconds = time.perf_counter() - begin
        return self.pages * self.record / seconds / GB, 1e3 * device_ms, 1e6 * host_s / len(messages)

    def load(self, pages: int) -> tuple[float, float]:
        """(seconds, microseconds of the host) of one message that loads so many pages."""
        loads = tuple((page - 1, page) for page in range(1, pages + 1))
        begin = time.perf_counter()
        self.mover.move(Moves(0, loads=loads))
        host_s = time.perf_counter() - begin
        self.done()
        return time.perf_counter() - begin, 1e6 * host_s


def by_model(total: int) -> None:
    """Print the second table."""
    for name, specs in models().items():
        mover = Mover(specs, total)
        mover.save()  # what is compiled or loaded the first time
        rate, waits_us, host_us = mover.save()
        batch, tokens = batch_of(mover.record), mover.pages * PAGE_TOKENS
        print(
            f"{name}: a page is {mover.record / KIB:.0f} KiB; {tokens:,} tokens pinned in {mover.pinned_s:.2f} s\n"
            f"  saved at {rate:.1f} GB/s; of a message with {batch} pages a step waits {waits_us:.0f} us, the host "
            f"launches {host_us:.0f} us"
        )
        for pages in (16, 128, mover.pages):
            mover.load(pages)
            seconds, host_us = mover.load(pages)
            tokens, rate = pages * PAGE_TOKENS, pages * mover.record / seconds / GB
            print(
                f"  {tokens:7,d} tokens loaded in {1e3 * seconds:6.2f} ms, {rate:.1f} GB/s; the host launches "
                f"{host_us:.0f} us",
                flush=True,
            )
        mover.mover.close()
        del mover
        torch.cuda.empty_cache()


def by_disk(base: Path, total: int) -> None:
    """Print the third table."""
    print(f"record    to disk    from disk   GB/s, in {base}")
    for size in DISK_SIZES:
        with tempfile.TemporaryDirectory(dir=base) as folder:
            pages = total // size
            memory = HostMemory.shared(pages * size, size, Group(), torch.device("cpu"))
            memory.slot_SB.random_(0, 256)
            room = pages * (size + HEADER_BYTES)
            files = DiskFiles.open(Path(folder), room, size, bytes(16), Group(), torch.device("cpu"))
            told: queue.SimpleQueue[DiskMoved] = queue.SimpleQueue()
            mover = DiskMover(files, memory, 0, told.put)
            named = [DiskPage(slot, slot, slot.to_bytes(16, "little"), b"", 1, bytes(256)) for slot in range(pages)]
            begin, under_way = time.perf_counter(), 0
            for ticket, first in enumerate(range(0, pages, WRITE_BATCH)):
                if under_way == MOST_WRITES:
                    _told(told)
                    under_way -= 1
                mover.move(DiskMoves(ticket, saves=tuple(named[first : first + WRITE_BATCH])))
                under_way += 1
            for _ in range(under_way):
                _told(told)
            written = time.perf_counter() - begin
            begin = time.perf_counter()
            mover.move(DiskMoves(0, loads=tuple(named)))
            _told(told)
            read = time.perf_counter() - begin
            note = "" if files.direct else "   through the system's cache of files"
            print(
                f"{size // KIB:5d} KiB  {pages * size / written / GB:6.2f}  {pages * size / read / GB:10.2f}{note}",
                flush=True,
            )
            mover.close()


def _told(told: queue.SimpleQueue[DiskMoved]) -> None:
    """Wait for a message to be done."""
    moved = told.get(timeout=LIMIT_S)
    if moved.bad:
        raise SystemExit("pages were not written, or not read as written")


def main() -> None:
    """Print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of memory that is copied")
    parser.add_argument("--disk", type=Path, help="folder on a disk that is measured, too")
    given = parser.parse_args()
    total = int(given.gigabytes * GB)
    if not torch.cuda.is_available() and given.disk is None:
        sys.exit("no GPU here that torch can use")
    if torch.cuda.is_available():
        by_size(total)
        by_model(total)
    if given.disk is not None:
        by_disk(given.disk, total)


if __name__ == "__main__":
    main()
