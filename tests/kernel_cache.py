"""Carries compiled kernels from one machine to the next: most of a run of GPU tests is compilation.

    python tests/kernel_cache.py pack kernels      # what Triton's cache on this machine has, in files of 12 MiB
    python tests/kernel_cache.py unpack kernels    # into it, before tests on a machine of the same kind and software

Machine code and its description alone travel, a seventh of their size. A kernel whose source, options or compiler have
changed since has another name, so nothing stale is taken; it is compiled anew.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import os
import sys
import tarfile
from pathlib import Path
from typing import Any

PART_BYTES = 12 << 20
KEPT = (".cubin", ".json", ".so")


class Parts(io.RawIOBase):
    """A stream that is written to files of a folder, part-000 and on, of at most so many bytes each."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder, self._size = folder, size
        self._file: io.BufferedWriter | None = None
        self._left = self._count = 0

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, data: Any, /) -> int:
        """All of it."""
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), max(self._size, 1)):
            self._put(view[begin : begin + self._size])
        return len(view)

    def _put(self, view: memoryview) -> None:
        while view:
            if not self._left:
                self.finish()
                self._file = (self._folder / f"part-{self._count:03}").open("wb")
                self._left, self._count = self._size, self._count + 1
            assert self._file is not None
            self._file.write(view[: self._left])
            view, self._left = view[self._left :], max(self._left - len(view), 0)

    def finish(self) -> None:
        """Close the file that is being written."""
        if self._file is not None:
            self._file.close()


def cache() -> Path:
    """Return the folder in which Triton keeps what it has compiled."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def pack(source: Path, folder: Path, part_bytes: int = PART_BYTES) -> int:
    """Write the kernels of a cache to `folder`, in place of what it has; how many files they are."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in folder.glob("part-*"):
        part.unlink()
    parts, count = Parts(folder, part_bytes), 0
    with lzma.open(parts, "wb", preset=1) as packed, tarfile.open(fileobj=packed, mode="w|") as tar:
        for path in sorted(source.rglob("*")):
            if path.suffix in KEPT and path.is_file():
                tar.add(path, path.relative_to(source))
                count += 1
    parts.finish()
    return count


def unpack(folder: Path, into: Path) -> int:
    """Add the kernels of `folder` to a cache; how many files they are. FileNotFoundError where it has none."""
    names = sorted(folder.glob("part-*"))
    if not names:
        raise FileNotFoundError(f"{folder} has no kernels: pack some first")
    into.mkdir(parents=True, exist_ok=True)
    groups: list[Path] = []
    packed = io.BytesIO(b"".join(part.read_bytes() for part in names))
    with lzma.open(packed) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
        count = 0
        for member in tar:
            tar.extract(member, into, filter="data")
            if Path(member.name).name.startswith("__grp__"):
                groups.append(into / member.name)
            count += 1
    for group in groups:
        _find(group)
    return count


def _find(group: Path) -> None:
    """Let a list of a kernel's files name those that are here: Triton names them by where they were written."""
    known = json.loads(group.read_text())
    here = {name: str(group.parent / name) for name in known["child_paths"] if (group.parent / name).exists()}
    group.write_text(json.dumps(known | {"child_paths": here}))


def main() -> None:
    """Pack or unpack, and say how much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pack", "unpack"))
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    try:
        count = pack(cache(), given.folder) if given.what == "pack" else unpack(given.folder, cache())
    except FileNotFoundError as error:
        sys.exit(str(error))
    size = sum(part.stat().st_size for part in given.folder.glob("part-*"))
    print(f"{given.what}ed {count} files, {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
