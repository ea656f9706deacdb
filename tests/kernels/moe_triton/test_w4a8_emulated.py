"""Hopper's products of activations in FP8 with weights in MXFP4 as they were compiled, run by the PTX emulator under
drawn schedules."""

import re
from typing import Any

import pytest
import torch
from experts_case import Experts
from w8a8_stages import IN_FP32, Stages, tiled

from kernels.matrix import MicroScaled4
from kernels.quantize import quantize_reference
from kernels.rms_norm import AddNorm
from tests.support.ptx import emulated
from tests.support.ptx.memory import Fault

pytestmark = pytest.mark.long


def case(tokens: int, chosen: int = 2, experts: int = 3, sizes: tuple[int, int] = (512, 512), **more: Any) -> Experts:
    return Experts(tokens, chosen, experts, *sizes, formats=("mxfp4", "mxfp4"), quantize_activations=True, **more)


def check(case: Experts, seed: int = 0, programs: int = 3, **product: int) -> None:
    with emulated(seed, consecutive=True) as launches:
        stages = Stages.run(case, tiled(case, programs, **product))
    assert launches.count("product") == 2
    assert launches.count("gather") == 1
    stages.check(IN_FP32)


@pytest.mark.parametrize("tokens", [1, 64, 65, 130, 200, 257])
def test_any_number_of_tokens(tokens: int) -> None:
    check(case(tokens), tokens)


def test_clamped() -> None:
    check(case(65, limit=0.5))


def test_rings_go_round() -> None:
    """Programs take several items, the last of which has no pairs for a partition; one program has none."""
    check(case(140, 2, 2, (1024, 512)), stages=2, programs=2)
    check(case(3, 2, 2), programs=9)


def test_padded_tokens_get_zero_and_disturb_nobody() -> None:
    check(case(5, padded=(2, 3, 4), holes=True))


def test_shared_experts_among_the_routed() -> None:
    check(case(20, 3, 4, shared=1, padded=(0, 7)), group=1)


def test_sums_begin_with_what_comes_before() -> None:
    found = case(20, holes=True, added=True)
    check(found)
    found.inputs["before"] = found.inputs["before"].flip(0)
    with pytest.raises(AssertionError):
        check(found)


def test_a_group_of_zeros_is_zero() -> None:
    found = case(40)
    found.tensors["x"][:, :128] = 0
    found.tensors["x"][3] = 0
    check(found)
    assert not found.tensors["out"][3].any()


def test_scales_that_are_far_apart() -> None:
    """Groups of a row are up to 2^11 apart, and those of zeros any; rows have their own powers of two."""
    random, weights = torch.Generator().manual_seed(5), []
    for rows, features in ((1024, 512), (512, 512)):
        data = torch.randint(0, 256, (3, rows, features // 2), generator=random).to(torch.uint8)
        row = torch.randint(104, 112, (3, rows, 1), generator=random)
        scales = row + torch.randint(0, 12, (3, rows, features // 32), generator=random)
        data[:, ::5, 48:64], scales[:, ::5, 3] = 0x80, 3
        found = MicroScaled4(data, scales.to(torch.uint8)).with_least()
        assert found.least is not None
        weights.append(found)
    check(case(70, weights=tuple(weights)))


def test_a_whole_call() -> None:
    """The same bits as kernel by kernel, from tokens that were rounded before, and with the norm behind."""
    found = case(30, holes=True)
    with emulated():
        want = Stages.run(found, tiled(found, 3)).case.tensors["out"].clone()
        found.refill()
        assert torch.equal(found.run(tiled(found, 2)), want)
        x = found.tensors["x"]
        rounded = torch.empty(x.shape, dtype=torch.float8_e4m3fn), torch.empty(len(x), x.shape[1] // 128)
        quantize_reference(x, *rounded)
        found.refill()
        assert torch.equal(found.run(tiled(found, 3), rounded=rounded), want)
        norm: AddNorm = found.norm()
        found.run(tiled(found, 3), norm=norm)
    found.check_norm(norm, want)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(r"fence\.proxy\.async[^;]*;", id="weights that are not fenced"),
        pytest.param(r"wgmma\.wait_group[^;]*;", id="sums that are not waited for"),
    ],
)
def test_faults_would_be_noticed(fault: str) -> None:
    found = case(70, sizes=(1024, 512))

    def broken(ptx: str) -> str:
        return re.sub(fault, "", ptx) if "wgmma" in ptx else ptx

    with pytest.raises((AssertionError, Fault)):  # noqa: PT012
        with emulated(3, edit=broken):
            stages = Stages.run(found, tiled(found, 2))
        stages.check(IN_FP32)
