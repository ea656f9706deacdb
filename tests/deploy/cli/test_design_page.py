"""docs/design.md and the other pages name files that there are, and thresholds as they are."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from kernels.moe.schedule import ExpertsShape, tiling
from tests.gated import launched

ROOT = Path(__file__).parents[3]
DESIGN = (ROOT / "docs" / "design.md").read_text()
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
NAME, FILE = r"`([A-Z][A-Z_0-9]+)`", r"`([\w/]+\.py)`"
THRESHOLDS = re.findall(rf"^\| {NAME} \| (\d+) \| {FILE} \|", DESIGN, re.MULTILINE)
[SECTION] = re.findall(r"^### Which kernels a step launches\n(.*?)^###? ", DESIGN, re.MULTILINE | re.DOTALL)


def assigned(path: Path) -> set[str]:
    """Names that a module gives values, not those that it imports."""
    nodes = [node for node in ast.parse(path.read_text()).body if isinstance(node, (ast.Assign, ast.AnnAssign))]
    names = [name for node in nodes for name in ast.walk(node) if isinstance(name, ast.Name)]
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


@pytest.mark.parametrize(("name", "value", "file"), THRESHOLDS)
def test_a_threshold_has_the_value_that_the_table_states(name: str, value: str, file: str) -> None:
    assert name in assigned(ROOT / file)
    assert getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), name) == int(value)


def test_the_table_has_every_threshold_that_its_section_names() -> None:
    assert {*re.findall(NAME, SECTION)} == {name for name, *_ in THRESHOLDS}


def test_the_table_has_every_upper_bound_of_kernels_and_models() -> None:
    """So that a new one is documented: all that are called MOST_..."""
    known = {(name, file) for name, _, file in THRESHOLDS}
    found = {
        (name, str(path.relative_to(ROOT)))
        for folder in ("kernels", "workers/models")
        for path in (ROOT / folder).rglob("*.py")
        for name in assigned(path)
        if name.startswith("MOST_")
    }
    assert len(found) > 10
    assert found <= known


def test_the_section_names_every_kernel_that_is_launched() -> None:
    """And no other; two of its words are functions."""
    named = {*re.findall(r"`([a-z][a-z0-9_]*)`", SECTION)} - {"unsupported", "tiling"}
    assert named == {name.split(".")[-1] for name in launched()}


@pytest.mark.parametrize(("mean", "rows"), [(11.9, 16), (12.1, 64), (55.9, 64), (56.1, 128)])
def test_tiles_of_experts_are_as_high_as_the_page_says(mean: float, rows: int) -> None:
    assert "fewer than 12 tokens" in SECTION
    assert "at most 56" in SECTION
    assert tiling(ExpertsShape(round(mean * 10), 1, 10, 256, 256)).rows == rows


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    """Those given with their folders; NAME stands for one of the reader's."""
    named = re.findall(r"(?<![\w./-])(?:assets|bench|deploy|docs|kernels|tests|workers)/[\w./*-]+", page.read_text())
    missing = [name for name in named if not [*ROOT.glob(name.rstrip("./"))]]
    # Some tests are named without their folder.
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    missing += [name for name in re.findall(r"\btest_\w+\.py\b", page.read_text()) if name not in tests]
    assert [name for name in missing if "NAME" not in name] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        there = page if not file else page.parent / file
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in slugs, target
