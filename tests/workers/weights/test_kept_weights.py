"""Weights that stay for the next rank: the same bits as loaded ones, and never those of other files or settings."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_v4_layout import QUANTIZATION, published_v4, quantized_v4, tiny_v4, write_v4
from paged import CPU
from quantized_checkpoints import quantize
from rank_processes import run_ranks
from tiny_draft_models import write_draft
from tiny_mistral_eagle import write_eagle
from tiny_models import VOCAB, write_tiny
from torch import Tensor

from kernels.matrix import MicroScaled4
from workers.channel.ports import free_port
from workers.config import EngineConfig
from workers.drafters.draft_model import load_draft_model
from workers.families import load_model
from workers.families.draft_models import read_draft_model
from workers.families.registry import load_config
from workers.memory.keeper import KeeperClient, WeightKeeper
from workers.memory.weight_memory import HostWeights
from workers.models.deepseek_v4_model import CompressedModel
from workers.models.model import Model
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh
from workers.weights import reader
from workers.weights.arena import Arena
from workers.weights.formats.mxfp4 import Mxfp4
from workers.weights.kept import KeptWeights
from workers.weights.source import WeightSource

KEPT = re.compile(r"[\d.]+ GiB of weights were kept: mapped and verified in [\d.]+ s")


@pytest.fixture
def keeper() -> Iterator[WeightKeeper]:
    made = WeightKeeper()
    yield made
    made.close()


class Loads:
    """Loads models as a rank does, and notes what it is told, and each tensor that holds weights."""

    def __init__(self, keeper: WeightKeeper | None, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keeper, self.told, self.tensors = keeper, list[str](), list[Tensor]()
        self.read = 0
        self._patch = monkeypatch
        empty, put = WeightSource.empty, reader.CheckpointReader._put

        def noted_empty(source: WeightSource, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
            self.tensors.append(empty(source, *shape, dtype=dtype))
            return self.tensors[-1]

        def noted_put(source: Any, *arguments: Any) -> None:
            self.read += 1
            put(source, *arguments)

        monkeypatch.setattr(WeightSource, "empty", noted_empty)
        monkeypatch.setattr(reader.CheckpointReader, "_put", noted_put)

    def __call__(self, folder: Path, *, draft: Path | None = None, group: Group | None = None, **options: Any) -> Model:
        group = group or Group()
        self.told.clear()
        self.tensors.clear()
        self.read = 0
        given = {"dtype": torch.float32, "device": CPU, "max_positions": 64, **options}
        kept = None if self.keeper is None else KeptWeights(self.keeper.path(), group, CPU, self.told.append)
        model = load_model(folder, group=group, kept=kept, **given)
        if draft is not None:
            asked = EngineConfig(model=str(folder), draft_model=str(draft))
            read = read_draft_model(asked, load_config(folder), group.mesh)
            assert read is not None
            model.drafter = load_draft_model(read, model, kept=kept)
        self.tensors = [tensor for tensor in self.tensors if tensor.device == CPU]
        # Wherever weights come from, what kernels read of experts is made before anything is captured.
        if isinstance(model, CompressedModel):
            mixtures = [block.experts for block in model.blocks]
        else:
            mixtures = [layer.feed_forward.mixture for layer in model.layers if hasattr(layer.feed_forward, "mixture")]
        assert mixtures
        assert all("matrix" in vars(weight) for own in mixtures for weight in (own.gate_up_XFE, own.down_XEI))
        return model

    @property
    def kept(self) -> bool:
        """Whether the last weights came from the keeper, and none from files."""
        said = any(KEPT.fullmatch(line) for line in self.told)
        assert said == (self.read == 0)
        return said

    def bits(self) -> list[Tensor]:
        """Return copies of all weights, byte by byte."""
        return [tensor.contiguous().flatten().view(torch.uint8).clone() for tensor in self.tensors]


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("v3", {}),
        ("hyv4", {}),
        ("v2", {"dtype": torch.bfloat16}),
        ("axk1", {"invariant": True}),
        ("v32", {"fp8_cache": True}),
        ("glm5", {"group": Group(Mesh.of(1, 2))}),
        ("mistral3", {"group": Group(Mesh.of(0, 4))}),
    ],
)
def test_they_are_those_that_were_loaded(
    kind: str, options: dict[str, Any], keeper: WeightKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(write_tiny(tmp_path, kind, seed=5), keeper, monkeypatch, **options)


@pytest.mark.parametrize("kind", ["fp8", "int4", "mxfp8"])
def test_quantized_ones_and_their_scales_too(
    kind: str, keeper: WeightKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny(tmp_path, "v3-one-group", seed=2, num_hidden_layers=2, n_routed_experts=4)
    quantize(folder, kind, r"_proj\.weight$" if kind != "int4" else r"experts\.\d+\..*_proj\.weight$")
    check(folder, keeper, monkeypatch, dtype=torch.bfloat16)


def test_experts_are_looked_at_as_soon_as_they_are_there(
    keeper: WeightKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look at numbers of MXFP4 a GPU has to be waited for. A start runs a few layers before it captures, so most
    layers' experts are multiplied in a capture first, which must not wait, and by kernels that those have compiled."""
    monkeypatch.setattr(Group, "minimum", lambda self, x: x)
    config, oracle = tiny_v4(seed=1)
    config = {**config, "expert_dtype": "fp4", "quantization_config": QUANTIZATION}
    tensors, load = quantized_v4(published_v4(oracle))[0], Loads(keeper, monkeypatch)

    def exact(folder: Path) -> set[bool]:
        model = load(folder, progress=load.told.append)
        assert isinstance(model, CompressedModel)
        assert len(model.segments.few(model).layers) < len(model.blocks)
        experts = [each for block in model.blocks for each in (block.experts.gate_up_XFE, block.experts.down_XEI)]
        with monkeypatch.context() as patch:
            patch.setattr(Mxfp4, "matrix", lambda *given: pytest.fail("made when a step asks for it"))
            matrices = [weight.matrix for weight in experts]
        assert all(isinstance(matrix, MicroScaled4) for matrix in matrices)
        return {isinstance(matrix, MicroScaled4) and matrix.least is not None for matrix in matrices}

    folder = write_v4(tmp_path / "exact", config, tensors)
    for kept in (False, True):
        assert exact(folder) == {True}
        assert load.kept is kept
    with monkeypatch.context() as patch:
        patch.setattr(Group, "minimum", lambda self, x: x.zero_() if x.dtype == torch.int64 else x)
        assert exact(folder) == {False}  # another rank has such a row
    scale = next(name for name in sorted(tensors) if name.endswith("experts.0.w1.scale"))
    far = tensors[scale].clone()
    far.view(torch.uint8)[0, 0] = far.view(torch.uint8)[0, 1] - 20
    assert exact(write_v4(tmp_path / "far", config, {**tensors, scale: far})) == {False}
    assert any("multiplied in bf16" in line for line in load.told)


