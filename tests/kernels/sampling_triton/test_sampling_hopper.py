"""Compilation of the sampling and verification kernels for Hopper: no spills, wide loads, few variants."""

import pytest
import torch
from sampling_case import Case

from kernels.decode_state import launch_accept_drafts
from kernels.sampling import launch
from tests.support.hopper import compile_only, machine_code, resources

pytestmark = pytest.mark.gate

VOCABULARIES = {"demo": 4096, "V3": 129280, "odd": 50257}


@pytest.mark.parametrize(("name", "dependent"), [("demo", False), *((name, True) for name in VOCABULARIES)])
def test_compiles_without_spills_and_loads_wide(name: str, dependent: bool) -> None:
    case = Case.random(VOCABULARIES[name], 1, 2, 1, seed=1)
    case.logits = case.logits.contiguous()
    with compile_only() as compiled:
        if dependent:
            case.launched_by_name(dependent)
        else:
            case.launched()
    found = {kernel.metadata.name: resources(kernel) for kernel in compiled}
    assert list(found) == ["peak", "search", "draw", "finish"]
    for one in found.values():
        one.check(registers=128)
        assert one.waits == dependent
    assert found["peak"].registers <= 96
    assert found["draw"].registers <= 96
    if name != "odd":
        assert all("LDG.E.128" in machine_code(kernel) for kernel in compiled[:3])


@pytest.mark.parametrize("name", VOCABULARIES)
def test_masked_compiles_without_spills_and_loads_wide(name: str) -> None:
    case = Case.random(VOCABULARIES[name], 1, 2, 1, seed=1).masked(1)
    case.logits = case.logits.contiguous()
    with compile_only() as compiled:
        case.launched_by_name()
    assert [kernel.metadata.name for kernel in compiled] == ["peak", "search", "draw", "finish"]
    for kernel in compiled:
        resources(kernel).check(registers=128)
    if name != "odd":
        assert all("LDG.E.128" in machine_code(kernel) for kernel in compiled[:3])


@pytest.mark.parametrize("dependent", [False, True])
def test_the_small_kernels_compile_without_spills(dependent: bool) -> None:
    case = Case.random(4096, 3, 4, 0, seed=1)
    row, tokens, fault = torch.zeros(3, dtype=torch.int64), torch.zeros(3, 4, dtype=torch.int64), torch.zeros(1).long()
    with compile_only() as compiled:
        launch_accept_drafts(tokens, tokens[:, 1:], row, 4096, fault, dependent=dependent)
        launch.count_tokens(case.tables, row, tokens, row, 4096, fault, True, 1, dependent=dependent)
    for kernel in compiled:
        found = resources(kernel)
        found.check(registers=64)
        assert found.waits == dependent


@pytest.mark.parametrize("rows", [1, 256, 1024])
def test_one_program_verifies_all_rows_without_spills(rows: int) -> None:
    token_DW, fault = torch.zeros(rows, 8, dtype=torch.int64), torch.zeros(1).long()
    with compile_only() as compiled:
        launch_accept_drafts(token_DW, token_DW[:, 1:], token_DW[:, 0], 9, fault, fault, dependent=True)
    resources(compiled[0]).check(registers=128)  # 16 warps of at most 128 fit


def test_the_number_of_rows_compiles_nothing_new() -> None:
    with compile_only() as compiled:
        for rows in (1, 2, 16, 17, 33):
            Case.random(4096, rows, 2, 1, seed=1).launched_by_name()
    assert len({kernel.hash for kernel in compiled}) <= 4 + 3  # `finish` has one for every power of two of parts
