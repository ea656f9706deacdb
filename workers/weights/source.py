"""Reading the weights of a checkpoint: safetensors files, each rank only its slices.

A model builds itself from a `WeightSource`, twice: a `Census` first collects, on the meta device, which tensors it
wants, in which shapes and how many bytes they take; after that was held against the files, a `Reader` fills real
memory. So the model's constructors are the only place that names a tensor.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workers.parallel.group import TensorParallel
from workers.weights.upload import Uploader

Shape = tuple[int, ...]

READABLE_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""By safetensors' names."""


class WeightsError(ValueError):
    """The checkpoint's files are missing, unreadable or do not hold what the model needs."""


class WeightSource(ABC):
    """Where a model's constructors get their tensors from."""

    def __init__(self, group: TensorParallel, dtype: torch.dtype, device: torch.device) -> None:
        self.group = group
        self.dtype = dtype
        self.device = device

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Uninitialised memory for weights."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def load(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The whole tensor `name`, which must have `shape`."""
        into = self.empty(*shape, dtype=dtype)
        self.fill(into, name)
        return into

    def fill(
        self, into: Tensor, name: str, *, shard: int | None = None, unit: int | None = None, units: int = 1
    ) -> None:
        """Copy tensor `name` into `into`, or, with `shard`, this rank's part of that dimension (which `into` has).

        `unit`: not of the whole dimension, but of the unit-th of its `units` equal parts. ValueError when there is no
        such part.
        """
        if unit is not None and (shard is None or not 0 <= unit < units):
            raise ValueError(f"{name}: part {unit} of {units} of dimension {shard} does not exist")
        shape, index = list(into.shape), [slice(None)] * into.ndim
        if shard is not None:
            length = shape[shard] * self.group.size
            own, begin = self.group.shard(length, name), (unit or 0) * length
            shape[shard] = length * units
            index[shard] = slice(begin + own.start, begin + own.stop)
        self.fill_part(into, name, tuple(shape), tuple(index))

    def lossless(self, name: str) -> torch.dtype:
        """The model's dtype if tensor `name` is stored in it, else fp32."""
        return torch.float32

    @abstractmethod
    def fill_part(self, into: Tensor, name: str, shape: Shape, index: tuple[slice, ...]) -> None:
        """Copy `index` of the tensor `name`, whose shape in the checkpoint is `shape`, into `into`."""

    @abstractmethod
    def progress(self, text: str) -> None:
        """Tell the user what is being loaded."""

    def settle(self) -> None:  # noqa: B027 - most sources fill at once
        """Wait until everything that was asked for is in place: before it is read or changed, and at the end."""


