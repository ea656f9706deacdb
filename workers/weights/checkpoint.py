"""The safetensors files of a checkpoint: what is in them, whether it is what a model wants, and parts of it."""

from __future__ import annotations

import ctypes
import json
import mmap
import re
import sys
from bisect import bisect
from collections.abc import Iterable, Mapping, Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import Tensor

from workers.weights.published import Entry, shown
from workers.weights.wanted import Wanted

_LIBC: Final = ctypes.CDLL(None)


class WeightsError(ValueError):
    """The checkpoint's files are missing, unreadable or do not hold what the model needs."""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that `Checkpoint.open` opens, in the order of their names. `WeightsError` where there are
    none."""
    return [folder / name for name in _file_names(folder)[1]]


def _file_names(folder: Path) -> tuple[bool, list[str]]:
    """Whether they are in Mistral's layout, and the files."""
    for stem in ("model", "consolidated"):
        index = folder / f"{stem}.safetensors.index.json"
        if index.exists():
            try:
                files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
                if wrong := [file for file in files if not _is_inside(file)]:
                    raise ValueError(f"its weight_map names {wrong[0]!r}, which is no file of this folder")
                return stem == "consolidated", sorted(files)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise WeightsError(f"cannot read {index}: {error!r}") from error
        if (folder / f"{stem}.safetensors").exists():
            return stem == "consolidated", [f"{stem}.safetensors"]
    raise WeightsError(
        f"there is neither model.safetensors.index.json nor model.safetensors in {folder}, nor are there such "
        "files whose names begin with consolidated"
    )


def _is_inside(file: object) -> bool:
    """Whether an index names a file of its own folder, or of one in it."""
    return isinstance(file, str) and file != "" and not Path(file).is_absolute() and ".." not in Path(file).parts


