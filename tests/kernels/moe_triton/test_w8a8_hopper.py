"""Compilation of Hopper's products of activations in FP8, at the sizes of published models."""

import re
from dataclasses import replace

import pytest
import torch

from kernels.matrix import BlockScaled
from kernels.moe import launch, schedule
from kernels.moe.records import stored
from kernels.moe.schedule import ExpertsShape, Workspace
from tests.support.hopper import compile_only, instructions, machine_code, resources, serialized

pytestmark = pytest.mark.gate

MODELS = {
    "V3": (9, 257, 7168, 2048),
    "V2-Lite": (8, 66, 2048, 1408),
    "small": (1, 3, 256, 128),
}


def matrix(rows: int, features: int) -> BlockScaled:
    """An expert's, of no value: nothing runs."""
    data = torch.empty(1, rows, features, dtype=torch.float8_e4m3fn)
    return BlockScaled(data, torch.empty(1, rows // 128, features // 128))


def products(shape: ExpertsShape, stages: int = 4) -> list[object]:
    """gate_up and down."""
    gate_up, down = matrix(2 * shape.intermediate, shape.hidden), matrix(shape.hidden, shape.intermediate)
    tiling = schedule.w8a8(shape, 132, (stored(gate_up), stored(down)))
    tiling = replace(tiling, gate_up=replace(tiling.gate_up, stages=stages), down=replace(tiling.down, stages=stages))
    x = torch.empty(shape.tokens, shape.hidden, dtype=shape.dtype)
    ids, weight = torch.zeros(shape.tokens, shape.chosen, dtype=torch.int64), torch.zeros(shape.tokens, shape.chosen)
    scratch = Workspace.over(torch.empty(Workspace.bytes(shape, tiling), dtype=torch.uint8), shape, tiling)
    with compile_only() as compiled:
        call = launch.ExpertLaunches(x, ids, weight, gate_up, down, torch.empty_like(x), scratch, shape, tiling)
        call.gate_up()
        call.down()
    return compiled


@pytest.mark.parametrize("model", MODELS)
def test_compiles_to_what_it_was_written_for(model: str) -> None:
    for kernel, gathers in zip(products(ExpertsShape(2048, *MODELS[model])), (True, False), strict=True):
        found = resources(kernel)
        found.check()
        assert found.warps == 12
        code = machine_code(kernel)
        # Two partitions with two blocks of weights, of each four products of 32 features a stage. A short loop over the
        # stages may be unrolled.
        made = re.findall(r"[HQ]GMMA\.(\S+)", code)
        assert set(made) == {"64x128x32.F32.E4M3.E4M3"}
        quantize_activations, rest = divmod(len(made), 16)
        assert not rest
        assert quantize_activations == 1 or model == "small"
        # To each of a thread's 128 sums a product is added by one instruction.
        assert instructions(kernel)["FFMA"] >= 256 * quantize_activations
        assert "LDGSTS.E.BYPASS.128" in code or not gathers
        given = {int(size, 16) for size in re.findall(r"USETMAXREG\.\S+ (?:UP0, )?(0x\w+)", code)}
        assert given >= ({224, 64} if gathers else {232, 40})
        assert not serialized(kernel)


def test_a_shorter_ring() -> None:
    for kernel in products(ExpertsShape(512, *MODELS["V2-Lite"]), stages=3):
        resources(kernel).check()


def test_tokens_compile_no_more() -> None:
    """Every number of tokens runs the same machine code, but for `down`, which few do not claim their items of."""
    hashes = {
        kernel.hash for tokens in (1, 7, 16, 300, 1000) for kernel in products(ExpertsShape(tokens, 2, 8, 256, 128))
    }
    assert len(hashes) == 3
