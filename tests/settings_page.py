"""The settings in docs/command-line.md, written from the models that state them:

python -m tests.settings_page
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap

from deploy.config.application import ServeConfig
from deploy.config.settings import settings_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "command-line.md"
BLOCK = re.compile(r"(?<=^```yaml\n).*?(?=^```)", re.DOTALL | re.MULTILINE)
COLUMN, WIDTH = 29, 130
"""Column in which comments begin, and width of lines."""


def lines() -> Iterator[str]:
    """A settings file with all settings and their defaults; what is said of each stands beside it."""
    section = ""
    for setting in settings_of(ServeConfig):
        inside, _, _ = setting.name.rpartition(".")
        if inside != section and inside:
            yield f"{inside}:"
        section = inside
        line, said = setting.documented()
        line = f"{'  ' * bool(inside)}{line}"
        begin = max(COLUMN, len(line) + 2)
        first, *more = wrap(said, WIDTH - begin - 2, break_long_words=False, break_on_hyphens=False) or [""]
        if more:  # which begin at the same column in every entry
            first, rest = first, said[len(first) + 1 :]
            more = wrap(rest, WIDTH - COLUMN - 4, break_long_words=False, break_on_hyphens=False)
        yield f"{line:<{begin}}# {first}" if first else line
        yield from (f"{'':<{COLUMN}}#   {each}" for each in more)


def written(page: str) -> str:
    """The page with the settings as they are."""
    return BLOCK.sub(lambda _: "".join(f"{line}\n" for line in lines()), page, count=1)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
