"""The sampling parameters in docs/api.md, written from the table that states them:

python -m tests.sampling_page
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from workers.protocol.request import TABLE

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
BLOCK = re.compile(r"(?<=^## Sampling parameters\n\n)(?:\|[^\n]*\n)*\n?", re.MULTILINE)


def lines() -> Iterator[str]:
    """A table with the name, default, range and meaning of each parameter, and whether generation_config.json may give
    another default."""
    yield "| parameter | default | range | `generation_config.json` | meaning |"
    yield "| --- | --- | --- | --- | --- |"
    for row in TABLE:
        least, most = row.parameter.asked
        end = "and more" if most is None else f"... {most:g}"
        of_model = "yes" if row.parameter.in_generation_config else "no"
        yield f"| `{row.name}` | {row.default:g} | {least:g} {end} | {of_model} | {row.parameter.meaning} |"


def written(page: str) -> str:
    """The page with the parameters as they are."""
    return BLOCK.sub(lambda _: "".join(f"{line}\n" for line in lines()) + "\n", page, count=1)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
