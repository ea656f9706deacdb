"""The page that explains the model quotes the file that is executed, which stays short enough to be read."""

import re
from pathlib import Path

from workers.models import deepseek

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
SOURCE = Path(deepseek.__file__).read_text().splitlines()


def test_every_line_that_is_quoted_is_in_the_file_in_its_order() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) > 3
    for block in blocks:
        places = [SOURCE.index(line) for line in block.splitlines()]
        assert places == sorted(places)


def test_what_the_page_names_is_there() -> None:
    for path in re.findall(r"`((?:workers|tests)/[\w/]+\.py)`", PAGE):
        assert (ROOT / path).is_file(), path
    code = "\n".join(file.read_text() for file in (ROOT / "workers" / "models").rglob("*.py"))
    for owner, name in re.findall(r"`(\w+)\.(\w+)`", PAGE):
        if name != "py":
            assert re.search(rf"^(class {owner}\b|.*\b{owner}\b)", code, re.MULTILINE), owner
            assert re.search(rf"def {name}\b", code), name


def test_the_file_is_short() -> None:
    assert len(SOURCE) <= 120
