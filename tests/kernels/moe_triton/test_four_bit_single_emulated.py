"""Hopper's products of a single token with weights of four bits as they were compiled, run by the PTX emulator under
drawn schedules, on memory that holds poison."""

from typing import Any

import pytest
import torch
from experts_case import Experts, Format

from kernels.matrix import FourBits, GroupScaled, MicroScaled4
from kernels.moe import schedule
from kernels.moe.schedule import ExpertsShape
from tests.support.ptx import emulated

INT4 = ("int4", "int4")


def case(chosen: int = 2, experts: int = 3, sizes: tuple[int, int] = (512, 512), **more: Any) -> Experts:
    return Experts(1, chosen, experts, *sizes, formats=INT4, **more)


def check(case: Experts, seed: int = 0) -> None:
    with emulated(seed, consecutive=True) as launches:
        case.run(schedule.four_bit_alone(case.shape, 1, case.stored), dependent=True)
    assert launches == ["product", "product", "combine"]
    case.check()


@pytest.mark.long
@pytest.mark.parametrize(("format", "limit"), [("int4", 0.0), ("mxfp4", 0.0), ("int4", 0.5), ("mxfp4", 0.5)])
def test_one_token(format: Format, limit: float) -> None:
    """Eight pieces of work for four programs, then sixteen: both products have programs with several experts."""
    check(Experts(1, 2, 3, 512, 512, formats=(format, format), limit=limit))


@pytest.mark.long
@pytest.mark.parametrize("format", ["int4", "mxfp4"])
def test_three_programs_of_blocks_of_several_experts(format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """With four steps of weights on their way, which at the end of an expert are the next one's."""
    monkeypatch.setattr(schedule, "THREE_SINGLE", 64)
    found = Experts(1, 2, 3, 2048, 1024, formats=(format, format), limit=0.5, holes=True)
    tiling = schedule.four_bit_alone(found.shape, 1, found.stored)
    assert (tiling.gate_up.stages, tiling.down.stages) == (4, 4)
    check(found)


@pytest.mark.long
@pytest.mark.parametrize(
    "found",
    [
        case(3, 5, (1024, 512), holes=True),
        case(2, 5, (512, 1024), shared=1),
        case(sizes=(768, 256)),
        case(padded=(0,)),
        case(added=True),
    ],
    ids=["pairs of no expert", "a shared expert", "steps that are no pairs", "padding", "added to what comes before"],
)
def test_calls_of_every_kind(found: Experts) -> None:
    check(found, 1)


@pytest.mark.long
@pytest.mark.parametrize("format", ["int4", "mxfp4"])
def test_every_number_is_what_it_is(format: Format) -> None:
    """Every nibble in any place of a word and in any group, with scales of their own, for inputs of one feature."""
    features = 512
    torch.manual_seed(0)
    number = (torch.arange(features) + torch.arange(512)[:, None]) % 16
    data = (number[:, ::2] | number[:, 1::2] << 4).to(torch.uint8)
    data = data[None].repeat(8, 1, 1)
    down: FourBits = GroupScaled(data, torch.rand(8, 512, features // 32).bfloat16())
    if format == "mxfp4":
        # The largest that the loader lets in, and such as no product may make a number of fewer bits of.
        down = MicroScaled4(data, torch.randint(20, 129, (8, 512, features // 32), dtype=torch.uint8))
    found = Experts(1, 8, 8, 512, features, formats=(format, format))
    assert found.weights is not None
    found.weights = found.weights[0], down
    tiling = schedule.four_bit_alone(found.shape, 1, found.stored)
    call = found.call(tiling, found.workspace(tiling))
    place = torch.randperm(features)[:8]
    with emulated(2):
        call.scratch.act_YI.copy_(torch.eye(features)[place])
        call.down()
    for pair, expert in enumerate(found.tensors["id"].flatten().tolist()):
        want = down.float()[expert, :, place[pair]]
        assert torch.equal(call.scratch.partial_YGE[pair, 0], want.bfloat16())


@pytest.mark.long
def test_a_whole_call_with_the_norm_behind() -> None:
    found = case(3)
    tiling = schedule.four_bit_alone(found.shape, 1, found.stored)
    with emulated():
        want = found.run(tiling).clone()
        found.refill()
        norm = found.norm()
        found.run(tiling, norm=norm)
    found.check_norm(norm, want)


def test_what_it_does_not_take() -> None:
    for wrong in (
        Experts(2, hidden=512, intermediate=512, formats=INT4),
        Experts(1, hidden=512, intermediate=128, formats=INT4),
        Experts(1, hidden=640, intermediate=512, formats=INT4),
        Experts(1, hidden=512, intermediate=512, formats=("int4", None)),
        Experts(1, hidden=512, intermediate=512, formats=("int4", "mxfp4")),
        Experts(1, hidden=512, intermediate=512, formats=INT4, dtype=torch.float16),
        Experts(1, hidden=512, intermediate=512, formats=INT4, groups=2),
        Experts(1, 1, hidden=512, intermediate=512, formats=INT4),
    ):
        with pytest.raises(ValueError, match="a single token's weights of four bits take"):
            schedule.four_bit_alone(wrong.shape, 132, wrong.stored)


def test_it_serves_single_tokens_alone() -> None:
    """The memory is the same however weights are stored."""
    stored = case().stored
    for tokens, hopper, groups in ((1, 132, 0), (2, 132, 0), (1, 0, 0), (1, 132, 8)):
        shape = ExpertsShape(tokens, 8, 384, 7168, 2048, groups=groups, hopper=hopper)
        found = schedule.tiling(shape, stored)
        assert (not found.rows and found.programs > 0) == (tokens == 1 and hopper > 0 and not groups)
        plain = schedule.tiling(shape, (schedule.PLAIN,) * 2)
        assert schedule.Workspace.bytes(shape, found) == schedule.Workspace.bytes(shape, plain)
