"""Files of cached pages on disk: what was written is read, by the same bits or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kernels.page import PAGE_TOKENS
from workers.parallel.group import Group
from workers.protocol.request import chain_keys, pack_tokens
from workers.protocol.tiers import FOUND, DiskFound, DiskMoved, DiskMoves, DiskPage
from workers.tiers import disk_files
from workers.tiers.disk_files import HEADER_BYTES, DiskFailedError, DiskFiles, segment_name, slots_within
from workers.tiers.disk_mover import MOST_BAD_READS, DiskMover
from workers.tiers.host_memory import HostMemory

CPU = torch.device("cpu")
RECORD = 3 * 4096
SLOTS = 10
SIZE = SLOTS * (RECORD + HEADER_BYTES)
ROOT = b"root of sixteen."
TEXT = [pack_tokens([100 * number + at for at in range(PAGE_TOKENS)]) for number in range(SLOTS)]
KEYS = chain_keys(ROOT, b"".join(TEXT))


@pytest.fixture(autouse=True)
def nobody_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_files, "LOCK_WAIT_S", 0.0)


def opened(base: Path, size: int = SIZE, root: bytes = ROOT, record: int = RECORD) -> DiskFiles:
    return DiskFiles.open(base, size, record, root, Group(), CPU)


def page(of: int, slot: int = -1, host: int = 0, **changes: Any) -> DiskPage:
    """Page `of` of a prompt, from 1 on; in the slot before that number where none is given."""
    parent = KEYS[of - 2] if of > 1 else b""
    named = {"key": KEYS[of - 1], "parent": parent, "tokens": TEXT[of - 1], "serial": of, "number": of}
    return DiskPage(**{"slot": of - 1 if slot < 0 else slot, "host": host, **named, **changes})


def contents(seed: int, size: int = RECORD) -> Any:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def memory(slots: int = 4) -> HostMemory:
    return HostMemory.shared(slots * RECORD, RECORD, Group(), CPU)


def written(base: Path, numbers: range = range(1, 6), **how: Any) -> DiskFiles:
    files = opened(base, **how)
    for number in numbers:
        files.write(page(number), contents(number))
    return files


@pytest.mark.parametrize("aligned", [False, True])
def test_a_page_comes_back_with_all_its_bits(tmp_path: Path, aligned: bool) -> None:
    files, place_B = opened(tmp_path), memory().slot_SB.numpy()[1] if aligned else np.empty(RECORD, np.uint8)
    for number in (1, 2, 10):
        place_B[:] = contents(number)
        files.write(page(number), place_B)
    for number in (10, 1, 2):
        place_B[:] = 0
        assert files.read(page(number, serial=0), place_B)
        np.testing.assert_array_equal(place_B, contents(number))


def test_segments_are_of_their_size_and_nobody_else_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_files, "SEGMENT_BYTES", 4 * RECORD)
    old = os.umask(0)
    try:
        files = written(tmp_path / "new", range(1, 11))
    finally:
        os.umask(old)
    sizes = {path.name: path.stat().st_size for path in files.folder.glob("segment-*")}
    assert sizes == {segment_name(0): 4 * RECORD, segment_name(1): 4 * RECORD, segment_name(2): 2 * RECORD}
    assert sum(512 * path.stat().st_blocks for path in files.folder.glob("segment-*")) >= SLOTS * RECORD, (
        "no room taken"
    )
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert stat.S_IMODE(files.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in files.folder.iterdir()} == {0o600}
    out_B = np.empty(RECORD, np.uint8)
    for number in range(1, 11):
        assert files.read(page(number), out_B)
        np.testing.assert_array_equal(out_B, contents(number))
    files.close()
    smaller = opened(tmp_path / "new", size=SIZE // 2)
    assert {path.name for path in smaller.folder.glob("segment-*")} == {segment_name(0), segment_name(1)}
    assert len(smaller.found) == 5 * FOUND.size


def test_another_page_is_not_taken_for_the_one_that_is_asked_for(tmp_path: Path) -> None:
    files, out_B = written(tmp_path), np.empty(RECORD, np.uint8)
    assert files.read(page(3), out_B)
    for change in ({"key": KEYS[8]}, {"parent": KEYS[7]}, {"number": 4}, {"tokens": TEXT[5]}, {"slot": 3}, {"slot": 8}):
        assert not files.read(page(3, **change), out_B), change
    with pytest.raises(ValueError, match="slot 10 of a disk with 10"):
        files.read(page(3, slot=10), out_B)
    files.erase(2)
    assert not files.read(page(3), out_B)


def flip(path: Path, at: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def a_bit_is_another(folder: Path, at: int) -> None:
    files, out_B = written(folder), np.empty(RECORD, np.uint8)
    flip(files.folder / segment_name(0), 2 * RECORD + at)
    assert not files.read(page(3), out_B)
    assert files.read(page(2), out_B)
    assert files.read(page(4), out_B)


@pytest.mark.parametrize("at", [0, 1, 4095, 4096, RECORD - 1])
def test_one_bit_of_a_page_that_is_another_is_noticed(tmp_path: Path, at: int) -> None:
    a_bit_is_another(tmp_path, at)


@pytest.mark.parametrize("at", [0, 8, 24, 40, 56, 60, 64, 72, 327, 328, 343])
def test_one_bit_of_a_header_that_is_another_is_noticed(tmp_path: Path, at: int) -> None:
    files, out_B = written(tmp_path), np.empty(RECORD, np.uint8)
    flip(files.folder / "headers", 2 * HEADER_BYTES + at)
    assert not files.read(page(3), out_B)
    assert files.read(page(2), out_B)


def a_write_is_torn(folder: Path) -> None:
    """The first half of other contents are there when the process ends, and the header still says what was before."""
    files, out_B = written(folder), np.empty(RECORD, np.uint8)
    with (files.folder / segment_name(0)).open("r+b") as file:
        file.seek(2 * RECORD)
        file.write(contents(99)[: RECORD // 2].tobytes())
    assert not files.read(page(3), out_B)


def test_a_write_that_was_torn_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_write_is_torn(tmp_path / "right")
    # A planted fault: the digest is of the header alone.
    honest = disk_files._digest
    monkeypatch.setattr(disk_files, "_digest", lambda named, record_B: honest(named, record_B[:0]))
    with pytest.raises(AssertionError):
        a_write_is_torn(tmp_path / "torn")
    with pytest.raises(AssertionError):
        a_bit_is_another(tmp_path / "bit", 4096)


def test_a_file_that_ends_too_early_or_is_gone_costs_its_pages(tmp_path: Path) -> None:
    files, out_B = written(tmp_path), np.empty(RECORD, np.uint8)
    os.truncate(files.folder / segment_name(0), 2 * RECORD + 4096)
    assert files.read(page(2), out_B)
    assert not files.read(page(3), out_B)
    (files.folder / segment_name(0)).unlink()
    with pytest.raises(FileNotFoundError):
        files.read(page(2), out_B)


def entries(files: DiskFiles) -> list[tuple[Any, ...]]:
    return list(FOUND.iter_unpack(files.found))


def test_another_start_finds_what_was_written_in_that_order(tmp_path: Path) -> None:
    files = opened(tmp_path)
    for number, slot in ((1, 7), (2, 3), (3, 9), (4, 0)):
        files.write(page(number, slot), contents(number))
    files.erase(9)
    files.close()
    again = opened(tmp_path)
    assert again.folder == files.folder
    assert [(slot, number, key) for slot, number, _, _, key, _ in entries(again)] == [
        (7, 1, KEYS[0]),
        (3, 2, KEYS[1]),
        (0, 4, KEYS[3]),
    ]
    assert again.serial == 5
    assert "3 pages are there from before" in again.summary()
    out_B = np.empty(RECORD, np.uint8)
    assert again.read(page(2, 3), out_B)
    np.testing.assert_array_equal(out_B, contents(2))


def test_a_start_reads_the_headers_in_few_pieces_and_no_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many pages and segments there are: each segment is opened once, for its room."""
    monkeypatch.setattr(disk_files, "SEGMENT_BYTES", 2 * RECORD)
    written(tmp_path, range(1, 11)).close()
    monkeypatch.setattr(disk_files, "_SCANNED", 4)
    names, reads = list[str](), list[tuple[int, int]]()
    opens, pread = os.open, os.pread

    def counted_open(path: Any, *args: Any, **named: Any) -> int:
        names.append(Path(path).name)
        return opens(path, *args, **named)

    def counted_pread(descriptor: int, size: int, at: int) -> bytes:
        assert Path(f"/proc/self/fd/{descriptor}").readlink().name == "headers"
        reads.append((size // HEADER_BYTES, at // HEADER_BYTES))
        return pread(descriptor, size, at)

    def no_contents(*args: Any) -> int:
        raise AssertionError("contents are read or written at the start")

    monkeypatch.setattr(disk_files.os, "open", counted_open)
    monkeypatch.setattr(disk_files.os, "pread", counted_pread)
    for name in ("preadv", "pwritev", "pwrite"):
        monkeypatch.setattr(disk_files.os, name, no_contents)
    files = opened(tmp_path)
    monkeypatch.undo()
    assert [number for _, number, *_ in entries(files)] == [*range(1, 11)]
    assert reads == [(4, 0), (4, 4), (2, 8)]
    assert sorted(name for name in names if name.startswith("segment")) == [segment_name(at) for at in range(5)]
    assert names.count("headers") == 2, "for its room, and to be read"
    files.close()


def test_another_root_finds_nothing_and_writes_over_it(tmp_path: Path) -> None:
    written(tmp_path).close()
    other = opened(tmp_path, root=b"another root, so")
    assert other.found == b""
    assert not other.read(page(2), np.empty(RECORD, np.uint8))
    other.write(page(2), contents(2))
    other.close()
    again = opened(tmp_path)
    assert [entry[1] for entry in entries(again)] == [1, 3, 4, 5]
    # Another size of pages: what is where the contents were is found out.
    again.close()
    large = opened(tmp_path, root=b"of larger pages.", record=2 * RECORD, size=SIZE)
    large.write(page(1, 1), contents(1, 2 * RECORD))
    large.close()
    last, out_B = opened(tmp_path), np.empty(RECORD, np.uint8)
    assert [entry[1] for entry in entries(last)] == [1, 3, 4, 5]
    assert [last.read(page(number), out_B) for number in (1, 3, 4, 5)] == [True, False, False, True]


def test_two_replicas_have_a_folder_each_and_each_comes_back_to_its_own_root(tmp_path: Path) -> None:
    one, other = written(tmp_path), opened(tmp_path, root=b"another root, so")
    assert (one.folder.name, other.folder.name) == ("0", "1")
    other.write(page(1), contents(1))
    third = opened(tmp_path)
    assert third.folder.name == "2"
    assert third.found == b""
    for files in (one, other, third):
        files.close()
    again = opened(tmp_path, root=b"another root, so")
    assert again.folder.name == "1"
    assert len(entries(again)) == 1
    assert opened(tmp_path).folder.name == "0"
    # A root that nobody knows takes what is free.
    assert opened(tmp_path, root=b"a third root, so").folder.name == "2"


def test_a_rank_that_outlives_the_one_that_leads_keeps_the_folder(tmp_path: Path) -> None:
    files = opened(tmp_path)
    rank = disk_files._lock(files.folder / "ranks", fcntl.LOCK_SH)
    files.close()
    assert opened(tmp_path).folder.name == "1"
    os.close(rank)
    assert opened(tmp_path).folder.name == "0"


def test_folders_of_others_and_links_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "0").symlink_to(tmp_path / "elsewhere")
    assert opened(tmp_path).folder.name == "1"
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_disk_says_what_is_too_much_and_what_too_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"disk_cache_bytes = 999 is less than one page .* takes 12800"):
        opened(tmp_path, size=999)
    with pytest.raises(
        RuntimeError, match=r"disk_cache_bytes takes \d+ bytes of .*, where only \d+ are free: give less"
    ):
        opened(tmp_path, size=1 << 50)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(RuntimeError, match=r"disk_cache_dir: .*file cannot be used \(.*\): give a folder"):
        opened(file)
    assert slots_within(SIZE, RECORD) == SLOTS == opened(tmp_path).slots


