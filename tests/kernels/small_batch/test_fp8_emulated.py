"""FP8 weights that the copy engine fetches, multiplied by a few tokens in scaled fp16: the kernels as they were
compiled for Hopper, run by the PTX emulator under drawn schedules."""

import pytest
import small_batch_cases as cases
import torch
from torch import Tensor

from kernels.few_experts import fp8_launch as experts_launch
from kernels.fp16_scaled import Fp16Scaled, to_fp16_scaled
from kernels.linear import fp8_even_launch, fp8_launch
from kernels.matrix import BlockScaled, Matrix
from kernels.pending_norm import PIECE, PendingNorm
from tests.support.ptx import emulated

CPU = cases.Place(torch.device("cpu"), dependent=True)
BLOCKS = (128, 128)

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers take the device for one, with few multiprocessors: programs go through the ring several times."""
    monkeypatch.setattr(fp8_launch, "is_hopper", lambda device: True)
    for launch in (fp8_launch, fp8_even_launch, experts_launch):
        monkeypatch.setattr(launch, "multiprocessors", lambda device: 3)
    for name, value in (("LONG_ROWS", 512), ("LONG_EXPERTS", 512), ("WARPS", 2)):
        monkeypatch.setattr(fp8_even_launch, name, value)


@pytest.mark.parametrize("tokens", [1, pytest.param(5, marks=pytest.mark.long)])
def test_every_weight_is_what_it_is(tokens: int) -> None:
    """Zero and subnormal numbers included; NaN apart, which no checkpoint that is loaded holds."""
    code = torch.arange(256, dtype=torch.uint8).repeat(8)
    code[(code & 127) == 127] = 0
    weight = BlockScaled(code.view(16, 128).view(torch.float8_e4m3fn), torch.ones(1, 1))
    x = torch.eye(128)[:tokens].bfloat16()
    rows, out = Fp16Scaled.empty(x, torch.empty), torch.full((tokens, 16), torch.nan)
    to_fp16_scaled(x, rows)
    with emulated():
        fp8_launch.fp8_linear(rows, weight, out)
    assert torch.equal(out.T, weight.data.float()[:, :tokens])


def test_every_weight_is_what_it_is_for_one_token() -> None:
    code = torch.arange(256, dtype=torch.uint8).repeat(64)
    code[(code & 127) == 127] = 0
    weight = BlockScaled(code.view(32, 512).view(torch.float8_e4m3fn), torch.ones(1, 4))
    out = torch.full((1, 32), torch.nan)
    for feature in (0, 127, 200, 300, 511):
        x = torch.zeros(1, 512).bfloat16()
        x[0, feature] = 1
        with emulated():
            fp8_even_launch.fp8_even(x, weight, out)
        assert torch.equal(out[0], weight.data.float()[:, feature])


@pytest.mark.parametrize(("tokens", "features"), [(1, 384), pytest.param(8, 1152, marks=pytest.mark.long)])
def test_products(tokens: int, features: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter than the ring and longer, and rows that end in the middle of a program."""
    monkeypatch.setattr(fp8_launch, "WHOLE_BYTES", 0)
    with emulated(tokens, consecutive=True) as launches:
        cases.check_linear(CPU, tokens, 150, features, BLOCKS)
        cases.check_residual(CPU, tokens, 144, features, (16, 128))
    assert launches == ["to_fp16_scaled_kernel", "fp8_linear"] * 3


@pytest.mark.parametrize(
    ("rows", "features"),
    [
        (48, 512),
        pytest.param(144, 640, marks=pytest.mark.long),
        pytest.param(208, 2176, marks=pytest.mark.long),
        pytest.param(400, 1024, marks=pytest.mark.long),
    ],
)
def test_products_of_one_token(rows: int, features: int) -> None:
    """Programs of two and more blocks, of which the last one has fewer; features that end in the middle of the warps'
    share; more rows than the programs of three multiprocessors take."""
    with emulated(rows, consecutive=True) as launches:
        cases.check_linear(CPU, 1, rows, features, BLOCKS)
        cases.check_residual(CPU, 1, rows, features, BLOCKS)
    assert launches == ["fp8_even"] * 3


