"""The page at `/`: HTML, styles and JavaScript modules that a browser reads as they are, without a build step."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final

TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Content types, by how a file's name ends."""
INDEX: Final = "index.html"


@dataclass(frozen=True)
class PageFile:
    """File of the page as it is served."""

    content: bytes
    content_type: str
    etag: str
    """Changes with the content."""


def page_files() -> dict[str, PageFile]:
    """Read all files of the page, by name, from beside this module."""
    files = sorted(Path(__file__).parent.iterdir())
    return {file.name: _read(file) for file in files if file.suffix in TYPES}


def _read(file: Path) -> PageFile:
    content = file.read_bytes()
    return PageFile(content, TYPES[file.suffix], f'"{blake2b(content, digest_size=8).hexdigest()}"')
