"""Products of some rounded tokens as they were compiled, run by the PTX emulator under drawn schedules."""

import pytest
import torch
from w8a8_case import case, check

from kernels.linear import stream_k_launch
from tests.support.ptx import emulated

pytestmark = pytest.mark.long


def run(tokens: int, features: int, outputs: int, programs: int, seed: int = 0, **more: int) -> None:
    number, scale, weight = case(tokens, features, outputs, "cpu")
    out = torch.full((tokens, outputs), torch.nan, dtype=torch.bfloat16)
    pieces = torch.full(stream_k_launch.pieces(tokens, weight, programs), torch.nan)
    with emulated(seed, consecutive=True) as launches:
        stream_k_launch.stream_k(number, scale, weight, out, pieces, programs=programs, dependent=True, **more)
    assert launches == ["multiply", "add_pieces"]
    check(number, scale, weight, out)


@pytest.mark.parametrize("tokens", [1, 9, 16, 17, 32, 64])
def test_any_number_of_tokens(tokens: int) -> None:
    run(tokens, 256, 256, 2, tokens)


@pytest.mark.parametrize("programs", [1, 2, 3, 5, 9])
def test_shares_that_end_in_the_middle_of_blocks(programs: int) -> None:
    """Three blocks of three steps: pieces of one and two programs, whole blocks, and programs with one step."""
    run(10, 384, 304, programs, programs, stages=2)


def test_a_block_of_many_pieces() -> None:
    run(12, 768, 128, 6)
