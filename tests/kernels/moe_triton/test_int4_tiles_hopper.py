"""What the compiler makes of Hopper's products of several tokens with INT4 weights, at published sizes."""

import re
from collections import Counter
from typing import Any

import pytest
import torch

from kernels.matrix import GroupScaled
from kernels.moe import launch, schedule
from kernels.moe.records import stored
from kernels.moe.scaled_launch import TILED_PROGRAMS, TILED_REGISTERS
from kernels.moe.schedule import ExpertsShape, Workspace
from tests.support.hopper import compile_only, machine_code, main_loop, resources

pytestmark = pytest.mark.gate

SIZES = {"K2": (8, 384, 7168, 2048), "K2 on 4 ranks": (8, 384, 7168, 512), "small": (2, 24, 1024, 512)}


def matrix(rows: int, features: int) -> GroupScaled:
    """An expert's, of no value: nothing runs."""
    data = torch.empty(1, rows, features // 2, dtype=torch.uint8)
    return GroupScaled(data, torch.empty(1, rows, features // 32, dtype=torch.bfloat16))


def compiled(name: str, tokens: int) -> list[Any]:
    """Both products."""
    shape = ExpertsShape(tokens, *SIZES[name])
    gate_up, down = matrix(2 * shape.intermediate, shape.hidden), matrix(shape.hidden, shape.intermediate)
    tiling = schedule.int4_tiled(shape, 132, (stored(gate_up), stored(down)))
    x = torch.empty(tokens, shape.hidden, dtype=shape.dtype)
    ids, weight = torch.zeros(tokens, shape.chosen, dtype=torch.int64), torch.zeros(tokens, shape.chosen)
    scratch = Workspace.over(torch.empty(Workspace.bytes(shape, tiling), dtype=torch.uint8), shape, tiling)
    with compile_only() as kernels:
        call = launch.ExpertLaunches(x, ids, weight, gate_up, down, x, scratch, shape, tiling, dependent=True)
        call.gate_up()
        call.down()
    return kernels


@pytest.mark.parametrize(("tokens", "pairs"), [(2, 2), (5, 8)])
@pytest.mark.parametrize("name", SIZES)
def test_compiles_to_what_it_was_written_for(name: str, tokens: int, pairs: int) -> None:
    kernels = compiled(name, tokens)
    assert [resources(kernel).name for kernel in kernels] == ["product", "product"]
    hidden, intermediate = SIZES[name][2:]
    for kernel, features in zip(kernels, (hidden, intermediate), strict=True):
        found = resources(kernel)
        found.check(TILED_REGISTERS)
        assert TILED_PROGRAMS[pairs] * (found.shared + 1024) <= 228 * 1024
        assert (found.waits, found.releases) == (True, True)
        if features <= 512:
            continue  # a block's steps are no loop of their own
        body = main_loop(machine_code(kernel))
        names = Counter(re.sub(r"^@!?\w+ ", "", text).split()[0] for text in body)
        products = names["HMMA.16816.F32"]
        assert (4 * names["LDG.E.EF.128"], 4 * names["LDG.E.U16"], 2 * names["LDS.128"]) == (products,) * 3
        assert not any(name.startswith(("SHFL", "LDSM", "LDL", "STL", "STS")) for name in names)
        # As of a single token: at an H200's bandwidth a scheduler has 28 issue slots for a product of 256 weights.
        assert names["LOP3.LUT"] <= 4.5 * products
        assert names["HMUL2"] + names["HADD2"] + names["HFMA2"] <= 8.5 * products
        assert len(body) <= 22 * products
