"""Hopper's products of activations in FP8 as they were compiled, run by the PTX emulator under drawn schedules."""

import re
from typing import Any

import pytest
import torch
from experts_case import Experts
from torch import Tensor
from w8a8_stages import BLOCKS, IN_FP32, Stages, tiled

from kernels.moe import schedule, w8a8_launch
from kernels.quantize import Fp8Rows, quantize_reference
from kernels.rms_norm import AddNorm
from tests.support.ptx import emulated
from tests.support.ptx.memory import Fault

pytestmark = pytest.mark.long


def case(tokens: int, chosen: int = 1, experts: int = 2, sizes: tuple[int, int] = (256, 128), **more: Any) -> Experts:
    return Experts(tokens, chosen, experts, *sizes, formats=BLOCKS, quantize_activations=True, **more)


def check(case: Experts, seed: int = 0, programs: int = 3, **product: int) -> None:
    with emulated(seed, consecutive=True) as launches:
        stages = Stages.run(case, tiled(case, programs, **product))
    assert launches.count("product") == 2
    assert launches.count("quantize_kernel") == 1
    stages.check(IN_FP32)


@pytest.mark.parametrize("tokens", [1, 64, 65, 130])
def test_any_number_of_tokens(tokens: int) -> None:
    check(case(tokens), tokens)


def test_clamped() -> None:
    check(case(65, limit=0.5))


def test_rings_go_round() -> None:
    """Both products have more steps than stages; the last block of `down` is moved back."""
    check(case(70, sizes=(640, 384)), stages=2, programs=2)


def test_padded_tokens_get_zero_and_disturb_nobody() -> None:
    check(case(5, 2, 3, padded=(2, 3, 4), holes=True))


def test_shared_experts_among_the_routed() -> None:
    check(case(20, 3, 4, shared=1, padded=(0, 7)), group=1, stages=3)


def test_a_group_of_zeros_is_zero() -> None:
    """The group is one of a token, and one of the inputs of `down`."""
    found = case(40)
    found.tensors["x"][:, :128] = 0
    found.tensors["x"][3] = 0
    check(found)
    assert not found.tensors["out"][3].any()


def test_a_whole_call() -> None:
    """The same bits as kernel by kernel; and with the norm behind."""
    found = case(30, 2, 3, holes=True)
    with emulated():
        want = Stages.run(found, tiled(found, 3)).case.tensors["out"].clone()
        found.refill()
        assert torch.equal(found.run(tiled(found, 2)), want)
        norm: AddNorm = found.norm()
        found.run(tiled(found, 3), norm=norm)
    found.check_norm(norm, want)


@pytest.mark.parametrize("before", [False, True])
def test_few_tokens_claim_nothing(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, whether programs claim the items of `down` or not, and whoever rounds the tokens."""
    found = case(18, 3, 5, sizes=(640, 384), holes=True, shared=1)
    with emulated(1), monkeypatch.context() as patch:
        patch.setattr(w8a8_launch, "MOST_UNCLAIMED", 0)
        want = found.run(tiled(found, 3)).clone()
    found.refill()
    x, rounded = found.tensors["x"], None
    if before:
        rounded = torch.empty(x.shape, dtype=torch.float8_e4m3fn), torch.empty(len(x), x.shape[1] // 128)
        quantize_reference(x, *rounded)
    with emulated(2) as launches:
        found.run(tiled(found, 3), rounded=rounded)
    assert torch.equal(found.tensors["out"], want)
    assert ("quantize_kernel" in launches) is not before


def unrounded(tokens: int, features: int) -> Fp8Rows:
    """Memory for a norm in FP8 that lies as products want it, with rows behind the last token."""
    groups, rows = features // 128, tokens + 3
    number = torch.full((rows, features), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return Fp8Rows(number, torch.full((groups, rows), torch.nan).t(), torch.full((tokens, groups), torch.nan))


def check_rounded(fp8: Fp8Rows, out: Tensor) -> None:
    """What `quantize` makes of the norm, bit for bit, and nothing behind the last token."""
    tokens = len(out)
    number, scale = torch.empty(out.shape, dtype=torch.float8_e4m3fn), torch.empty_like(fp8.scale_RG[:tokens])
    quantize_reference(out, number, scale)
    assert torch.equal(fp8.number_RK[:tokens].view(torch.uint8), number.view(torch.uint8))
    assert torch.equal(fp8.scale_RG[:tokens], scale)
    assert fp8.by_token_TG is not None
    assert torch.equal(fp8.by_token_TG, scale)
    assert fp8.scale_RG[tokens:].isnan().all()


@pytest.mark.parametrize(("seed", "sizes", "tokens"), [(0, (256, 128), 9), (1, (384, 640), 4), (2, (640, 256), 20)])
def test_a_norm_that_is_rounded(seed: int, sizes: tuple[int, int], tokens: int) -> None:
    """Two calls one behind the other, of other tokens, on memory that holds poison; features that are a power of two
    and that are not."""
    found = case(tokens, 3, 5, sizes=sizes, holes=True, shared=1, padded=(2,))
    tiling, norm, x = tiled(found, 3), found.norm(), found.tensors["x"]
    workspace, begun, first = found.workspace(tiling), norm.residual_TE.clone(), x.clone()
    rounded = torch.empty(x.shape, dtype=torch.float8_e4m3fn), torch.empty(len(x), x.shape[1] // 128)
    sums = []
    for sign in (1, -2):
        quantize_reference(x.copy_(sign * first), *rounded)
        with emulated():
            sums.append(found.run(tiling, rounded=rounded).clone())
    with emulated(seed, consecutive=True) as launches:
        for sign, want in zip((1, -2), sums, strict=True):
            found.poison(workspace, tiling)
            quantize_reference(x.copy_(sign * first), *rounded)
            norm.residual_TE.copy_(begun)
            fp8 = unrounded(*x.shape)
            found.call(tiling, workspace, True, norm, rounded, fp8).run()
            found.check_norm(norm, want)
            check_rounded(fp8, found.tensors["out"])
    assert launches == 2 * ["sort_few", "product", "product", "combine_norm"]


def test_what_it_does_not_take() -> None:
    for wrong in (
        Experts(4, hidden=192, intermediate=128, formats=BLOCKS),
        Experts(4, hidden=128, intermediate=128, formats=BLOCKS),
        Experts(4, hidden=256, intermediate=128, formats=((64, 128), (128, 128))),
        Experts(4, hidden=256, intermediate=128, formats=((128, 128), None)),
        Experts(4, hidden=256, intermediate=128, formats=BLOCKS, dtype=torch.float16),
        Experts(4, hidden=256, intermediate=128, formats=BLOCKS, groups=2),
    ):
        with pytest.raises(ValueError, match="whole blocks"):
            schedule.w8a8(wrong.shape, 3, wrong.stored)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(r"fence\.proxy\.async[^;]*;", id="copies that are not fenced"),
        pytest.param(r"wgmma\.wait_group[^;]*;", id="sums that are not waited for"),
    ],
)
def test_faults_would_be_noticed(fault: str) -> None:
    found = case(70, sizes=(640, 384))

    def broken(ptx: str) -> str:
        return re.sub(fault, "", ptx) if "wgmma" in ptx else ptx

    with pytest.raises((AssertionError, Fault)):  # noqa: PT012
        with emulated(3, edit=broken):
            stages = Stages.run(found, tiled(found, 2, stages=2))
        stages.check(IN_FP32)
