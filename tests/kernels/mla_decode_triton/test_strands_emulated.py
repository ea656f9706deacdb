"""The merge of invariant mode as it was compiled, of made-up pieces, run by the PTX emulator."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.mla_decode.strands import merge_strands
from kernels.strands import FINE_ROUNDS, FINEST, STRANDS
from kernels.strands import merge_strands as merged_in_torch
from tests.support.ptx import emulated

pytestmark = pytest.mark.long

VECTORS, LATENT = 2, 256


def pieces_of(count: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pieces [count, VECTORS, LATENT] and log2-sum-exp2, some of which are equal and some of nothing."""
    part = torch.randn(count, VECTORS, LATENT, generator=random).bfloat16()
    lse = 4 * torch.randn(count, VECTORS, generator=random)
    lse[torch.rand(lse.shape, generator=random) < 0.2] = 1.0
    empty = torch.rand(lse.shape, generator=random) < 0.2
    return part.masked_fill_(empty.unsqueeze(-1), 0.0), lse.masked_fill_(empty, -torch.inf)


def merged(
    part: Tensor, lse: Tensor, columns: int, finest: int = FINEST, last: bool = True, strands: int = STRANDS
) -> tuple[Tensor, Tensor]:
    """The kernel's result of one row."""
    out, total = torch.full((VECTORS, LATENT), 7.0), torch.full((VECTORS,), 7.0)
    record = torch.tensor([0, 0, len(part), 0], dtype=torch.int32)
    with emulated(seed=len(part)):
        merge_strands[(1, VECTORS, LATENT // columns)](
            *(part.contiguous(), lse.contiguous(), record, out, total, VECTORS, 0),
            LATENT=LATENT,
            COLUMNS=columns,
            STRANDS=strands,
            LAST=last,
            FINEST=finest,
            DEPENDENT=True,
            enable_fp_fusion=False,
            num_warps=1,
            launch_pdl=True,
        )
    return out, total


def same(mine: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    """Whether results have the same bits, but for which NaN one is."""
    for a, b in zip(mine, other, strict=True):
        if not torch.equal(a.isnan(), b.isnan()):
            return False
        if not torch.equal(a.nan_to_num().view(torch.int32), b.nan_to_num().view(torch.int32)):
            return False
    return True


def strand_of(piece: int) -> int:
    """Of a piece of one rank."""
    first, fine = STRANDS * FINEST, STRANDS * FINEST // 2
    if piece < first:
        return piece // FINEST
    if piece < first + (FINE_ROUNDS - 1) * fine:
        return (piece - first) % fine // (FINEST // 2)
    return (piece - first) % STRANDS


@pytest.mark.parametrize("count", [1, 3, 9, 17, 32, 33, 70, 95])
def test_pieces_are_merged_by_strands(count: int) -> None:
    """Rows of one round and of more, against fp64."""
    part, lse = pieces_of(count, torch.Generator().manual_seed(count))
    lse[0] = 0.5  # of a row of empty pieces alone the log-sum-exp would be compared with itself
    out, total = merged(part, lse, 64)
    pieces = ((strand_of(piece), (part[piece].double(), lse[piece].double())) for piece in range(count))
    want, want_log = merged_in_torch(pieces)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total.double(), want_log * math.log(2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("columns", [64, 128, 256])
@pytest.mark.parametrize("count", [1, 5, 12, 32])
def test_a_short_row_has_the_bits_of_a_long_one_that_ends_in_nothing(count: int, columns: int) -> None:
    """Also where a piece, or its log-sum-exp, is not finite, and of -0."""
    part, lse = pieces_of(count, torch.Generator().manual_seed(count))
    part[0, :, 0], part[-1, :, 1], part[count // 2, 0, 2:6] = -0.0, torch.nan, torch.inf
    part[: 1 + count // 2, :, 7] = -0.0
    lse[0, 0] = -torch.inf
    lse[count // 3, 1] = torch.nan if count == 5 else -0.0
    nothing = torch.zeros(STRANDS * FINEST + 1 - count, VECTORS, LATENT).bfloat16()
    empty = torch.full((len(nothing), VECTORS), -torch.inf)
    for last in (True, False):
        short = merged(part, lse, columns, last=last)
        assert same(short, merged(torch.cat([part, nothing]), torch.cat([lse, empty]), columns, last=last))
        assert same(short, merged(part, lse, 64, last=last))


def test_a_row_without_pieces_is_zero() -> None:
    out, total = merged(torch.empty(0, VECTORS, LATENT).bfloat16(), torch.empty(0, VECTORS), 128)
    assert not out.any()
    assert bool((total == -torch.inf).all())
