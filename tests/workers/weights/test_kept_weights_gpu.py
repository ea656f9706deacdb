"""Weights in a GPU's memory outlive the process that loaded them, whatever ended it, and end when nobody holds them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import quantize
from tiny_models import write_tiny

from workers.memory.keeper import KeeperClient, WeightKeeper
from workers.memory.weight_memory import NoSharedMemory
from workers.weights.arena import memory_of, new_memory
from workers.weights.checksum import checksum

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,  # what of the GPU is free says whether weights are there once or twice
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GPU = torch.device("cuda", 0)
SIZES = {"vocab_size": 131072, "hidden_size": 256}
"""Of a model whose embedding lies in many pieces of 2 MiB, and takes much more than loaded kernels do."""


@pytest.fixture
def keeper() -> Iterator[WeightKeeper]:
    made = WeightKeeper()
    yield made
    made.close()


def load(folder: Path, keeper: WeightKeeper | None, end: str = "end") -> tuple[dict[str, Any], list[str], int]:
    """Return what `kept_weights_program` said, its further lines, and how it ended."""
    program = Path(__file__).parent / "kept_weights_program.py"
    command = [sys.executable, str(program), str(folder), "" if keeper is None else str(keeper.path()), end]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ran.stdout, ran.stderr
    first, *more = ran.stdout.splitlines()
    return json.loads(first), more, ran.returncode


@pytest.mark.parametrize("end", ["kill", "fault", "write"])
def test_they_are_whole_after_any_end_of_their_maker(end: str, keeper: WeightKeeper, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "v3", seed=5, **SIZES)
    plain, _, _ = load(folder, None)
    first, more, code = load(folder, keeper, end)
    assert (more, code) == {"kill": ([], -9), "fault": (["lost"], 3), "write": (["refused"], 3)}[end]
    second, more, code = load(folder, keeper, end)  # one that has mapped them ends so, too
    third, _, _ = load(folder, keeper)
    assert [plain["kept"], first["kept"], second["kept"], third["kept"]] == [False, False, True, True], third["told"]
    assert plain["sums"] == first["sums"] == second["sums"] == third["sums"]
    assert first["pieces"] == second["pieces"] > 4
    assert (more, code) == {"kill": ([], -9), "fault": (["lost"], 3), "write": (["refused"], 3)}[end]
    assert first["taken"] >= first["bytes"]  # less than that is other memory
    assert second["taken"] < first["bytes"] // 2  # they were there


def test_quantized_ones_too(keeper: WeightKeeper, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "v3-one-group", seed=2, num_hidden_layers=2, n_routed_experts=4)
    quantize(folder, "fp8", r"_proj\.weight$")
    plain, first, second = load(folder, None)[0], load(folder, keeper)[0], load(folder, keeper)[0]
    assert second["kept"]
    assert plain["sums"] == first["sums"] == second["sums"]


def test_the_memory_is_free_once_they_are_let_go(keeper: WeightKeeper) -> None:
    torch.zeros(1, device=GPU)
    torch.cuda.synchronize()
    before, size = torch.cuda.mem_get_info(GPU)[0], 3 << 30  # two pieces
    memory = new_memory(size, GPU)
    client = KeeperClient(keeper.path())
    assert len(memory.descriptors()) == 2
    client.keep("rank 0, model", {"fingerprint": "a", "size": size}, memory.descriptors())
    memory.unmap()
    assert before - torch.cuda.mem_get_info(GPU)[0] >= size
    assert client.drop() == {"rank 0, model": size}
    deadline = time.monotonic() + 30
    while before - torch.cuda.mem_get_info(GPU)[0] >= size:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_checksum_is_that_of_a_cpu_and_sees_a_flipped_bit_behind_the_first_piece(keeper: WeightKeeper) -> None:
    size = (2 << 30) + (4 << 20)
    memory = new_memory(size, GPU)
    memory.at(0, size).view(torch.int64).random_(generator=torch.Generator(GPU).manual_seed(1))
    own = checksum(memory.at(0, size))
    assert own == checksum(memory.at(0, size).cpu())
    client = KeeperClient(keeper.path())
    client.keep("rank 0, model", {"fingerprint": "a", "size": size}, memory.descriptors())
    found = client.ask("rank 0, model", "a")
    assert found is not None
    other = memory_of(found[1], size, GPU)
    assert checksum(other.at(0, size)) == own
    memory.at(size - 5, 1).bitwise_xor_(4)
    torch.cuda.synchronize()
    assert checksum(other.at(0, size)) != own
    del found
    other.unmap()
    memory.unmap()


def test_more_than_there_is_is_refused_and_takes_nothing() -> None:
    torch.zeros(1, device=GPU)
    free, total = torch.cuda.mem_get_info(GPU)
    with pytest.raises(NoSharedMemory, match="out of memory"):
        new_memory(total + (8 << 30), GPU)
    assert free - torch.cuda.mem_get_info(GPU)[0] < 64 << 20