def test_room_that_a_dying_replica_still_has_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = written(tmp_path)
    free = os.statvfs(tmp_path)

    class Full:
        f_bavail, f_frsize = 0, free.f_frsize

    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        files.close()

    monkeypatch.setattr(disk_files, "LOCK_WAIT_S", 60.0)
    monkeypatch.setattr(disk_files.os, "statvfs", lambda path: Full)
    monkeypatch.setattr(disk_files.time, "sleep", sleep)
    again = opened(tmp_path)
    assert len(waited) == 1
    assert again.folder == files.folder
    assert len(entries(again)) == 5


@pytest.mark.parametrize("free", [False, True])
def test_the_folder_of_a_dying_replica_is_waited_for_though_there_is_room_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: bool
) -> None:
    files = written(tmp_path)
    if free:
        opened(tmp_path, root=b"another root, so").close()
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        files.close()

    monkeypatch.setattr(disk_files, "LOCK_WAIT_S", 60.0)
    monkeypatch.setattr(disk_files.time, "sleep", sleep)
    other = opened(tmp_path, root=b"a third root, so")
    assert waited == [], "nobody has pages of this root"
    again = opened(tmp_path)
    assert len(waited) == 1
    assert again.folder == files.folder
    assert len(entries(again)) == 5
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}
    assert other.folder.name == "1"