class Census(WeightSource):
    """Collects what a model wants, without memory."""

    def __init__(self, group: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(group, dtype, torch.device("meta"))
        self.shapes: dict[str, Shape] = {}
        self.bytes = 0
        """Of this rank's share."""

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Counts the bytes."""
        tensor = super().empty(*shape, dtype=dtype)
        self.bytes += tensor.nbytes
        return tensor

    def fill_part(self, into: Tensor, name: str, shape: Shape, index: tuple[slice, ...]) -> None:
        """Notes the name and the shape."""
        self.shapes[name] = shape

    def progress(self, text: str) -> None:
        """Says nothing."""


@dataclass(frozen=True)
class _Entry:
    file: Path
    shape: Shape
    dtype: str


@dataclass
class Checkpoint:
    """The safetensors files of one folder, open for reading. Use as a context manager."""

    folder: Path
    entries: dict[str, _Entry] = field(default_factory=dict)
    _files: dict[Path, Any] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    @staticmethod
    def open(folder: str | Path) -> Checkpoint:
        """Open model.safetensors.index.json and its files, or model.safetensors; `WeightsError` if that fails."""
        checkpoint = Checkpoint(Path(folder))
        try:
            for file in checkpoint._file_names():
                checkpoint._open_file(checkpoint.folder / file)
        except BaseException:
            checkpoint.close()
            raise
        return checkpoint

    def _file_names(self) -> list[str]:
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            try:
                weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                return sorted(set(weight_map.values()))
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise WeightsError(f"cannot read {index}: {error!r}") from error
        if (self.folder / "model.safetensors").exists():
            return ["model.safetensors"]
        raise WeightsError(f"there is neither model.safetensors.index.json nor model.safetensors in {self.folder}")

    def _open_file(self, path: Path) -> None:
        try:
            file = self._files[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"cannot read {path}, is the download complete? {error}") from error
        for name in file.keys():  # noqa: SIM118 - not a mapping
            tensor = file.get_slice(name)
            self.entries[name] = _Entry(path, tuple(tensor.get_shape()), tensor.get_dtype())

    def has_any(self, prefix: str) -> bool:
        """Whether any tensor's name begins so."""
        return any(name.startswith(prefix) for name in self.entries)

    def verify(self, expected: Mapping[str, Shape], ignored: Iterable[str]) -> None:
        """Compare with what the model wants; one `WeightsError` lists every tensor that is missing, unexpected, of the
        wrong shape or of a dtype that cannot be read. Names that match a pattern of `ignored` may be there or not."""
        skip = re.compile("|".join(f"(?:{pattern})" for pattern in ignored))
        missing = [name for name in expected if name not in self.entries]
        unexpected = [name for name in self.entries if name not in expected and not skip.search(name)]
        shared = {name: entry for name, entry in self.entries.items() if name in expected}
        misshapen = [
            f"{name} is {list(entry.shape)}, config.json wants {list(expected[name])}"
            for name, entry in shared.items()
            if entry.shape != expected[name]
        ]
        unreadable = [f"{n} is {entry.dtype}" for n, entry in shared.items() if entry.dtype not in READABLE_DTYPES]
        lists = {
            "missing": missing,
            "unexpected": unexpected,
            "of the wrong shape": misshapen,
            f"of an unsupported dtype (supported: {', '.join(sorted(READABLE_DTYPES))})": unreadable,
        }
        problems = [_listed(what, names) for what, names in lists.items() if names]
        if problems:
            raise WeightsError("\n".join([f"the tensors in {self.folder} do not fit its config.json:", *problems]))

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """The part `index` of a tensor, on the CPU."""
        entry = self.entries[name]
        tensor: Tensor = self._files[entry.file].get_slice(name)[index]
        return tensor

    def close(self) -> None:
        """Close the files."""
        self._stack.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _listed(what: str, names: list[str], limit: int = 12) -> str:
    more = [f"    and {len(names) - limit} more"] if len(names) > limit else []
    return "\n".join([f"  {len(names)} {what}:", *(f"    {name}" for name in sorted(names)[:limit]), *more])


class Reader(WeightSource):
    """Fills memory from a verified checkpoint; a GPU's in the background, see `settle`. Use as a context manager."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        group: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[str], None] | None,
    ) -> None:
        super().__init__(group, dtype, device)
        self.checkpoint = checkpoint
        self._progress = progress
        self._uploader = Uploader(device) if device.type == "cuda" else None

    def fill_part(self, into: Tensor, name: str, shape: Shape, index: tuple[slice, ...]) -> None:
        """Reads only `index`; converts to the dtype and device of `into`."""
        if self._uploader is None:
            into.copy_(self.checkpoint.read(name, index))
        else:
            self._uploader.fill(into, partial(self.checkpoint.read, name, index))

    def lossless(self, name: str) -> torch.dtype:
        """See `WeightSource`."""
        stored = READABLE_DTYPES[self.checkpoint.entries[name].dtype]
        return self.dtype if self.dtype == stored else torch.float32

    def settle(self) -> None:
        """See `WeightSource`."""
        if self._uploader is not None:
            self._uploader.settle()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._uploader is not None:
            self._uploader.close()

    def progress(self, text: str) -> None:
        """Passes the line on."""
        if self._progress is not None:
            self._progress(text)


def check_memory(bytes_wanted: int, group: TensorParallel, device: torch.device) -> None:
    """MemoryError when this rank's weights do not fit the free memory. Collective: call it on every rank."""
    if device.type == "cuda":
        free, where = torch.cuda.mem_get_info(device)[0], f"GPU {device.index or 0}"
    else:
        # Ranks on CPUs share one memory.
        free, where, bytes_wanted = _free_host_bytes(), "this machine", bytes_wanted * group.size
    group.minimum(torch.zeros(1, device=device))  # nobody begins to load before all have looked
    if bytes_wanted > free:
        raise MemoryError(
            f"the weights need {bytes_wanted / 2**30:.2f} GiB, but {where} has {free / 2**30:.2f} GiB free: "
            "use more ranks (tensor_parallel), a smaller dtype or a smaller model"
        )


def _free_host_bytes() -> int:
    free: int = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    try:
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(statistics["file"])  # the page cache gives way
        return min(free, int((group / "memory.max").read_text()) - used)
    except (OSError, ValueError, KeyError):  # no control group, or no limit ("max")
        return free
