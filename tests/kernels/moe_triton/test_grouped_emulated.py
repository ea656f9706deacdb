"""Hopper's products of many tokens as they were compiled, run by the PTX emulator under drawn schedules."""

from dataclasses import replace

import pytest
import torch
from experts_case import Experts

from kernels.moe import schedule
from kernels.moe.launch import ExpertLaunches as Call
from kernels.moe.schedule import FEW, ExpertTiling
from tests.support.ptx import emulated

pytestmark = pytest.mark.long


def grouped(case: Experts, programs: int = 3, stages: int = 4, group: int = 8) -> ExpertTiling:
    tiling = schedule.grouped(case.shape, programs)
    gate_up, down = (replace(product, stages=stages, group=group) for product in (tiling.gate_up, tiling.down))
    return replace(tiling, gate_up=gate_up, down=down)


def check(case: Experts, seed: int = 0, dependent: bool = False, **changes: int) -> None:
    with emulated(seed, consecutive=True) as launches:
        case.run(grouped(case, **changes), dependent)
    assert launches.count("product") == 2
    case.check()


@pytest.mark.parametrize(
    ("tokens", "dtype"),
    [(1, torch.bfloat16), (64, torch.float16), (65, torch.bfloat16), (129, torch.float16), (200, torch.bfloat16)],
)
def test_any_number_of_tokens(tokens: int, dtype: torch.dtype) -> None:
    """One expert of two has the tokens, through the ring twice."""
    check(Experts(tokens, 1, 2, 512, 64, dtype), tokens)


def test_clamped() -> None:
    check(Experts(65, 2, 4, 64, 32, limit=0.5))


@pytest.mark.parametrize("sizes", [(64, 32), (80, 48), (144, 176)])
def test_features_that_blocks_and_stages_do_not_divide(sizes: tuple[int, int]) -> None:
    check(Experts(5, 3, 5, *sizes))


@pytest.mark.parametrize("padded", [(2, 3, 4), (0, 1, 2, 3, 4)])
def test_padded_tokens_get_zero_and_disturb_nobody(padded: tuple[int, ...]) -> None:
    check(Experts(5, 2, padded=padded, holes=True))


def test_nothing_is_written_for_pairs_that_are_no_work() -> None:
    case = Experts(30, 2, holes=True)
    tiling = grouped(case)
    call = case.call(tiling, case.workspace(tiling))
    with emulated():
        call.run()
    wanted = (case.tensors["id"].flatten() >= 0).sum()
    assert 0 < wanted < 60
    assert bool(call.scratch.act_YI[wanted:].isnan().all())
    assert not call.scratch.act_YI[:wanted].isnan().any()
    assert torch.equal(call.scratch.partial_YGE.isnan().all(2)[:, 0], case.tensors["id"].flatten() < 0)


@pytest.mark.parametrize(
    ("tokens", "holes", "skewed", "programs", "stages", "group"),
    [(1, False, False, 1, 2, 1), (90, True, True, 1, 2, 1), (130, True, False, 4, 3, 2), (140, False, True, 2, 3, 2)],
)
def test_routings_and_rings(tokens: int, holes: bool, skewed: bool, programs: int, stages: int, group: int) -> None:
    """Rings go round several times, and programs take several items."""
    case = Experts(tokens, 2, 5, 208, 80, holes=holes, skewed=skewed, seed=tokens)
    check(case, tokens, programs=programs, stages=stages, group=group)


@pytest.mark.parametrize(
    ("tokens", "chosen", "experts", "shared", "group"),
    [(150, 3, 6, 2, 2), (270, 2, 4, 1, 1), (20, 3, 4, 2, 8), (140, 3, 3, 2, 2)],
)
@pytest.mark.parametrize("few", [FEW, 0])
def test_shared_experts_among_the_routed(
    tokens: int, chosen: int, experts: int, shared: int, group: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are as many tiles of shared experts as of routed ones, fewer and more; after either sort."""
    sort = Call.sort
    monkeypatch.setattr(Call, "sort", lambda call: sort(call, few=few))
    case = Experts(tokens, chosen, experts, 128, 272, shared=shared, padded=(0, 7), seed=tokens)
    with emulated(tokens, consecutive=True):
        case.run(replace(grouped(case, group=group), spread=True))
    case.check()


def test_every_item_is_claimed_once() -> None:
    """Whichever program comes first; and the counters are 0 again, so that products may be repeated without a sort."""
    case = Experts(150, 2, 4, 128, 176, shared=1)
    tiling = grouped(case)
    call = case.call(tiling, case.workspace(tiling))
    with emulated(consecutive=True):
        call.run()
    want = call.scratch.act_YI.clone(), case.tensors["out"].clone()
    assert call.scratch.table[2:4].tolist() == [0, 0]
    call.scratch.act_YI.fill_(float("nan"))
    call.scratch.partial_YGE.fill_(float("nan"))
    with emulated(seed=1, consecutive=True):
        call.gate_up()
        call.down()
        call.combine()
    assert torch.equal(call.scratch.act_YI, want[0])
    assert torch.equal(case.tensors["out"], want[1])


@pytest.mark.parametrize("tokens", [3, 90])
def test_the_same_bits_as_the_triton_kernels(tokens: int) -> None:
    """Steps of 64 features in both. What a pair gets depends neither on its tile nor on where in it it lies."""
    case = Experts(tokens, 2, 3, 192, 128)
    with emulated(fences=False):
        want = case.run(case.tall_tiling()).clone()
    check(case)
    assert torch.equal(case.tensors["out"], want)


def test_a_single_expert_is_a_dense_feed_forward() -> None:
    case = Experts(150, 1, 1, 128, 96)
    case.tensors["id"].zero_()
    check(case)


def test_dependent_launches() -> None:
    check(Experts(70, 2, 3, 192, 128), dependent=True)


def test_inputs_that_it_does_not_take() -> None:
    case = Experts(4, hidden=64, intermediate=32)
    case.tensors["x"] = torch.zeros(4, 66, dtype=torch.bfloat16)[:, 1:-1]
    with emulated(), pytest.raises(ValueError, match="16 bytes"):
        case.run(grouped(case))
    with pytest.raises(ValueError, match="16-bit"):
        schedule.grouped(Experts(4, dtype=torch.float32).shape, 3)
    with pytest.raises(ValueError, match="64 hidden"):
        schedule.grouped(Experts(4, hidden=48).shape, 3)