def fails_with(code: int) -> Any:
    def fails(*args: Any, **named: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fails


@pytest.mark.parametrize("name", ["pread", "chmod", "open"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS])
def test_a_disk_that_has_failed_before_a_start_is_no_error_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    written(tmp_path).close()
    with monkeypatch.context() as broken:
        broken.setattr(disk_files.os, name, fails_with(code))
        with pytest.raises(DiskFailedError, match=os.strerror(code)):
            opened(tmp_path)
    assert len(entries(opened(tmp_path))) == 5, "the folder is free"


@pytest.mark.parametrize("root", [ROOT, b"another sixteen."])
def test_a_start_on_a_disk_that_others_have_filled_up_leaves_what_the_folder_says_of_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: bytes
) -> None:
    """The room of pages is taken; there is none for anything else. Only a folder that is to have other pages needs
    some, and if it gets none its pages are still found by who had written them."""
    written(tmp_path).close()
    about = (tmp_path / "0" / "about.json").read_text()
    with monkeypatch.context() as full:
        full.setattr(disk_files.json, "dump", fails_with(errno.ENOSPC))
        if root == ROOT:
            files = opened(tmp_path)
            assert len(entries(files)) == 5
            files.close()
        else:
            with pytest.raises(RuntimeError, match="No space left on device"):
                opened(tmp_path, root=root)
    assert (tmp_path / "0" / "about.json").read_text() == about
    assert len(entries(opened(tmp_path))) == 5


