"""Ray Serve imported without pandas, which it needs for deployments that return data frames alone.

Written for Ray 2.60.0: which module imports it, and by what name, is private. Where these are others, pandas is
imported if it is installed, which takes each process of Serve some tenths of a second and tens of megabytes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Final

from typing_extensions import override

_PANDAS: Final = "pandas"
_IMPORTS_IT: Final = "ray.serve._private.utils"
_CALLS_IT: Final = "pd"
"""Name that the module has for pandas, or for None where it finds none."""


class _NotForServe(MetaPathFinder):
    """Says to that module that pandas is not installed, and to nobody else: others may import pandas meanwhile."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _PANDAS:
            return None
        asks: FrameType | None = sys._getframe(1)
        while asks is not None and asks.f_code.co_filename.startswith("<frozen importlib"):
            asks = asks.f_back
        if asks is not None and asks.f_globals.get("__name__") == _IMPORTS_IT and _CALLS_IT not in asks.f_globals:
            raise ModuleNotFoundError(f"No module named {_PANDAS!r}", name=_PANDAS)
        return None


def spare_pandas() -> None:
    """Have this process import Ray Serve without pandas, whenever it does. Whoever else imports pandas gets it."""
    if not any(isinstance(finder, _NotForServe) for finder in sys.meta_path):
        sys.meta_path.insert(0, _NotForServe())
