"""Pages into records and back in the repaired interpreter. Run with TRITON_INTERPRET=1, see test_interpreted.py."""

from tests.support import interpreter

interpreter.repair()

import pytest  # noqa: E402
from records_case import Records  # noqa: E402


@pytest.mark.parametrize("sizes", [[64], [16, 40704, 8448], [16384, 16400, 16368]])
@pytest.mark.parametrize(("pages", "count"), [(1, 1), (9, 4)])
def test_every_byte_comes_and_goes(sizes: list[int], pages: int, count: int) -> None:
    Records(sizes, pages, count).check()
