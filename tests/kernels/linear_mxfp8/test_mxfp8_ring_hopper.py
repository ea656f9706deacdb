"""Compilation of products with MXFP8 weights that come through a ring, at the sizes of Hy4."""

from __future__ import annotations

import re

import pytest
import torch

from kernels.linear import mxfp8_launch
from kernels.linear.records import Blocks
from kernels.matrix import MicroScaled
from tests.support.hopper import compile_only, instructions, machine_code, resources, serialized

pytestmark = pytest.mark.gate


def products(tokens: int, rows: int, features: int, tiling: Blocks) -> list[object]:
    """A product and the sum of its pieces, of no value: nothing runs."""
    data = torch.empty(rows, features, dtype=torch.float8_e4m3fn)
    matrix = MicroScaled(data, torch.empty(rows, features // 32, dtype=torch.uint8))
    x, out = (torch.empty(tokens, width, dtype=torch.bfloat16) for width in (features, rows))
    pieces = torch.empty(mxfp8_launch.pieces(tokens, matrix, 132, tiling))
    with compile_only() as compiled:
        mxfp8_launch.mxfp8_linear(x, matrix, out, pieces, programs=132, tiling=tiling, dependent=True)
    return compiled


@pytest.mark.parametrize(("rows", "features"), [(16384, 2048), (6144, 16384), (2624, 6144)])
@pytest.mark.parametrize(
    "tiling", [(1, 2, 1), (64, 2, 1), (128, 2, 1), (1, 2, 2), (128, 2, 2), (1, 4, 1), (32, 4, 1), (64, 4, 1)]
)
def test_compiles_to_what_it_was_written_for(tiling: tuple[int, int, int], rows: int, features: int) -> None:
    tokens, groups, chunks = tiling
    blocks = mxfp8_launch.tiling_of(tokens, groups, chunks)
    multiply, *adding = products(tokens, rows, features, blocks)
    wide = mxfp8_launch.columns(tokens)
    found, code = resources(multiply), machine_code(multiply)
    found.check(registers=168 if groups == 2 else 96)
    assert found.shared <= 226 * 1024
    # Some 40 KB in flight on each multiprocessor hide the latency of memory.
    assert blocks.stages * 64 * groups * chunks * 128 >= 40 * 1024
    assert (found.waits, found.releases) == (True, True)
    assert not serialized(multiply)
    # All groups multiply a step's 128 features, and widen each of its numbers once, whatever the number of tokens.
    assert re.findall(r"HGMMA\.(\S+)", code) == [f"64x{wide}x16.F32.BF16"] * (8 * groups * chunks)
    assert instructions(multiply)["HMUL2"] == groups * chunks * 2 * 64 * 128 // (2 * 128)
    for add_pieces in adding:
        found = resources(add_pieces)
        found.check(registers=255)
        assert (found.waits, found.releases) == (True, True)


def test_blocks_that_have_a_program_each_leave_no_pieces() -> None:
    """128 blocks of 128 rows on 132 multiprocessors."""
    matrix = MicroScaled(torch.empty(16384, 2048, dtype=torch.float8_e4m3fn), torch.empty(16384, 64).byte())
    assert mxfp8_launch.tiling_for(16, matrix) == mxfp8_launch.tiling_of(16, 2, 1)
    x, out = torch.empty(16, 2048).bfloat16(), torch.empty(16, 16384).bfloat16()
    with compile_only() as compiled:
        mxfp8_launch.mxfp8_linear(x, matrix, out, torch.empty(mxfp8_launch.pieces(16, matrix)), dependent=True)
    assert [kernel.metadata.name for kernel in compiled] == ["mxfp8_multiply"]


def test_the_number_of_tokens_compiles_nothing_new() -> None:
    hashes = {
        kernel.hash
        for tokens in (33, 36, 47, 64)
        for kernel in products(tokens, 6144, 16384, mxfp8_launch.tiling_of(tokens))
    }
    assert len(hashes) == 2