def test_draft_models_too(keeper: WeightKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny(tmp_path / "model", "v3", seed=5)
    draft = write_draft(tmp_path / "draft", "gqa", hidden_size=48, vocab_size=VOCAB)
    check(folder, keeper, monkeypatch, draft=draft, draft_layer=False)
    assert keeper.pid is not None
    assert len(files_of(keeper.pid)) == 2
    of_mistral = write_tiny(tmp_path / "mistral4", "mistral4", seed=5)
    check(of_mistral, keeper, monkeypatch, draft=write_eagle(tmp_path / "eagle", of_mistral, fp8=True))


def check(folder: Path, keeper: WeightKeeper, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Weights that are loaded, handed in and taken back are those that are loaded without a keeper."""
    monkeypatch.setattr(Group, "minimum", lambda self, x: x)  # the other ranks agree
    load = Loads(None, monkeypatch)
    load(folder, **options)
    expected = load.bits()
    load.keeper = keeper
    for kept in (False, True, True):
        load(folder, **options)
        assert load.kept is kept
        assert equal(load.bits(), expected)
        assert all(tensor.data_ptr() % 512 == 0 for tensor in load.tensors if tensor.numel())


def files_of(pid: int) -> list[int]:
    """Return the bytes of each anonymous file that a process has open."""
    found = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the folder itself
            if "memfd:" in os.readlink(each):
                found.append(each.stat().st_size)
    return found


def test_all_of_them_lie_in_the_memory_that_is_kept_and_nowhere_else(
    keeper: WeightKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny(tmp_path, "v3", seed=5)
    load = Loads(keeper, monkeypatch)
    for _ in range(2):
        model = load(folder)
        places = [(int(a, 16), int(b, 16)) for a, b in mappings("/memfd:latentserve weights")]
        assert all(any(a <= x.data_ptr() < b for a, b in places) for x in load.tensors if x.numel())
        assert any(x.data_ptr() == model.embedding_YE.data_ptr() for x in load.tensors)
        assert keeper.pid is not None
        [size] = files_of(keeper.pid)
        own = sum(-(-tensor.nbytes // 512) * 512 for tensor in load.tensors)
        assert size == own
        # Read-only, once they are handed over.
        assert all(rights.startswith("r--s") for rights in mappings("/memfd:latentserve weights", rights=True))
        del model
        load.tensors.clear()


def mappings(name: str, rights: bool = False) -> list[Any]:
    """Return address ranges, or rights, of what this process has mapped by this name."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if name in line]
    return [line.split()[1] if rights else line.split()[0].split("-") for line in lines]


def change_file(folder: Path) -> None:
    file = folder / "model.safetensors"
    before = file.stat()
    with file.open("r+b") as opened:
        opened.seek(-2, os.SEEK_END)
        opened.write(b"\x01")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # as those do who copy files with their times


def change_config(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"routed_scaling_factor": 2.5', '"routed_scaling_factor": 2.0'))


@pytest.mark.parametrize("change", [change_file, change_config])
def test_those_of_other_files_are_let_go(
    change: Any, keeper: WeightKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny(tmp_path, "v3", seed=5)
    load = Loads(keeper, monkeypatch)
    load(folder)
    change(folder)
    load(folder)
    assert not load.kept
    found = load.bits()
    load.keeper = None
    load(folder)
    assert equal(load.bits(), found)
    assert keeper.pid is not None
    assert len(files_of(keeper.pid)) == 1


@pytest.mark.parametrize(
    "options", [{"dtype": torch.bfloat16}, {"draft_layer": False}, {"invariant": True}, {"group": Group(Mesh.of(1, 2))}]
)
def test_those_of_other_settings_are_not_used(
    options: dict[str, Any], keeper: WeightKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Group, "minimum", lambda self, x: x)
    folder = write_tiny(tmp_path, "v3", seed=5)
    load = Loads(keeper, monkeypatch)
    load(folder)
    load(folder, **options)
    assert not load.kept


def test_those_of_another_version_are_not_used(
    keeper: WeightKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny(tmp_path, "v3", seed=5)
    load = Loads(keeper, monkeypatch)
    load(folder)
    monkeypatch.setattr("kernels.__version__", "0.0.1")
    load(folder)
    assert not load.kept


@pytest.mark.parametrize("place", [0, -1])
def test_one_flipped_bit_is_found_and_all_are_loaded_anew(
    place: int, keeper: WeightKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny(tmp_path, "v3", seed=5)
    load = Loads(keeper, monkeypatch)
    load(folder)
    expected = load.bits()
    # What is kept cannot be written to, so a copy takes its place.
    client = KeeperClient(keeper.path())
    slots = client._talk({"kind": "drop"})[0]["dropped"]
    assert list(slots) == ["rank 0, model"]

    handed: list[Any] = []
    keep = KeeperClient.keep

    def flip(self: KeeperClient, slot: str, what: dict[str, Any], descriptors: Any) -> None:
        copy = os.memfd_create("copy")
        data = bytearray(os.pread(descriptors[0], what["size"], 0))
        data[place] ^= 1
        os.write(copy, data)
        keep(self, slot, what, [copy])
        os.close(copy)
        handed.append(slot)

    with monkeypatch.context() as patch:
        patch.setattr(KeeperClient, "keep", flip)
        load(folder)
    assert handed
    load(folder)
    assert not load.kept
    assert "kept weights are not used, all are loaded anew: their checksum is not that of the loaded ones" in load.told
    assert equal(load.bits(), expected)
    load(folder)
    assert load.kept


def test_memory_that_was_cut_is_not_used(keeper: WeightKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny(tmp_path, "v3", seed=5)
    load = Loads(keeper, monkeypatch)
    keep = KeeperClient.keep

    def cut(self: KeeperClient, slot: str, what: dict[str, Any], descriptors: Any) -> None:
        copy = os.memfd_create("copy")
        os.ftruncate(copy, what["size"] - 512)
        keep(self, slot, what, [copy])
        os.close(copy)

    with monkeypatch.context() as patch:
        patch.setattr(KeeperClient, "keep", cut)
        load(folder)
    load(folder)
    assert not load.kept
    assert any("cannot be mapped" in line for line in load.told)


def test_without_a_keeper_that_answers_they_are_simply_loaded(
    keeper: WeightKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny(tmp_path, "v3", seed=5)
    load = Loads(keeper, monkeypatch)
    load(folder)
    expected, path = load.bits(), keeper.path()
    assert keeper.pid is not None
    monkeypatch.setattr(keeper, "path", lambda: path)
    os.kill(keeper.pid, signal.SIGKILL)
    load(folder)
    assert not load.kept
    assert any(line.startswith("weights will not be kept for a restart: ") for line in load.told)
    assert equal(load.bits(), expected)
    monkeypatch.undo()


def test_without_such_memory_they_are_simply_loaded(
    keeper: WeightKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any) -> int:
        raise OSError(38, "Function not implemented")

    folder = write_tiny(tmp_path, "v3", seed=5)
    load = Loads(keeper, monkeypatch)
    monkeypatch.setattr(os, "memfd_create", none)
    load(folder)
    assert not load.kept
    assert any("the system gives no anonymous file: Function not implemented" in line for line in load.told)


def test_a_tensor_that_was_not_counted_is_a_defect() -> None:
    arena = Arena(HostWeights.new(512), [])
    with pytest.raises(RuntimeError, match="and None was counted"):
        arena.take((3,), torch.float32)


WRITER = """
import sys, torch
from pathlib import Path
from workers.families import load_model
from workers.parallel.group import Group
from workers.weights.kept import KeptWeights
cpu = torch.device("cpu")
kept = KeptWeights(Path(sys.argv[2]), Group(), cpu)
model = load_model(sys.argv[1], group=Group(), dtype=torch.float32, device=cpu, max_positions=8, kept=kept)
print(float(model.embedding_YE.sum()), flush=True)
model.embedding_YE[0, 0] = 1.0
print("written", flush=True)
"""


def test_who_writes_to_them_is_ended_and_the_next_one_has_them_whole(keeper: WeightKeeper, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "v3", seed=5)
    command = [sys.executable, "-c", WRITER, str(folder), str(keeper.path())]
    first, second = (subprocess.run(command, capture_output=True, text=True, check=False) for _ in range(2))
    assert first.returncode == second.returncode == -signal.SIGSEGV
    assert first.stdout == second.stdout
    assert "written" not in first.stdout


def load_as_one_of_two(rank: int, rendezvous: str, folder: str, keeper: str, results: str) -> None:
    group = Group.connect(Mesh.of(rank, 2), rendezvous, CPU, 60.0)
    told: list[str] = []
    for number in range(3):
        told.append(f"{number}")
        kept = KeptWeights(Path(keeper), group, CPU, told.append)
        load_model(folder, group=group, dtype=torch.float32, device=CPU, max_positions=8, kept=kept)
        if number == 0 and rank == 1:
            kept.client.forget("rank 1, model")
    Path(results, str(rank)).write_text("\n".join(told))
    Group.close()


def test_where_one_rank_has_none_all_ranks_load(keeper: WeightKeeper, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "model", "v3", seed=5)
    results = tmp_path / "results"
    results.mkdir()
    address = f"tcp://127.0.0.1:{free_port()}"
    run_ranks(load_as_one_of_two, 2, address, str(folder), str(keeper.path()), str(results))
    zero, one = ((results / str(rank)).read_text().split("\n") for rank in range(2))
    assert [line for line in zero if line in "012" or "kept" in line][:4] == [
        *("0", "1", "kept weights are not used, all are loaded anew: another rank has none", "2")
    ]
    assert [line for line in one if line in "012" or "kept" in line][:3] == ["0", "1", "2"]
    assert KEPT.fullmatch(zero[-1])
    assert KEPT.fullmatch(one[-1])