@pytest.mark.parametrize(
    ("tokens", "features"),
    [(1, 384), (3, 256), *(pytest.param(*case, marks=pytest.mark.long) for case in [(8, 1152), (2, 2176)])],
)
def test_products_of_programs_that_stand_at_once(tokens: int, features: int) -> None:
    """Rows that end in the middle of a program, warps of which the last ones have fewer features."""
    with emulated(tokens, consecutive=True) as launches:
        cases.check_linear(CPU, tokens, 40, features, BLOCKS)
        cases.check_residual(CPU, tokens, 48, features, (16, 128))
    assert launches == ["fp8_whole"] * 3


@pytest.mark.parametrize(
    ("rows", "features", "blocks"),
    [
        (24, 128, (128, 128)),
        (88, 384, (128, 128)),
        pytest.param(40, 1536, (16, 128), marks=pytest.mark.long),
        pytest.param(24, 2176, (128, 128), marks=pytest.mark.long),
    ],
)
def test_normed_products_of_one_token(rows: int, features: int, blocks: tuple[int, int]) -> None:
    """Rows that end in the middle of a program, warps of which the last ones have fewer features."""
    with emulated(features, consecutive=True) as launches:
        cases.check_normed(CPU, 1, rows, features, 16, blocks)
    assert launches == ["fp8_whole"] * 3


@pytest.mark.parametrize(
    ("tokens", "rows", "features"),
    [(2, 24, 384), *(pytest.param(*case, marks=pytest.mark.long) for case in [(8, 40, 1536), (5, 88, 128)])],
)
def test_normed_products_of_a_few_tokens(tokens: int, rows: int, features: int) -> None:
    with emulated(features, consecutive=True) as launches:
        cases.check_normed(CPU, tokens, rows, features, 16, BLOCKS)
    assert launches == ["fp8_whole"] * 3


@pytest.mark.parametrize("tokens", [1, 3])
def test_products_that_leave_a_norm_pending(tokens: int) -> None:
    with emulated(tokens, consecutive=True) as launches:
        cases.check_to_norm(CPU, tokens, 56, 256, 32, (16, 128))
    assert launches == ["fp8_whole"]


