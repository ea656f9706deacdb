"""Matrices that repeat others are found byte for byte, whichever rank sees the difference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from paged import CPU
from safetensors.torch import save_file

from workers.parallel.group import Group
from workers.parallel.mesh import Mesh
from workers.weights import copies
from workers.weights.checkpoint import Checkpoint
from workers.weights.copies import differing

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32]
PAIR = {"copy.weight": "model.weight"}


def found(folder: Path, tensors: dict[str, torch.Tensor], ranks: int = 1) -> list[int]:
    """Return for each rank whether it finds nothing but repetitions."""
    save_file(tensors, folder / "model.safetensors")
    agreed: list[torch.Tensor] = []
    with Checkpoint.open(folder) as checkpoint, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "minimum", lambda self, x: agreed.append(x) or x)
        for rank in range(ranks):
            differing(checkpoint, PAIR, Group(Mesh.of(rank, ranks)), CPU)
    return [int(x.min()) for x in agreed]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(13, 8), (131, 3), (1, 1)])
def test_one_byte_is_enough(dtype: torch.dtype, shape: tuple[int, int], tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    width = shape[1] * dtype.itemsize
    raw = torch.randint(0, 256, (shape[0], width), dtype=torch.uint8, generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "_AT_ONCE", 16)  # several pieces a rank
        for ranks in (1, 2, 4):
            same = {name: raw.clone().view(dtype) for name in ("model.weight", "copy.weight")}
            assert found(tmp_path, same, ranks) == [1] * ranks
            share = -(-shape[0] // ranks)
            for row in {0, shape[0] // 2, shape[0] - 1}:
                other = raw.clone()
                other[row, -1] ^= 1
                got = found(tmp_path, {**same, "copy.weight": other.view(dtype)}, ranks)
                assert got == [int(rank != row // share) for rank in range(ranks)]


def test_what_numbers_alone_do_not_show(tmp_path: Path) -> None:
    """NaN that is the same is the same, and another zero is another."""
    nan, zero = torch.full((2, 4), torch.nan), torch.zeros(2, 4)
    assert found(tmp_path, {"model.weight": nan, "copy.weight": nan.clone()}) == [1]
    assert found(tmp_path, {"model.weight": zero, "copy.weight": -zero}) == [0]


def test_other_shapes_dtypes_and_parts_are_others(tmp_path: Path) -> None:
    one = torch.zeros(2, 4)
    assert found(tmp_path, {"model.weight": one}) == []
    assert found(tmp_path, {"copy.weight": one}) == [0]
    for other in (torch.zeros(4, 2), torch.zeros(2, 4, dtype=torch.int32), torch.tensor(0.0)):
        assert found(tmp_path, {"model.weight": one, "copy.weight": other}) == [0]
    scaled = {"model.weight": one, "copy.weight": one.clone(), "copy.weight_scale_inv": torch.ones(1, 1)}
    assert found(tmp_path, scaled) == [0]
    assert found(tmp_path, {**scaled, "model.weight_scale_inv": torch.ones(1, 1)}) == [1]
    assert found(tmp_path, {**scaled, "model.weight_scale_inv": torch.full((1, 1), 2.0)}) == [0]
