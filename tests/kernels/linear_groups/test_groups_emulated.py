"""Products of groups of a few tokens as they were compiled, run by the PTX emulator under drawn schedules."""

from __future__ import annotations

import pytest
import torch

from kernels.linear.fp8_groups_launch import GroupTiling, fp8_groups
from kernels.matrix import BlockScaled
from kernels.pending_norm import PIECE, PendingNorm
from tests.support.ptx import emulated
from tests.support.ptx.memory import Fault
from tests.support.ptx.order import Unordered

pytestmark = pytest.mark.long

RING = GroupTiling(4, 2, 2, 1, 1)
"""A ring that goes round, with tokens that are asked for as it does."""


def run(tokens: int, groups: int, features: int, tiling: GroupTiling, **options: object) -> None:
    """Tokens whose groups lie apart, NaN between them, and products that do, too."""
    rows, random = 128, torch.Generator().manual_seed(tokens)
    x = torch.full((tokens, groups, features + 16), torch.nan, dtype=torch.bfloat16)[..., :features]
    x.copy_(torch.randn(x.shape, generator=random) * torch.exp2(8 * torch.rand(x.shape, generator=random)))
    data = torch.randn(groups * rows, features, generator=random).to(torch.float8_e4m3fn)
    matrix = BlockScaled(data, torch.rand(groups, -(-features // 128), generator=random) + 0.5)
    out = torch.full((tokens, groups, rows + 8), torch.nan, dtype=torch.bfloat16)
    with emulated(tokens, consecutive=True, **options) as launches:  # type: ignore[arg-type]
        fp8_groups(x, matrix, out[..., :rows], tiling=tiling, dependent=True)
    assert launches == ["fp8_groups"]
    want = torch.einsum("tge,gue->tgu", x.double(), matrix.float().view(groups, rows, features).double())
    torch.testing.assert_close(out[..., :rows].double(), want, rtol=2**-8, atol=2**-18 * float(want.abs().max()))
    assert bool(out[..., rows:].isnan().all())


@pytest.mark.parametrize("tokens", [1, 8, 9, 16])
@pytest.mark.parametrize("kept", [False, True])
def test_any_number_of_tokens(tokens: int, kept: bool) -> None:
    run(tokens, 2, 512, GroupTiling(4, 2, 2, 1, 2, kept))


@pytest.mark.parametrize("features", [640, 1024])
@pytest.mark.parametrize("kept", [False, True])
def test_a_ring_that_goes_round(features: int, kept: bool) -> None:
    """The last chunk is of half as many features as warps could have."""
    run(3, 2, features, RING._replace(kept=kept))


def test_without_its_wait_kept_tokens_would_be_noticed() -> None:
    with pytest.raises((AssertionError, Fault, Unordered)):
        run(3, 2, 512, RING._replace(kept=True), edit=lambda ptx: ptx.replace("griddepcontrol.wait;", ""))


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(("tokens", "features"), [(1, 128), (3, 256), (8, 512)])
def test_tokens_whose_norm_is_pending(tokens: int, features: int, kept: bool) -> None:
    """Rows of several programs, of one chunk or two; sums of squares in fewer and more pieces than warps."""
    rows, random = 128, torch.Generator().manual_seed(tokens)
    residual, norm = torch.randn(tokens, features, generator=random) * 30, torch.randn(features, generator=random)
    x = torch.full((tokens, features + 16), torch.nan, dtype=torch.bfloat16)[:, :features]
    x.copy_(residual * norm)
    pending = PendingNorm(x, residual.square().unflatten(1, (-1, PIECE)).sum(-1), 1e-5)
    matrix = BlockScaled(
        torch.randn(rows, features, generator=random).to(torch.float8_e4m3fn),
        torch.rand(1, features // 128, generator=random) + 0.5,
    )
    out = torch.full((tokens, rows), torch.nan, dtype=torch.bfloat16)
    with emulated(tokens, consecutive=True) as launches:
        tiling = GroupTiling(4, 2, 3, 2, 2, kept=kept)
        fp8_groups(x.unsqueeze(1), matrix, out.unsqueeze(1), pending=pending, tiling=tiling, dependent=True)
    assert launches == ["fp8_groups"]
    rms = (residual.double().square().mean(1, keepdim=True) + 1e-5).sqrt()
    want = x.double() / rms @ matrix.float().double().T
    torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=2**-10 * float(want.abs().max()))


def test_without_its_wait_it_would_be_noticed() -> None:
    with pytest.raises((AssertionError, Fault, Unordered)):
        run(3, 2, 512, RING, edit=lambda ptx: ptx.replace("griddepcontrol.wait;", ""))


def test_a_matrix_alone() -> None:
    """Programs of fewer rows."""
    run(2, 1, 1024, GroupTiling(2, 2, 3, 1, 2))
