"""Hopper's decode kernels as they were compiled, run by the PTX emulator under drawn schedules."""

import pytest
import torch
from decode_case import Case

from kernels.mla_decode import launch
from kernels.mla_decode.schedule import hopper_tiling
from kernels.testing.ptx import emulated


def check(path: str, case: Case, workers: int, seed: int = 0, dependent: bool = True) -> None:
    tiling = hopper_tiling(case.shape, workers)
    assert tiling.path == path
    workspace, t = case.workspace(tiling), case.tensors
    tensors = (t[name] for name in ("q", "cache", "table", "length", "out", "lse"))
    with emulated(seed) as launches:
        launch.plan(t["length"], t["table"], workspace, first=case.first)
        launch.attend(*tensors, workspace, scale=case.scale, first=case.first, dependent=dependent, early=dependent)
        launch.merge(t["out"], t["lse"], workspace, dependent=dependent)
    assert launches[1] == f"attend_{path}"
    case.compare()


def deepseek(lengths: list[int], width: int, heads: int, first: int = 0, invariant: bool = False) -> Case:
    return Case(lengths, width, heads, 512, 64, torch.bfloat16, first=first, invariant=invariant)


@pytest.mark.parametrize(
    ("lengths", "width", "heads", "workers"),
    [([70], 2, 16, 1), ([200, 65, 0, 1], 4, 16, 3), ([130, 64], 2, 40, 3), ([300], 8, 3, 1)],
)
def test_wide(lengths: list[int], width: int, heads: int, workers: int) -> None:
    """One tile and several, whole and not; splits, and queries of more than one block."""
    check("wide", deepseek(lengths, width, heads), workers, seed=len(lengths))


@pytest.mark.parametrize("seed", range(2))
def test_wide_under_other_schedules(seed: int) -> None:
    check("wide", deepseek([390, 64], 4, 16), 2, seed)


def test_wide_from_a_later_entry_on() -> None:
    check("wide", deepseek([2, 100], 4, 16, first=1), 2)


def test_wide_in_invariant_mode() -> None:
    check("wide", deepseek([515, 0], 1, 16, invariant=True), 2, dependent=False)


@pytest.mark.parametrize(
    ("lengths", "width", "heads", "first"),
    [([0, 1, 64, 65, 129], 1, 16, 0), ([130, 2, 70], 2, 8, 0), ([71, 200], 1, 4, 70), ([7, 65], 5, 3, 1)],
)
def test_narrow(lengths: list[int], width: int, heads: int, first: int) -> None:
    check("narrow", deepseek(lengths, width, heads, first), 3, seed=width)


@pytest.mark.parametrize("lengths", [[64, 0, 70, 1, 130, 64], [1] * 7, [200, 1, 0, 0, 1]])
@pytest.mark.parametrize("first", [0, 1])
def test_narrow_where_workers_go_on_with_other_rows(lengths: list[int], first: int) -> None:
    check("narrow", deepseek(lengths, 1, 16, first), 2, seed=first)


def test_narrow_launched_plainly() -> None:
    check("narrow", deepseek([200, 13], 1, 16), 3, dependent=False)
