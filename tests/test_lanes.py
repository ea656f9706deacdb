"""Every test runs in exactly one of the commands of the Makefile."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

MAKEFILE = (Path(__file__).resolve().parent.parent / "Makefile").read_text()
LANES = re.findall(r'pytest .*?-m "?([a-z ]+?)"?(?= -n| \$)', MAKEFILE)
MARKS = ("alone", "long", "gate")


@pytest.mark.parametrize("marked", [each for each in product((False, True), repeat=3) if not each[2] or sum(each) == 1])
def test_a_test_with_these_marks_runs_once(marked: tuple[bool, ...]) -> None:
    """A test of the compile gate has no other mark."""
    assert len(LANES) == 5
    marks = dict(zip(MARKS, marked, strict=True))
    assert sum(eval(lane, {}, marks) for lane in LANES) == 1
