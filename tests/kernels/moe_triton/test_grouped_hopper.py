"""Compilation of Hopper's products of many tokens, at the sizes of published models."""

import re
from dataclasses import replace

import pytest
import torch

from kernels.moe import launch, schedule
from kernels.moe.schedule import ExpertsShape, Workspace
from tests.support.hopper import compile_only, instructions, machine_code, resources, serialized

pytestmark = pytest.mark.gate

MODELS = {
    "V2-Lite": (8, 66, 2048, 1408),
    "V3": (9, 257, 7168, 2048),
    "demo": (3, 9, 192, 128),
    "small": (1, 3, 80, 48),
}


def products(shape: ExpertsShape, stages: int = 4) -> list[object]:
    """gate_up and down. Of the weights one expert exists, for nothing runs."""
    tiling = schedule.grouped(shape, 132)
    tiling = replace(tiling, gate_up=replace(tiling.gate_up, stages=stages), down=replace(tiling.down, stages=stages))
    gate_up = torch.empty(1, 2 * shape.intermediate, shape.hidden, dtype=shape.dtype)
    down = torch.empty(1, shape.hidden, shape.intermediate, dtype=shape.dtype)
    x = torch.empty(shape.tokens, shape.hidden, dtype=shape.dtype)
    ids, weight = torch.zeros(shape.tokens, shape.chosen, dtype=torch.int64), torch.zeros(shape.tokens, shape.chosen)
    scratch = Workspace.over(torch.empty(Workspace.bytes(shape, tiling), dtype=torch.uint8), shape, tiling)
    with compile_only() as compiled:
        call = launch.ExpertLaunches(x, ids, weight, gate_up, down, torch.empty_like(x), scratch, shape, tiling)
        call.gate_up()
        call.down()
    return compiled


@pytest.mark.parametrize(
    ("model", "dtype"), [(model, torch.bfloat16) for model in MODELS] + [("V2-Lite", torch.float16)]
)
def test_compiles_to_what_it_was_written_for(model: str, dtype: torch.dtype) -> None:
    shape = ExpertsShape(512, *MODELS[model], dtype)
    tiling = schedule.grouped(shape, 132)
    for kernel, width, gathers in zip(
        products(shape), (tiling.gate_up.block, tiling.down.block // 2), (True, False), strict=True
    ):
        found = resources(kernel)
        found.check()
        assert found.warps == 12
        code = machine_code(kernel)
        # Two partitions with four products of 16 features a stage, as wide as both blocks of weights together.
        assert re.findall(r"HGMMA\.(\w+)\.", code) == [f"64x{2 * width}x16"] * 8
        # A short loop over the stages is unrolled.
        stages = instructions(kernel)["UTMALDG"] / (2 if gathers else 4)
        assert stages == 1 or (stages == 2 and model in ("demo", "small"))
        assert len(re.findall(r"LDGSTS\.E\.BYPASS\.128", code)) == (8 * stages if gathers else 0)
        # Results, and the counter that is put back.
        stores = re.findall(r"STG\.E[.\w]*", code)
        assert set(stores) == {"STG.E.128", "STG.E"}
        assert stores.count("STG.E") == instructions(kernel)["ATOMG"]
        # 128 sums and addresses for a multiplying thread, all of 64 K registers in sum.
        given = {int(size, 16) for size in re.findall(r"USETMAXREG\.\S+ (?:UP0, )?(0x\w+)", code)}
        assert given >= ({216, 224, 64} if gathers else {232, 40})
        assert not serialized(kernel)


@pytest.mark.parametrize("stages", [2, 3])
def test_other_rings(stages: int) -> None:
    for kernel in products(ExpertsShape(512, *MODELS["V2-Lite"]), stages):
        resources(kernel).check()


def test_tokens_compile_no_more() -> None:
    """Every number of tokens runs the same machine code."""
    hashes = {
        kernel.hash for tokens in (1, 7, 16, 300, 1000) for kernel in products(ExpertsShape(tokens, 2, 8, 192, 128))
    }
    assert len(hashes) == 2
