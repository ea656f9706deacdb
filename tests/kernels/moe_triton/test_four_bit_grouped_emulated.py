"""Hopper's products of many tokens with weights of four bits as they were compiled, run by the PTX emulator under drawn
schedules, on memory that holds poison."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from experts_case import Experts, Format

from kernels.moe import four_bit_grouped, schedule
from kernels.moe.launch import ExpertLaunches as Call
from kernels.moe.schedule import FEW, ExpertsShape, ExpertTiling
from tests.support.ptx import emulated


def case(
    tokens: int,
    chosen: int = 2,
    experts: int = 3,
    sizes: tuple[int, int] = (256, 256),
    format: Format = "int4",
    **more: Any,
) -> Experts:
    return Experts(tokens, chosen, experts, *sizes, formats=(format, format), **more)


def grouped(case: Experts, rows: int = 0, programs: int = 2, stages: int = 0, group: int = 4) -> ExpertTiling:
    """Return the tiling of the call, or one with other tiles, rings and programs. Tiles of a height have the rings of
    that height."""
    tiling = schedule.four_bit_grouped(case.shape, programs, case.stored)
    stages = stages or {0: tiling.gate_up.stages, 64: 5, 128: 4}[rows]
    gate_up, down = (replace(product, stages=stages, group=group) for product in (tiling.gate_up, tiling.down))
    return replace(tiling, rows=rows or tiling.rows, gate_up=gate_up, down=down)


def check(case: Experts, seed: int = 0, **changes: int) -> None:
    with emulated(seed, consecutive=True) as launches:
        case.run(grouped(case, **changes), dependent=True)
    assert launches[-4:] == ["rearrange", "product", "product", "combine"]
    case.check()


@pytest.mark.long
@pytest.mark.parametrize(
    ("tokens", "rows"), [(2, 64), (32, 64), (33, 64), (65, 64), (3, 128), (64, 128), (65, 128), (129, 128)]
)
def test_any_number_of_pairs(tokens: int, rows: int) -> None:
    """One expert of two has the pairs: one in tiles of either width, and two that have several."""
    check(case(tokens, 1, 2, skewed=True), tokens, rows=rows)


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "stages", "programs"),
    [((1024, 256), 5, 1), ((512, 512), 3, 3), ((256, 768), 2, 2), ((768, 256), 4, 5)],
)
def test_rings_and_blocks(sizes: tuple[int, int], stages: int, programs: int) -> None:
    """Rings go round several times, and programs take several items; one program has none."""
    check(case(20, sizes=sizes), stages, rows=64, stages=stages, programs=programs)


@pytest.mark.long
@pytest.mark.parametrize(
    ("found", "rows", "stages"),
    [
        (case(20, sizes=(1024, 512), format="mxfp4", holes=True), 64, 5),
        (case(65, 1, 2, (512, 512), "mxfp4", skewed=True, limit=0.5), 128, 4),
        (case(9, limit=0.5), 64, 5),
    ],
    ids=["rings go round", "both widths of tile, clamped", "INT4, clamped"],
)
def test_mxfp4_and_clamped_experts(found: Experts, rows: int, stages: int) -> None:
    check(found, 1, rows=rows, stages=stages)


@pytest.mark.long
@pytest.mark.parametrize(
    "found",
    [
        case(40, 3, 5, holes=True),
        case(9, 3, 6, padded=(0, 4)),
        case(5, 3, padded=(0, 1, 2, 3, 4)),
        case(70, 3, 4, shared=1, padded=(7,)),
    ],
    ids=["pairs of no expert", "padding", "padding alone", "a shared expert"],
)
@pytest.mark.parametrize("few", [FEW, 0])
def test_calls_of_every_kind(found: Experts, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls come after either sort."""
    sort = Call.sort
    monkeypatch.setattr(Call, "sort", lambda call: sort(call, few=few))
    found.refill()
    check(found, few)


