"""What the compiler makes of Hopper's products of a single token with INT4 weights, at published sizes."""

import re
from collections import Counter
from typing import Any

import pytest
import torch

from kernels.matrix import GroupScaled
from kernels.moe import launch, schedule
from kernels.moe.records import stored
from kernels.moe.scaled_launch import SINGLE_PROGRAMS, SINGLE_REGISTERS
from kernels.moe.schedule import ExpertsShape, Workspace
from tests.support.hopper import compile_only, machine_code, main_loop, resources

pytestmark = pytest.mark.gate

SIZES = {"K2": (8, 384, 7168, 2048), "K2 on 4 ranks": (8, 384, 7168, 512), "small": (2, 8, 1024, 512)}


def matrix(rows: int, features: int) -> GroupScaled:
    """An expert's, of no value: nothing runs."""
    data = torch.empty(1, rows, features // 2, dtype=torch.uint8)
    return GroupScaled(data, torch.empty(1, rows, features // 32, dtype=torch.bfloat16))


def compiled(name: str) -> list[Any]:
    """Both products."""
    shape = ExpertsShape(1, *SIZES[name])
    gate_up, down = matrix(2 * shape.intermediate, shape.hidden), matrix(shape.hidden, shape.intermediate)
    tiling = schedule.int4_alone(shape, 132, (stored(gate_up), stored(down)))
    x = torch.empty(1, shape.hidden, dtype=shape.dtype)
    ids, weight = torch.zeros(1, shape.chosen, dtype=torch.int64), torch.zeros(1, shape.chosen)
    scratch = Workspace.over(torch.empty(Workspace.bytes(shape, tiling), dtype=torch.uint8), shape, tiling)
    with compile_only() as kernels:
        call = launch.ExpertLaunches(x, ids, weight, gate_up, down, x, scratch, shape, tiling, dependent=True)
        call.gate_up()
        call.down()
    return kernels


@pytest.mark.parametrize("name", SIZES)
def test_compiles_to_what_it_was_written_for(name: str) -> None:
    kernels = compiled(name)
    assert [resources(kernel).name for kernel in kernels] == ["product", "product"]
    hidden, intermediate = SIZES[name][2:]
    for kernel, features in zip(kernels, (hidden, intermediate), strict=True):
        found = resources(kernel)
        found.check(SINGLE_REGISTERS)
        assert SINGLE_PROGRAMS * (found.shared + 1024) <= 228 * 1024
        assert (found.waits, found.releases) == (True, True)
        if features <= 512:
            continue  # a block's steps are no loop of their own
        # Weights go from memory to registers, 16 bytes at a time, and inputs come from shared memory.
        body = main_loop(machine_code(kernel))
        names = Counter(re.sub(r"^@!?\w+ ", "", text).split()[0] for text in body)
        products = names["HMMA.16816.F32"]
        assert (4 * names["LDG.E.EF.128"], 4 * names["LDG.E.U16"], 2 * names["LDS.128"]) == (products,) * 3
        assert not any(name.startswith(("SHFL", "LDSM", "LDL", "STL", "STS")) for name in names)
        # A product of 256 weights takes five logical operations, and four of each of two kinds in fp16. At an H200's
        # bandwidth a scheduler has 28 issue slots for it.
        assert names["LOP3.LUT"] <= 4.5 * products
        assert names["HMUL2"] + names["HADD2"] + names["HFMA2"] <= 8.5 * products
        assert len(body) <= 22 * products
