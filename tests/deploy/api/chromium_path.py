"""Path of Chromium, found without starting playwright to ask."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

NAMES = ("chromium", "google-chrome", "chrome")
PLACES = ("chromium-*/chrome-*/chrome", "chromium_headless_shell-*/chrome-*/chrome-headless-shell")
"""Patterns of the browsers that `playwright install chromium` fetches, with or without `--only-shell`, on Linux."""


def chromium() -> str | None:
    """The one on the PATH, else the newest of playwright's own."""
    if found := next((path for name in NAMES if (path := shutil.which(name))), None):
        return found
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or cache / "ms-playwright")
    for place in PLACES:
        if browsers := sorted(folder.glob(place), key=_revision):
            return str(browsers[-1])
    return None


def _revision(path: Path) -> int:
    found = re.search(r"-(\d+)$", path.parent.parent.name)
    return int(found[1]) if found else 0
