"""The header that names tools of which a model is not told."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any, Final

IGNORED_TOOLS: Final = b"x-latentserve-ignored-tools"
"""The header. It also names formats of tools that the model is not held to."""
MOST_HEADER: Final = 1024
"""Characters of it."""


def name_ignored_tools(scope: MutableMapping[str, Any], names: Iterable[str]) -> None:
    """Have the answer to the request of this ASGI scope name them, each once; no header where there are none. `names`
    are in characters that a header can hold."""
    if told := ", ".join(dict.fromkeys(names)):
        scope["latentserve.headers"].append((IGNORED_TOOLS, told[:MOST_HEADER].encode()))