def test_a_folder_that_can_never_have_been_written_to_is_an_error_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for code in (errno.EROFS, errno.EACCES, errno.ENOSPC):
        with monkeypatch.context() as broken:
            broken.setattr(disk_files.Path, "mkdir", fails_with(code))
            with pytest.raises(RuntimeError, match=r"cannot be used \(.*\): give a folder"):
                opened(tmp_path)


class Gathering:
    """Ranks of one node, a thread each, which gather bytes and do nothing else together."""

    def __init__(self, rank: int, barrier: threading.Barrier, parts: list[bytes]) -> None:
        self.mesh = SimpleNamespace(world=SimpleNamespace(rank=rank))
        self._barrier, self._parts = barrier, parts

    def gather_bytes(self, payload: bytes, device: torch.device) -> list[bytes]:
        self._parts[self.mesh.world.rank] = payload
        self._barrier.wait(60)
        found = [*self._parts]
        self._barrier.wait(60)
        return found


@pytest.mark.parametrize("fails", [None, 0, 1])
def test_all_ranks_start_without_a_disk_that_fails_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int | None
) -> None:
    written(tmp_path).close()
    honest = disk_files._lock

    def lock(path: Path, how: int) -> int:
        if fails is not None and (how == fcntl.LOCK_EX) == (fails == 0):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return honest(path, how)

    monkeypatch.setattr(disk_files, "_lock", lock)
    barrier, parts = threading.Barrier(2), [b"", b""]

    def start(rank: int) -> str:
        try:
            group: Any = Gathering(rank, barrier, parts)
            files = DiskFiles.open(tmp_path, SIZE, RECORD, ROOT, group, CPU)
        except DiskFailedError as error:
            return str(error)
        files.close()
        return "started"

    with ThreadPoolExecutor(2) as threads:
        outcomes = list(threads.map(start, range(2)))
    named = {None: "started", 0: f"{tmp_path}/0/lock: Input/output error", 1: f"{tmp_path}/0/ranks: Input/output error"}
    assert outcomes == [named[fails]] * 2
    monkeypatch.undo()
    assert opened(tmp_path).folder.name == "0", "nobody has locked it"


def test_only_what_all_nodes_have_counts() -> None:
    parts = [
        np.frombuffer(
            b"".join(FOUND.pack(slot, number, 0, serial, KEYS[number - 1], b"") for slot, number, serial in rows),
            disk_files._ENTRIES,
        )
        for rows in ([(0, 1, 5), (1, 2, 6), (2, 3, 7)], [(0, 1, 9), (2, 4, 8), (1, 2, 3)])
    ]
    assert [int(slot) for slot in disk_files._in_all(parts)["slot"]] == [0, 1]


