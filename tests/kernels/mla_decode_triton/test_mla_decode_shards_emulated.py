"""Hopper's decode kernels over the entries of shards, as they were compiled, run by the PTX emulator."""

from __future__ import annotations

import pytest
import torch
from decode_case import Case
from shards_of_case import run_invariant_shards, run_shards, with_pieces_in_turns

from kernels.mla_decode.schedule import fp8_tiling, hopper_tiling, narrow_fp8_tiling
from tests.support.ptx import emulated

pytestmark = pytest.mark.long

CASES = [
    pytest.param("narrow", 512, False, [130, 0, 1, 65], 4, 4, 0, id="narrow"),
    pytest.param("narrow", 512, False, [1, 200, 70], 2, 8, 1, id="narrow-first"),
    pytest.param("narrow", 512, True, [130, 3, 65], 4, 9, 1, id="narrow-fp8"),
    pytest.param("wide", 512, False, [130, 0, 1, 65, 260], 4, 16, 1, id="wide"),
    pytest.param("fp8", 512, True, [130, 3, 65], 3, 16, 1, id="fp8-blocks"),
    pytest.param("fp8", 512, True, [130, 3, 65, 0], 3, 9, 1, id="fp8"),
    pytest.param("either", 512, False, [190], 2, 32, 0, id="either"),
    pytest.param("narrow", 256, False, [130, 0, 1, 65], 2, 8, 1, id="narrow-256"),
    pytest.param("wide", 256, False, [130, 0, 1, 65, 460], 4, 16, 1, id="wide-256"),
]


@pytest.mark.parametrize(("path", "latent", "fp8", "lengths", "width", "heads", "first"), CASES)
def test_shards_together_attend_as_one(
    path: str, latent: int, fp8: bool, lengths: list[int], width: int, heads: int, first: int
) -> None:
    """Widths over a page's border, rows of which a shard has nothing, and the first entry, which is left out on its
    shard alone. A planted fault that this finds: all drafts have the bound of the last one."""
    case = Case(lengths, width, heads, latent, 64, torch.bfloat16, first=first, fp8=fp8)
    of_fp8 = {"fp8": fp8_tiling, "narrow": narrow_fp8_tiling}
    tiling = (of_fp8[path] if fp8 else hopper_tiling)(case.shape, 5)
    assert tiling.path == path
    with emulated(1) as launches:
        run_shards(case, tiling, 2, dependent=True, early=True)
    assert any(name.startswith("attend_") for name in launches)
    case.compare_with(tiling)


@pytest.mark.parametrize(("latent", "fp8"), [(512, False), (512, True), (256, False)])
def test_shards_have_the_bits_of_one_in_invariant_mode(latent: int, fp8: bool) -> None:
    """Rows of several pieces, of drafts before and behind a piece's border, and of shards that have nothing."""
    case = Case([514, 0, 1, 1100], 3, 16, latent, 64, torch.bfloat16, first=1, fp8=fp8, invariant=True)
    with_pieces_in_turns(case, 4)
    tiling = hopper_tiling(case.shape, 3, fp8=fp8, own=True)
    with emulated(1) as launches:
        want = run_invariant_shards(case, tiling, 1)
        case.compare_with(tiling)
        for count in (2, 4):
            got = run_invariant_shards(case, tiling, count)
            assert all(torch.equal(mine, one) for mine, one in zip(got, want, strict=True))
    assert {name for name in launches if name.startswith("attend_")} == {"attend_fp8" if fp8 else "attend_wide"}
