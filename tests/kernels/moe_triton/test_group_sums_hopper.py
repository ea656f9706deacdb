"""Compilation of Hopper's `down` of sums of groups, at the sizes of published models."""

import re

import pytest
import torch

from kernels.moe import launch, schedule
from kernels.moe.schedule import ExpertsShape, Workspace
from tests.support.hopper import compile_only, instructions, machine_code, resources, serialized

pytestmark = pytest.mark.gate

MODELS = {
    "V2-Lite": (8, 66, 2048, 1408),
    "V3": (9, 257, 7168, 2048),
    "Sarvam": (9, 129, 4096, 2048),
    "demo": (3, 9, 192, 128),
}


def group_sums(shape: ExpertsShape) -> object:
    """Compile the kernel of a call. Of the weights one expert exists, for nothing runs."""
    tiling = schedule.tiling(shape)
    gate_up = torch.empty(1, 2 * shape.intermediate, shape.hidden, dtype=shape.dtype)
    down = torch.empty(1, shape.hidden, shape.intermediate, dtype=shape.dtype)
    x = torch.empty(shape.tokens, shape.hidden, dtype=shape.dtype)
    ids, weight = torch.zeros(shape.tokens, shape.chosen, dtype=torch.int64), torch.zeros(shape.tokens, shape.chosen)
    scratch = Workspace.over(torch.empty(Workspace.bytes(shape, tiling), dtype=torch.uint8), shape, tiling)
    out = torch.empty(shape.tokens, shape.groups, shape.hidden)
    with compile_only() as compiled:
        launch.ExpertLaunches(x, ids, weight, gate_up, down, out, scratch, shape, tiling, True).down()
    (found,) = compiled
    return found


@pytest.mark.parametrize(
    ("model", "ranks", "dtype"),
    [(model, ranks, torch.bfloat16) for model in MODELS for ranks in (1, 8)] + [("V2-Lite", 1, torch.float16)],
)
def test_compiles_to_what_it_was_written_for(model: str, ranks: int, dtype: torch.dtype) -> None:
    """Whether a rank has all groups of an expert or one."""
    chosen, experts, hidden, intermediate = MODELS[model]
    groups = 8 // ranks
    shape = ExpertsShape(64, chosen, experts, hidden, intermediate // ranks, dtype, groups, hopper=132)
    kernel = group_sums(shape)
    found = resources(kernel)
    found.check(168)
    assert found.name == "group_sums"
    assert found.warps == 12
    assert found.waits
    assert found.shared + 1024 <= 228 * 1024
    assert not serialized(kernel)
    # The instruction that the wider tiles of Triton's kernel have, of half the columns.
    assert set(re.findall(r"HGMMA\.(\w+)\.", machine_code(kernel))) == {"64x64x16"}
    used = instructions(kernel)
    assert used["UTMALDG"] >= 4
    assert "ATOMG" not in used


def test_tokens_compile_no_more() -> None:
    """Every number of tokens runs the same machine code."""
    hashes = {group_sums(ExpertsShape(tokens, 8, 66, 2048, 1408, groups=8, hopper=132)).hash for tokens in (1, 64, 900)}  # type: ignore[attr-defined]
    assert len(hashes) == 1