# Ranks and threads


class Told(list[DiskMoved]):
    """Answers of movers."""

    def wait(self, count: int, most_s: float = 60.0) -> list[DiskMoved]:
        deadline = time.monotonic() + most_s
        while len(self) < count:
            assert time.monotonic() < deadline, f"{count} answers are waited for, and there are {list(self)}"
            time.sleep(0.001)
        return list(self)


def mover(files: DiskFiles, host: HostMemory, told: Told, rank: int = 0) -> DiskMover:
    return DiskMover(files, host, rank, told.append)


def test_ranks_copy_a_part_each_and_each_of_them_answers(tmp_path: Path) -> None:
    files, host, told = opened(tmp_path), memory(), Told()
    other = DiskFiles(files.folder, RECORD, SLOTS, ROOT, [], rank=1, ranks=2)
    files.ranks = 2
    movers = [mover(files, host, told), mover(other, host, told, 1)]
    host.slot_SB.copy_(torch.from_numpy(np.stack([contents(number) for number in range(1, 5)])))
    expected = host.slot_SB.clone()
    pages = tuple(page(number, host=number - 1) for number in range(1, 5))
    movers[0].move(DiskMoves(1, saves=pages))
    told.wait(1)
    assert [files.read(one, np.empty(RECORD, np.uint8)) for one in pages] == [True, False, True, False]
    movers[1].move(DiskMoves(1, saves=pages))
    assert {(moved.rank, moved.ticket, moved.bad, moved.off) for moved in told.wait(2)} == {
        (0, 1, (), False),
        (1, 1, (), False),
    }
    host.slot_SB.zero_()
    for one in movers:
        one.move(DiskMoves(2, loads=pages))
    told.wait(4)
    assert torch.equal(host.slot_SB, expected)
    movers[0].move(DiskMoves(3, erased=(1,)))  # the other's
    assert told.wait(5)[-1].seconds == 0
    for one in movers:
        one.move(DiskMoves(4, erased=(0, 1)))
        one.move(DiskMoves(5, loads=pages[1:2]))
    assert {moved.bad for moved in told.wait(9) if moved.ticket == 5} <= {(), (1,)}
    for one in movers:
        one.close()
    assert opened(tmp_path).folder.name == "0", "the folder is free"


