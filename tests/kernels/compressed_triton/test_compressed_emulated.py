"""The kernels of compressed entries as they were compiled, at the sizes of DeepSeek V4's entries, under drawn
schedules."""

from __future__ import annotations

import pytest
import torch
from compressed_case import Attending, Compressing, Storing

from kernels.linear.groups import launch_group_linear
from kernels.matrix import BlockScaled
from tests.support.ptx import emulated

pytestmark = pytest.mark.long


@pytest.mark.parametrize(("ratio", "features", "overlaps"), [(4, 512, True), (4, 128, True), (128, 512, False)])
def test_compressors(ratio: int, features: int, overlaps: bool) -> None:
    case = Compressing(
        2,
        ratio + 16,
        ratio=ratio,
        features=features,
        overlaps=overlaps,
        rope=64,
        width=3,
        dtype=torch.bfloat16,
    )
    case.dependent = True
    with emulated(ratio):
        case.run([ratio - 3, ratio - 1])
        case.run([3, 3], 3, [1, 0])
        case.run([3, 3], 3, [2, 2])


def test_queries_and_the_window() -> None:
    case = Storing(2, 40, heads=5, features=512, rope=64, window=6, width=3, dtype=torch.bfloat16)
    case.dependent = True
    with emulated(1):
        case.run([9, 2])
        case.run([3, 3], 3, [0, 2])


@pytest.mark.parametrize(
    ("heads", "ratio", "selected", "programs", "width"),
    [(16, 4, 40, 4, 2), (20, 4, 40, 1, 0), (8, 0, 0, 1, 2), (3, 128, 0, 8, 2)],
)
def test_attention(heads: int, ratio: int, selected: int, programs: int, width: int) -> None:
    """Several tiles in flight; tokens that several programs share, or one."""
    case = Attending(
        2,
        300,
        heads=heads,
        features=512,
        rope=64,
        window=70,
        ratio=ratio,
        selected=selected,
        width=max(width, 1),
        programs=programs,
        dtype=torch.bfloat16,
    )
    case.length = [260, 0]
    # Triton's own pipelined loops do without the fence behind cp.async.
    with emulated(heads, fences=False):
        case.run([width or 1, width or 2], width)


@pytest.mark.parametrize(("heads", "programs", "width"), [(8, 1, 2), (8, 8, 2), (20, 1, 2), (20, 8, 0)])
def test_entries_that_a_layer_that_drafts_has_not_made(heads: int, programs: int, width: int) -> None:
    """Of decode rows, and of chunks, which see each other's entries as well; in one block of heads, and in two."""
    sizes = {"heads": heads, "features": 512, "rope": 64, "window": 70, "first": 1, "width": 2, "programs": programs}
    case = Attending(2, 90, dtype=torch.bfloat16, **sizes)  # type: ignore[arg-type]
    case.length, case.missing = [64, 1], {(0, 64 - 20)}
    with emulated(programs, fences=False):
        case.run([2, 2], width)


@pytest.mark.parametrize(("heads", "programs"), [(8, 8), (20, 1)])
def test_tokens_of_a_block_see_all_of_each_other(heads: int, programs: int) -> None:
    sizes = {"heads": heads, "features": 512, "rope": 64, "window": 70, "programs": programs}
    case = Attending(2, 90, dtype=torch.bfloat16, **sizes)  # type: ignore[arg-type]
    case.length = [75, 1]
    with emulated(programs, fences=False):
        case.run([3, 3], block=3)


@pytest.mark.parametrize("tokens", [3, 20])
def test_products_of_groups(tokens: int) -> None:
    groups, rows, features = 2, 128, 256
    random = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, groups, features, generator=random).bfloat16()
    data = torch.randn(groups * rows, features, generator=random).to(torch.float8_e4m3fn)
    matrix = BlockScaled(data, torch.rand(groups, 2, generator=random) + 0.5)
    out = torch.full((tokens, groups, rows), torch.nan, dtype=torch.bfloat16)
    with emulated(tokens, fences=False):
        launch_group_linear(x, matrix, out)
    want = torch.einsum("tge,gue->tgu", x.double(), matrix.float().view(groups, rows, features).double())
    torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=2**-8 * float(want.abs().max()))
