"""Hopper's products of several tokens with weights of four bits as they were compiled, run by the PTX emulator under
drawn schedules, on memory that holds poison."""

from typing import Any

import pytest
import torch
from experts_case import Experts, Format

from kernels.moe import schedule
from kernels.moe.schedule import ExpertsShape, ExpertTiling
from tests.support.ptx import emulated


def case(
    tokens: int,
    chosen: int = 2,
    experts: int = 16,
    sizes: tuple[int, int] = (512, 512),
    format: Format = "int4",
    **more: Any,
) -> Experts:
    return Experts(tokens, chosen, experts, *sizes, formats=(format, format), **more)


def tiled(case: Experts, multiprocessors: int = 1) -> ExpertTiling:
    return schedule.four_bit_tiled(case.shape, multiprocessors, case.stored)


def check(case: Experts, seed: int = 0) -> None:
    with emulated(seed, consecutive=True) as launches:
        case.run(tiled(case), dependent=True)
    assert launches[-3:] == ["product", "product", "combine"]
    case.check()


@pytest.mark.long
@pytest.mark.parametrize(("tokens", "experts"), [(2, 4), (4, 8), (5, 10), (13, 4)])
def test_every_height_of_tile(tokens: int, experts: int) -> None:
    """The last height's experts have more pairs than a tile has."""
    check(case(tokens, experts=experts), tokens)


@pytest.mark.long
@pytest.mark.parametrize(
    "found",
    [
        case(3, 3, 9, (1024, 512), "mxfp4", holes=True),
        case(13, 2, 4, (512, 256), "mxfp4", limit=0.5),
        case(2, limit=0.5),
    ],
    ids=["tiles of two", "tiles of eight, clamped", "INT4, clamped"],
)
def test_mxfp4_and_clamped_experts(found: Experts) -> None:
    check(found, 2)


@pytest.mark.long
@pytest.mark.parametrize(
    "found",
    [
        case(3, 3, 9, (1024, 512), holes=True),
        case(2, 3, 5, (512, 1024), shared=1),
        case(2, sizes=(512, 256)),
        case(6, sizes=(768, 256)),
        case(9, 2, 18, padded=(0, 4), skewed=True),
        case(2, padded=(0, 1)),
    ],
    ids=[
        "pairs of no expert",
        "a shared expert",
        "one step",
        "steps that are no pairs",
        "two tiles of an expert, and padding",
        "padding alone",
    ],
)
def test_calls_of_every_kind(found: Experts) -> None:
    check(found, 1)


@pytest.mark.long
def test_a_whole_call_with_the_norm_behind() -> None:
    found = case(3)
    with emulated():
        want = found.run(tiled(found)).clone()
        found.refill()
        norm = found.norm()
        found.run(tiled(found), norm=norm)
    found.check_norm(norm, want)


@pytest.mark.long
def test_a_pair_does_not_depend_on_its_tile() -> None:
    """Bit for bit, whatever else is in it, and however many it has."""
    batch = case(8)
    with emulated():
        out = batch.run(tiled(batch)).clone()
        for tokens in (2, 3, 5):
            part = case(tokens, weights=batch.weights)
            for name in ("x", "id", "weight"):
                part.tensors[name].copy_(batch.inputs[name][-tokens:])
            assert torch.equal(part.run(tiled(part)), out[-tokens:])


@pytest.mark.long
def test_what_it_does_not_take() -> None:
    for wrong in (
        case(1),
        case(13, experts=3),
        case(2, sizes=(512, 128)),
        case(2, sizes=(640, 512)),
        case(2, sizes=(7424, 512)),
        Experts(2, hidden=512, intermediate=512, formats=("int4", None)),
        case(2, dtype=torch.float16),
        case(2, groups=2),
    ):
        with pytest.raises(ValueError, match="several tokens' weights of four bits take"):
            tiled(wrong, 132)


def test_it_serves_few_tokens_of_an_expert() -> None:
    """The memory is the same however weights are stored."""
    stored = case(2).stored
    for tokens, rows in ((2, 2), (4, 2), (5, 8), (48, 8), (336, 8), (337, 64)):
        shape = ExpertsShape(tokens, 8, 384, 7168, 2048, hopper=132)
        found, plain = schedule.tiling(shape, stored), schedule.tiling(shape)
        assert (found.rows, found.programs) == (rows, 132)
        assert schedule.Workspace.bytes(shape, found) == schedule.Workspace.bytes(shape, plain)