@dataclass
class Checkpoint:
    """The safetensors files of one folder, open for reading. Use as a context manager."""

    folder: Path
    entries: dict[str, Entry] = field(default_factory=dict)
    _files: dict[Path, Any] = field(default_factory=dict)
    _mapped: list[tuple[int, int]] = field(default_factory=list)
    """Places of files in memory, first bytes and ends, in order."""
    _stack: ExitStack = field(default_factory=ExitStack)

    @staticmethod
    def open(folder: str | Path) -> Checkpoint:
        """Open model.safetensors.index.json and its files, or model.safetensors, or where there are neither those of
        Mistral's layout, consolidated*.safetensors; `WeightsError` if that fails. `entries` has what is in them as
        `published.shown` shows it."""
        checkpoint = Checkpoint(Path(folder))
        try:
            mistral, files = _file_names(checkpoint.folder)
            for file in files:
                checkpoint._open_file(checkpoint.folder / file)
            checkpoint.entries = shown(checkpoint.entries, mistral=mistral)
            checkpoint._mapped = _mappings(set(checkpoint._files))
        except BaseException:
            checkpoint.close()
            raise
        return checkpoint

    def _open_file(self, path: Path) -> None:
        try:
            file = self._files[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"cannot read {path}, is the download complete? {error}") from error
        for name in file.keys():  # noqa: SIM118 - not a mapping
            tensor = file.get_slice(name)
            shape = tuple(tensor.get_shape())
            self.entries[name] = Entry(path, shape, tensor.get_dtype(), name, stored=shape)

    def identity(self) -> list[tuple[str, int, int, int, int]]:
        """Name, size, inode and times of change of each file, in nanoseconds: others where a file was written to or
        replaced."""
        found = [(path, path.stat()) for path in sorted(self._files)]
        return [(str(path), of.st_size, of.st_ino, of.st_mtime_ns, of.st_ctime_ns) for path, of in found]

    def has_any(self, prefix: str) -> bool:
        """Whether any tensor's name begins so."""
        return any(name.startswith(prefix) for name in self.entries)

    def dtype_of(self, name: str) -> str | None:
        """Return the dtype of a tensor in safetensors' words; None if there is no such tensor."""
        return self.entries[name].dtype if name in self.entries else None

    def verify(self, wanted: Mapping[str, Wanted], ignored: Iterable[str]) -> None:
        """Compare with what the model wants; one `WeightsError` lists every tensor that is missing, unexpected, of the
        wrong shape or of a dtype that cannot be read. Names that match a pattern of `ignored` may be there or not."""
        skip = re.compile("|".join(f"(?:{pattern})" for pattern in ignored))
        missing = [name for name in wanted if name not in self.entries]
        unexpected = [name for name in self.entries if name not in wanted and not skip.search(name)]
        shared = {name: entry for name, entry in self.entries.items() if name in wanted}
        misshapen = [
            f"{name} is {list(entry.shape)}, config.json wants {list(wanted[name].shape)}"
            for name, entry in shared.items()
            if entry.shape != wanted[name].shape
        ]
        unreadable = [
            f"{name} is {entry.dtype}; supported: {', '.join(sorted(wanted[name].dtypes))}"
            for name, entry in shared.items()
            if entry.dtype not in wanted[name].dtypes
        ]
        lists = {
            "missing": missing,
            "unexpected": unexpected,
            "of the wrong shape": misshapen,
            "of an unsupported dtype": unreadable,
        }
        problems = [_listed(what, names) for what, names in lists.items() if names]
        if any(name.endswith("lm_head.weight") for name in missing):
            problems.append("  if the output head is the embedding, config.json has to say tie_word_embeddings: true")
        if problems:
            raise WeightsError("\n".join([f"the tensors in {self.folder} do not fit its config.json:", *problems]))

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """The part `index` of a tensor, on the CPU; `WeightsError` when the file cannot be read."""
        entry = self.entries[name]
        index = (*index, *(slice(None),) * (len(entry.shape) - len(index)))
        own = index if entry.repeated else (_moved(index[0], entry.row), *index[1:]) if index else index
        whole = not entry.stored
        try:
            found = self._files[entry.file]
            where = entry.outer if entry.repeated else (*entry.outer, *own)
            tensor: Tensor = found.get_tensor(entry.name) if whole else found.get_slice(entry.name)[where]
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"cannot read {name} of {entry.file}, is the download complete? {error}") from error
        if not entry.repeated:
            return tensor
        sizes = [part.indices(size) for part, size in zip(index, entry.shape, strict=True)]
        return tensor.reshape(()).expand(*(end - begin for begin, end, _ in sizes))

    def release(self, tensor: Tensor) -> None:
        """Release the memory of `tensor`, which will not be read again soon. Whole pages of its file are unmapped; a
        later read maps them again. Closing large files unmaps what is still mapped, which takes a while in which no
        other thread can run; here others can. Copies are not affected."""
        begin, mapped = tensor.data_ptr(), self._mapped
        place = bisect(mapped, (begin, sys.maxsize)) - 1
        if place < 0 or begin >= mapped[place][1] or not tensor.numel():
            return
        length = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        page = mmap.PAGESIZE
        first, end = -(-begin // page) * page, (begin + length * tensor.itemsize) // page * page
        if first < end:
            _unmap(first, end - first)

    def close(self) -> None:
        """Close the files."""
        self._mapped = []  # another thread may be looking at the old one
        self._stack.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _moved(rows: slice, by: int) -> slice:
    """Return these rows, counted from a row before them; all of them where none is said to be the first."""
    return slice((rows.start or 0) + by, None if rows.stop is None else rows.stop + by) if by else rows


def _mappings(files: Set[Path]) -> list[tuple[int, int]]:
    """Return the address ranges at which files are mapped in this process; none if it cannot be known, or if they are
    read in another way."""
    maps, names = Path("/proc/self/maps"), {str(path.resolve()) for path in files}
    found = []
    for line in maps.read_text(encoding="utf-8", errors="replace").splitlines() if maps.exists() else ():
        fields = line.split(maxsplit=5)
        if fields[-1] in names:
            begin, end = fields[0].split("-")
            found.append((int(begin, 16), int(end, 16)))
    return sorted(found)


def _unmap(begin: int, length: int) -> None:
    """Advise the system to unmap memory. Where the advice is not taken, nothing is lost but time."""
    _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


def _listed(what: str, names: list[str], limit: int = 12) -> str:
    more = [f"    and {len(names) - limit} more"] if len(names) > limit else []
    return "\n".join([f"  {len(names)} {what}:", *(f"    {name}" for name in sorted(names)[:limit]), *more])
