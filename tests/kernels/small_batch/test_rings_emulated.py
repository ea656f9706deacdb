"""Kernels whose weights stream through a ring, as they were compiled, run by the PTX emulator under drawn schedules."""

import pytest
import small_batch_cases as cases
import torch

from kernels.few_experts import launch
from kernels.linear import launch as linear_launch
from kernels.matrix import BlockScaled
from tests.support.ptx import emulated

pytestmark = pytest.mark.long

CPU = cases.Place(torch.device("cpu"))


@pytest.mark.parametrize(
    ("tokens", "sizes", "shared", "programs"),
    [(1, (64, 48), 2, 3), (3, (192, 528), 1, 2), (16, (128, 64), 0, 5), (5, (2048, 24), 2, 7), (9, (640, 144), 1, 4)],
)
@pytest.mark.parametrize("dependent", [False, True])
def test_experts(
    tokens: int, sizes: tuple[int, int], shared: int, programs: int, dependent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the rings several times, with fewer programs than blocks."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device: programs)
    place = cases.Place(CPU.device, dependent)
    with emulated(tokens, consecutive=dependent) as launches:
        cases.check_experts(place, tokens, 6, 2, *sizes, shared, residual=tokens != 3)
    assert launches.count("gate_up") == launches.count("down") == 1


@pytest.mark.parametrize("blocks", [None, (32, 64)])
def test_tokens_that_stream_beside_the_weights(blocks: cases.Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens stream where they are too many bytes to stay."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(launch, "RESIDENT_BYTES", 0)
    with emulated():
        cases.check_experts(CPU, 4, 5, 2, 576, 32, 1, True, blocks)


@pytest.mark.parametrize(("tokens", "hidden", "programs"), [(1, 592, 3), (16, 192, 2)])
def test_experts_of_fp8_weights(tokens: int, hidden: int, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "multiprocessors", lambda device: programs)
    with emulated(tokens, consecutive=True):
        cases.check_experts(cases.Place(CPU.device, dependent=True), tokens, 6, 2, hidden, 64, 1, True, (64, 128))


@pytest.mark.parametrize("tokens", [1, 16])
def test_products_of_fp8_weights(tokens: int) -> None:
    place = cases.Place(CPU.device, dependent=True)
    with emulated(tokens, consecutive=True):
        cases.check_linear(place, tokens, 150, 2608, (128, 128))
        cases.check_normed(place, tokens, 88, 192, 48, (64, 64))
        cases.check_gated(place, tokens, 32, 336, (32, 128))


@pytest.mark.parametrize(("rows", "features"), [(20, 3592), (20, 7168), (33, 9216)])
def test_what_no_register_holds_is_asked_for_inside_of_the_weights(rows: int, features: int) -> None:
    """The part of a row behind the first tiles, which is brought into L2 before the wait: no further than to its end,
    and of no rows behind the last."""
    place = cases.Place(CPU.device, dependent=True)
    with emulated(1, consecutive=True, fences=False):
        cases.check_linear(place, 1, rows, features)


def test_every_fp8_weight_is_what_it_is_in_bf16() -> None:
    """Zero and subnormal numbers included; NaN apart, which no checkpoint that is loaded holds."""
    code = torch.arange(256, dtype=torch.uint8)
    code[(code & 127) == 127] = 0
    weight = BlockScaled(code.view(16, 16).view(torch.float8_e4m3fn), torch.ones(1, 1))
    out = torch.full((16, 16), torch.nan)
    with emulated():
        linear_launch.stream_linear(torch.eye(16).bfloat16(), weight, out)
    assert torch.equal(out.T, weight.data.float())


@pytest.mark.parametrize(
    ("tokens", "rows", "features", "programs"),
    [(1, 400, 192, 3), (8, 131, 2048, 2), (16, 90, 520, 1), (11, 200, 64, 3)],
)
@pytest.mark.parametrize("dependent", [False, True])
def test_many_rows(
    tokens: int, rows: int, features: int, programs: int, dependent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are as many rows as in the output head of few tokens."""
    monkeypatch.setattr(linear_launch, "multiprocessors", lambda device: programs)
    place = cases.Place(CPU.device, dependent)
    with emulated(tokens, consecutive=dependent) as launches:
        cases.check_linear(place, tokens, rows, features)
    assert launches.count("ring_linear") == 2
