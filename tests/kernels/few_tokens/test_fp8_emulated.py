"""FP8 weights that the copy engine fetches, multiplied by a few halved tokens: the kernels as they were compiled for
Hopper, run by the PTX emulator under drawn schedules."""

import few_token_cases as cases
import pytest
import torch

from kernels.few_experts import fp8_launch as experts_launch
from kernels.halve import Halved, halve
from kernels.linear import fp8_launch
from kernels.matrix import BlockScaled
from kernels.pending_norm import PIECE, PendingNorm
from tests.support.ptx import emulated

CPU = cases.Place(torch.device("cpu"), dependent=True)
BLOCKS = (128, 128)


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers take the device for one, with few multiprocessors: programs go through the ring several times."""
    monkeypatch.setattr(fp8_launch, "is_hopper", lambda device: True)
    for launch in (fp8_launch, experts_launch):
        monkeypatch.setattr(launch, "multiprocessors", lambda device: 3)


@pytest.mark.parametrize("tokens", [1, 5])
def test_every_weight_is_what_it_is(tokens: int) -> None:
    """Zero and subnormal numbers included; NaN apart, which no checkpoint that is loaded holds."""
    code = torch.arange(256, dtype=torch.uint8).repeat(8)
    code[(code & 127) == 127] = 0
    weight = BlockScaled(code.view(16, 128).view(torch.float8_e4m3fn), torch.ones(1, 1))
    x = torch.eye(128)[:tokens].bfloat16()
    rows, out = Halved.empty(x, torch.empty), torch.full((tokens, 16), torch.nan)
    halve(x, rows)
    with emulated():
        fp8_launch.fp8_linear(rows, weight, out)
    assert torch.equal(out.T, weight.data.float()[:, :tokens])


@pytest.mark.parametrize(("tokens", "features"), [(1, 384), (8, 1152)])
def test_products(tokens: int, features: int) -> None:
    """Shorter than the ring and longer, and rows that end in the middle of a program."""
    with emulated(tokens, consecutive=True) as launches:
        cases.check_linear(CPU, tokens, 150, features, BLOCKS)
        cases.check_residual(CPU, tokens, 144, features, (16, 128))
    assert launches == ["halve", "fp8_linear"] * 3


@pytest.mark.parametrize(
    ("rows", "features", "blocks"),
    [(24, 128, (128, 128)), (88, 384, (128, 128)), (40, 1536, (16, 128)), (24, 2176, (128, 128))],
)
def test_normed_products_of_one_token(rows: int, features: int, blocks: tuple[int, int]) -> None:
    """Rows that end in the middle of a program, warps of which the last ones have fewer features."""
    with emulated(features, consecutive=True) as launches:
        cases.check_normed(CPU, 1, rows, features, 16, blocks)
    assert launches == ["fp8_whole"] * 2


@pytest.mark.parametrize("power", [-90, -40, 40, 90])
def test_every_block_of_a_token_has_a_unit_of_its_own(power: int) -> None:
    """Blocks of very different sizes, zeros among them, each of which alone counts for some outputs."""
    torch.manual_seed(0)
    sizes = torch.tensor([0.0, 2.0**power, 1.0, 2.0 ** (power / 2)]).repeat_interleave(128)
    x, data = (torch.randn(1, 512) * sizes).bfloat16(), torch.zeros(16, 512)
    for block in range(4):
        data[block::4, 128 * block : 128 * (block + 1)] = torch.randn(4, 128) * 64
    weight = BlockScaled(data.to(torch.float8_e4m3fn), torch.ones(1, 4))
    square = torch.ones(1, 512 // PIECE) * PIECE  # of a root mean square of one
    out = torch.full((1, 16), torch.nan)
    with emulated():
        fp8_launch.fp8_whole(PendingNorm(x, square, 0.0), weight, out)
    torch.testing.assert_close(out.double(), x.double() @ weight.data.double().T, rtol=1e-4, atol=2.0**-140)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_token_that_is_not_finite_stays_so(value: float) -> None:
    x = torch.ones(1, 256).bfloat16()
    x[0, 200] = value
    weight, _ = CPU.matrix(16, 256, blocks=BLOCKS)
    assert isinstance(weight, BlockScaled)
    out = torch.zeros(1, 16)
    with emulated():
        fp8_launch.fp8_whole(PendingNorm(x, torch.ones(1, 256 // PIECE), 1e-6), weight, out)
    assert not out.isfinite().any()


@pytest.mark.parametrize(("tokens", "blocks"), [(1, (128, 128)), (3, (32, 128))])
def test_gated(tokens: int, blocks: tuple[int, int]) -> None:
    with emulated(tokens, consecutive=True) as launches:
        cases.check_gated(CPU, tokens, 40 if blocks[0] == 128 else 32, 384, blocks)
    assert launches == ["fp8_gate_up"]


@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate", "shared", "residual"),
    [(1, 384, 128, 1, True), (1, 128, 2048, 1, True), (5, 256, 384, 0, True), (8, 1152, 128, 2, False)],
)
def test_experts(tokens: int, hidden: int, intermediate: int, shared: int, residual: bool) -> None:
    with emulated(tokens, consecutive=True) as launches:
        cases.check_experts(CPU, tokens, 6, 2, hidden, intermediate, shared, residual, BLOCKS)
    assert launches == ["choose", "gate_up", "halve", "down"]


def test_companions_that_are_not_numbers_change_nothing() -> None:
    with emulated(1, consecutive=True):
        cases.check_companions(CPU, 3, 4, 2, 128, shared=1, blocks=BLOCKS)


def test_matrices_and_tokens_that_are_not_for_it() -> None:
    """Scales for 64 features, features that end in the middle of a block, more tokens than columns."""
    plain, _ = CPU.matrix(128, 128)
    coarse, _ = CPU.matrix(128, 128, blocks=BLOCKS)
    fine, _ = CPU.matrix(128, 128, blocks=(128, 64))
    odd, _ = CPU.matrix(128, 192, blocks=BLOCKS)
    assert fp8_launch.kept(8, coarse)
    for tokens, weight in ((8, plain), (8, fine), (8, odd), (9, coarse)):
        assert not fp8_launch.fetched(tokens, weight)
    wide = BlockScaled(torch.empty(16, 16384, dtype=torch.float8_e4m3fn), torch.ones(1, 128))
    assert fp8_launch.fetched(8, wide)
    assert not fp8_launch.kept(8, wide)
    assert fp8_launch.kept(1, wide)
    assert not fp8_launch.whole(1, wide)
    assert fp8_launch.whole(1, coarse)
    assert not fp8_launch.whole(2, coarse)
