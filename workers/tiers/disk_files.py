"""Files on a disk for pages of the latent cache, which the ranks of a node share, and which outlive them.

A slot holds one page of all caches of a rank, as a slot of host memory does, and so does a header of it:

- **Segments** are files of about a gibibyte with the contents of slots, one behind the other. Their room is taken at
  the start. They are read and written past the system's cache of files where it lets us (`O_DIRECT`).
- **Headers** are in a file of their own, 512 bytes each, so that a start reads all of them in one go. A header names
  the root of the page's key, its key and that of the page before, its tokens, and a digest of all of that and of the
  contents. It is written when the contents are. Nothing is forced to the disk: whatever a crash leaves behind, contents
  that are not those of their header are found out when they are read.

Every rank writes and reads the slots whose number modulo the ranks of the node is its own. The folder of a replica is a
numbered one in the folder that was given; a lock on it lasts as long as any rank, so two replicas of a node, or two
runs of a replica that overlap, never have the same. A start takes the free folder whose pages have its root, so that it
finds them again, and waits some seconds for one that others have locked; else any other free one, whose pages it
overwrites in time. Folders and files are their owner's alone:
cached latents are prompts.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import re
import struct
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.page import PAGE_TOKENS
from workers.parallel.group import Group
from workers.protocol.request import KEY_BYTES, PAGE_BYTES
from workers.protocol.tiers import FOUND, DiskPage, check_of
from workers.tiers.host_memory import node_name

SEGMENT_BYTES: Final = 1 << 30
HEADER_BYTES: Final = 512
BLOCK_BYTES: Final = 1 << 16
"""Of contents, for one checksum: it notices every error in a single place of them."""
LOCK_WAIT_S: Final = 15.0
"""Seconds for the processes of a replica that has just ended to be gone, where they have the only folder with pages of
the same root, or there is no room for another one."""
_SETTINGS: Final = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES}
    | {errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EINVAL, errno.EOPNOTSUPP}
)
"""Errors of a disk that works, and of which another thing was asked than it can do. All others are its own."""
_MAGIC: Final = b"lspages1"
"""Begins a header; another format has another number."""
_NAMED: Final = struct.Struct(f"<8s{KEY_BYTES}s{KEY_BYTES}s{KEY_BYTES}sIIQ{PAGE_BYTES}s")
_DIGEST_BYTES: Final = 16
_HEADERS: Final = np.dtype(
    {
        "names": ["magic", "root", "key", "parent", "number", "check", "serial"],
        "formats": ["V8", "V16", "V16", "V16", "<u4", "<u4", "<u8"],
        "offsets": [0, 8, 24, 40, 56, 60, 64],
        "itemsize": HEADER_BYTES,
    }
)
_ENTRIES: Final = np.dtype(
    [("slot", "<u4"), ("number", "<u4"), ("check", "<u4"), ("serial", "<u8"), ("key", "V16"), ("parent", "V16")]
)
assert _ENTRIES.itemsize == FOUND.size
assert _NAMED.size + _DIGEST_BYTES <= HEADER_BYTES
_SCANNED: Final = 1 << 17
"""Headers that are looked at together."""
_PRIVATE: Final = os.O_CLOEXEC | os.O_NOFOLLOW


class DiskFailedError(Exception):
    """The disk has failed before anything was read from it; raised on all ranks alike."""


@dataclass
class DiskFiles:
    """The slots of a replica on a node's disk, and this rank's place among those that share them."""

    folder: Path
    record_bytes: int
    slots: int
    root: bytes
    locks: list[int]
    """Descriptors that hold the folder's locks."""
    rank: int = 0
    ranks: int = 1
    found: bytes = b""
    """On rank 0: pages that were there already, as in `DiskFound`."""
    serial: int = 0
    """Of the next page that is written."""

    def __post_init__(self) -> None:
        self._headers = os.open(self.folder / "headers", os.O_RDWR | _PRIVATE)
        self._per_segment = slots_of_segment(self.record_bytes)
        self.direct = True
        """Whether files are read and written past the system's cache of them."""

    @staticmethod
    def open(base: Path, size: int, record_bytes: int, root: bytes, group: Group, device: torch.device) -> DiskFiles:
        """`size` bytes in a folder of `base` for pages of `record_bytes`, keyed from `root`; all ranks together.
        RuntimeError where that is not to be had, DiskFailedError where any rank's disk does not work."""
        slots = slots_within(size, record_bytes)
        if slots == 0:
            raise RuntimeError(
                f"disk_cache_bytes = {size} is less than one page of latent cache, which takes "
                f"{record_bytes + HEADER_BYTES}: give more, or 0 for none"
            )
        nodes = group.gather_bytes(node_name().encode(), device)
        own = group.mesh.world.rank
        peers = [rank for rank, node in enumerate(nodes) if node == nodes[own]]
        place = peers.index(own), len(peers)
        path, locks, trouble = "", list[int](), ""
        files, entries_E = None, np.empty(0, _ENTRIES)
        if own == peers[0]:
            try:
                folder, locks = _prepared(base, slots, record_bytes, root)
                files = DiskFiles(folder, record_bytes, slots, root, locks, *place)
                entries_E = files._scan()
                path = str(folder)
            except OSError as error:
                if _is_setting(error, base):
                    raise RuntimeError(
                        f"disk_cache_dir: {error.filename or base} cannot be used ({error.strerror}): give a folder on "
                        "a local disk in which this user may write, or disk_cache_bytes 0"
                    ) from None
                trouble = f"{error.filename or base}: {error.strerror}"
        path = group.gather_bytes(path.encode(), device)[peers[0]].decode()
        if own != peers[0] and path:
            try:
                locks = [_lock(Path(path) / "ranks", fcntl.LOCK_SH)]
                files = DiskFiles(Path(path), record_bytes, slots, root, locks, *place)
            except OSError as error:
                trouble = f"{error.filename or path}: {error.strerror}"
        troubles = [part.decode() for part in group.gather_bytes(trouble.encode(), device) if part]
        if troubles or files is None:
            if files is not None:
                files.close()
            else:
                _release(locks)
            raise DiskFailedError(troubles[0])
        if len(set(nodes)) > 1:  # each node has a disk of its own: only what all of them have counts
            parts = group.gather_bytes(entries_E.tobytes(), device)
            leaders = [rank for rank, node in enumerate(nodes) if nodes.index(node) == rank]
            entries_E = _in_all([np.frombuffer(parts[rank], _ENTRIES) for rank in leaders])
        files.found = entries_E.tobytes() if own == 0 else b""
        files.serial = int(entries_E["serial"].max(initial=0)) + 1
        return files

    def summary(self) -> str:
        """What there is, for the user."""
        held = f"{self.slots:,} pages, {self.slots * PAGE_TOKENS:,} tokens, in {self.folder}"
        known = len(self.found) // FOUND.size
        return f"disk behind that: {held}; {known:,} pages are there from before"

    def owns(self, slot: int) -> bool:
        """Whether this rank, of those that share the disk, is the one to write and read this slot."""
        return slot % self.ranks == self.rank

    def write(self, page: DiskPage, record_B: NDArray[np.uint8]) -> None:
        """Write a page's contents, and then its header. OSError."""
        header = self._named(page)
        header_B = np.frombuffer((header + _digest(header, record_B)).ljust(HEADER_BYTES, b"\0"), np.uint8)
        if not self._copy(os.pwritev, page.slot, record_B) or not _whole(
            os.pwritev, self._headers, header_B, self._at(page.slot)
        ):
            raise OSError(errno.EIO, "nothing is written, and no error told", str(self.folder))

    def read(self, page: DiskPage, record_B: NDArray[np.uint8]) -> bool:
        """Read a page's contents, and return whether they are those of this very page. OSError."""
        header = os.pread(self._headers, HEADER_BYTES, self._at(page.slot))
        named = self._named(page)
        # All but the serial number, of which who asks knows nothing.
        if header[:64] != named[:64] or header[72 : len(named)] != named[72:]:
            return False
        if not self._copy(os.preadv, page.slot, record_B):
            return False
        end = _NAMED.size + _DIGEST_BYTES
        return _digest(header[: _NAMED.size], record_B) == header[_NAMED.size : end]

    def erase(self, slot: int) -> None:
        """Let nobody find what is in a slot. OSError."""
        os.pwrite(self._headers, bytes(HEADER_BYTES), self._at(slot))

    def close(self) -> None:
        """Let others have the folder."""
        os.close(self._headers)
        _release(self.locks)

    def _at(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot {slot} of a disk with {self.slots}: scheduler and rank disagree")
        return slot * HEADER_BYTES

    def _named(self, page: DiskPage) -> bytes:
        check = check_of(page.tokens)
        return _NAMED.pack(_MAGIC, self.root, page.key, page.parent, page.number, check, page.serial, page.tokens)

    def _copy(self, copy: Any, slot: int, record_B: NDArray[np.uint8]) -> bool:
        """Read or write the contents of a slot; whether there was all of them. The segment is opened anew each time,
        which takes microseconds: there may be more of them than a process may have open."""
        if record_B.nbytes != self.record_bytes:
            raise ValueError(f"{record_B.nbytes} bytes for a slot of {self.record_bytes}")
        path = self.folder / segment_name(slot // self._per_segment)
        begin = slot % self._per_segment * self.record_bytes
        if self.direct and record_B.ctypes.data % mmap.PAGESIZE == 0:
            try:
                with _opened(path, os.O_DIRECT) as descriptor:
                    return _whole(copy, descriptor, record_B, begin)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False  # this file system has no such thing: some say so here, and others at the copy
        with _opened(path) as descriptor:
            whole = _whole(copy, descriptor, record_B, begin)
            if whole and copy is os.preadv:
                os.posix_fadvise(descriptor, begin, self.record_bytes, os.POSIX_FADV_DONTNEED)
            return whole

    def _scan(self) -> NDArray[np.void]:
        """Pages that are there under the root, in the order in which they were written."""
        found: list[NDArray[np.void]] = []
        for first in range(0, self.slots, _SCANNED):
            count = min(_SCANNED, self.slots - first)
            headers_H = np.frombuffer(os.pread(self._headers, count * HEADER_BYTES, first * HEADER_BYTES), _HEADERS)
            ours_H = (headers_H["magic"] == np.void(_MAGIC)) & (headers_H["root"] == np.void(self.root))
            index_E = np.flatnonzero(ours_H)
            entries_E = np.empty(len(index_E), _ENTRIES)
            for name in ("number", "check", "serial", "key", "parent"):
                entries_E[name] = headers_H[name][index_E]
            entries_E["slot"] = index_E + first
            found.append(entries_E)
        all_E = np.concatenate(found) if found else np.empty(0, _ENTRIES)
        return all_E[np.argsort(all_E["serial"], kind="stable")]


def slots_within(size: int, record_bytes: int) -> int:
    """Slots that `size` bytes hold, with their headers."""
    return size // (record_bytes + HEADER_BYTES)


def slots_of_segment(record_bytes: int) -> int:
    """Slots of a segment."""
    return max(1, SEGMENT_BYTES // record_bytes)


def segment_name(number: int) -> str:
    """Name of a segment's file."""
    return f"segment-{number:05d}"


def _digest(named: bytes, record_B: NDArray[np.uint8]) -> bytes:
    """Digest of a page's header and contents: a CRC of each block of these, hashed with the rest."""
    view = record_B.data
    parts = [zlib.crc32(view[at : at + BLOCK_BYTES]) for at in range(0, len(view), BLOCK_BYTES)]
    return blake2b(named + struct.pack(f"<{len(parts)}I", *parts), digest_size=_DIGEST_BYTES).digest()


@contextmanager
def _opened(path: Path, how: int = 0) -> Iterator[int]:
    """A descriptor of a segment."""
    descriptor = os.open(path, os.O_RDWR | how | _PRIVATE)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _whole(copy: Any, descriptor: int, record_B: NDArray[np.uint8], begin: int) -> bool:
    """Read or write all of a record; whether there was all of it."""
    view, done = record_B.data, 0
    while done < len(view):
        try:
            count = copy(descriptor, [view[done:]], begin + done)
        except OSError as error:
            if done and error.errno == errno.EINVAL:
                return False  # past the cache of files nothing goes on in the middle of a block, as where a file ends
            raise
        if count == 0:
            return False
        done += count
    return True


def _in_all(nodes: list[NDArray[np.void]]) -> NDArray[np.void]:
    """Entries whose slot has the same page on every node; the first node's."""
    others = [{(int(e["slot"]), bytes(e["key"]), int(e["number"])) for e in entries_E} for entries_E in nodes[1:]]
    kept = [all((int(e["slot"]), bytes(e["key"]), int(e["number"])) in other for other in others) for e in nodes[0]]
    found: NDArray[np.void] = nodes[0][np.asarray(kept, dtype=bool)]
    return found


# Folders


def _prepared(base: Path, slots: int, record_bytes: int, root: bytes) -> tuple[Path, list[int]]:
    """A folder of this replica's own in `base`, with room for so many slots, and the descriptors that lock it. OSError,
    RuntimeError where there is too little room."""
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        chosen = _existing(base, root)
        late = time.monotonic() >= deadline
        known = chosen is not None and _root_of(chosen[0]) == root
        short = _short_of(base if chosen is None else chosen[0], slots, record_bytes)
        # Others may have a folder with pages of this root, or one that takes the room: perhaps a run whose last process
        # is about to end.
        waits = not known and not late and _has_root(base, root)
        if not short and not waits:
            break
        _release([] if chosen is None else chosen[1])
        if late or (chosen is not None and not waits):
            raise RuntimeError(short)
        time.sleep(0.2)
    folder, locks = chosen or _new(base)
    try:
        os.chmod(folder, 0o700)
        _make_room(folder, slots, record_bytes)
        about = {"format": _MAGIC.decode(), "root": root.hex(), "record_bytes": record_bytes, "slots": slots}
        _note(folder / "about.json", about)
    except BaseException:
        _release(locks)
        raise
    return folder, locks


def _note(path: Path, about: dict[str, Any]) -> None:
    """Write what a folder says of itself, unless it says so already: whoever is killed meanwhile, or finds no room for
    it, leaves what was there. OSError."""
    with suppress(FileNotFoundError, ValueError):
        if json.loads(path.read_text()) == about:
            return
    fresh = path.with_suffix(".new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _PRIVATE, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(about, file)
    fresh.replace(path)


def _existing(base: Path, root: bytes) -> tuple[Path, list[int]] | None:
    """A folder that is there and that no process uses, locked: best one with pages of this root."""
    for number in sorted(_numbers(base), key=lambda number: (_root_of(base / str(number)) != root, number)):
        if locks := _locked(base / str(number)):
            return base / str(number), locks
    return None


def _numbers(base: Path) -> list[int]:
    """Numbers of the folders that are there."""
    return [int(path.name) for path in base.iterdir() if re.fullmatch(r"0|[1-9]\d{0,5}", path.name)]


def _has_root(base: Path, root: bytes) -> bool:
    """Whether any folder has pages of this root."""
    return any(_root_of(base / str(number)) == root for number in _numbers(base))


def _is_setting(error: OSError, base: Path) -> bool:
    """Whether the user is to mend this, as it can never have worked so; else the disk has failed."""
    if error.errno != errno.EROFS:
        return error.errno in _SETTINGS
    try:
        return not _numbers(base)  # a disk that was written to became read-only when it failed
    except OSError:
        return False


def _release(locks: list[int]) -> None:
    for descriptor in locks:
        os.close(descriptor)


def _new(base: Path) -> tuple[Path, list[int]]:
    number = 0
    while True:
        folder = base / str(number)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            if locks := _locked(folder):
                return folder, locks
        number += 1


def _root_of(folder: Path) -> bytes:
    """Root of the pages in a folder, as far as it says so."""
    try:
        return bytes.fromhex(json.loads((folder / "about.json").read_text())["root"])
    except (OSError, ValueError, KeyError, TypeError):
        return b""


def _locked(folder: Path) -> list[int]:
    """Descriptors that lock a folder of this user's for the process that leads a node's ranks; none where others use it
    or have it."""
    locks: list[int] = []
    try:
        found = folder.lstat()
        if found.st_uid != os.geteuid() or not folder.is_dir() or folder.is_symlink():
            return []
        locks.append(_lock(folder / "lock", fcntl.LOCK_EX))
        # Ranks of an earlier run may be there still though the one that led them is gone.
        locks.append(_lock(folder / "ranks", fcntl.LOCK_EX))
        fcntl.flock(locks[1], fcntl.LOCK_SH)
    except OSError as error:
        _release(locks)
        if isinstance(error, BlockingIOError):
            return []
        raise
    return locks


def _lock(path: Path, how: int) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _PRIVATE, 0o600)
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _short_of(folder: Path, slots: int, record_bytes: int) -> str:
    """What to say where a file system has too little room for so many slots; empty where it has enough."""
    room = os.statvfs(folder)
    files = [path.lstat() for path in folder.iterdir() if path.name == "headers" or path.name.startswith("segment-")]
    free = room.f_bavail * room.f_frsize + sum(512 * file.st_blocks for file in files)
    needed = slots * (record_bytes + HEADER_BYTES)
    if needed <= free:
        return ""
    return (
        f"disk_cache_bytes takes {needed} bytes of {folder}, where only {free} are free: give less, or end or delete "
        "what takes the rest"
    )


def _make_room(folder: Path, slots: int, record_bytes: int) -> None:
    """Take the room of all files, and give back what is too much. OSError."""
    per_segment = slots_of_segment(record_bytes)
    sizes = {"headers": slots * HEADER_BYTES}
    for number, first in enumerate(range(0, slots, per_segment)):
        sizes[segment_name(number)] = min(per_segment, slots - first) * record_bytes
    for path in folder.iterdir():
        if path.name.startswith("segment-") and path.name not in sizes:
            path.unlink()
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(partial(_take_room, folder), sizes.items()))


def _take_room(folder: Path, of: tuple[str, int]) -> None:
    name, size = of
    descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | _PRIVATE, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, size)
        fallocate(descriptor, size)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder / name)) from None
    finally:
        os.close(descriptor)


def fallocate(descriptor: int, size: int) -> None:
    """Have the system set aside the first `size` bytes of a file; on file systems that cannot, nothing. OSError.

    `os.posix_fallocate` would write all of them there.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if libc.fallocate(descriptor, 0, 0, size) != 0:
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise OSError(code, os.strerror(code))