@pytest.mark.long
def test_nothing_is_written_for_pairs_that_are_no_work() -> None:
    found = case(30, 3, holes=True)
    tiling = grouped(found)
    call = found.call(tiling, found.workspace(tiling))
    with emulated():
        call.sort()
        call.rearrange()
        call.gate_up()
        call.scratch.partial_YGE.fill_(torch.nan)
        call.down()
    wanted = (found.tensors["id"].flatten() >= 0).sum()
    assert 0 < wanted < 90
    assert bool(call.scratch.act_YI[wanted:].isnan().all())
    assert not call.scratch.act_YI[:wanted].isnan().any()
    assert torch.equal(call.scratch.partial_YGE.isnan().all(2)[:, 0], found.tensors["id"].flatten() < 0)
    assert call.scratch.table[2:4].tolist() == [0, 0]


@pytest.mark.long
def test_a_pair_does_not_depend_on_its_tile() -> None:
    """Bit for bit, whatever else is in it, however many it has, and how wide it is."""
    batch = case(70, 1, 2)
    with emulated():
        out = batch.run(grouped(batch, rows=128)).clone()
        for tokens, rows in ((2, 64), (40, 64), (66, 128)):
            part = case(tokens, 1, 2, weights=batch.weights)
            for name in ("x", "id", "weight"):
                part.tensors[name].copy_(batch.inputs[name][-tokens:])
            assert torch.equal(part.run(grouped(part, rows=rows)), out[-tokens:])


@pytest.mark.long
@pytest.mark.parametrize(("format", "features"), [("int4", (0, 5, 37, 200, 255)), ("mxfp4", (3, 100, 290, 511))])
def test_every_number_times_its_scale_is_rounded_once(format: Format, features: tuple[int, ...]) -> None:
    """A token that is 0 but for one feature gets, of gate and up, the checkpoint's weight in bf16."""
    found = case(2, 1, 1, (512, 512) if format == "mxfp4" else (256, 256), format)
    assert found.weights is not None
    for feature in features:
        found.tensors["x"].zero_()
        found.tensors["x"][:, feature] = 1.0
        found.tensors["id"].zero_()
        tiling = grouped(found)
        call = found.call(tiling, found.workspace(tiling))
        with emulated():
            call.sort()
            call.rearrange()
            call.gate_up()
        order = torch.cat([64 * j + places() for j in range(found.intermediate // 64)])
        gate, up = found.weights[0].float()[0, :, feature].bfloat16().float().chunk(2)
        want = (torch.nn.functional.silu(gate) * up)[order]
        torch.testing.assert_close(call.scratch.act_YI[0].float(), want, rtol=2**-8, atol=1e-6)


def places() -> torch.Tensor:
    """Return which feature stands at each of 64 places."""
    i = torch.arange(64)
    two, eighth, quarter, one = i // 16, i // 8 % 2, i // 2 % 4, i % 2
    return 16 * quarter + 8 * (two // 2) + 4 * one + 2 * (two % 2) + eighth


def test_every_feature_has_a_place() -> None:
    assert sorted(places().tolist()) == list(range(64))
    assert [four_bit_grouped.place.fn(i) for i in range(64)] == places().tolist()


def test_what_it_does_not_take() -> None:
    for wrong in (
        case(1),
        case(99, sizes=(512, 128)),
        case(99, sizes=(640, 512)),
        Experts(99, hidden=512, intermediate=512, formats=("int4", None)),
        case(99, dtype=torch.float16),
        case(99, groups=2),
        case(99, sizes=(512, 256), format="mxfp4"),
        Experts(99, hidden=512, intermediate=512, formats=("int4", "mxfp4")),
    ):
        with pytest.raises(ValueError, match="many tokens' weights of four bits take"):
            grouped(wrong)


@pytest.mark.parametrize("inner", [2048, 1024, 512, 256])
def test_it_serves_many_tokens(inner: int) -> None:
    """The memory is the same however weights are stored; sizes are all of a rank's of Kimi K2."""
    stored = case(2).stored
    for tokens, rows in ((336, 8), (337, 64), (575, 64), (576, 64), (2688, 64), (2689, 128), (8192, 128)):
        shape = ExpertsShape(tokens, 8, 384, 7168, inner, hopper=132)
        found, plain = schedule.tiling(shape, stored), schedule.tiling(shape)
        assert (found.rows, found.programs, found.rearranged) == (rows, 132, rows >= 64)
        assert schedule.Workspace.bytes(shape, found) == schedule.Workspace.bytes(shape, plain)
