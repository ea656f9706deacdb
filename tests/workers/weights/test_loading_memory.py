"""Memory that loading takes of a machine beyond a rank's own share: files are read where they lie in the page cache,
and nothing is kept twice."""

from __future__ import annotations

import json
import struct
import sys
import threading
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.multiprocessing import ProcessRaisedException

from tests.rank_processes import run_ranks
from workers.families import loading
from workers.families.loading import counted, load_model
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh
from workers.weights.checkpoint import Checkpoint
from workers.weights.formats import FP8_BLOCKS, INT4_GROUPS, PLAIN
from workers.weights.formats.format import Format
from workers.weights.formats.int4_groups import INT4_SHAPE
from workers.weights.reader import MOST_DEQUANTIZED, CheckpointReader
from workers.weights.upload import Uploader
from workers.weights.wanted import Wanted

CPU = torch.device("cpu")
MIB = 1 << 20
SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "moe_intermediate_size": 1024,
    "n_routed_experts": 64,
    "num_hidden_layers": 2,
    "vocab_size": 16384,
    "n_group": 1,
    "topk_group": 1,
}
"""A shard holds 64 experts of 3 M numbers: 384 MB in bf16, 192 in FP8, 100 in INT4. A rank of two has half of them."""
SLACK = 24 * MIB
"""Objects of Python for a few hundred tensors, and pages that the allocator keeps: an expert has 6 MiB."""
THREADS = 2


def write_zeros(path: Path, tensors: dict[str, Wanted], bytes_of: dict[str, int]) -> None:
    """A safetensors file with a hole in place of its numbers: reading gives zeros, and takes page cache."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + prod(tensor.shape) * bytes_of[tensor.dtypes[0]]
        header[name] = {"dtype": tensor.dtypes[0], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
        for name in (name for name in tensors if name.endswith(INT4_SHAPE)):
            rows, words = tensors[name.removesuffix(INT4_SHAPE) + "_packed"].shape
            file.seek(8 + len(text) + header[name]["data_offsets"][0])
            file.write(struct.pack("<2i", rows, 8 * words))


def write_folder(folder: Path, form: Format, bench: Path) -> None:
    """A file a layer, as they are published."""
    sys.path.insert(0, str(bench))
    import checkpoint
    import shapes

    values = {**shapes.SHAPES["v3-slice"][0], **SIZES, "num_nextn_predict_layers": 0, **checkpoint.QUANTIZED[form]}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    files = list(checkpoint.by_layer(checkpoint.wanted(values)))
    for number, tensors in enumerate(files):
        write_zeros(folder / f"{number}.safetensors", tensors, checkpoint.BYTES)
    index = {name: f"{number}.safetensors" for number, tensors in enumerate(files) for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def resident(kind: str) -> int:
    """Bytes of this process's memory of a kind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"Rss{kind}:"))


def anonymous_bytes() -> int:
    """Memory of this process that is no page cache."""
    return resident("Anon")


