"""Every test runs in exactly one of the commands of the Makefile."""

from __future__ import annotations

import ast
import re
from itertools import product
from pathlib import Path

import pytest

from tests.conftest import soaked_cases
from tests.support.gpu_files import needs_gpu_by_name

MAKEFILE = (Path(__file__).resolve().parent.parent / "Makefile").read_text()
LANES = re.findall(r'pytest .*?-m "?([a-z ]+?)"?(?= -n| \$)', MAKEFILE)
MARKS = ("alone", "long", "gate", "soak")


@pytest.mark.parametrize(
    "marked",
    [each for each in product((False, True), repeat=4) if not each[2] or not any(each[:2])],
)
def test_a_test_with_these_marks_runs_once(marked: tuple[bool, ...]) -> None:
    """Any may soak; those of the compile gate have no other mark."""
    assert len(LANES) == 6
    marks = dict(zip(MARKS, marked, strict=True))
    assert sum(eval(lane, {}, marks) for lane in LANES) == 1


def test_files_are_named_for_a_gpu_exactly_if_all_their_tests_need_one() -> None:
    """A file that is named so is not even imported where there is no GPU."""
    wrong = []
    for file in sorted(Path(__file__).parent.rglob("test_*.py")):
        source = file.read_text()
        marks = [
            ast.unparse(node.value)
            for node in ast.parse(source).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        ]
        needs_gpu = bool(re.search(r"\bpytest\.mark\.gpus?\b", " ".join(marks)))
        if needs_gpu != needs_gpu_by_name(file):
            wrong.append(file.name)
    assert not wrong


def test_cases_that_are_listed_to_soak_are_of_tests_that_exist() -> None:
    root = Path(__file__).resolve().parent.parent
    functions = {case.partition("[")[0] for case in soaked_cases()}
    assert functions
    for file, name in (function.split("::") for function in functions):
        assert re.search(rf"^(async )?def {name}\(", (root / file).read_text(), re.MULTILINE), f"{file}: {name} is gone"