def test_what_is_not_as_it_was_written_is_said_and_drops_only_that(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files, host, told = written(tmp_path), memory(), Told()
    flip(files.folder / segment_name(0), RECORD)
    flip(files.folder / segment_name(0), 2 * RECORD)
    moves = mover(files, host, told)
    moves.move(DiskMoves(1, loads=tuple(page(number, host=number - 1) for number in (1, 2, 3, 4))))
    (moved,) = told.wait(1)
    assert sorted(moved.bad) == [1, 2]
    assert not moved.off
    np.testing.assert_array_equal(host.slot_SB[3].numpy(), contents(4))
    assert len(caplog.records) == 1
    assert "is not as it was written: it is computed again" in caplog.text
    moves.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_cannot_be_written_to_is_given_up_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    files, told = written(tmp_path), Told()
    moves = mover(files, memory(), told)

    def fails(*args: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(disk_files.os, "pwritev", fails)
    moves.move(DiskMoves(1, saves=(page(6), page(7))))
    (moved,) = told.wait(1)
    monkeypatch.undo()
    assert (sorted(moved.bad), moved.off) == ([5, 6], True)
    moves.move(DiskMoves(2, loads=(page(1),)))
    moves.move(DiskMoves(3, saves=(page(8),)))
    assert [(moved.bad, moved.off) for moved in sorted(told.wait(3)[1:], key=lambda moved: moved.ticket)] == [
        ((0,), True),
        ((7,), True),
    ]
    assert len([record for record in caplog.records if "it is not used any more" in record.message]) == 1
    assert os.strerror(code) in caplog.text
    moves.close()


def a_full_disk(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Two pages of four find room."""
    files, host, told = opened(folder), memory(), Told()
    moves, honest = mover(files, host, told), os.pwritev

    def full(descriptor: int, buffers: Any, at: int) -> int:
        if at >= 2 * RECORD:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return honest(descriptor, buffers, at)

    with patch.context() as broken:
        broken.setattr(disk_files.os, "pwritev", full)
        for number in range(1, 5):
            moves.move(DiskMoves(number, saves=(page(number, host=number - 1),)))
            told.wait(number)
    moves.close()
    saved = [not moved.bad for moved in told]
    assert [moved.off for moved in told] == [False, False, True, True], "a full disk is written to again and again"
    assert saved == [True, True, False, False], "pages count as saved that are not"


class Unconcerned(DiskMover):
    """A planted fault: a page that finds no room counts as saved."""

    def _copied(self, one: Any) -> bool:
        return super()._copied(one) or one.kind == "save"


class Persistent(DiskMover):
    """A planted fault: a disk is written to that has no room."""

    def _give_up(self, why: str) -> None:
        pass


@pytest.mark.parametrize(("fault", "shows"), [(Unconcerned, "count as saved"), (Persistent, "again and again")])
def test_a_full_disk_is_given_up_and_nothing_counts_as_saved_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: type[DiskMover], shows: str
) -> None:
    a_full_disk(tmp_path / "right", monkeypatch)
    monkeypatch.setattr(sys.modules[__name__], "DiskMover", fault)
    with pytest.raises(AssertionError, match=shows):
        a_full_disk(tmp_path / "wrong", monkeypatch)


def test_reads_that_fail_cost_their_pages_and_many_of_them_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files, told = written(tmp_path), Told()
    moves = mover(files, memory(), told)

    def fails(*args: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(disk_files.os, "preadv", fails)
    for number in range(MOST_BAD_READS):
        moves.move(DiskMoves(number, loads=(page(1 + number % 5),)))
        assert told.wait(number + 1)[-1].bad == (number % 5,)
    assert [moved.off for moved in told] == [False] * (MOST_BAD_READS - 1) + [True]
    assert len(caplog.records) == 2, "the first page, and the end"
    moves.close()


def test_pages_that_an_earlier_run_left_half_written_do_not_cost_the_disk(tmp_path: Path) -> None:
    files, told = written(tmp_path), Told()
    flip(files.folder / segment_name(0), 0)
    moves = mover(files, memory(), told)
    for number in range(MOST_BAD_READS + 5):
        moves.move(DiskMoves(number, loads=(page(1),)))
        (bad, off) = (told.wait(number + 1)[-1].bad, told[-1].off)
        assert (bad, off) == ((0,), False)
    moves.close()


def test_a_disk_is_given_up_for_what_it_did_lately_and_not_for_all_its_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.tiers.disk_mover.RECENT_READS", MOST_BAD_READS + 6)
    files, told = opened(tmp_path), Told()
    moves = mover(files, memory(), told)
    moves.move(DiskMoves(0, saves=(page(1), page(2, host=1))))
    told.wait(1)
    flip(files.folder / segment_name(0), 0)

    def reads(number: int, count: int) -> bool:
        """Whether the disk is given up when a page was read so often."""
        for _ in range(count):
            moves.move(DiskMoves(len(told), loads=(page(number),)))
            told.wait(len(told) + 1)
        return told[-1].off

    assert not reads(1, MOST_BAD_READS - 1)
    assert not reads(2, MOST_BAD_READS + 6)
    assert not reads(1, MOST_BAD_READS - 1)
    assert reads(1, 1)
    moves.close()


def test_a_defect_of_ours_costs_the_disk_and_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files, told = written(tmp_path), Told()
    moves = mover(files, memory(), told)
    for number in range(20):  # more than there are threads
        moves.move(DiskMoves(number, loads=(page(1, slot=SLOTS + 1),)))
    assert [moved.bad for moved in told.wait(20)] == [(SLOTS + 1,)] * 20
    assert told[-1].off
    assert "scheduler and rank disagree" in caplog.text
    moves.close()


@pytest.mark.parametrize("where", ["open", "copy"])
def test_a_file_system_that_knows_no_direct_access_is_read_and_written_through_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Some say so when a file is opened, and others when it is read or written."""
    files, record_B = opened(tmp_path), memory().slot_SB.numpy()[1]
    honest_open = os.open

    def refuses(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT and where == "open":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return honest_open(path, flags, *mode)

    def copies(honest: Any) -> Any:
        def copy(descriptor: int, *given: Any) -> Any:
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT and where == "copy":
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return honest(descriptor, *given)

        return copy

    monkeypatch.setattr(disk_files.os, "open", refuses)
    for name in ("pwritev", "preadv"):
        monkeypatch.setattr(disk_files.os, name, copies(getattr(os, name)))
    record_B[:] = contents(1)
    files.write(page(1), record_B)
    assert not files.direct
    files.direct = True
    record_B[:] = 0
    assert files.read(page(1), record_B)
    np.testing.assert_array_equal(record_B, contents(1))
    assert not files.direct


def test_a_disk_that_writes_nothing_and_tells_no_error_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, told = written(tmp_path), Told()
    moves = mover(files, memory(), told)
    monkeypatch.setattr(disk_files.os, "pwritev", lambda *given: 0)
    moves.move(DiskMoves(1, saves=(page(6),)))
    (moved,) = told.wait(1)
    assert (moved.bad, moved.off) == ((5,), True)
    assert os.pread(files._headers, HEADER_BYTES, 5 * HEADER_BYTES) == bytes(HEADER_BYTES), "no header follows"
    moves.close()


def a_read_never_ends(folder: Path, patch: pytest.MonkeyPatch, most_s: float) -> None:
    files, host, told = written(folder), memory(), Told()
    honest, release = os.preadv, threading.Event()

    def preadv(descriptor: int, buffers: Any, at: int) -> int:
        if at == RECORD:
            release.wait(60)
        return honest(descriptor, buffers, at)

    with patch.context() as broken:
        broken.setattr(disk_files.os, "preadv", preadv)
        broken.setattr("workers.tiers.disk_mover.CLOSING_S", 0.01)
        moves = mover(files, host, told)
        moves.move(DiskMoves(1, loads=(page(1), page(2, host=1))))
        moves.move(DiskMoves(2, loads=(page(3, host=2),)))
        moves.move(DiskMoves(3, saves=(page(6),)))
        try:
            assert {moved.ticket for moved in told.wait(2, most_s)} == {2, 3}
            moves.close()
            assert len(told) == 2
        finally:
            release.set()
    assert told.wait(3)[-1].ticket == 1


def test_a_read_that_never_ends_holds_up_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_read_never_ends(tmp_path / "right", monkeypatch, most_s=60)
    # A planted fault: one page is read at a time.
    monkeypatch.setattr("workers.tiers.disk_mover.READERS", 1)
    with pytest.raises(AssertionError, match="2 answers are waited for"):
        a_read_never_ends(tmp_path / "wrong", monkeypatch, most_s=0.2)


def test_what_is_found_is_told_some_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.tiers.disk_mover.FOUND_PAGES", 2)
    written(tmp_path).close()
    moves = mover(opened(tmp_path), memory(), Told())
    told = moves.found()
    assert [(len(one.packed) // FOUND.size, one.last) for one in told] == [(2, False), (2, False), (1, True)]
    moves.close()
    empty = mover(opened(tmp_path / "other"), memory(), Told())
    assert empty.found() == [DiskFound(b"", last=True)]
    empty.close()


WRITER = """
import sys, itertools
sys.path[:0] = [{root!r}, {tests!r}]
from pathlib import Path
from test_disk_files import *
files = opened(Path({base!r}))
print("ready", flush=True)
for turn in itertools.count():
    for number in range(1, 11):
        files.write(page(number, slot=(number + turn) % SLOTS, serial=10 * turn + number), contents(number))
    if turn == 3:
        print("wrote", flush=True)
"""


@pytest.mark.parametrize("after_s", [0.0, pytest.param(0.003, marks=pytest.mark.long)])
def test_who_is_killed_while_it_writes_leaves_no_page_that_is_wrong(tmp_path: Path, after_s: float) -> None:
    root, tests = str(Path(disk_files.__file__).parents[2]), str(Path(__file__).parent)
    program = WRITER.format(root=root, tests=tests, base=str(tmp_path))
    writer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    beside = opened(tmp_path)
    assert beside.folder.name == "1", "the other is in use"
    beside.close()
    assert writer.stdout.readline() == "wrote\n"
    time.sleep(after_s)
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    files, out_B, good = opened(tmp_path), np.empty(RECORD, np.uint8), 0
    assert files.folder.name == "0"
    found = entries(files)
    assert len(found) == SLOTS
    for slot, number, *_ in found:
        if files.read(page(number, slot), out_B):
            good += 1
            np.testing.assert_array_equal(out_B, contents(number))
    assert good >= SLOTS - 1, "one was being written"