def multiplied(kernel: str, x: Tensor, weight: Matrix) -> Tensor:
    """Tokens, of a root mean square of one where that is asked for."""
    assert isinstance(weight, BlockScaled)
    out = torch.full((len(x), weight.shape[0]), torch.nan)
    with emulated():
        if kernel == "fp8_whole":
            square = torch.full((len(x), x.shape[1] // PIECE), float(PIECE))
            fp8_launch.fp8_whole(PendingNorm(x, square, 0.0), weight, out)
        else:
            fp8_even_launch.fp8_even(x, weight, out)
    return out


@pytest.mark.parametrize("power", [-90, -40, 40, 90])
@pytest.mark.parametrize(("kernel", "share"), [("fp8_whole", 128), ("fp8_even", 256)])
def test_every_share_of_a_token_has_a_unit_of_its_own(kernel: str, share: int, power: int) -> None:
    """Shares are what a warp multiplies at a time. They are of very different sizes, zeros among them, and each alone
    counts for some outputs."""
    torch.manual_seed(0)
    sizes = torch.tensor([0.0, 2.0**power, 1.0, 2.0 ** (power / 2)]).repeat_interleave(share)
    x, data = (torch.randn(1, 4 * share) * sizes).bfloat16(), torch.zeros(16, 4 * share)
    for part in range(4):
        data[part::4, share * part : share * (part + 1)] = torch.randn(4, share) * 64
    weight = BlockScaled(data.to(torch.float8_e4m3fn), torch.ones(1, share // 32))
    want = x.double() @ weight.data.double().T
    torch.testing.assert_close(multiplied(kernel, x, weight).double(), want, rtol=1e-4, atol=2.0**-140)


@pytest.mark.parametrize("power", [-90, 90])
def test_every_share_of_several_tokens_has_a_unit_of_its_own(power: int) -> None:
    """Shares are of different sizes, for three tokens."""
    torch.manual_seed(0)
    sizes = torch.tensor([0.0, 2.0**power, 1.0, 2.0 ** (power / 2)])
    sizes_TF = torch.stack([sizes.roll(by) for by in range(3)]).repeat_interleave(128, 1)
    x, data = (torch.randn(3, 512) * sizes_TF).bfloat16(), torch.zeros(16, 512)
    for part in range(4):
        data[part::4, 128 * part : 128 * (part + 1)] = torch.randn(4, 128) * 64
    weight = BlockScaled(data.to(torch.float8_e4m3fn), torch.ones(1, 4))
    want = x.double() @ weight.data.double().T
    torch.testing.assert_close(multiplied("fp8_whole", x, weight).double(), want, rtol=1e-4, atol=2.0**-140)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("kernel", ["fp8_whole", "fp8_even"])
def test_a_token_that_is_not_finite_stays_so(kernel: str, value: float) -> None:
    x = torch.ones(1, 512).bfloat16()
    x[0, 200] = value
    weight, _ = CPU.matrix(16, 512, blocks=BLOCKS)
    assert not multiplied(kernel, x, weight).isfinite().any()


@pytest.mark.parametrize(("tokens", "blocks"), [(1, (128, 128)), (3, (32, 128))])
def test_gated(tokens: int, blocks: tuple[int, int]) -> None:
    with emulated(tokens, consecutive=True) as launches:
        cases.check_gated(CPU, tokens, 40 if blocks[0] == 128 else 32, 384, blocks)
    assert launches == ["fp8_gate_up"]


@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate", "shared", "residual"),
    [
        pytest.param(1, 384, 128, 1, True, marks=pytest.mark.long),
        pytest.param(2, 128, 1152, 1, True, marks=pytest.mark.long),
        (3, 128, 256, 1, True),
        pytest.param(1, 384, 512, 1, True, marks=pytest.mark.long),
        pytest.param(1, 128, 1152, 2, False, marks=pytest.mark.long),
        pytest.param(5, 256, 384, 0, True, marks=pytest.mark.long),
        pytest.param(8, 1152, 128, 2, False, marks=pytest.mark.long),
    ],
)
def test_experts(tokens: int, hidden: int, intermediate: int, shared: int, residual: bool) -> None:
    with emulated(tokens, consecutive=True) as launches:
        cases.check_experts(CPU, tokens, 6, 2, hidden, intermediate, shared, residual, BLOCKS)
    if tokens == 1 and intermediate >= 512:
        behind = ["fp8_even"]
    else:
        behind = ["to_fp16_scaled_kernel", "down_short" if intermediate <= 256 else "down"]
    assert launches == ["choose", "gate_up", *behind]


@pytest.mark.long
@pytest.mark.parametrize("beside", [1, 2])
@pytest.mark.parametrize(("hidden", "intermediate", "shared"), [(384, 512, 1), (1152, 128, 1), (256, 256, 0)])
def test_experts_of_one_program_on_a_multiprocessor_and_of_two(
    hidden: int, intermediate: int, shared: int, beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program has blocks of several experts, which it has to know before it fetches their weights."""
    monkeypatch.setattr(experts_launch, "BESIDE_FEATURES", hidden if beside == 2 else hidden - 1)
    monkeypatch.setattr(experts_launch, "multiprocessors", lambda device: 10)
    assert experts_launch.gate_up_ring(1, hidden)[0] == beside
    with emulated(hidden, consecutive=True) as launches:
        cases.check_experts(CPU, 1, 6, 3, hidden, intermediate, shared, True, BLOCKS)
    assert launches[:2] == ["choose", "gate_up"]


@pytest.mark.long
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
    assert not fp8_launch.whole(2, wide)
    assert fp8_launch.whole(8, coarse)
    many = BlockScaled(torch.empty(4096, 4096, dtype=torch.float8_e4m3fn), torch.ones(32, 32))
    assert not fp8_launch.whole(1, many)  # programs would have to wait for others
    assert fp8_launch.whole(1, many, normed=True)
    assert not fp8_launch.whole(2, many, normed=True)
    assert not fp8_launch.whole(1, CPU.matrix(2, 128, 128, blocks=BLOCKS)[0])
    assert fp8_even_launch.even(1, wide)
    fine_rows = BlockScaled(wide.data, torch.ones(1, 128), rows=32)
    odd_rows = BlockScaled(torch.empty(24, 16384, dtype=torch.float8_e4m3fn), torch.ones(1, 128))
    for tokens, weight in ((2, wide), (1, coarse), (1, plain), (1, fine_rows), (1, odd_rows)):
        assert not fp8_even_launch.even(tokens, weight)
