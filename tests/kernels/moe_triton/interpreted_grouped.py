"""Hopper's products of many tokens: their values and the order of their messages, without layouts. Run with
TRITON_INTERPRET=1, see test_moe_interpreted.py."""

from kernels.testing import gluon_interpreter, interpreter

interpreter.repair()
gluon_interpreter.install()

from dataclasses import replace  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from experts_case import Experts  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kernels.moe import schedule  # noqa: E402
from kernels.moe.schedule import Tiling  # noqa: E402
from kernels.testing.gluon_partitions import SCHEDULE  # noqa: E402


def grouped(case: Experts, programs: int = 3, stages: int = 4, group: int = 8) -> Tiling:
    tiling = schedule.grouped(case.shape, programs)
    gate_up, down = (replace(product, stages=stages, group=group) for product in (tiling.gate_up, tiling.down))
    return replace(tiling, gate_up=gate_up, down=down)


def check(case: Experts, **changes: int) -> None:
    case.run(grouped(case, **changes))
    case.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 64, 65, 128, 129, 200])
def test_any_number_of_tokens(tokens: int, dtype: torch.dtype) -> None:
    check(Experts(tokens, 1, 2, 512, 64, dtype))


@pytest.mark.parametrize("sizes", [(64, 32), (80, 48), (144, 176), (272, 272)])
def test_features_that_blocks_and_stages_do_not_divide(sizes: tuple[int, int]) -> None:
    check(Experts(5, 3, 5, *sizes))


@pytest.mark.parametrize("padded", [(0,), (2, 3, 4), (0, 1, 2, 3, 4)])
def test_padded_tokens_get_zero_and_disturb_nobody(padded: tuple[int, ...]) -> None:
    check(Experts(5, 2, padded=padded, holes=True))


def test_nothing_is_written_for_pairs_that_are_no_work() -> None:
    case = Experts(30, 2, holes=True)
    tiling = grouped(case)
    call = case.call(tiling, case.workspace(tiling))
    call.run()
    wanted = (case.tensors["id"].flatten() >= 0).sum()
    assert 0 < wanted < 60
    assert bool(call.scratch.act_YI[wanted:].isnan().all())
    assert not call.scratch.act_YI[:wanted].isnan().any()
    assert torch.equal(call.scratch.partial_YGE.isnan().all(2)[:, 0], case.tensors["id"].flatten() < 0)


@settings(max_examples=20, deadline=None)
@given(
    tokens=st.integers(1, 200),
    experts=st.sampled_from([3, 5]),
    holes=st.booleans(),
    skewed=st.booleans(),
    programs=st.integers(1, 7),
    stages=st.integers(2, 6),
    group=st.sampled_from([1, 2, 8]),
    seed=st.integers(0, 10**6),
)
def test_any_routing_ring_and_order_of_events(
    tokens: int, experts: int, holes: bool, skewed: bool, programs: int, stages: int, group: int, seed: int
) -> None:
    SCHEDULE.seed(seed)
    case = Experts(tokens, 2, experts, 400, 80, holes=holes, skewed=skewed and experts > 3, seed=seed)
    check(case, programs=programs, stages=stages, group=group)


@pytest.mark.parametrize("tokens", [3, 150])
def test_the_same_bits_as_the_triton_kernels(tokens: int) -> None:
    """Steps of 64 features in both. What a pair gets depends neither on its tile nor on where in it it lies."""
    case = Experts(tokens, 2, 3, 192, 128)
    want = case.run(case.tall_tiling()).clone()
    assert torch.equal(case.run(grouped(case)), want)


def test_a_single_expert_is_a_dense_feed_forward() -> None:
    case = Experts(200, 1, 1, 128, 96)
    case.tensors["id"].zero_()
    check(case)


def test_inputs_that_it_does_not_take() -> None:
    case = Experts(4, hidden=64, intermediate=32)
    case.tensors["x"] = torch.zeros(4, 66, dtype=torch.bfloat16)[:, 1:-1]
    with pytest.raises(ValueError, match="16 bytes"):
        case.run(grouped(case))
    with pytest.raises(ValueError, match="16-bit"):
        schedule.grouped(Experts(4, dtype=torch.float32).shape, 3)
    with pytest.raises(ValueError, match="64 hidden"):
        schedule.grouped(Experts(4, hidden=48).shape, 3)
