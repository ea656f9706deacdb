"""The pages of the documentation name files that exist and thresholds as they are, and their links resolve."""

from __future__ import annotations

import ast
import importlib
import itertools
import re
from pathlib import Path

import pytest

from kernels.moe.schedule import ExpertsShape, tiling
from tests.gated import launched

ROOT = Path(__file__).parents[3]
KERNELS = (ROOT / "docs" / "internals" / "kernels.md").read_text()
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
NAME, FILE = r"`([A-Z][A-Z_0-9]+)`", r"`([\w/]+\.py)`"
THRESHOLDS = re.findall(rf"^\| {NAME} \| (\d+) \| {FILE} \|", KERNELS, re.MULTILINE)
[SECTION] = re.findall(r"^## Which kernels a step launches\n(.*?)^## ", KERNELS, re.MULTILINE | re.DOTALL)
LINK = r"\]\(([^)\s]+)\)"


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
    """A new bound has to be documented: all constants called MOST_... are looked for."""
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
    """The section names no other kernel; two of its words are functions."""
    named = {*re.findall(r"`([a-z][a-z0-9_]*)`", SECTION)} - {"unsupported", "tiling"}
    assert named == {name.split(".")[-1] for name in launched()}


@pytest.mark.parametrize(("mean", "rows"), [(11.9, 16), (12.1, 64), (55.9, 64), (56.1, 128)])
def test_tiles_of_experts_are_as_high_as_the_page_says(mean: float, rows: int) -> None:
    assert "fewer than 12 tokens" in SECTION
    assert "at most 56" in SECTION
    assert tiling(ExpertsShape(round(mean * 10), 1, 10, 256, 256)).rows == rows


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    """Files are looked for that are given with their folders; NAME stands for one of the reader's."""
    named = re.findall(r"(?<![\w./-])(?:assets|bench|deploy|docs|kernels|tests|workers)/[\w./*-]+", page.read_text())
    missing = [name for name in named if not [*ROOT.glob(name.rstrip("./"))]]
    # Some tests are named without their folder.
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    missing += [name for name in re.findall(r"\btest_\w+\.py\b", page.read_text()) if name not in tests]
    assert [name for name in missing if "NAME" not in name] == []


def without_code(text: str) -> str:
    """A page without its blocks of code, in which brackets are no links and # begins no heading."""
    return re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page, those of its headings as GitHub makes them: headings of the same text are numbered."""
    found = set(re.findall(r'<a id="([^"]+)">', page.read_text()))
    for heading in re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.MULTILINE):
        text = re.sub(LINK, "", heading)  # of a link the text alone counts
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        number = next(number for number in itertools.count() if (f"{slug}-{number}" if number else slug) not in found)
        found.add(f"{slug}-{number}" if number else slug)
    return found


def linked(page: Path) -> list[tuple[str, Path, str]]:
    """Every relative link of a page: as it is written, the file, and the anchor in it or an empty string."""
    targets = [target for target in re.findall(LINK, without_code(page.read_text())) if "://" not in target]
    parts = [(target, *target.partition("#")[::2]) for target in targets]
    return [(target, (page.parent / file).resolve() if file else page, anchor) for target, file, anchor in parts]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, file, anchor in linked(page):
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_anchors_are_those_of_github(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    headings = ("# The `--width` of a [step](x.md)", "```\n# no heading\n```", "## Rules", "### Rules", "## 17 to 64")
    page.write_text("\n\n".join(headings))
    assert anchors(page) == {"the---width-of-a-step", "rules", "rules-1", "17-to-64"}


def test_every_page_is_reached_from_the_readme() -> None:
    reached = {ROOT / "README.md"}
    waiting = [*reached]
    while waiting:
        page = waiting.pop()
        new = {file for _, file, _ in linked(page) if file.suffix == ".md"} - reached
        reached |= new
        waiting += new
    assert [page.name for page in PAGES if page not in reached] == []


def test_pages_that_the_code_names_exist() -> None:
    """Pages are named in docstrings, comments and messages, with their anchors."""
    files = [ROOT / "pyproject.toml", *(ROOT / "tests").rglob("*.py")]
    for package in ("assets", "bench", "deploy", "kernels", "workers"):
        files += [file for file in (ROOT / package).rglob("*") if file.suffix in {".py", ".html", ".js", ".yaml"}]
    named = {
        (file.relative_to(ROOT), page, anchor)
        for file in files
        for page, anchor in re.findall(r"(?<![\w/])(docs/[\w/-]+\.md)(?:#([\w-]+))?", file.read_text())
    }
    assert len(named) > 10
    missing = [(file, page) for file, page, _ in named if not (ROOT / page).exists()]
    assert missing == []
    assert [(file, page, anchor) for file, page, anchor in named if anchor and anchor not in anchors(ROOT / page)] == []
