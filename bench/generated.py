"""A checkpoint that is nowhere: its numbers are made when they are read, for models that are larger than the disk.

    python bench/generated.py v3 /tmp/v3    # DeepSeek-V3, whole: the folder has its config.json and no weights

Such a folder is read as any other, by the same loader, wherever `bench/replica_hooks` is on the PYTHONPATH: what
`Checkpoint.open` gives for it is a `GeneratedCheckpoint`. Files that are there are read as ever. Nothing that is
served knows of it.

What is read of a tensor depends on the folder's seed and on its name alone, so ranks agree on what they share, and have
different parts of one matrix otherwise. The numbers are those of `bench/checkpoint.py`: matrices normal(0, 0.02), norms
1. For every kind of matrix they come from one table, which is drawn once; a name says where in it the matrix begins.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from checkpoint import QUANTIZED, ROOT, TEXT, numbers
from shapes import SHAPES, V3, V4_FLASH

from workers.families.registry import FAMILIES
from workers.weights import identity
from workers.weights.checkpoint import Checkpoint
from workers.weights.formats import FP8_BLOCKS, INT4_GROUPS, PLAIN
from workers.weights.formats.format import Format
from workers.weights.stored import PLAIN_DTYPES
from workers.weights.wanted import FP8_DTYPE, FP8_SCALES, MX_SCALES, Shape, Wanted

MARK = "generated.json"
"""The file that says that a folder's weights are generated, and how: the arguments of `numbers_of`."""
TABLE = 1 << 25
"""Numbers of a kind that are drawn. A stretch of a matrix that is half as long is read without a copy: that is an
expert of DeepSeek-V3."""
ALIGNMENT = 64
"""Places at which matrices begin are multiples of this."""
GENERATED = {**SHAPES, "v3": (V3, FP8_BLOCKS), "v4-flash": (V4_FLASH, PLAIN)}
"""Shapes by name; of all of them in FP8 and bf16, but not in INT4. DeepSeek V4's config.json says by itself what its
matrices are in."""
DTYPES = {
    **PLAIN_DTYPES,
    FP8_DTYPE: torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I64": torch.int64,
}


@dataclass
class Numbers:
    """Reads tensors that nobody has written."""

    seed: int
    size: int = TABLE
    _tables: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    _lock: RLock = field(default_factory=RLock)

    def read(self, name: str, shape: Shape, dtype: str, index: tuple[slice, ...]) -> Tensor:
        """`index` of tensor `name`, which is of `shape` and, in safetensors' words, of `dtype`; on the CPU, and not to
        be written to. ValueError where a row is longer than the tables."""
        if len(shape) < 2:
            return self._made(name, shape, dtype)[index]
        table, (rows, columns) = self._table(name, dtype), index
        height = self.size // 2 // shape[1]
        if not height:
            raise ValueError(f"{name}: rows of {shape[1]} numbers are longer than tables of {self.size} allow")
        stretches = range(rows.start // height, -(-rows.stop // height))
        parts = [
            self._stretch(table, f"{name} {stretch}", min(height, shape[0]), shape[1])[
                max(rows.start - stretch * height, 0) : min(rows.stop - stretch * height, height), columns
            ]
            for stretch in stretches
        ]
        return (
            parts[0]
            if len(parts) == 1
            else torch.cat([part.contiguous().view(torch.uint8) for part in parts]).view(table.dtype)
        )

    def _stretch(self, table: Tensor, name: str, height: int, width: int) -> Tensor:
        """Return `height` rows of the table, from the place that the name gives."""
        digest = hashlib.blake2b(f"{self.seed} {name}".encode(), digest_size=8).digest()
        places = (self.size - height * width) // ALIGNMENT + 1
        begin = int.from_bytes(digest, "little") % places * ALIGNMENT
        return table[begin : begin + height * width].view(height, width)

    def _table(self, name: str, dtype: str) -> Tensor:
        scales = next((ending for ending in (FP8_SCALES, MX_SCALES) if name.endswith(f".weight{ending}")), "")
        with self._lock:
            if (dtype, scales) not in self._tables:
                self._tables[dtype, scales] = self._made(f"table.weight{scales}", (1, self.size), dtype).view(-1)
            return self._tables[dtype, scales]

    def _made(self, name: str, shape: Shape, dtype: str) -> Tensor:
        """Make all of a tensor, as `bench/checkpoint.py` writes it."""
        with self._lock, torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)
            return numbers(name, shape, dtype, torch.device("cpu")).view(DTYPES[dtype]).view(shape)