class Watch:
    """The most anonymous memory while the block runs, in bytes more than before it."""

    def __enter__(self) -> Watch:
        self._before = self._most = anonymous_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._done.wait(0.0005):
            self.look()

    def look(self) -> None:
        self._most = max(self._most, anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self.look()
        self._done.set()
        self._thread.join()

    @property
    def growth(self) -> int:
        return self._most - self._before


def upload_in_the_background() -> None:
    """Upload as with a GPU, whose memory is this process's here."""
    begin: Callable[..., None] = CheckpointReader.__init__

    def with_uploader(self: CheckpointReader, *given: Any) -> None:
        begin(self, *given)
        self._uploader = Uploader(CPU, threads=THREADS, piece_bytes=MIB, release=self.checkpoint.release)

    CheckpointReader.__init__ = with_uploader  # type: ignore[method-assign]


def keep_what_is_read() -> None:
    """The mistake that is looked for."""
    read, kept = Checkpoint.read, []

    def keeping(self: Checkpoint, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        kept.append(read(self, name, index).clone())
        return kept[-1]

    Checkpoint.read = keeping  # type: ignore[method-assign]


def loads(rank: int, folder: Path, ranks: int, dtype: torch.dtype, how: str) -> None:
    """Measure, in a process of its own, how much memory loading takes."""
    torch.set_num_threads(1)
    group = Group(Mesh.of(0, ranks))
    loading.check_memory = lambda *_: None  # collective
    threads = 1
    if how == "in the background":
        upload_in_the_background()
        threads = THREADS
    elif how == "wrong":
        keep_what_is_read()
    config = loading.load_config(folder)
    with Checkpoint.open(folder) as checkpoint:
        _, dry_run = counted(config, group, dtype, checkpoint.dtype_of, draft_layer=False, invariant=False)
    torch.ones(1 << 20).to(torch.float8_e4m3fn).float().sum()  # what torch keeps for itself
    with Watch() as watch:
        model = load_model(folder, group=group, dtype=dtype, device=CPU, max_positions=64)
    # A thread has two buffers, and while it dequantizes numbers, scales and products, in fp32, and what it stores.
    work = threads * (2 * MIB + 16 * MOST_DEQUANTIZED)
    expert = 3 * SIZES["hidden_size"] * SIZES["moe_intermediate_size"] * dtype.itemsize
    assert len(model.layers) == SIZES["num_hidden_layers"]
    assert watch.growth > dry_run.bytes / 2 > 30 * MIB, "nothing was measured"
    beyond = watch.growth - dry_run.bytes
    assert beyond < expert + work + SLACK, f"{beyond / MIB:.0f} MiB beyond {dry_run.bytes / MIB:.0f}"


CASES = [
    (PLAIN, 1, torch.bfloat16),
    (FP8_BLOCKS, 2, torch.bfloat16),
    (INT4_GROUPS, 2, torch.bfloat16),
]


def named(case: object) -> str:
    """Return the case for the name of a test."""
    return case[0].name.lower() if isinstance(case, tuple) else str(case)


@pytest.fixture(scope="module")
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    form, ranks, dtype = request.param
    folder = tmp_path_factory.mktemp("memory") / form.name
    write_folder(folder, form, Path(__file__).parents[3] / "bench")
    return folder, ranks, dtype


QUICK = ((FP8_BLOCKS, "at once"), (INT4_GROUPS, "in the background"))


@pytest.mark.parametrize(
    ("stored", "how"),
    [
        pytest.param(case, how, marks=() if (case[0], how) in QUICK else pytest.mark.long)
        for case in CASES
        for how in ("at once", "in the background")
    ],
    indirect=["stored"],
    ids=named,
)
def test_a_rank_holds_little_beyond_its_share(stored: tuple[Any, ...], how: str) -> None:
    """A rank holds at most an expert, and what the threads that fill it work with; no shard, and no matrix twice."""
    run_ranks(loads, 1, *stored, how)


@pytest.mark.parametrize(
    "stored",
    [pytest.param(case, marks=() if case[0] is FP8_BLOCKS else pytest.mark.long) for case in CASES],
    indirect=True,
    ids=named,
)
def test_what_is_held_twice_is_found(stored: tuple[Any, ...]) -> None:
    with pytest.raises(ProcessRaisedException, match="MiB beyond"):
        run_ranks(loads, 1, *stored, "wrong")


def test_what_was_uploaded_is_mapped_no_more(tmp_path: Path) -> None:
    """The memory is as it was to whoever reads it again; what was copied from a file is nobody else's to release."""
    numbers = torch.arange(16 * MIB, dtype=torch.int32).view(4096, 4096)
    save_file({"a": numbers, "b": numbers.clone()}, tmp_path / "model.safetensors")
    whole, half = (slice(None), slice(None)), (slice(None), slice(0, 2048))
    with Checkpoint.open(tmp_path) as checkpoint:
        uploader, before = Uploader(CPU, threads=THREADS, release=checkpoint.release), resident("File")
        for name, index in (("a", whole), ("b", half)):
            into = torch.zeros_like(numbers[index])
            uploader.fill(into, partial(checkpoint.read, name, index))
            uploader.settle()
            assert torch.equal(into, numbers[index])
            assert resident("File") - before < 8 * MIB
        again = checkpoint.read("a", whole)
        assert torch.equal(again, numbers)
        assert resident("File") - before > 60 * MIB, "nothing was measured"
        copy = again.clone()
        checkpoint.release(copy)
        assert torch.equal(copy, numbers)
        checkpoint.release(again[1:2, 1:3])  # less than a page
        checkpoint.release(again[:, :0])
        uploader.close()
