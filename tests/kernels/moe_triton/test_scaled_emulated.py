"""The experts' products with FP8 and INT4 weights as they were compiled, run by the PTX emulator: their launches are
dependent, and follow each other on memory that holds poison."""

import pytest
from experts_case import Experts, Format

from tests.support.ptx import emulated

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("rows", "format", "sizes", "groups"),
    [
        (0, (16, 64), (80, 16), 0),
        (16, "int4", (288, 64), 0),
        (16, (16, 64), (144, 80), 0),
        (64, (128, 128), (144, 80), 4),
    ],
)
def test_every_tile(rows: int, format: Format, sizes: tuple[int, int], groups: int) -> None:
    """Two steps of the main loop and more, of whole blocks and of parts of one. Sums are added to what comes before."""
    how = {"groups": groups, "holes": True, "padded": (2,), "seed": rows, "added": not groups}
    case = Experts(4, 2, 3, *sizes, formats=(format, format), **how)
    with emulated(rows, consecutive=True, fences=False) as launches:
        case.run(case.tiling(rows=rows), dependent=True)
    assert launches == (["sort_few"] if rows else []) + ["gate_up", "down"] + (["combine"] if rows else [])
    case.check()
