"""Products in parts as they were compiled, run by the PTX emulator under drawn schedules."""

import pytest
from parts_case import Product

from kernels.linear.parts import Cut
from tests.support.ptx import emulated

pytestmark = pytest.mark.long


@pytest.mark.parametrize("tokens", [1, 17, 33, 64])
@pytest.mark.parametrize("dependent", [False, True])
def test_any_number_of_tokens(tokens: int, dependent: bool) -> None:
    case = Product(tokens, 64, 256, Cut(64, 2, 2), seed=tokens)
    with emulated(tokens, consecutive=dependent) as launches:
        case.run(dependent)
    assert launches == ["part_linear"]
    case.check()


@pytest.mark.parametrize(
    ("rows", "features", "cut"),
    [(200, 128, Cut(128, 1, 2)), (72, 328, Cut(64, 2, 3)), (129, 64, Cut(64, 1, 1)), (7, 8, Cut(128, 1, 1))],
    ids=["rows", "features", "one part", "few of both"],
)
def test_sizes_that_blocks_and_stages_do_not_divide(rows: int, features: int, cut: Cut) -> None:
    case = Product(19, rows, features, cut)
    with emulated():
        case.run()
    case.check()


def test_no_tokens() -> None:
    with emulated() as launches:
        Product(0, 64, 64, Cut(64, 1, 1)).run()
    assert not launches
