"""Hopper's kernel for few query vectors, its values without its layouts. Run with TRITON_INTERPRET=1."""

from tests.support import gluon_interpreter, interpreter

interpreter.repair()
gluon_interpreter.install()

from dataclasses import replace  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from decode_case import Case  # noqa: E402
from triton.experimental import gluon  # noqa: E402

from kernels.mla_decode.schedule import hopper_tiling, narrow_fp8_tiling  # noqa: E402

gluon.language.num_warps = lambda: 4


def check(case: Case, **changes: int) -> None:
    tiling = (narrow_fp8_tiling if case.fp8 else hopper_tiling)(case.shape, 3)
    assert tiling.path == "narrow"
    case.check(replace(tiling, **changes))


def deepseek(lengths: list[int], width: int, heads: int, first: int = 0, fp8: bool = False) -> Case:
    return Case(lengths, width, heads, 512, 64, torch.bfloat16, first=first, fp8=fp8)


@pytest.mark.parametrize("lengths", [[1], [64], [65], [200, 0, 1, 129], [0, 0], [30] * 7, [300, 2, 2, 2, 2]])
def test_lengths(lengths: list[int]) -> None:
    check(deepseek(lengths, 1, 16))


@pytest.mark.parametrize(("width", "heads"), [(2, 8), (5, 3), (8, 2), (1, 1)])
def test_widths_and_heads(width: int, heads: int) -> None:
    check(deepseek([width - 1, 70, 129], width, heads))


@pytest.mark.parametrize("first", [1, 70])
def test_first_entry(first: int) -> None:
    check(deepseek([first, first + 1, 200], 1, 4, first))


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_tiles_of_half_a_page_and_more_stages(stages: int) -> None:
    check(deepseek([500, 33], 1, 16), tile=32, stages=stages)


def test_several_blocks_of_queries() -> None:
    check(deepseek([200, 0, 65], 1, 16), block=16, ctas=5)
    case = Case([130, 7], 3, 16, 512, 64, torch.bfloat16)
    case.check(replace(hopper_tiling(deepseek([1], 1, 16).shape, 3), block=16, ctas=2))


@pytest.mark.parametrize(("length", "width", "heads", "first"), [(200, 2, 16, 0), (65, 4, 7, 1), (0, 2, 16, 0)])
def test_one_row_of_two_blocks(length: int, width: int, heads: int, first: int) -> None:
    check(deepseek([length], width, heads, first))


def small(lengths: list[int], width: int, heads: int, first: int = 0) -> Case:
    """Of Mistral Small 4."""
    return Case(lengths, width, heads, 256, 64, torch.bfloat16, first=first)


@pytest.mark.parametrize("lengths", [[1], [65], [200, 0, 1, 129], [0, 0], [30] * 7, [300, 2, 2, 2, 2]])
@pytest.mark.parametrize("heads", [8, 16])
def test_latents_of_256_features(lengths: list[int], heads: int) -> None:
    check(small(lengths, 1, heads))


@pytest.mark.parametrize(("width", "heads", "first"), [(2, 8, 0), (5, 3, 1), (4, 4, 0), (3, 5, 70)])
def test_latents_of_256_features_at_widths(width: int, heads: int, first: int) -> None:
    check(small([max(width - 1, first), 70, 129], width, heads, first))
    check(small([200], width, heads, first))


def test_one_row_of_two_blocks_of_256_features() -> None:
    check(small([200], 1, 32))
    check(small([71], 2, 13, 70))


@pytest.mark.parametrize("lengths", [[1], [65], [200, 0, 1, 129], [300, 2, 2, 2, 2]])
def test_fp8_entries(lengths: list[int]) -> None:
    check(deepseek(lengths, 1, 16, fp8=True))


@pytest.mark.parametrize(("width", "heads"), [(2, 16), (5, 3), (3, 16), (1, 128)])
def test_fp8_entries_of_more_query_vectors(width: int, heads: int) -> None:
    check(deepseek([width - 1, 70, 129], width, heads, fp8=True))
    check(deepseek([70], width, heads, fp8=True))


@pytest.mark.parametrize("first", [1, 70])
def test_first_fp8_entry(first: int) -> None:
    check(deepseek([first, first + 1, 200], 1, 4, first, fp8=True), stages=2)
