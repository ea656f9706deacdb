"""Compilation of prefill attention and the merge for Hopper: no spills, few variants."""

import re

import pytest
import torch
from prefill_case import REAL, SMALL, Case

from kernels.merge_attention import launch_merge_attention
from kernels.mla_prefill.launch import HOPPER, PrefillTiling
from tests.support.hopper import compile_only, instructions, machine_code, resources, serialized

pytestmark = pytest.mark.gate

SIZES = {
    "V2 and V3": REAL,
    "Mistral Small 4": SMALL,
    "GLM": {"nope": 192, "rope": 64, "value": 256},
    "A.X K2 Light": {"nope": 64, "rope": 32, "value": 64},
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
    assert {"HGMMA", "LDGSTS"} <= instructions(compiled[0]).keys()


def test_fp32_compiles_without_spills() -> None:
    with compile_only() as compiled:
        Case([(4, 8)]).run(True)
    resources(compiled[0]).check()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("sizes", "steps"), [(REAL, 12), (SMALL, 8)], ids=["128", "64"])
def test_hoppers_own_kernel(sizes: dict[str, int], steps: int, causal: bool, out_dtype: torch.dtype) -> None:
    """Exactly the products it needs, all of them asynchronous, and the schedule it claims: the exponentials of a tile
    (64 x 128 by 128 lanes) between the wait for its scores and the wait for the sum of the tile before."""
    with compile_only() as compiled:
        Case([(4, 8)], heads=2, dtype=torch.bfloat16, out_dtype=out_dtype, **sizes).run(causal, HOPPER)
    found = resources(compiled[0])
    found.check()
    used = instructions(compiled[0])
    assert used["HGMMA"] == 2 * (steps + (steps + 8) + 8)  # first scores, the loop, last sum of two groups
    boxes = sizes["nope"] // 64
    assert used["UTMALDG"] >= 2 * (boxes + 1) + (boxes + 1 + 2)  # boxes of 64 features: queries, keys, values
    assert used["USETMAXREG"] >= 4
    assert not serialized(compiled[0])
    beside = re.findall(r"DEPBAR\.LE gsb0, 0x1(.*?)DEPBAR\.LE gsb0, 0x0", machine_code(compiled[0]), re.DOTALL)
    assert [code.count("MUFU.EX2") for code in beside] == [66, 66]


@pytest.mark.parametrize("tiles", [None, HOPPER], ids=["triton", "hopper"])
def test_the_number_of_tokens_and_rows_compiles_nothing_new(tiles: PrefillTiling | None) -> None:
    with compile_only() as compiled:
        for rows in ([(100, 100)], [(70, 80), (65, 66)], [(128, 4096)] * 16):
            Case(rows, heads=1, dtype=torch.bfloat16, **REAL).run(True, tiles)
    assert len({kernel.hash for kernel in compiled}) == 1


@pytest.mark.parametrize("tiles", [None, HOPPER], ids=["triton", "hopper"])
def test_the_number_of_parts_compiles_nothing_new(tiles: PrefillTiling | None) -> None:
    with compile_only() as compiled:
        for parts, rows in ((1, [(100, 100)]), (2, [(70, 80), (65, 66)]), (5, [(1, 4096)])):
            case = Case(rows, heads=1, dtype=torch.bfloat16, out_dtype=torch.float32, **REAL)
            case.cut(parts, 128)
            case.run(False, tiles or PrefillTiling(128, 128, 8, 2))
    assert len({kernel.hash for kernel in compiled}) == 1


def test_merge_compiles_without_spills_and_loads_wide() -> None:
    part, log = torch.zeros(5, 16, 128), torch.zeros(5, 16)
    with compile_only() as compiled:
        for cut in ((), (1,), (5,)):
            parts = torch.zeros(*cut, *part.shape), torch.zeros(*cut, *log.shape)
            launch_merge_attention(part, log, *parts, part.bfloat16(), log)
    assert len({kernel.hash for kernel in compiled}) == 1
    resources(compiled[0]).check(registers=128)
    assert "LDG.E.128" in machine_code(compiled[0])
