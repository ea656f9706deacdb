"""Compilation of the experts' products with weights of 8 and 4 bits for Hopper, at the sizes of published models."""

import re

import pytest
import torch

from kernels.matrix import BlockScaled, GroupScaled, MicroScaled, MicroScaled4
from kernels.moe import launch, scaled_launch, schedule
from kernels.moe.records import stored
from kernels.moe.scaled_launch import REGISTERS
from kernels.moe.schedule import ExpertsShape, Workspace
from tests.support.hopper import compile_only, instructions, machine_code, resources, serialized

pytestmark = pytest.mark.gate

V3 = (9, 257, 7168, 2048)
"""Experts of a token, experts, hidden and intermediate features of DeepSeek-V3. Kimi K2 has more experts."""
KIMI = (9, 385, 7168, 2048)
HY4 = (8, 256, 6144, 256)
"""Experts of a rank of eight."""
V4_FLASH = (7, 257, 4096, 256)
"""Experts of a rank of eight."""
SMALL = (3, 9, 192, 128)


def matrix(rows: int, features: int, format: str) -> BlockScaled | GroupScaled | MicroScaled | MicroScaled4:
    """An expert's, of no value: nothing runs."""
    if format == "int4":
        data = torch.empty(1, rows, features // 2, dtype=torch.uint8)
        return GroupScaled(data, torch.empty(1, rows, features // 32, dtype=torch.bfloat16))
    if format == "mxfp4":
        data = torch.empty(1, rows, features // 2, dtype=torch.uint8)
        return MicroScaled4(data, torch.empty(1, rows, features // 32, dtype=torch.uint8))
    data = torch.empty(1, rows, features, dtype=torch.float8_e4m3fn)
    if format == "mxfp8":
        return MicroScaled(data, torch.empty(1, rows, features // 32, dtype=torch.uint8))
    return BlockScaled(data, torch.empty(1, -(-rows // 128), -(-features // 128)))


def products(shape: ExpertsShape, format: str) -> list[object]:
    """gate_up and down. Of the weights one expert exists."""
    gate_up = matrix(2 * shape.intermediate, shape.hidden, format)
    down = matrix(shape.hidden, shape.intermediate, format)
    tiling = schedule.tiling(shape, (stored(gate_up), stored(down)))
    x = torch.empty(shape.tokens, shape.hidden, dtype=shape.dtype)
    ids, weight = torch.zeros(shape.tokens, shape.chosen, dtype=torch.int64), torch.zeros(shape.tokens, shape.chosen)
    scratch = Workspace.over(torch.empty(Workspace.bytes(shape, tiling), dtype=torch.uint8), shape, tiling)
    with compile_only() as compiled:
        call = launch.ExpertLaunches(x, ids, weight, gate_up, down, x, scratch, shape, tiling, dependent=True)
        if tiling.rows:
            call.gate_up()
            call.down()
        else:
            call.gate_up_singly()
            call.down_singly()
    return compiled


@pytest.mark.parametrize(
    ("model", "format", "tokens", "groups"),
    [(V3, "fp8", tokens, 0) for tokens in (1, 256, 1024, 4096)]
    + [(KIMI, "int4", tokens, 0) for tokens in (1, 1024, 4096)]
    + [(V3, "fp8", 16, 8), (HY4, "mxfp8", 16, 8), (V4_FLASH, "mxfp4", 16, 8), (KIMI, "int4", 16, 8)]
    + [(HY4, "mxfp8", tokens, 0) for tokens in (1, 16, 1024, 4096)]
    + [(V4_FLASH, "mxfp4", tokens, 0) for tokens in (16, 4096)],
)
def test_compiles_to_what_it_was_written_for(
    model: tuple[int, int, int, int], format: str, tokens: int, groups: int
) -> None:
    shape = ExpertsShape(
        tokens, *model, groups=groups, shared=0 if model == HY4 else 1, limit=10.0 * (model in (HY4, V4_FLASH))
    )
    rows = schedule.tiling(shape).rows if format != "int4" or tokens > 1 else 16
    if groups:
        how = stored(matrix(shape.hidden, shape.intermediate, format))
        assert schedule.tiling(shape, (how, how)).walked == (4 if format == "fp8" else 1)
    for kernel in products(shape, format):
        found = resources(kernel)
        # Of lower tiles than 128 three programs stand on a multiprocessor.
        found.check(REGISTERS if 0 < rows < 128 else 255)
        assert found.waits == (rows < 128)
        code = machine_code(kernel)
        if rows:
            assert 3 * (found.shared + 1024) <= 228 * 1024 or rows == 128
            # Weights come through the copy engine as they are stored, inputs past the registers; the tensor cores take
            # weights from registers, without waiting for each product.
            assert {"LDGSTS", "UTMALDG"} <= instructions(kernel).keys()
            widths = {re.match(r"64x(\d+)x16", product).group(1) for product in re.findall(r"HGMMA\.(\w+)", code)}  # type: ignore[union-attr]
            assert widths <= {"16", "64", "128"}
            assert not serialized(kernel)
        else:
            assert "LDG.E.EF.128" in code or shape.intermediate < 512


def test_tokens_compile_no_more() -> None:
    """Every number of tokens with the same tiles runs the same machine code."""
    for format in ("fp8", "int4"):
        shapes = (ExpertsShape(tokens, *SMALL, shared=1) for tokens in (2, 7, 16))
        assert len({kernel.hash for shape in shapes for kernel in products(shape, format)}) == 2


@pytest.mark.parametrize(("model", "format"), [(HY4, "mxfp8"), (V3, "fp8")])
def test_one_instruction_makes_fp16_of_two_weights_of_a_token(
    model: tuple[int, int, int, int], format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then two follow for each weight, one that makes fp32 and one that multiplies. Sums take some besides. Programs of
    `down` find room on a multiprocessor as many as there are to be, with weights of two steps in their registers."""
    monkeypatch.setattr(scaled_launch, "is_hopper", lambda device: True)
    gate_up, down = products(ExpertsShape(1, *model), format)
    programs, tile = scaled_launch.DOWN_PROGRAMS, scaled_launch.DOWN
    resources(gate_up).check()
    resources(down).check(65536 // (programs * tile.warps * 32))
    for kernel in (gate_up, down):
        used = instructions(kernel)
        multiplied = used["FFMA"] + used["FMUL"]
        assert 0.8 * multiplied <= 2 * used["F2FP"] <= 1.2 * multiplied, used
        assert used["HMUL2"] == 0
        assert used["PRMT"] <= used["F2FP"]
    # A thread asks for the weights of its rows 16 bytes at a time: of those ahead, and in the loop.
    rows = tile.block * min(tile.block_k, model[3]) // (16 * 32 * tile.warps)
    assert machine_code(down).count("LDG.E.EF.128") == tile.stages * rows
