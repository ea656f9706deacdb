"""The decode kernels over the entries of shards, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_case import Case
from shards_of_case import run_invariant_shards, run_shards, with_pieces_in_turns

from kernels.mla_decode.schedule import hopper_tiling, portable_tiling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEEPSEEK: dict[str, Any] = {"latent": 512, "rope": 64, "dtype": torch.bfloat16, "device": "cuda"}
SMALL = DEEPSEEK | {"latent": 256}
"""Mistral Small 4."""
kinds = pytest.mark.parametrize(("sizes", "fp8"), [(DEEPSEEK, False), (DEEPSEEK, True), (SMALL, False)])
LENGTHS = [0, 1, 63, 64, 65, 127, 128, 129, 700, 4095, 4097, 100_000, 0]


@kinds
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(("width", "heads"), [(1, 16), (2, 16), (1, 32), (4, 64), (8, 128), (1, 128), (3, 5)])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_shards_together_attend_as_one(
    count: int, width: int, heads: int, first: int, sizes: dict[str, Any], fp8: bool
) -> None:
    """All widths, and rows of which a shard has nothing."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these kernels are Hopper's")
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for lengths in (LENGTHS, [1100], [129]):
        case = Case(lengths, width, heads, first=first, fp8=fp8, **sizes)
        tiling = hopper_tiling(case.shape, processors, fp8=fp8, own=True)
        assert tiling.path != "triton"
        run_shards(case, tiling, count, dependent=True, early=True)
        case.compare_with(tiling)


@pytest.mark.parametrize("count", [2, 4])
def test_the_portable_kernel(count: int) -> None:
    case = Case([0, 1, 65, 700], 3, 5, first=1, device="cuda")
    run_shards(case, portable_tiling(case.shape, 100), count)
    case.compare_with(portable_tiling(case.shape, 100))


@kinds
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(("width", "heads"), [(1, 16), (2, 16), (4, 64), (8, 128), (3, 5)])
def test_shards_have_the_bits_of_one_in_invariant_mode(
    width: int, heads: int, first: int, sizes: dict[str, Any], fp8: bool
) -> None:
    """Rows of fewer and of more pieces than there are strands. A planted fault that this finds: the owners of a row's
    pages change at every page."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these kernels are Hopper's")
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for lengths in ([0, 1, 511, 512, 513, 4095, 4097, 20_000], [9000]):
        case = Case(lengths, width, heads, first=first, fp8=fp8, invariant=True, **sizes)
        with_pieces_in_turns(case, 8)
        tiling = hopper_tiling(case.shape, processors, fp8=fp8, own=True)
        assert tiling.path != "triton"
        want = run_invariant_shards(case, tiling, 1)
        case.compare_with(tiling)
        for count in (2, 4, 8):
            got = run_invariant_shards(case, tiling, count)
            assert all(torch.equal(mine, one) for mine, one in zip(got, want, strict=True))


def test_the_portable_kernel_in_invariant_mode() -> None:
    case = Case([0, 1, 65, 700, 5000], 3, 5, first=1, invariant=True, device="cuda")
    with_pieces_in_turns(case, 8)
    tiling = portable_tiling(case.shape, 100)
    want = run_invariant_shards(case, tiling, 1)
    case.compare_with(tiling)
    for count in (2, 4, 8):
        got = run_invariant_shards(case, tiling, count)
        assert all(torch.equal(mine, one) for mine, one in zip(got, want, strict=True))
