"""Products of groups of a few tokens as they were compiled, run by the PTX emulator under drawn schedules."""

from __future__ import annotations

import pytest
import torch

from kernels.linear.fp8_groups_launch import GroupTiling, fp8_groups
from kernels.matrix import BlockScaled
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
def test_any_number_of_tokens(tokens: int) -> None:
    run(tokens, 2, 512, GroupTiling(4, 2, 2, 1, 2))


@pytest.mark.parametrize("features", [640, 1024])
def test_a_ring_that_goes_round(features: int) -> None:
    """The last chunk is of half as many features as warps could have."""
    run(3, 2, features, RING)


def test_without_its_wait_it_would_be_noticed() -> None:
    with pytest.raises((AssertionError, Fault, Unordered)):
        run(3, 2, 512, RING, edit=lambda ptx: ptx.replace("griddepcontrol.wait;", ""))


def test_a_matrix_alone() -> None:
    """Programs of fewer rows."""
    run(2, 1, 1024, GroupTiling(2, 2, 3, 1, 2))
