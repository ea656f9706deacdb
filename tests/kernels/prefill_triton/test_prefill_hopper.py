"""What the compiler makes of prefill attention and the merge for Hopper: no spills, few variants."""

import pytest
import torch
from prefill_case import Case

from kernels.merge_attention import launch as merge_launch
from kernels.testing.hopper import compile_only, machine_code, resources

SIZES = {
    "V2 and V3": {"nope": 128, "rope": 64, "value": 128},
    "GLM": {"nope": 192, "rope": 64, "value": 256},
    "demo": {"nope": 32, "rope": 16, "value": 32},
}


@pytest.mark.parametrize("queries", [1, 1024])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_compiles_without_spills(name: str, causal: bool, queries: int) -> None:
    case = Case([(4, 8)], heads=2, dtype=torch.bfloat16, **SIZES[name])
    with compile_only() as compiled:
        case.run(causal, max_q=queries)
    found = resources(compiled[0])
    found.check()
    assert "HGMMA" in found.instructions
    assert "LDGSTS" in found.instructions


def test_fp32_compiles_without_spills() -> None:
    with compile_only() as compiled:
        Case([(4, 8)]).run(True)
    resources(compiled[0]).check()


def test_the_number_of_tokens_and_rows_compiles_nothing_new() -> None:
    with compile_only() as compiled:
        for rows in ([(100, 100)], [(70, 80), (65, 66)], [(128, 4096)] * 16):
            Case(rows, heads=1, dtype=torch.bfloat16).run(True)
    assert len({kernel.hash for kernel in compiled}) == 1


def test_merge_compiles_without_spills_and_loads_wide() -> None:
    part, log = torch.zeros(5, 16, 128), torch.zeros(5, 16)
    with compile_only() as compiled:
        merge_launch.merge_attention(part, log, part, log, part.bfloat16(), log)
    resources(compiled[0]).check(registers=128)
    assert "LDG.E.128" in machine_code(compiled[0])
