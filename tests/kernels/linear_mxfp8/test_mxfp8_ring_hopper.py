"""Compilation of products with MXFP8 weights that come through a ring, at the sizes of Hy4."""

from __future__ import annotations

import re

import pytest
import torch

from kernels.linear import mxfp8_launch
from kernels.matrix import MicroScaled
from tests.support.hopper import compile_only, instructions, machine_code, resources, serialized

pytestmark = pytest.mark.gate

ON_A_MULTIPROCESSOR = 227 * 1024
"""Bytes of shared memory, of which every program takes 1 KiB more than it asks for."""


def products(tokens: int, rows: int, features: int) -> list[object]:
    """A product and the sum of its pieces, of no value: nothing runs."""
    data = torch.empty(rows, features, dtype=torch.float8_e4m3fn)
    matrix = MicroScaled(data, torch.empty(rows, features // 32, dtype=torch.uint8))
    x, out = (torch.empty(tokens, width, dtype=torch.bfloat16) for width in (features, rows))
    programs = 132 * mxfp8_launch.beside(tokens)
    pieces = torch.empty(mxfp8_launch.pieces(tokens, matrix, programs))
    with compile_only() as compiled:
        mxfp8_launch.mxfp8_linear(x, matrix, out, pieces, programs=programs, dependent=True)
    return compiled


@pytest.mark.parametrize(("rows", "features"), [(16384, 2048), (6144, 16384), (2624, 6144)])
@pytest.mark.parametrize("tokens", [1, 32, 64, 128])
def test_compiles_to_what_it_was_written_for(tokens: int, rows: int, features: int) -> None:
    multiply, add_pieces = products(tokens, rows, features)
    wide, beside = mxfp8_launch.columns(tokens), mxfp8_launch.beside(tokens)
    found, code = resources(multiply), machine_code(multiply)
    found.check(registers=168 if beside == 1 else 80)
    assert beside * (found.shared + 1024) <= ON_A_MULTIPROCESSOR
    # Some 40 KB in flight on each multiprocessor hide the latency of memory.
    assert beside * mxfp8_launch.stages_of(tokens, beside) * 128 * 128 >= 40 * 1024
    assert (found.waits, found.releases) == (True, True)
    assert not serialized(multiply)
    # Both partitions multiply a step's 128 features, and widen each of its numbers once, whatever the number of tokens.
    assert re.findall(r"HGMMA\.(\S+)", code) == [f"64x{wide}x16.F32.BF16"] * 16
    assert instructions(multiply)["HMUL2"] == 2 * 2 * 64 * 128 // (2 * 128)
    found = resources(add_pieces)
    found.check(registers=255)
    assert (found.waits, found.releases) == (True, True)


def test_the_number_of_tokens_compiles_nothing_new() -> None:
    hashes = {kernel.hash for tokens in (33, 36, 47, 64) for kernel in products(tokens, 6144, 16384)}
    assert len(hashes) == 2
