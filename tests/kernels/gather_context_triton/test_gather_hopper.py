"""Compilation of the gather for Hopper: no spills, wide loads, one variant a kind of cache."""

import pytest
import torch
from gather_case import Gather

from tests.support.hopper import compile_only, machine_code, resources

pytestmark = pytest.mark.gate


@pytest.mark.parametrize("features", [576, 80])
def test_compiles_without_spills_and_loads_wide(features: int) -> None:
    with compile_only() as compiled:
        Gather([70, 3], 64, features).run()
    resources(compiled[0]).check(registers=96)
    assert "LDG.E.128" in machine_code(compiled[0])


@pytest.mark.parametrize(("latent", "features"), [(512, 576), (64, 80)])
def test_fp8_entries_compile_without_spills(latent: int, features: int) -> None:
    with compile_only() as compiled:
        Gather([70, 3], 64, features, latent=latent).run()
    resources(compiled[0]).check(registers=128)


def test_rows_and_entries_compile_nothing_new() -> None:
    with compile_only() as compiled:
        for counts, begin in [([1], 0), ([16], 1), ([0, 64], 64), ([3] * 17, 16), ([5, 2048], 4096)]:
            Gather(counts, begin).run()
    assert len({kernel.hash for kernel in compiled}) == 1


def test_tensors_of_another_kind_are_refused() -> None:
    case = Gather([3, 4])
    wrong = {
        "cache": case.tensors["cache"].float(),
        "table": case.tensors["table"].long(),
        "cu": case.tensors["cu"][1:],
        "out": case.tensors["out"].t().contiguous().t(),
    }
    for name, tensor in wrong.items():
        with pytest.raises(ValueError, match=r"page tables|the cache is|features lie side by side"):
            Gather.run(_with(Gather([3, 4]), name, tensor))


def _with(case: Gather, name: str, tensor: torch.Tensor) -> Gather:
    case.tensors[name] = tensor
    return case