@cache
def numbers_of(seed: int, size: int) -> Numbers:
    """Return the numbers of this seed; they are drawn once per process."""
    return Numbers(seed, size)


class GeneratedCheckpoint(Checkpoint):
    """Checkpoint of a folder that has a `MARK` and no weights: it has whatever the loader wants."""

    def __init__(self, folder: Path, source: Numbers) -> None:
        super().__init__(folder)
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self._assumed = FAMILIES[values["model_type"]].dtypes(values)
        self._experts = values.get("n_routed_experts")
        self._source = source
        self._shapes: dict[str, Shape] = {}

    def has_any(self, prefix: str) -> bool:
        """Tell whether it has tensors with a prefix: all but those of an undeclared draft layer, which this tensor
        stands for."""
        return not prefix.endswith(".eh_proj.weight")

    def dtype_of(self, name: str) -> str | None:
        """Return the dtype of a tensor, as such a checkpoint is published."""
        return "F32" if name.endswith("e_score_correction_bias") else self._assumed(name)

    def verify(self, wanted: Mapping[str, Wanted], ignored: Iterable[str]) -> None:
        """Notes what is wanted: that is what there is."""
        self._shapes = {name: tensor.shape for name, tensor in wanted.items()}

    @override
    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        dtype, shape = self.dtype_of(name), self._shapes[name]
        assert dtype is not None
        if dtype != "I64":
            return self._source.read(name, shape, dtype, index)
        rows, columns = index
        first = self._source.read(name, (shape[0], 1), dtype, (rows, slice(0, 1)))
        return (first + torch.arange(shape[1])[columns] * (self._experts // shape[1])) % self._experts


def opened(folder: str | Path, plain: Callable[[str | Path], Checkpoint]) -> Checkpoint:
    """The checkpoint in a folder, which is generated if the folder says so; else `plain` opens its files."""
    mark = Path(folder) / MARK
    if not mark.exists():
        return plain(folder)
    return GeneratedCheckpoint(Path(folder), numbers_of(**json.loads(mark.read_text(encoding="utf-8"))))


def files(folder: Path, plain: Callable[[Path], list[Path]]) -> list[Path]:
    """The files that decide what weights a folder has: of one that is generated the `MARK`."""
    mark = folder / MARK
    return [mark] if mark.exists() else plain(folder)


def install() -> None:
    """Make this process generate, from now on, what folders with a `MARK` lack."""
    plain, plain_files = Checkpoint.open, identity.weight_files
    Checkpoint.open = staticmethod(lambda folder: opened(folder, plain))  # type: ignore[method-assign]
    identity.weight_files = lambda folder: files(folder, plain_files)


@contextmanager
def installed() -> Iterator[None]:
    """`install`, within this context."""
    plain, plain_files = Checkpoint.open, identity.weight_files
    install()
    try:
        yield
    finally:
        Checkpoint.open = staticmethod(plain)  # type: ignore[method-assign]
        identity.weight_files = plain_files


def write_folder(values: dict[str, Any], form: Format, folder: Path, seed: int = 0, size: int = TABLE) -> None:
    """Write all of a model but its weights. `size`: of the tables that these will come from."""
    if form is INT4_GROUPS:
        raise ValueError("INT4 is not generated: give a shape in FP8 or bf16")
    folder.mkdir(parents=True, exist_ok=True)
    for name in TEXT:
        shutil.copy(ROOT / "assets" / "demo" / name, folder)
    values = {**values, "torch_dtype": "bfloat16", **QUANTIZED[form]}
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    (folder / MARK).write_text(json.dumps({"seed": seed, "size": size}) + "\n", encoding="utf-8")


def first_layers(values: dict[str, Any], layers: int) -> dict[str, Any]:
    """The values of a model that ends behind so many layers, with the draft layer of the whole."""
    cut = {**values, "num_hidden_layers": layers}
    if "compress_ratios" in values:
        behind = values["compress_ratios"][values["num_hidden_layers"] :]
        cut["compress_ratios"] = [*values["compress_ratios"][:layers], *behind]
    return cut


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = [name for name, (_, form) in GENERATED.items() if form is not INT4_GROUPS]
    parser.add_argument("shape", choices=shapes)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    values, form = GENERATED[given.shape]
    values = values if given.layers is None else first_layers(values, given.layers)
    write_folder(values, form, given.folder, given.seed)


if __name__ == "__main__":
    main()
