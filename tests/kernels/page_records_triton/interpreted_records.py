"""Pages into records and back in the repaired interpreter. Run with TRITON_INTERPRET=1, see test_interpreted.py."""

from tests.support import interpreter

interpreter.repair()

import pytest  # noqa: E402
from records_case import Records  # noqa: E402

from tests.support import bounds  # noqa: E402

bounds.check_bounds()


@pytest.mark.parametrize("sizes", [[64], [16, 40704, 8448], [16384, 16400, 16368]])
@pytest.mark.parametrize(("pages", "count"), [(1, 1), (9, 4)])
def test_every_byte_comes_and_goes(sizes: list[int], pages: int, count: int) -> None:
    case = Records(sizes, pages, count)
    with bounds.addressed(case.layers):
        case.check()


def test_an_access_behind_the_caches_is_seen() -> None:
    """The kernel knows the caches by addresses: what it may touch there is what the test says."""
    case = Records([64, 16], 3, 2)
    with bounds.addressed(case.layers[:1]), pytest.raises(Exception, match="lie outside the arguments"):
        case.check()
