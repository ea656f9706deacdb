"""The experts' products with FP8 and INT4 weights as they were compiled, run by the PTX emulator: their launches are
dependent, and follow each other on memory that holds poison."""

import pytest
import torch
from experts_case import Experts, Format

from kernels.matrix import BlockScaled
from kernels.moe import scaled_launch
from kernels.moe.schedule import Product
from tests.support.ptx import emulated

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("rows", "format", "sizes", "groups"),
    [
        (0, (16, 64), (80, 16), 0),
        (16, "int4", (288, 64), 0),
        (16, (16, 64), (144, 80), 0),
        (64, (128, 128), (144, 80), 4),
    ],
)
def test_every_tile(rows: int, format: Format, sizes: tuple[int, int], groups: int) -> None:
    """Two steps of the main loop and more, of whole blocks and of parts of one. Sums are added to what comes before."""
    how = {"groups": groups, "holes": True, "padded": (2,), "seed": rows, "added": not groups}
    case = Experts(4, 2, 3, *sizes, formats=(format, format), **how)
    with emulated(rows, consecutive=True, fences=False) as launches:
        case.run(case.tiling(rows=rows), dependent=True)
    assert launches == (["sort_few"] if rows else []) + ["gate_up", "down"] + (["combine"] if rows else [])
    case.check()


@pytest.mark.parametrize("format", [(16, 64), (64, 128)])
def test_programs_of_several_groups_have_the_bits_of_one_for_each(format: Format) -> None:
    """Two steps for each group."""
    case = Experts(5, 2, 3, 64, 4 * 128, groups=4, holes=True, padded=(2,), adds=False, formats=(format, format))
    served = case.tiling()
    assert (served.walked, served.down.block_k) == (4, 64)
    found = []
    for walked in (1, 2, 4):
        case.refill()
        with emulated(3, fences=False):
            found.append(case.run(case.tiling(walked=walked), dependent=True).clone())
        case.check()
    assert [torch.equal(found[0], other) for other in found] == [True] * len(found)


@pytest.mark.parametrize("format", [(16, 64), "mxfp8"])
def test_a_single_token_on_hopper(format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero and subnormal weights included, and more features than a step has."""
    monkeypatch.setattr(scaled_launch, "is_hopper", lambda device: True)
    case = Experts(1, 3, 5, 2112, 64, formats=(format, format), holes=True, limit=0.5)
    with emulated(1, consecutive=True, fences=False) as launches:
        case.run(case.tiling(rows=0), dependent=True)
    assert launches == ["gate_up", "down"]
    case.check()


@pytest.mark.parametrize(
    ("format", "ahead", "sizes"),
    [
        ("mxfp8", 0, (64, 96)),
        ("mxfp8", 1, (64, 64)),
        ((16, 64), 2, (48, 160)),  # two steps and a half of a pair; the last block of rows is moved back
        ((128, 128), 3, (64, 48)),
    ],
)
def test_down_of_a_single_token_on_hopper(
    format: Format, ahead: int, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are on their way while others are multiplied, of pairs with several steps and of one; pairs without
    an expert, and something before the sum."""
    monkeypatch.setattr(scaled_launch, "is_hopper", lambda device: True)
    monkeypatch.setattr(scaled_launch, "DOWN", Product(32, 64, ahead + 1, 2))
    case = Experts(1, 4, 5, *sizes, formats=(format, format), holes=True, added=True, seed=ahead)
    with emulated(ahead, consecutive=True, fences=False) as launches:
        case.run(case.tiling(rows=0), dependent=True)
    assert launches == ["gate_up", "down"]
    case.check()


def test_every_weight_is_what_it_is_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN apart, which no checkpoint that is loaded holds."""
    monkeypatch.setattr(scaled_launch, "is_hopper", lambda device: True)
    code = torch.arange(256, dtype=torch.uint8)
    code[(code & 127) == 127] = 0
    down = BlockScaled(
        code[None, :, None].expand(1, 256, 16).contiguous().view(torch.float8_e4m3fn), torch.ones(1, 2, 1)
    )
    case = Experts(1, 1, 1, 256, 16, formats=((128, 128), (128, 128)))
    assert case.weights is not None
    case.weights = case.weights[0], down
    tiling = case.tiling(rows=0)
    call = case.call(tiling, case.workspace(tiling))
    with emulated(2):
        call.scratch.act_YI.copy_(torch.eye(16)[:1])
        call.down_singly()
    weight = case.tensors["weight"][0, 0]
    assert torch.equal(call.out_TE[0], (down.data.float()[0, :, 0] * weight).bfloat16())
